"""LongT5 (Guo et al. 2022): T5 whose encoder's tokens see a window around them, and with
transient-global attention besides the sums of blocks of tokens, normed. By PyTorch's operations, a
tile of queries at a time.

T tokens, E hidden size, H this rank's heads of D, N tokens of a text, G blocks of it, Q queries of
a tile, S keys that they may see.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.norm import RMS, RMSNorm
from headrace.back.layers.position_bias import RelativeBias
from headrace.back.layers.scope import Scope
from headrace.back.models.encoder import EncoderSizes, TokenLayer
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.back.models.t5 import T5Form, build_t5, encoder_sizes
from headrace.back.parallel.shard import Part, local_units
from headrace.base.config.hf import ConfigReader

LOCAL, GLOBAL = "local", "transient-global"
MODULES = {LOCAL: "layer.0.LocalSelfAttention", GLOBAL: "layer.0.TransientGlobalSelfAttention"}
QUERIES = 256
"""Of a tile."""


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """LongT5ForConditionalGeneration."""
    reads = WindowedReads(config)
    scaled = config.bool("scale_decoder_outputs", config.bool("tie_word_embeddings", True))
    return build_t5(scope, config, T5Form(scaled=scaled, reads=reads.layer))


@dataclass(frozen=True, kw_only=True)
class WindowBiases:
    """By distance within the window, and by how many blocks a sum of one is away; None: there are
    no sums."""

    near: RelativeBias
    far: RelativeBias | None


class WindowedReads:
    """The attention of the encoder's layers, of which the first holds the biases of all."""

    def __init__(self, config: ConfigReader) -> None:
        self._config, self._sizes = config, encoder_sizes(config)
        self._kind = config.choice("encoder_attention_type", MODULES, LOCAL)
        self._biases: WindowBiases | None = None

    def layer(self, scope: Scope) -> TokenLayer:
        """That of the layer with this scope; the first one comes first."""
        config, scope = self._config, scope / MODULES[self._kind]
        if self._biases is None:
            self._biases = WindowBiases(
                near=self._bias(scope / "relative_attention_bias"),
                far=self._bias(scope / "global_relative_attention_bias")
                if self._kind == GLOBAL
                else None,
            )
        return WindowedAttention(
            scope,
            self._sizes,
            self._biases,
            radius=config.int("local_radius", 127, ge=1),
            block=config.int("global_block_size", 16, ge=1),
        )

    def _bias(self, scope: Scope) -> RelativeBias:
        buckets = self._config.int("relative_attention_num_buckets", 32, ge=4)
        farthest = self._config.int("relative_attention_max_distance", 128, ge=buckets, le=1 << 16)
        heads = Part("heads", self._sizes.heads, self._sizes.heads)
        return RelativeBias(scope, heads, buckets=buckets, max_distance=farthest, both_ways=True)


class WindowedAttention:
    """x_TE -> y_TE: see the file. `radius`: tokens seen on each side; `block`: tokens of a sum."""

    def __init__(
        self, scope: Scope, sizes: EncoderSizes, biases: WindowBiases, *, radius: int, block: int
    ) -> None:
        size = sizes.heads * sizes.head_dim
        parts = tuple(Part(name, size, sizes.heads) for name in "qkv")
        self._heads = local_units(parts[0], scope.mesh.tp)
        self._biases, self._radius, self._block = biases, radius, block
        self._qkv = ColumnLinear(scope, sizes.width, parts)
        self._out = RowLinear(scope / "o", parts[0], sizes.width)
        self._norm: RMSNorm | None = None
        if biases.far is not None:
            norm = RMS.build(scope / "global_input_layer_norm", sizes.width, eps=sizes.eps)
            assert isinstance(norm, RMSNorm), norm
            self._norm = norm

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        assert batch.query_start is not None
        q_HTD, k_HTD, v_HTD = self._heads_of(x_TE)
        y_HTD = torch.empty_like(v_HTD)
        for first, last in pairwise(batch.query_start.tolist()):
            text = slice(first, last)
            far = self._sums(x_TE[text])
            for start in range(0, last - first, QUERIES):
                stop = min(start + QUERIES, last - first)
                tile = slice(first + start, first + stop)
                low, high = max(0, start - self._radius), min(last - first, stop + self._radius)
                seen = slice(first + low, first + high)
                scores_HQS = q_HTD[:, tile] @ k_HTD[:, seen].transpose(1, 2)
                place_Q1 = torch.arange(start, stop, device=x_TE.device)[:, None]
                distance_QS = torch.arange(low, high, device=x_TE.device) - place_Q1
                scores_HQS = scores_HQS.float() + _biases(self._biases.near, distance_QS)
                scores_HQS.masked_fill_(distance_QS.abs() > self._radius, float("-inf"))
                values_HSD = v_HTD[:, seen]
                if far is not None:
                    scores_HQG = self._far_scores(q_HTD[:, tile], far[0], place_Q1)
                    scores_HQS = torch.cat((scores_HQS, scores_HQG), dim=2)
                    values_HSD = torch.cat((values_HSD, far[1]), dim=1)
                y_HTD[:, tile] = scores_HQS.softmax(-1).to(x_TE.dtype) @ values_HSD
        return self._out.project(y_HTD.transpose(0, 1).flatten(1))

    def _far_scores(
        self, q_HQD: torch.Tensor, k_HGD: torch.Tensor, place_Q1: torch.Tensor
    ) -> torch.Tensor:
        """Of queries and sums of blocks; what fills no block belongs to the last."""
        assert self._biases.far is not None
        blocks = k_HGD.shape[1]
        own_Q1 = (place_Q1 // self._block).clamp(max=blocks - 1)
        distance_QG = torch.arange(blocks, device=q_HQD.device) - own_Q1
        scores_HQG = (q_HQD @ k_HGD.transpose(1, 2)).float()
        return scores_HQG + _biases(self._biases.far, distance_QG)

    def _sums(self, x_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values [H, G, D] of the blocks' sums; None: there is no whole block."""
        blocks = len(x_NE) // self._block
        if self._norm is None or blocks == 0:
            return None
        place_N = torch.arange(len(x_NE), device=x_NE.device)
        owner_N = (place_N // self._block).clamp_(max=blocks - 1)
        sums_GE = x_NE.new_zeros(blocks, x_NE.shape[1]).index_add_(0, owner_N, x_NE)
        _, k_HGD, v_HGD = self._heads_of(self._norm.norm(sums_GE))
        return k_HGD, v_HGD

    def _heads_of(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, each [H, T, D]."""
        qkv = self._qkv.project(x_TE).unflatten(1, (3, self._heads, -1))
        return qkv.permute(1, 2, 0, 3).unbind(0)


def _biases(bias: RelativeBias, distance_QS: torch.Tensor) -> torch.Tensor:
    """[H, Q, S] by a key's position less the query's."""
    return bias.table[:, distance_QS.clamp(-bias.reach, bias.reach) + bias.reach]

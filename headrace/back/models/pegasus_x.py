"""Pegasus-X (Phang et al. 2022): Pegasus whose encoder attends in blocks, with tokens of its own
that see all of a text and are seen by all. By PyTorch's operations, some blocks at a time.

Every second layer's blocks begin half a block earlier. The first layer puts the global tokens of
each text behind all tokens, the last one leaves them out.

T tokens, E hidden size, H this rank's heads of D, N tokens of a text, G global tokens, B blocks of
S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from headrace.back.attention.plan import Batch
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.mlp import PlainMLP
from headrace.back.layers.norm import LAYER
from headrace.back.layers.positions import SinusoidalPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.bart import MLP, BartForm, build_bart
from headrace.back.models.encoder import EncoderSizes, TokenLayer
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.back.parallel.shard import Part, local_units
from headrace.base.config.hf import ConfigReader

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
NORMS = ("self_attn_layer_norm", "global_self_attn_layer_norm", "final_layer_norm")
TILE = 2048
"""Queries whose scores are computed at a time, about."""


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """PegasusXForConditionalGeneration."""
    blocks = GlobalBlocks(
        size=config.int("block_size", 512, ge=2),
        tokens=config.int("num_global_tokens", 32, ge=1, le=4096),
        staggered=config.bool("stagger_local_blocks", True),
        layers=config.int("encoder_layers", ge=1),
    )
    if blocks.size % 2:
        raise config.wrong("block_size", "even")

    encoder = scope / "model" / "encoder"

    def layer(scope: Scope, sizes: EncoderSizes, *, index: int) -> TokenLayer:
        return GlobalLocalLayer(scope, sizes, blocks, index=index, encoder=encoder)

    form = BartForm(
        pre=True, embedding_norm=False, logits_bias=False, bias=False, encoder_layer=layer
    )
    config = ConfigReader({"scale_embedding": True, **config.raw}, config.where)
    return build_bart(scope, config, form, positions=SinusoidalPositions(spread=1))


@dataclass(frozen=True, kw_only=True)
class GlobalBlocks:
    """`size`: tokens of a block; `tokens`: global ones of a text; `staggered`: every second layer's
    blocks are moved; `layers`: of the encoder."""

    size: int
    tokens: int
    staggered: bool
    layers: int


class GlobalLocalLayer:
    """x of tokens and global tokens -> the same: see the file. `encoder` holds what global tokens
    begin as."""

    def __init__(
        self,
        scope: Scope,
        sizes: EncoderSizes,
        blocks: GlobalBlocks,
        *,
        index: int,
        encoder: Scope,
    ) -> None:
        self._blocks, self._is_last = blocks, index == blocks.layers - 1
        self._front = blocks.size // 2 if blocks.staggered and index % 2 else 0
        self._embeddings = None
        if index == 0:
            shape = (blocks.tokens, sizes.width)
            self._embeddings = encoder.param("embed_global.weight", shape)
        self._global_GE = torch.empty(0)
        self._norm, self._global_norm, self._mlp_norm = (
            LAYER.build(scope / name, sizes.width, eps=sizes.eps) for name in NORMS
        )
        at, size = scope / "self_attn", sizes.heads * sizes.head_dim
        parts = tuple(Part(name, size, sizes.heads) for name in PROJECTIONS)
        self._heads, self._scale = local_units(parts[0], scope.mesh.tp), sizes.head_dim**-0.5
        self._qkv = ColumnLinear(at, sizes.width, parts)
        self._out = RowLinear(at / "out_proj", parts[0], sizes.width)
        mlp = MLP.build(scope, sizes.feed_forward)
        assert isinstance(mlp, PlainMLP), mlp
        self._mlp = mlp
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        if self._embeddings is not None:
            self._global_GE = self._embeddings.take()

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        assert batch.query_start is not None
        starts = batch.query_start.tolist()
        if self._embeddings is not None:
            x_TE = torch.cat((x_TE, self._global_GE.repeat(len(starts) - 1, 1)))
        tokens = starts[-1]
        normed_TE = torch.cat(
            (self._norm.norm(x_TE[:tokens]), self._global_norm.norm(x_TE[tokens:]))
        )
        x_TE = x_TE + self._attend(normed_TE, starts)
        x_TE = x_TE + self._mlp.forward(self._mlp_norm.norm(x_TE))
        return x_TE[:tokens] if self._is_last else x_TE

    def _attend(self, x_TE: torch.Tensor, starts: list[int]) -> torch.Tensor:
        """y_TE of all texts and their global tokens."""
        qkv = self._qkv.project(x_TE).unflatten(1, (3, self._heads, -1))
        q_HTD, k_HTD, v_HTD = qkv.permute(1, 2, 0, 3).unbind(0)
        q_HTD, y_HTD = q_HTD * self._scale, torch.empty_like(v_HTD)
        for row, (first, last) in enumerate(pairwise(starts)):
            behind = starts[-1] + row * self._blocks.tokens
            text, own = slice(first, last), slice(behind, behind + self._blocks.tokens)
            k_HXD, v_HXD = (torch.cat((x[:, own], x[:, text]), dim=1) for x in (k_HTD, v_HTD))
            scores_HGX = (q_HTD[:, own] @ k_HXD.transpose(1, 2)).float()
            y_HTD[:, own] = scores_HGX.softmax(-1).to(v_HXD.dtype) @ v_HXD
            y_HTD[:, text] = self._local(q_HTD[:, text], k_HXD, v_HXD)
        return self._out.project(y_HTD.transpose(0, 1).flatten(1))

    def _local(self, q_HND: torch.Tensor, k_HXD: torch.Tensor, v_HXD: torch.Tensor) -> torch.Tensor:
        """y_HND of one text's tokens; X: its global tokens, then its own."""
        count, size = self._blocks.tokens, self._blocks.size
        length = q_HND.shape[1]
        blocks = -(-(length + self._front) // size)

        def blocked(x_HND: torch.Tensor) -> torch.Tensor:
            pad = (0, 0, self._front, blocks * size - self._front - length)
            return F.pad(x_HND, pad).unflatten(1, (blocks, size))

        q_HBSD, k_HBSD, v_HBSD = map(blocked, (q_HND, k_HXD[:, count:], v_HXD[:, count:]))
        there_BS = blocked(torch.ones_like(q_HND[:1, :, :1]))[0, :, :, 0] > 0
        k_H1GD, v_H1GD = k_HXD[:, None, :count], v_HXD[:, None, :count]
        y_HBSD = torch.empty_like(q_HBSD)
        step = max(1, TILE // size)
        for start in range(0, blocks, step):
            some = slice(start, start + step)
            q = q_HBSD[:, some]
            near = (q @ k_HBSD[:, some].transpose(2, 3)).float()
            near.masked_fill_(~there_BS[some, None, :], float("-inf"))
            far = (q @ k_H1GD.transpose(2, 3)).float()
            shares = torch.cat((far, near), dim=3).softmax(-1).to(v_HXD.dtype)
            y_HBSD[:, some] = shares[..., :count] @ v_H1GD + shares[..., count:] @ v_HBSD[:, some]
        return y_HBSD.flatten(1, 2)[:, self._front : self._front + length]

"""BigBird-Pegasus (Zaheer et al. 2020): Pegasus with learned positions whose encoder, over long
texts, attends in blocks. By PyTorch's operations, a tile of queries at a time.

Tokens of the first and of the last block of a text see all of it; the others see these two, their
own block and those beside it. The blocks drawn at random, of training, are the first block at
inference, as often as they are: its tokens count 1 + num_random_blocks times (transformers 5.23,
modeling_bigbird_pegasus.py).

T tokens, E hidden size, H this rank's heads of D, N tokens of a text, Q queries of a tile, S keys
that they may see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.scope import Scope
from headrace.back.models.bart import BartForm, build_bart, learned
from headrace.back.models.encoder import EncoderSizes, SpanAttentionLayer, SpanHeads, TokenLayer
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.back.parallel.shard import Part, local_units
from headrace.base.config.hf import ConfigReader

SPARSE, FULL = "block_sparse", "original_full"
PROJECTIONS = ("self.query", "self.key", "self.value")
OUT = "output"
TILE = 256
"""Queries of a tile, about."""


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """BigBirdPegasusForConditionalGeneration."""
    blocks = read_blocks(config)
    bias = config.bool("use_bias", False)

    def attention(scope: Scope, sizes: EncoderSizes, index: int) -> TokenLayer:
        if blocks is not None:
            return BlockSparseAttention(scope, sizes, blocks, names=PROJECTIONS, out=OUT, bias=bias)
        return SpanAttentionLayer(scope, sizes, names=PROJECTIONS, out=OUT, bias=bias)

    named = {"activation_function": "gelu_new", "scale_embedding": True}
    form = BartForm(
        pre=True,
        embedding_norm=False,
        last_norm="layernorm_embedding",
        bias=bias,
        encoder_attention=attention,
    )
    config = ConfigReader({**named, **config.raw}, config.where)
    return build_bart(scope, config, form, positions=learned(config, unused=0))


@dataclass(frozen=True, kw_only=True)
class SparseBlocks:
    """Tokens of each, and how many are drawn at random for a block of queries."""

    size: int
    drawn: int

    @property
    def seen_whole(self) -> int:
        """The longest text whose tokens all see each other."""
        return (5 + 2 * self.drawn) * self.size


def read_blocks(config: ConfigReader) -> SparseBlocks | None:
    """None: all tokens see each other."""
    if config.choice("attention_type", (SPARSE, FULL), SPARSE) == FULL:
        return None
    return SparseBlocks(
        size=config.int("block_size", 64, ge=1), drawn=config.int("num_random_blocks", 3, ge=0)
    )


class BlockSparseAttention:
    """x_TE -> y_TE: see the file. Texts that are seen whole, if there are no others, are attended
    to by a kernel. `names`, `out`: see SpanAttentionLayer."""

    def __init__(
        self,
        scope: Scope,
        sizes: EncoderSizes,
        blocks: SparseBlocks,
        *,
        names: tuple[str, ...],
        out: str,
        bias: bool = True,
    ) -> None:
        size = sizes.heads * sizes.head_dim
        parts = tuple(Part(name, size, sizes.heads) for name in names)
        self._heads, self._blocks = local_units(parts[0], scope.mesh.tp), blocks
        self._scale = sizes.head_dim**-0.5
        self._qkv = ColumnLinear(scope, sizes.width, parts, bias=bias)
        self._out = RowLinear(scope / out, parts[0], sizes.width, bias=bias)
        self._whole = SpanHeads(scope, self._heads, self._heads, sizes.head_dim)

    def forward(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        assert batch.query_start is not None
        qkv = self._qkv.project(x_TE).unflatten(1, (3, self._heads, -1))
        spans = [*pairwise(batch.query_start.tolist())]
        if all(last - first <= self._blocks.seen_whole for first, last in spans):
            y_THD = self._whole.attend(*qkv.unbind(1), batch)
            return self._out.project(y_THD.reshape(len(x_TE), -1))
        q_HTD, k_HTD, v_HTD = qkv.permute(1, 2, 0, 3).unbind(0)
        y_HTD = torch.empty_like(v_HTD)
        for first, last in spans:
            text = (slice(None), slice(first, last))
            self._attend(q_HTD[text] * self._scale, k_HTD[text], v_HTD[text], y_HTD[text])
        return self._out.project(y_HTD.transpose(0, 1).flatten(1))

    def _attend(
        self, q_HND: torch.Tensor, k_HND: torch.Tensor, v_HND: torch.Tensor, y_HND: torch.Tensor
    ) -> None:
        """One text; what is attended to goes into `y_HND`."""
        size, length = self._blocks.size, q_HND.shape[1]
        blocks = -(-length // size)
        step = size * max(1, TILE // size)
        whole = length <= self._blocks.seen_whole
        ends = (0, length) if whole else (0, size, (blocks - 1) * size, length)
        for at, (begin, end) in enumerate(pairwise(ends)):
            for start in range(begin, end, step):
                tile = slice(start, min(start + step, end))
                if at == 1:
                    keys_S = self._seen(tile.start // size, -(-tile.stop // size), length)
                    bias_QS = self._biases(tile, keys_S.to(q_HND.device), length)
                    k_HSD, v_HSD = k_HND[:, keys_S], v_HND[:, keys_S]
                    scores_HQS = (q_HND[:, tile] @ k_HSD.transpose(1, 2)).float() + bias_QS
                else:
                    v_HSD = v_HND
                    scores_HQS = (q_HND[:, tile] @ k_HND.transpose(1, 2)).float()
                y_HND[:, tile] = scores_HQS.softmax(-1).to(v_HSD.dtype) @ v_HSD

    def _seen(self, low: int, high: int, length: int) -> torch.Tensor:
        """The places of what blocks low .. high - 1 may see: the first block, those around them,
        and the last."""
        size, last = self._blocks.size, -(-length // self._blocks.size) - 1
        near = range(max(1, low - 1) * size, min(last, high + 1) * size)
        return torch.tensor([*range(size), *near, *range(last * size, length)])

    def _biases(self, tile: slice, keys_S: torch.Tensor, length: int) -> torch.Tensor:
        """[Q, S]: -inf where a query does not see a key, and how often it sees the first block."""
        size, last = self._blocks.size, -(-length // self._blocks.size) - 1
        block_S = keys_S // size
        block_Q1 = torch.arange(tile.start, tile.stop, device=keys_S.device)[:, None] // size
        seen_QS = (block_S - block_Q1).abs() <= 1
        seen_QS |= (block_S == 0) | (block_S == last)
        often_S = torch.where(block_S == 0, math.log1p(self._blocks.drawn), 0.0)
        return often_S.expand(seen_QS.shape).masked_fill(~seen_QS, float("-inf"))

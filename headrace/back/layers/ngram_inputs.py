"""What the last tokens, as n-grams, add to the streams of a residual (Qwen 4, "per-layer
embeddings"): rows of a table by hashes of each n-gram, gated by how their keys meet the streams,
and a short dilated convolution of the result over the tokens before.

The tokens and the convolution's inputs lie in windowed caches. T tokens, E hidden size, S streams,
N longest n-gram, H hashes of each n-gram, D values of a row, K taps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm, LatentForm
from headrace.back.attention.plan import AttentionPlan, Batch
from headrace.back.kernels.activation.op import OP as ACTIVATION
from headrace.back.kernels.activation.op import Activation, ActivationProblem
from headrace.back.kernels.gated_norm.op import OP as GATED_NORM
from headrace.back.kernels.gated_norm.op import GatedNorm, GatedNormProblem
from headrace.back.kernels.sparse_attention.op import row_of_tokens
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.gated_streams import StreamsNorm
from headrace.back.layers.group_choice import write_rows
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.scope import Scope, not_loaded
from headrace.base.splitmix import GAMMA, mix

SEED_STEP = 10007
"""Between the layers' seeds."""
LEAST_GATE = 1e-6


@dataclass(frozen=True, kw_only=True)
class NGramSpec:
    """`index`: of this among the decoder's such layers; `longest`: N; `heads`: H; `values`: H (N -
    1) D; `base`: table sizes of the hashes are the primes from it on; `divisor`: of the table's
    rows, which lie in `parts` tensors; `end_id`: n-grams do not reach back over it."""

    streams: int
    index: int
    vocabulary: int
    longest: int
    heads: int
    values: int
    base: int
    divisor: int
    parts: int
    seed: int
    end_id: int
    taps: int
    eps: float
    name: str = "ple"

    @property
    def hashes(self) -> int:
        """Of all n-grams."""
        return (self.longest - 1) * self.heads

    @property
    def sizes(self) -> list[int]:
        """Rows of each hash: primes that no other hash of the decoder has."""
        return primes(self.base, self.index * self.hashes, self.hashes)

    @property
    def rows(self) -> int:
        """Of the whole table."""
        return -(-sum(self.sizes) // self.divisor) * self.divisor

    @property
    def tables(self) -> list[tuple[str, int]]:
        """The tensors of the table and their rows, as torch.chunk cuts these."""
        size = -(-self.rows // self.parts)
        firsts = enumerate(range(0, self.rows, size))
        return [(f"shard_{i}.weight", min(size, self.rows - first)) for i, first in firsts]

    @property
    def multipliers(self) -> list[int]:
        """Of a token and those before it: odd, and so that products fit 63 bits."""
        half = max(1, ((1 << 63) - 1) // max(self.vocabulary, 1) // 2)
        seed = self.seed + SEED_STEP * self.index
        return [2 * (mix(seed + GAMMA * (i + 2)) % half) + 1 for i in range(self.longest)]

    def build(self, scope: Scope, cache: int, width: int) -> NGramInputs:
        """`cache`: the id of the first of its caches."""
        return NGramInputs(scope, cache, self, width)


def primes(base: int, skipped: int, count: int) -> list[int]:
    """`count` primes, the first of those from `base` on but for `skipped` of them."""
    chosen: list[int] = []
    number = base - 1
    while len(chosen) < skipped + count:
        number += 1
        if number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            chosen.append(number)
    return chosen[skipped:]


class NGramInputs:
    """`of(x_TSE, batch)` -> what is added to the streams."""

    def __init__(self, scope: Scope, cache: int, spec: NGramSpec, width: int) -> None:
        self._scope, self._cache, self._spec, self._width = scope, cache, spec, width
        streams, whole = spec.streams, spec.streams * width
        self._table = TokenEmbedding(
            scope / "ple_embedding" / "ngram_embedding",
            spec.rows,
            spec.values // spec.hashes,
            tables=spec.tables,
        )
        self._key = WholeLinear(scope / "key_proj", spec.values, whole)
        self._value = WholeLinear(scope / "value_proj", spec.values, width)
        self._key_norm, self._query_norm, self._conv_norm = (
            StreamsNorm(scope / name, streams, width, eps=spec.eps)
            for name in ("norm_key", "norm_query", "norm_conv")
        )
        self._conv = scope.param("conv1d.weight", (whole, 1, spec.taps))
        self._conv_KX = self._sizes_H = self._offsets_H = torch.empty(0)
        self._act: Activation = not_loaded
        self._gated: GatedNorm = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Of the tokens, and of the convolution's inputs."""
        spec, at = self._spec, self._cache
        reach = (spec.taps - 1) * spec.longest + 1
        return (
            LatentForm(cache=at, width=1, kind="window", span=spec.longest, dtype=torch.float32),
            LatentForm(cache=at + 1, width=spec.streams * self._width, kind="window", span=reach),
        )

    def of(self, x_TSE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        shape = (self._spec.streams, self._width)
        rows_TH = self._rows(batch)
        embedded_TV = self._table.lookup(rows_TH.flatten()).view(len(rows_TH), -1)
        key_TSE = self._key_norm.norm(self._key.project(embedded_TV).unflatten(1, shape))
        query_TSE = self._query_norm.norm(x_TSE)
        gate_TS = (key_TSE.float() * query_TSE.float()).sum(2) * self._width**-0.5
        gate_TS = gate_TS.abs().clamp_min(LEAST_GATE).sqrt() * gate_TS.sign()
        value_TX = self._value.project(embedded_TV).repeat(1, self._spec.streams)
        value_TX = self._gated(value_TX, gate_TS.to(value_TX.dtype))
        normed_TX = self._conv_norm.norm(value_TX.unflatten(1, shape)).flatten(1)
        return (value_TX + self._convolved(normed_TX, batch)).unflatten(1, shape)

    def _rows(self, batch: Batch) -> torch.Tensor:
        """The table's rows of each token's n-grams, int64 [T, hashes]."""
        spec, plan = self._spec, batch.plans[batch.group_of_layer[self._cache]]
        tokens = batch.kv[self._cache]
        write_rows(tokens, batch.token_ids_T[:, None].float(), plan.slot_T)
        own_T = batch.token_ids_T
        before = values_before(tokens, plan, batch.positions_T, range(1, spec.longest), spec.end_id)
        before_TN = before[..., 0].long()
        valid_TN = (before_TN != spec.end_id).cumprod(1).bool()
        before_TN = before_TN.masked_fill(~valid_TN, spec.end_id)
        mixed_T, blocks = own_T * spec.multipliers[0], []
        for i in range(1, spec.longest):
            mixed_T = mixed_T ^ (before_TN[:, i - 1] * spec.multipliers[i])
            part = slice((i - 1) * spec.heads, i * spec.heads)
            blocks.append(mixed_T[:, None] % self._sizes_H[part] + self._offsets_H[part])
        return torch.cat(blocks, dim=1)

    def _convolved(self, x_TX: torch.Tensor, batch: Batch) -> torch.Tensor:
        spec, at = self._spec, self._cache + 1
        plan, inputs = batch.plans[batch.group_of_layer[at]], batch.kv[at]
        write_rows(inputs, x_TX, plan.slot_T)
        reach = range(0, spec.taps * spec.longest, spec.longest)
        before_TKX = values_before(inputs, plan, batch.positions_T, reach, 0)
        y_TX = before_TKX[:, 0].float() * self._conv_KX[0]
        for step in range(1, spec.taps):
            y_TX += before_TKX[:, step].float() * self._conv_KX[step]
        return self._act(y_TX.to(x_TX.dtype))

    def _finish(self) -> None:
        spec, scope = self._spec, self._scope
        sizes = torch.tensor(spec.sizes, dtype=torch.int64)
        self._sizes_H = sizes.to(scope.device)
        self._offsets_H = (sizes.cumsum(0) - sizes).to(scope.device)
        # The last step is that of the token itself.
        self._conv_KX = self._conv.take().float()[:, 0].t().flip(0).contiguous()
        facts = {"device": scope.kind, "dtype": scope.dtype}
        self._act = scope.bind(ACTIVATION, ActivationProblem(**facts, activation="silu"))
        gate = GatedNormProblem(
            **facts,
            width=spec.streams * self._width,
            group=0,
            gate="sigmoid",
            spread=self._width,
        )
        self._gated = scope.bind(GATED_NORM, gate, None)


def values_before(
    cache: torch.Tensor,
    plan: AttentionPlan,
    position_T: torch.Tensor,
    reach: range,
    absent: int,
) -> torch.Tensor:
    """What the cache holds of the positions so far before each token, [T, len(reach), Z]; `absent`
    before the text's begin."""
    block_tokens = cache.shape[1]
    row_T = row_of_tokens(plan, len(position_T))
    # Made on the device: a graph that is recorded takes no copies of the host's numbers.
    reach_N = torch.arange(reach.start, reach.stop, reach.step, device=position_T.device)
    at_TN = position_T[:, None] - reach_N
    column_TN = at_TN.clamp(min=0) // block_tokens
    block_TN = plan.block_table_RB[row_T[:, None], column_TN].long()
    value_TNZ = cache[block_TN, at_TN.clamp(min=0) % block_tokens]
    return value_TNZ.masked_fill((at_TN < 0)[:, :, None], absent)

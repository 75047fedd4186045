"""What the last tokens, as n-grams, add to the streams of a residual (DeepSeek V4.1, "Engram",
conditional memory): rows of a table by hashes of each n-gram, of which one linear layer makes a key
for each stream and a value that all share, gated by how the keys meet the streams.

N-grams are of classes of tokens, which read alike without case and accents; the classes of the last
tokens lie in a windowed cache. T tokens, E hidden size, S streams, N longest n-gram, H hashes of
each n-gram, D values of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.attention.forms import CacheForm, LatentForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.gated_norm.op import OP as GATED_NORM
from headrace.back.kernels.gated_norm.op import GatedNorm, GatedNormProblem
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.group_choice import write_rows
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.ngram_inputs import LEAST_GATE, SEED_STEP, primes, values_before
from headrace.back.layers.scope import Scope, not_loaded


@dataclass(frozen=True, kw_only=True)
class EngramSpec:
    """`layer`: whose it is, `index`: which of the decoder's; `classes`: that of each token, below
    `num_classes`; `pad`: the class in place of tokens before a text; `longest`: N; `heads`: H;
    `dim`: D; `base`: table sizes of the hashes are the primes from it on; `rows`: of the table."""

    streams: int
    layer: int
    index: int
    classes: Sequence[int]
    num_classes: int
    pad: int
    longest: int
    heads: int
    dim: int
    base: int
    rows: int
    eps: float
    name: str = "engram"

    @property
    def hashes(self) -> int:
        """Of all n-grams."""
        return (self.longest - 1) * self.heads

    @property
    def sizes(self) -> list[int]:
        """Rows of each hash: primes that no other hash of the decoder has."""
        return primes(self.base, self.index * self.hashes, self.hashes)

    @property
    def multipliers(self) -> list[int]:
        """Of a token and those before it: odd, and so that products fit 63 bits; drawn by NumPy's
        PCG64, as the tables were trained with."""
        half = max(1, ((1 << 63) - 1) // self.num_classes // 2)
        drawn = np.random.default_rng(SEED_STEP * self.layer).integers(
            low=0, high=half, size=(self.longest,), dtype=np.int64
        )
        return [2 * int(one) + 1 for one in drawn]

    def build(self, scope: Scope, cache: int, width: int) -> Engram:
        """See StreamInputsSpec."""
        return Engram(scope, cache, self, width)


class Engram:
    """`of(x_TSE, batch)` -> what is added to the streams."""

    def __init__(self, scope: Scope, cache: int, spec: EngramSpec, width: int) -> None:
        self._scope, self._cache, self._spec, self._width = scope, cache, spec, width
        self._table = TokenEmbedding(scope / "embed", spec.rows, spec.dim)
        inputs, outputs = spec.hashes * spec.dim, (spec.streams + 1) * width
        self._key_value = WholeLinear(scope / "wkv", inputs, outputs)
        shape = (spec.streams, width)
        self._params = [
            scope.param(name, shape, init="ones", dtype=torch.float32)
            for name in ("q_weight", "k_weight")
        ]
        self._weight_SE = self._class_V = self._sizes_H = self._offsets_H = torch.empty(0)
        self._gated: GatedNorm = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Of the tokens' classes."""
        span = self._spec.longest
        form = LatentForm(cache=self._cache, width=1, kind="window", span=span, dtype=torch.float32)
        return (form,)

    def of(self, x_TSE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        spec, rows_TH = self._spec, self._rows(batch)
        embedded_TV = self._table.lookup(rows_TH.flatten()).view(len(rows_TH), -1)
        both_TX = self._key_value.project(embedded_TV)
        key_TX, value_TE = both_TX.tensor_split((spec.streams * self._width,), dim=1)
        key_TSE = key_TX.unflatten(1, (spec.streams, self._width)).float()
        wide_TSE = x_TSE.float()
        met_TS = (wide_TSE * self._weight_SE * key_TSE).sum(2) * self._width**-0.5
        for part_TSE in (wide_TSE, key_TSE):
            met_TS = met_TS * torch.rsqrt(part_TSE.square().mean(2) + spec.eps)
        gate_TS = met_TS.abs().clamp_min(LEAST_GATE).sqrt().copysign(met_TS)
        value_TX = value_TE.repeat(1, spec.streams)
        return self._gated(value_TX, gate_TS.to(value_TX.dtype)).view(x_TSE.shape)

    def _rows(self, batch: Batch) -> torch.Tensor:
        """The table's rows of each token's n-grams, int64 [T, hashes]."""
        spec, plan = self._spec, batch.plans[batch.group_of_layer[self._cache]]
        cache, own_T = batch.kv[self._cache], self._class_V[batch.token_ids_T]
        write_rows(cache, own_T[:, None].float(), plan.slot_T)
        before = values_before(cache, plan, batch.positions_T, range(1, spec.longest), spec.pad)
        mixed_T, rows = own_T * self._multipliers[0], []
        for i in range(1, spec.longest):
            mixed_T = mixed_T ^ (before[:, i - 1, 0].long() * self._multipliers[i])
            part = slice((i - 1) * spec.heads, i * spec.heads)
            rows.append(mixed_T[:, None] % self._sizes_H[part] + self._offsets_H[part])
        return torch.cat(rows, dim=1)

    def _finish(self) -> None:
        spec, scope = self._spec, self._scope
        query_SE, key_SE = (param.take().float() for param in self._params)
        self._weight_SE = query_SE * key_SE
        sizes = torch.tensor(spec.sizes, dtype=torch.int64)
        self._sizes_H = sizes.to(scope.device)
        self._offsets_H = (sizes.cumsum(0) - sizes).to(scope.device)
        self._class_V = torch.tensor(spec.classes, dtype=torch.int64).to(scope.device)
        self._multipliers = spec.multipliers
        gate = GatedNormProblem(
            device=scope.kind,
            dtype=scope.dtype,
            width=spec.streams * self._width,
            group=0,
            gate="sigmoid",
            spread=self._width,
        )
        self._gated = scope.bind(GATED_NORM, gate, None)

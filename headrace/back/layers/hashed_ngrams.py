"""What the n-grams that end with a token add to its embedding: rows of tables by several hashes of
each n-gram, each table with a projection of its own; the mean of all of them and the embedding
(LongCat-Flash-Lite, Meituan LongCat team 2026, "Scaling embeddings outperforms scaling experts").

The last tokens lie in a windowed cache. T tokens, E hidden size, N longest n-gram, K hashes of an
n-gram, H tables: K for each n-gram of 2 to N tokens, D values of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm, LatentForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.linear.op import Linear
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.group_choice import write_rows
from headrace.back.layers.ngram_inputs import values_before
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.param import WeightPiece


@dataclass(frozen=True, kw_only=True)
class HashedNGramSpec:
    """`longest`: N; `hashes`: K; `base`: rows of table i are `base` + 2i + 1; `end_id`: n-grams do
    not reach back over it."""

    vocabulary: int
    longest: int
    hashes: int
    base: int
    end_id: int

    @property
    def rows(self) -> list[int]:
        """Of each table."""
        return [self.base + 2 * i + 1 for i in range(self.hashes * (self.longest - 1))]

    def factors(self, table: int) -> list[int]:
        """Of the token and of those before it, the nearest first, in this table's hash."""
        reach = table // self.hashes + 2
        return [pow(self.vocabulary, back, self.rows[table]) for back in range(reach)]


class HashedNGrams:
    """`into(x_TE, batch)` -> x_TE with what its n-grams add."""

    def __init__(self, scope: Scope, cache: int, spec: HashedNGramSpec, width: int) -> None:
        self._scope, self._cache, self._spec, self._width = scope, cache, spec, width
        rows = spec.rows
        self._size = width // len(rows)
        tables = [(f"embedders.{i}.weight", count) for i, count in enumerate(rows)]
        self._table = TokenEmbedding(scope, sum(rows), self._size, tables=tables)
        self._weights = scope.param(
            "post_projs.weight",
            (len(rows) * width, self._size),
            pieces=tuple(
                WeightPiece(
                    name=scope.name(f"post_projs.{i}.weight"),
                    shape=(width, self._size),
                    offset=i * width,
                )
                for i in range(len(rows))
            ),
        )
        self._project: Linear = not_loaded
        self._rows_H = self._first_H = self._factors_NH = torch.empty(0)
        scope.on_finish(self._finish)

    @property
    def kv_form(self) -> CacheForm:
        """Of the tokens."""
        return LatentForm(
            cache=self._cache,
            width=1,
            kind="window",
            span=self._spec.longest,
            dtype=torch.float32,
        )

    def into(self, x_TE: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the class."""
        spec, plan = self._spec, batch.plans[batch.group_of_layer[self._cache]]
        cache = batch.kv[self._cache]
        write_rows(cache, batch.token_ids_T[:, None].float(), plan.slot_T)
        reach = range(1, spec.longest)
        before_TN1 = values_before(cache, plan, batch.positions_T, reach, spec.end_id)
        before_TN = before_TN1[..., 0].long()
        seen_TN = (before_TN != spec.end_id).cumprod(1)
        ids_TN = torch.cat((batch.token_ids_T[:, None], before_TN * seen_TN), dim=1)
        hash_TH = (ids_TN[:, :, None] * self._factors_NH).sum(1) % self._rows_H
        values = self._table.lookup((hash_TH + self._first_H).flatten())
        added_TE = self._project(values.view(len(x_TE), -1))
        return (x_TE + added_TE) / (1 + len(self._rows_H))

    def _finish(self) -> None:
        rows, scope = self._spec.rows, self._scope
        sizes = torch.tensor(rows, dtype=torch.int64)
        factors = torch.zeros(self._spec.longest, len(rows), dtype=torch.int64)
        for table in range(len(rows)):
            own = self._spec.factors(table)
            factors[: len(own), table] = torch.tensor(own)
        self._rows_H, self._factors_NH = sizes.to(scope.device), factors.to(scope.device)
        self._first_H = (sizes.cumsum(0) - sizes).to(scope.device)
        weight = self._weights.take().view(len(rows), self._width, self._size)
        weight_EX = weight.transpose(0, 1).flatten(1).contiguous()
        self._project = bind_linear(scope, weight_EX, None)

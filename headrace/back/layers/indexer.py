"""The indexer of sparse latent attention (DeepSeek-V3.2, "DeepSeek sparse attention"): it scores
every position before a query and says which of them the layer's attention reads.

It is small and not split: every rank holds all of it, so that all choose the same positions. Its
keys lie in a cache of their own, in the blocks of the layer's latents.

T tokens, N those that go on, E hidden size, X rank of the queries' down-projection, J heads of the
indexer, I dimensions of one, K positions chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from headrace.back.attention.forms import LatentForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.index_select.op import OP as INDEX_SELECT
from headrace.back.kernels.index_select.op import IndexSelectProblem
from headrace.back.kernels.index_write.op import OP as INDEX_WRITE
from headrace.back.kernels.index_write.op import IndexWriteProblem
from headrace.back.layers.linear import ColumnLinear
from headrace.back.layers.rope import Rope, RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.shard import Part

KEY_NORM_EPS = 1e-6
"""Of the layer norm of the keys, in all published models: not the model's own."""


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """`dim`: dimensions of a head, the first of which are rotated; `top_k`: positions chosen."""

    heads: int
    dim: int
    top_k: int
    rope: RopeSpec


class IndexQueries(NamedTuple):
    """A step's rotated queries and their heads' weights."""

    q_TJI: torch.Tensor
    weight_TJ: torch.Tensor


class Indexer:
    """`queries` writes the step's keys; `choose` says what is read. `scope` is its own, `cache` the
    id of its keys' cache, `width` the hidden size, `q_rank` the rank of the queries'
    down-projection."""

    def __init__(
        self, scope: Scope, cache: int, spec: IndexerSpec, *, width: int, q_rank: int
    ) -> None:
        self._scope, self._cache, self._spec = scope, cache, spec
        heads = Part("wq_b", spec.heads * spec.dim, 1)
        self._query = ColumnLinear(scope, q_rank, (heads,))
        self._key = ColumnLinear(scope, width, (Part("wk", spec.dim, 1),))
        self._weight = ColumnLinear(scope, width, (Part("weights_proj", spec.heads, 1),))
        self._norm_weight = scope.param("k_norm.weight", (spec.dim,), init="ones")
        self._norm_bias = scope.param("k_norm.bias", (spec.dim,), init="zeros")
        self._rope = Rope(scope, spec.rope)
        self._write = self._select = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_form(self) -> LatentForm:
        """The cache of its keys."""
        return LatentForm(cache=self._cache, width=self._spec.dim)

    def queries(
        self, x_TE: torch.Tensor, q_TX: torch.Tensor, batch: Batch, at_N: torch.Tensor | None
    ) -> IndexQueries:
        """Those of the tokens `at_N`, None: of all, whose keys are in the cache. `q_TX`: the
        normed down-projection of the attention's queries."""
        plan = batch.plans[batch.group_of_layer[self._cache]]
        q_TJI = self._query.project(q_TX).unflatten(1, (self._spec.heads, self._spec.dim))
        weight_TJ = self._weight.project(x_TE)
        self._write(
            q_TJI,
            self._key.project(x_TE),
            batch.positions_T,
            self._rope.table_PR,
            batch.kv[self._cache],
            plan.slot_T,
        )
        if at_N is not None:
            q_TJI, weight_TJ = q_TJI.index_select(0, at_N), weight_TJ.index_select(0, at_N)
        return IndexQueries(q_TJI, weight_TJ)

    def choose(self, queries: IndexQueries, batch: Batch) -> torch.Tensor:
        """chosen_TK: see kernels/index_select."""
        plan = batch.plans[batch.group_of_layer[self._cache]]
        chosen_TK: torch.Tensor = self._select(*queries, batch.kv[self._cache], plan)
        return chosen_TK

    def _finish(self) -> None:
        spec, scope = self._spec, self._scope
        facts = {"device": scope.kind, "dtype": scope.dtype, "block_tokens": scope.block_tokens}
        sizes = {"heads": spec.heads, "dim": spec.dim}
        rope = {"rotary": spec.rope.rotary_dim, "layout": spec.rope.layout}
        self._write = scope.bind(
            INDEX_WRITE,
            IndexWriteProblem(**facts, **sizes, **rope, eps=KEY_NORM_EPS),
            self._norm_weight.take().float(),
            self._norm_bias.take().float(),
        )
        self._select = scope.bind(
            INDEX_SELECT, IndexSelectProblem(**facts, **sizes, top_k=spec.top_k)
        )

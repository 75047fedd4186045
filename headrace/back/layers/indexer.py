"""The indexer of sparse latent attention (DeepSeek-V3.2, "DeepSeek sparse attention"): it scores
every position before a query and says which of them the layer's attention reads.

It is small and not split: every rank holds all of it, so that all choose the same positions. Its
keys lie in a cache of their own, in the blocks of the layer's latents. A layer may also read what
the indexer of a layer before it has chosen (GLM with DSA).

T tokens, N those that go on, E hidden size, X rank of the queries' down-projection, J heads of the
indexer, I dimensions of one, K positions chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from headrace.back.attention.forms import CacheForm, LatentForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.index_select.op import OP as INDEX_SELECT
from headrace.back.kernels.index_select.op import IndexSelectProblem
from headrace.back.kernels.index_write.op import OP as INDEX_WRITE
from headrace.back.kernels.index_write.op import IndexWriteProblem
from headrace.back.layers.linear import ColumnLinear
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.query_scale import HeadLogScale
from headrace.back.layers.rope import Rope, RopeSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.shard import Part

KEY_NORM_EPS = 1e-6
"""Of the layer norm of the keys, in most published models: not the model's own."""


Handed = TypeVar("Handed")


class PositionChoice(Protocol[Handed]):
    """What says which positions an attention reads, in the two halves of a mixer
    (layers/mixer.py)."""

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """Its caches."""
        ...

    def queries(
        self, x_TE: torch.Tensor, q_TX: torch.Tensor, batch: Batch, at_N: torch.Tensor | None
    ) -> Handed:
        """The first half, of the tokens `at_N`, None: of all. `q_TX`: the normed down-projection
        of the attention's queries; empty where there is none."""
        ...

    def choose(self, handed: Handed, batch: Batch, /) -> torch.Tensor:
        """chosen_TK: see kernels/index_select; or chosen_TGK, G lists for each query."""
        ...


class ChoiceSpec(Protocol):
    """A choice of positions as data of its attention: IndexerSpec and others."""

    @property
    def top_k(self) -> int:
        """Positions of a list, at most."""
        ...

    @property
    def lists(self) -> int:
        """Lists for each query."""
        ...

    def build(self, scope: Scope, cache: int, *, width: int, q_rank: int) -> PositionChoice[Any]:
        """`scope` is its own, `cache` the id of its first cache, `width` the hidden size, `q_rank`
        the rank of the queries' down-projection."""
        ...


class Selection:
    """The positions chosen last, for the layers that read the same: chosen_TK of the step that
    runs. A step that is recorded reads the tensor that it wrote itself."""

    def __init__(self) -> None:
        self.chosen_TK = torch.empty(0)


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """`dim`: dimensions of a head, of which those from `offset` on are rotated; `eps`: of the norm
    of its keys; `top_k`: positions chosen; `own_queries`: they are made of the normed hidden
    states, and grow with the logarithm of their position (Mistral Large 4), not of the attention's
    down-projection;
    `selection`: where they are left for other layers; `shared`: there is no indexer here, what lies
    in the selection is read."""

    heads: int
    dim: int
    top_k: int
    rope: RopeSpec
    offset: int = 0
    eps: float = KEY_NORM_EPS
    selection: Selection | None = None
    shared: bool = False
    own_queries: bool = False
    lists: int = 1

    def build(self, scope: Scope, cache: int, *, width: int, q_rank: int) -> PositionChoice[Any]:
        """See ChoiceSpec."""
        if self.shared:
            assert self.selection is not None, "a shared choice has a place"
            return SharedChoice(self.selection)
        return Indexer(scope, cache, self, width=width, q_rank=q_rank)


class IndexQueries(NamedTuple):
    """A step's rotated queries and their heads' weights."""

    q_TJI: torch.Tensor
    weight_TJ: torch.Tensor


class Indexer:
    """`queries` writes the step's keys; `choose` scores. See PositionChoice, IndexerSpec.build."""

    def __init__(
        self, scope: Scope, cache: int, spec: IndexerSpec, *, width: int, q_rank: int
    ) -> None:
        self._scope, self._cache, self._spec = scope, cache, spec
        heads = Part("wq_b", spec.heads * spec.dim, 1)
        self._query_norm: LayerNorm | None = None
        self._query_scale: HeadLogScale | None = None
        if spec.own_queries:
            self._query_norm = LayerNorm(scope / "q_input_norm", width, eps=KEY_NORM_EPS)
            self._query_scale = HeadLogScale(scope / "softmax_scaling", spec.heads)
        self._query = ColumnLinear(scope, width if spec.own_queries else q_rank, (heads,))
        self._key = ColumnLinear(scope, width, (Part("wk", spec.dim, 1),))
        self._weight = ColumnLinear(scope, width, (Part("weights_proj", spec.heads, 1),))
        self._norm_weight = scope.param("k_norm.weight", (spec.dim,), init="ones")
        self._norm_bias = scope.param("k_norm.bias", (spec.dim,), init="zeros")
        self._rope = Rope(scope, spec.rope)
        self._write = self._select = not_loaded
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[LatentForm, ...]:
        """The cache of its keys."""
        return (LatentForm(cache=self._cache, width=self._spec.dim),)

    def queries(
        self, x_TE: torch.Tensor, q_TX: torch.Tensor, batch: Batch, at_N: torch.Tensor | None
    ) -> IndexQueries:
        """See PositionChoice."""
        plan = batch.plans[batch.group_of_layer[self._cache]]
        if self._query_norm is not None:
            q_TX = self._query_norm.norm(x_TE)
        q_TJI = self._query.project(q_TX).unflatten(1, (self._spec.heads, self._spec.dim))
        if self._query_scale is not None:
            q_TJI = q_TJI * self._query_scale.factors(batch.positions_T)
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
        """See PositionChoice."""
        plan = batch.plans[batch.group_of_layer[self._cache]]
        chosen_TK: torch.Tensor = self._select(*queries, batch.kv[self._cache], plan)
        if self._spec.selection is not None:
            self._spec.selection.chosen_TK = chosen_TK
        return chosen_TK

    def _finish(self) -> None:
        spec, scope = self._spec, self._scope
        facts = {"device": scope.kind, "dtype": scope.dtype, "block_tokens": scope.block_tokens}
        sizes = {"heads": spec.heads, "dim": spec.dim}
        rope = {"rotary": spec.rope.rotary_dim, "layout": spec.rope.layout}
        rope |= {"offset": spec.offset, "eps": spec.eps}
        self._write = scope.bind(
            INDEX_WRITE,
            IndexWriteProblem(**facts, **sizes, **rope),
            self._norm_weight.take().float(),
            self._norm_bias.take().float(),
        )
        self._select = scope.bind(
            INDEX_SELECT, IndexSelectProblem(**facts, **sizes, top_k=spec.top_k)
        )


class SharedChoice:
    """What an indexer before it has chosen. See PositionChoice."""

    kv_forms: tuple[CacheForm, ...] = ()

    def __init__(self, selection: Selection) -> None:
        self._selection = selection

    def queries(
        self, x_TE: torch.Tensor, q_TX: torch.Tensor, batch: Batch, at_N: torch.Tensor | None
    ) -> torch.Tensor:
        """See PositionChoice: the choice itself."""
        chosen_TK = self._selection.chosen_TK
        return chosen_TK if at_N is None else chosen_TK.index_select(0, at_N)

    def choose(self, chosen_TK: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See PositionChoice. Layers behind this one read it for the same tokens."""
        self._selection.chosen_TK = chosen_TK
        return chosen_TK

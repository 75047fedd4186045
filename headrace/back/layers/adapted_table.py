"""Low-rank adapters of a table of tokens: see adapters.py. Every rank has all of them, as it has
all of a token's embedding once the ranks have summed it.

T tokens, V rows of the table, E its width, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.embedding.op import Embedding
from headrace.back.kernels.lora_embedding.op import (
    OP,
    LoraEmbedding,
    LoraEmbeddingProblem,
    LoraTables,
    empty_tables,
)
from headrace.back.layers.adapter_shares import TABLES, AdaptedModule, LowRank
from headrace.back.layers.adapters import AdapterSlots
from headrace.back.layers.scope import Scope
from headrace.back.parallel.param import Param


@dataclass(frozen=True, kw_only=True, eq=False)
class TableShare:
    """What one adapter holds for a table, in host memory: a [V, R] and b [R, E] in the model's
    dtype."""

    a_VR: torch.Tensor
    b_RE: torch.Tensor
    scale: float

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What goes into slots."""
        return self.a_VR, self.b_RE


class AdaptedTable:
    """The slots of one table, whose checkpoint name is `name`. `scale`: what a token's embedding is
    multiplied with, and so what is added to it."""

    def __init__(
        self,
        slots: AdapterSlots,
        name: str,
        problem: LoraEmbeddingProblem,
        *,
        scale: float,
        device: torch.device,
    ) -> None:
        module = AdaptedModule(
            inputs=problem.rows, outputs=problem.width, parts=(0,), pieces=(), kind="table"
        )
        self.modules = {name: module}
        self.problem = problem
        self.tables: LoraTables = empty_tables(problem, device)
        self._slots, self._scale = slots, scale

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on this rank."""
        tables = self.tables
        parts = (tables.a_SVR, tables.b_SRE, tables.scale_S, tables.rank_S)
        return sum(tensor.nbytes for tensor in parts)

    def add_to(self, lookup: Embedding, bind: Callable[..., LoraEmbedding]) -> Embedding:
        """The lookup, and what its tokens' adapters add. `bind`: see Scope."""
        slots, add = self._slots, bind(OP, self.problem, self.tables)

        def adapted(ids_T: torch.Tensor) -> torch.Tensor:
            x_TE = lookup(ids_T)
            if slots.rows_T is not None:
                add(ids_T, x_TE, slots.rows_T)
            return x_TE

        return adapted

    def share(self, pairs: dict[str, LowRank]) -> TableShare:
        """See AdaptedLayer; the pair's a is [R, V], its b [E, R]."""
        (pair,) = pairs.values()
        dtype = self.problem.dtype
        return TableShare(
            a_VR=pair.a_RI.t().to(dtype).contiguous(),
            b_RE=pair.b_OR.t().to(dtype).contiguous(),
            scale=pair.scale * self._scale,
        )

    def put(self, slot: int, share: TableShare | None) -> None:
        """See AdaptedLayer."""
        tables, at = self.tables, slot - 1
        tables.rank_S[at] = 0
        if share is None:
            return
        rank = len(share.b_RE)
        tables.a_SVR[at, :, :rank].copy_(share.a_VR)
        tables.b_SRE[at, :rank].copy_(share.b_RE)
        tables.scale_S[at] = share.scale
        tables.rank_S[at] = rank


def adapted_table(scope: Scope, weight: Param, *, scale: float) -> AdaptedTable | None:
    """The slots of a table of tokens, whose rows are multiplied with `scale`, if there are any."""
    slots = scope.adapters
    if slots is None or TABLES not in slots.kinds:
        return None
    rows, width = weight.shape
    problem = LoraEmbeddingProblem(
        device=scope.kind,
        dtype=scope.dtype,
        rows=rows,
        width=width,
        rank=slots.max_rank,
        slots=slots.count,
    )
    name = weight.pieces[0].name.removesuffix(".weight")
    return slots.kept(lambda: AdaptedTable(slots, name, problem, scale=scale, device=scope.device))

"""Attention over keys and values of which each query reads the positions that an indexer chooses
(layers/group_indexer.py), in place of all before it.

T tokens, H query heads, K KV heads, D head_dim, G lists of positions; H and K are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import AttentionPlan, Batch
from headrace.back.kernels.sparse_attention.op import OP as SPARSE_ATTENTION
from headrace.back.kernels.sparse_attention.op import SparseAttentionProblem
from headrace.back.layers.indexer import ChoiceSpec, PositionChoice
from headrace.back.layers.scope import Scope, not_loaded
from headrace.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ChosenSizes:
    """Of the attention, in global sizes."""

    width: int
    head_dim: int
    kv_heads: int
    scale: float


class ChosenPositions:
    """The choice and the attention over it; `scope` is that of the attention, whose first cache is
    `layer`. Every rank chooses for all KV heads, and reads the lists of its own."""

    def __init__(self, scope: Scope, layer: int, chooser: ChoiceSpec, sizes: ChosenSizes) -> None:
        if scope.kv_quantized:
            raise ConfigError(
                f"--kv-dtype {scope.kv_quantized}: attention over chosen positions reads the "
                "model's dtype; use auto with this model",
                field="kv_dtype",
            )
        self._scope, self._spec, self._sizes = scope, chooser, sizes
        width = sizes.width
        self._choice: PositionChoice[Any] = chooser.build(
            scope / "indexer", layer + 1, width=width, q_rank=width
        )
        self._attend = not_loaded
        self._own = slice(0, 1)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """The caches of the indexer."""
        return self._choice.kv_forms

    def queries(self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None) -> Any:
        """What the choice hands on: see PositionChoice."""
        return self._choice.queries(x_TE, x_TE, batch, at_N)

    def attend(
        self,
        q_THD: torch.Tensor,
        kv: torch.Tensor,
        plan: AttentionPlan,
        handed: Any,
        batch: Batch,
    ) -> torch.Tensor:
        """y_THD."""
        chosen_TGS = self._choice.choose(handed, batch)[:, self._own].contiguous()
        y_THD: torch.Tensor = self._attend(q_THD.contiguous(), kv, plan, chosen_TGS)
        return y_THD

    def bind(self, *, heads: int, kv_heads: int) -> None:
        """Binds the op for this rank's heads."""
        spec, sizes, axis = self._spec, self._sizes, self._scope.mesh.tp
        if spec.lists > 1:
            first = axis.rank * sizes.kv_heads // axis.size
            self._own = slice(first, first + kv_heads)
        problem = SparseAttentionProblem(
            device=self._scope.kind,
            dtype=self._scope.dtype,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=sizes.head_dim,
            lists=kv_heads if spec.lists > 1 else 1,
            top_k=spec.top_k,
            block_tokens=self._scope.block_tokens,
            scale=sizes.scale,
        )
        self._attend = self._scope.bind(SPARSE_ATTENTION, problem)

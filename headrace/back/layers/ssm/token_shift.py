"""Tokens beside those before them, which every branch of RWKV reads (op token_shift).

T query tokens, E hidden size, N results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import StateForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.kernels.token_shift.op import OP, TokenShiftProblem
from headrace.back.kernels.token_shift.op import TokenShift as Shift
from headrace.back.layers.scope import Scope, not_loaded


@dataclass(frozen=True, kw_only=True)
class TokenShiftSpec:
    """`names`: a tensor for each result. `flat`: they are [E], else [1, 1, E]. `of_token`: they
    hold the share of the token, else that of the one before it. `gives_before`: one more result is
    the token before as it is."""

    names: tuple[str, ...]
    flat: bool = False
    of_token: bool = False
    gives_before: bool = False


class TokenShift:
    """x_TE -> N times [T, E]. `scope` is that of its branch; its cache, `form`, a row's last x."""

    def __init__(self, scope: Scope, cache: int, width: int, spec: TokenShiftSpec) -> None:
        self._scope, self._spec, self._cache, self._width = scope, spec, cache, width
        shape = (width,) if spec.flat else (1, 1, width)
        self._weights = [scope.param(name, shape, dtype=torch.float32) for name in spec.names]
        self._shift: Shift = not_loaded
        scope.on_finish(self._finish)

    @property
    def form(self) -> StateForm:
        """See the class."""
        return StateForm(cache=self._cache, shape=(self._width,))

    def of(self, x_TE: torch.Tensor, batch: Batch, rows: ScanRows) -> tuple[torch.Tensor, ...]:
        """See the class."""
        return self._shift(x_TE, batch.kv[self._cache], rows).unbind(1)

    def _finish(self) -> None:
        weights = [weight.take().flatten() for weight in self._weights]
        if self._spec.of_token:
            weights = [1 - weight for weight in weights]
        if self._spec.gives_before:
            weights.append(torch.ones_like(weights[0]))
        problem = TokenShiftProblem(
            device=self._scope.kind,
            dtype=self._scope.dtype,
            width=self._width,
            count=len(weights),
        )
        self._shift = self._scope.bind(OP, problem, torch.stack(weights))

"""What lies 1, 2 ... tokens before each token of a row: of convolutions whose taps follow from the
token. Op causal_conv gives it, a tap of it being 1 and the others 0, so that rows, chunks and
states are its own.

T query tokens, C channels, W taps.
"""

from __future__ import annotations

import torch

from headrace.back.attention.forms import StateForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.causal_conv.op import OP, CausalConv, CausalConvProblem
from headrace.back.kernels.gated_scan.op import ScanRows
from headrace.back.layers.scope import Scope, not_loaded


class EarlierInputs:
    """x_TC -> W - 1 times [T, C], the nearest first; zeros before a row's first token. Its cache
    holds the channels once for each of them."""

    def __init__(self, scope: Scope, cache: int, channels: int, *, taps: int) -> None:
        self._scope, self._cache = scope, cache
        self._channels, self._taps = channels, taps
        self._before: CausalConv = not_loaded
        scope.on_finish(self._finish)

    @property
    def form(self) -> StateForm:
        """The last inputs of a row."""
        behind = self._taps - 1
        return StateForm(cache=self._cache, shape=(behind, behind * self._channels))

    def of(self, x_TC: torch.Tensor, batch: Batch, rows: ScanRows) -> tuple[torch.Tensor, ...]:
        """See the class."""
        behind = self._taps - 1
        before_TX = self._before(x_TC.repeat(1, behind), batch.kv[self._cache], rows)
        return before_TX.chunk(behind, dim=1)

    def _finish(self) -> None:
        scope, behind, channels = self._scope, self._taps - 1, self._channels
        weight_WC = torch.zeros(self._taps, behind * channels, device=scope.device)
        for lag in range(1, self._taps):
            weight_WC[self._taps - 1 - lag, (lag - 1) * channels : lag * channels] = 1.0
        problem = CausalConvProblem(
            device=scope.kind,
            dtype=scope.dtype,
            channels=behind * channels,
            taps=self._taps,
            activation="",
        )
        self._before = scope.bind(OP, problem, weight_WC, None)

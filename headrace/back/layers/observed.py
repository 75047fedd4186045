"""Linear layers that are looked at: in the place of adapter slots, something that sees what goes
into each linear layer and what comes out of it. No layer is fused with what is around it then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.back.kernels.linear.op import Linear
from headrace.back.layers.adapters import AdapterSlots
from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.param import Param

See = Callable[[tuple[str, ...], torch.Tensor, torch.Tensor], None]
"""Told the checkpoint's names of the weights whose outputs lie side by side, x_TI and y_TO."""


class ObservedLinears(AdapterSlots):
    """All linear layers of a model that takes adapters. `gemms`: their products, by the names of
    their weights, once the model is loaded; others may be put in their place."""

    def __init__(self, see: See) -> None:
        super().__init__(count=0, max_rank=0)
        self._see = see
        self.gemms: dict[tuple[str, ...], Linear] = {}

    def over(  # type: ignore[override]  # asked for `add_to` alone
        self, weight: Param, mesh: Mesh, device: torch.device, kind: str, *, wide: bool = False
    ) -> ObservedLinear:
        """See AdapterSlots."""
        names = tuple(dict.fromkeys(piece.name for piece in weight.pieces))
        return ObservedLinear(names, self._see, self.gemms)


class ObservedLinear:
    """One of them."""

    def __init__(
        self, names: tuple[str, ...], see: See, gemms: dict[tuple[str, ...], Linear]
    ) -> None:
        self._names, self._see, self._gemms = names, see, gemms

    def add_to(
        self, gemm: Linear, bind: Callable[..., object], weight: object, bias_O: object
    ) -> Linear:
        """See AdaptedLinear."""
        self._gemms[self._names] = gemm

        def project(x_TI: torch.Tensor) -> torch.Tensor:
            y_TO = self._gemms[self._names](x_TI)
            self._see(self._names, x_TI, y_TO)
            return y_TO

        return project

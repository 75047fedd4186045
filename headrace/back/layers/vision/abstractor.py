"""The C-Abstractor: blocks of convolutions over the patches of a square, the means of windows, and
blocks again, then two linear layers (Cha et al. 2024, Honeybee, section 3.3; blocks of Radosavovic
et al. 2020, RegNet, and Hu et al. 2018, Squeeze-and-Excitation, as timm has them).

T squares, S patches a side, L windows, E width of the tower, F of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.kernels.linear.op import Linear
from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.vision.encoder import Grid

EPS = 1e-5
DEPTH = 3
SQUEEZED = 0.25


@dataclass(frozen=True, kw_only=True)
class AbstractorSpec:
    """`merge`: patches a side of a window. `positions`: there is a table of S x S of them, else
    there is none."""

    width: int
    outputs: int
    merge: int
    side: int
    positions: bool
    module: str

    def build(self, scope: Scope) -> Abstractor:
        """See ProjectorSpec."""
        return Abstractor(scope / self.module, self)


class Abstractor:
    """x_NE -> y_MF by AbstractorSpec; `GridProjector`."""

    def __init__(self, scope: Scope, spec: AbstractorSpec) -> None:
        self._spec, width = spec, spec.width
        self._positions = None
        if spec.positions:
            self._positions = scope.param("pos_emb", (1, spec.side**2, width))
        self._before, self._behind = (
            [ConvolutionBlock(scope / f"net.{part}.b{i + 1}", width) for i in range(DEPTH)]
            for part in (0, 2)
        )
        self._up = WholeLinear(scope / "readout.0", width, spec.outputs, bias=True)
        self._down = WholeLinear(scope / "readout.2", spec.outputs, spec.outputs, bias=True)
        self._table_SSE = torch.empty(0)
        scope.on_finish(self._finish)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector; of whole squares."""
        return self.merge_grids(x_NE, [(x_NE.shape[0] // self._spec.side**2, 0, 0)])

    def merge_grids(self, x_NE: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See GridProjector."""
        side, merge, width = self._spec.side, self._spec.merge, self._spec.width
        half = side // merge
        windows = x_NE.view(-1, half, half, merge, merge, width)
        x_TSSE = windows.transpose(2, 3).reshape(-1, side, side, width)
        if self._positions is not None:
            x_TSSE = x_TSSE + self._table_SSE
        for block in self._before:
            x_TSSE = block.forward(x_TSSE)
        x_TLLE = x_TSSE.view(-1, half, merge, half, merge, width).mean((2, 4))
        for block in self._behind:
            x_TLLE = block.forward(x_TLLE)
        return self._down.project(F.silu(self._up.project(x_TLLE.view(-1, width))))

    def _finish(self) -> None:
        if self._positions is not None:
            side = self._spec.side
            self._table_SSE = self._positions.take().view(side, side, -1)


class ConvolutionBlock:
    """x_TSSE -> x_TSSE: a layer in each place, a convolution of 3 x 3 in each channel, channels
    weighed by their means over the square, a layer in each place; a norm behind each of the
    three."""

    def __init__(self, scope: Scope, width: int) -> None:
        self._scope, self._width = scope, width
        self._weights = [
            scope.param(f"{name}.conv.weight", (width, inputs, size, size))
            for name, inputs, size in (("conv1", width, 1), ("conv2", 1, 3), ("conv3", width, 1))
        ]
        self._norms = [LAYER.build(scope / f"conv{i}.bn", width, eps=EPS) for i in (1, 2, 3)]
        few = round(width * SQUEEZED)
        self._squeeze = _PlaceLinear(scope / "se.fc1", width, few)
        self._excite = _PlaceLinear(scope / "se.fc2", few, width)
        self._first: Linear = not_loaded
        self._last: Linear = not_loaded
        self._around = torch.empty(0)
        scope.on_finish(self._finish)

    def forward(self, x_TSSE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        first, second, third = self._norms
        shape, width = x_TSSE.shape, self._width
        y_NE = F.silu(first.norm(self._first(x_TSSE.reshape(-1, width))))
        planes = y_NE.view(shape).permute(0, 3, 1, 2)
        planes = F.conv2d(planes, self._around, padding=1, groups=width)
        y_NE = F.silu(second.norm(planes.permute(0, 2, 3, 1).reshape(-1, width)))
        y_TSSE = y_NE.view(shape)
        few = F.silu(self._squeeze.project(y_TSSE.mean((1, 2))))
        y_TSSE = y_TSSE * self._excite.project(few).sigmoid()[:, None, None]
        y_NE = third.norm(self._last(y_TSSE.reshape(-1, width)))
        return F.silu(y_NE.view(shape) + x_TSSE)

    def _finish(self) -> None:
        first, around, last = (param.take() for param in self._weights)
        self._around = around
        self._first, self._last = (
            bind_linear(self._scope, one.view(self._width, self._width).contiguous(), None)
            for one in (first, last)
        )


class _PlaceLinear:
    """x_TI -> y_TO, whose weight the checkpoint holds as a convolution of 1 x 1."""

    def __init__(self, scope: Scope, inputs: int, outputs: int) -> None:
        self.project: Linear = not_loaded
        self._scope = scope
        self._weight = scope.param("weight", (outputs, inputs, 1, 1))
        self._bias = scope.param("bias", (outputs,), init="zeros")
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        weight = self._weight.take()
        self.project = bind_linear(
            self._scope, weight.view(weight.shape[:2]).contiguous(), self._bias.take()
        )

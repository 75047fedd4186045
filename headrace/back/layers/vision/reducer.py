"""What leads from GLM's vision tower to its decoder: a convolution over each window, a layer with a
norm, a gated MLP.

N patches, M tokens, E width of the tower, F of the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation, FeedForwardPlace, GatedMLP
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.vision.bounded_mlp import BoundedMLP

EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class ReducerSpec:
    """`merge` patches a side of a window; `inner` of the gated MLP, whose activation it is;
    `bound`: of its inputs, see BoundedMLP."""

    width: int
    outputs: int
    merge: int
    inner: int
    activation: str
    bound: float = 0.0

    def build(self, scope: Scope, name: str, *, norm_merged: bool = False) -> WindowReducer:
        """Within the tower's scope. It has one form."""
        assert not norm_merged, "GLM adds nothing behind layers"
        return WindowReducer(scope, name, self)


class WindowReducer:
    """x_NE -> y_MF: N rows in windows, each of which becomes one."""

    def __init__(self, scope: Scope, name: str, spec: ReducerSpec) -> None:
        inside, side = scope / name, spec.merge
        self._inputs = spec.width * side**2
        self._scope = scope
        at = scope / "downsample"
        self._weight = at.param("weight", (spec.outputs, spec.width, side, side))
        self._bias = at.param("bias", (spec.outputs,), init="zeros")
        self._reduce = not_loaded
        self._project = WholeLinear(inside / "proj", spec.outputs, spec.outputs)
        self._norm = LAYER.build(inside / "post_projection_norm", spec.outputs, eps=EPS)
        self._activation = ElementwiseActivation(scope, "gelu")
        place = FeedForwardPlace(width=spec.outputs, inner=spec.inner, activation=spec.activation)
        self._mlp: GatedMLP | BoundedMLP
        if spec.bound:
            self._mlp = BoundedMLP(inside, place, bound=spec.bound)
        else:
            self._mlp = GatedMLP(inside, place)
        scope.on_finish(self._finish)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        y_MF = self._project.project(self._reduce(x_NE.view(-1, self._inputs)))
        return self._mlp.forward(self._activation.apply(self._norm.norm(y_MF)))

    def _finish(self) -> None:
        weight_FI = self._weight.take().permute(0, 2, 3, 1).flatten(1).contiguous()
        self._reduce = bind_linear(self._scope, weight_FI, self._bias.take())

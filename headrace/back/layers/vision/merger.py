"""What leads from a vision tower to the decoder: windows of merge x merge patches side by side, two
linear layers with an activation between them.

N patches, M tokens, E width of the tower, F of the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.linear import ColumnLinear, RowLinear, WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import LAYER, NormSpec
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.shard import Part


@dataclass(frozen=True, kw_only=True)
class MergerSpec:
    """`merge` patches a side; `norm_merged`: the norm is over the whole window, not over each
    patch. `names`: of the norm and the two layers."""

    width: int
    outputs: int
    merge: int
    norm: NormSpec
    eps: float
    names: tuple[str, str, str]
    norm_merged: bool = False
    activation: str = "gelu"

    def build(self, scope: Scope, name: str, *, norm_merged: bool = False) -> WindowMerger:
        """Within the tower's scope; `norm_merged`: whatever the data says."""
        return WindowMerger(
            scope / name, replace(self, norm_merged=norm_merged or self.norm_merged)
        )


class WindowMerger:
    """x_NE -> y_MF: N rows in windows, each of which becomes one."""

    def __init__(self, scope: Scope, spec: MergerSpec) -> None:
        norm, up, down = spec.names
        inner = spec.width * spec.merge**2
        self._inner = inner
        self._norm_merged = spec.norm_merged
        width = inner if spec.norm_merged else spec.width
        self._norm = spec.norm.build(scope / norm, width, eps=spec.eps)
        part = Part(up, inner, inner)
        self._up = ColumnLinear(scope, inner, (part,), bias=True)
        self._activation = ElementwiseActivation(scope, spec.activation)
        self._down = RowLinear(scope / down, part, spec.outputs, bias=True)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if self._norm_merged:
            x_MI = self._norm.norm(x_NE.view(-1, self._inner))
        else:
            x_MI = self._norm.norm(x_NE).view(-1, self._inner)
        return self._down.project(self._activation.apply(self._up.project(x_MI)))


@dataclass(frozen=True, kw_only=True)
class SideBySideSpec:
    """The patches of a window side by side, and nothing more."""

    width: int
    merge: int

    @property
    def outputs(self) -> int:
        """Of a window."""
        return self.width * self.merge**2

    def build(self, scope: Scope, name: str, *, norm_merged: bool = False) -> SideBySide:
        """It has no parameters."""
        assert not norm_merged, "it has no norm"
        return SideBySide(self)


class SideBySide:
    """x_NE -> y_MX by SideBySideSpec."""

    def __init__(self, spec: SideBySideSpec) -> None:
        self._outputs = spec.outputs

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return x_NE.view(-1, self._outputs)


@dataclass(frozen=True, kw_only=True)
class TwoLayers:
    """Windows side by side, a norm if there is one, then two linear layers. `names`: of both;
    `norm`: its name, kind and epsilon; it stands before the window is merged unless `norm_merged`.
    `reduced`: a layer of this name first turns a window into one row of the tower's width, its
    inputs channel by channel (Mistral 3). `by_channel`: the first layer's inputs are so. `inner`:
    outputs of the first layer, None: as many as of the second."""

    width: int
    outputs: int
    merge: int = 1
    names: tuple[str, str] = ("linear_1", "linear_2")
    bias: bool = True
    activation: str = "gelu"
    norm: tuple[str, NormSpec, float] | None = None
    norm_merged: bool = False
    reduced: str | None = None
    by_channel: bool = False
    inner: int | None = None
    module: str = "multi_modal_projector"

    def build(self, scope: Scope) -> TwoLayerProjector:
        """See ProjectorSpec."""
        return TwoLayerProjector(scope / self.module if self.module else scope, self)


class TwoLayerProjector:
    """x_NE -> y_MF by TwoLayers."""

    def __init__(self, scope: Scope, spec: TwoLayers) -> None:
        up, down = spec.names
        self._spec = spec
        window = spec.width * spec.merge**2
        inputs = spec.width if spec.reduced else window
        self._norm = None
        if spec.norm is not None:
            name, norm, eps = spec.norm
            self._norm = norm.build(
                scope / name, window if spec.norm_merged else spec.width, eps=eps
            )
        self._reduce = (
            None if spec.reduced is None else WholeLinear(scope / spec.reduced, window, spec.width)
        )
        inner = spec.inner or spec.outputs
        part = Part(up, inner, inner)
        self._up = ColumnLinear(scope, inputs, (part,), bias=spec.bias)
        self._activation = ElementwiseActivation(scope, spec.activation)
        self._down = RowLinear(scope / down, part, spec.outputs, bias=spec.bias)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector."""
        spec = self._spec
        if self._norm is not None and not spec.norm_merged:
            x_NE = self._norm.norm(x_NE)
        x_MWE = x_NE.view(-1, spec.merge**2, spec.width)
        if self._reduce is not None:
            x_MI = self._reduce.project(x_MWE.transpose(1, 2).flatten(1))
        elif spec.by_channel:
            x_MI = x_MWE.transpose(1, 2).flatten(1)
        else:
            x_MI = x_MWE.flatten(1)
        if self._norm is not None and spec.norm_merged:
            x_MI = self._norm.norm(x_MI)
        return self._down.project(self._activation.apply(self._up.project(x_MI)))


@dataclass(frozen=True, kw_only=True)
class NoProjector:
    """Rows stay what they are, in the order of windows, `outputs` wide."""

    outputs: int
    merge: int = 1

    def build(self, scope: Scope) -> Unprojected:
        """See ProjectorSpec."""
        return Unprojected()


class Unprojected:
    """x_NE -> x_NE."""

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector."""
        return x_NE


@dataclass(frozen=True, kw_only=True)
class OneLayer:
    """Windows side by side, then one linear layer of this name, without a bias unless `bias`."""

    width: int
    outputs: int
    merge: int
    name: str
    bias: bool = False

    def build(self, scope: Scope) -> OneLayerProjector:
        """See ProjectorSpec."""
        return OneLayerProjector(scope / self.name, self)


class OneLayerProjector:
    """x_NE -> y_MF by OneLayer."""

    def __init__(self, scope: Scope, spec: OneLayer) -> None:
        self._inputs = spec.width * spec.merge**2
        self._linear = WholeLinear(scope, self._inputs, spec.outputs, bias=spec.bias)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector."""
        return self._linear.project(x_NE.view(-1, self._inputs))


@dataclass(frozen=True, kw_only=True)
class PooledLayer:
    """The mean of each window, a norm, then a weight that the checkpoint holds as [inputs, outputs]
    (Gemma 3). `norm`: its name, kind and epsilon; `weight`: the name of the other."""

    width: int
    outputs: int
    merge: int
    norm: tuple[str, NormSpec, float]
    weight: str
    module: str = "multi_modal_projector"

    def build(self, scope: Scope) -> PooledLayerProjector:
        """See ProjectorSpec."""
        return PooledLayerProjector(scope / self.module, self)


class PooledLayerProjector:
    """x_NE -> y_MF by PooledLayer."""

    def __init__(self, scope: Scope, spec: PooledLayer) -> None:
        name, norm, eps = spec.norm
        self._spec, self._scope = spec, scope
        self._norm = norm.build(scope / name, spec.width, eps=eps)
        self._weight = scope.param(spec.weight, (spec.width, spec.outputs))
        self._project = not_loaded
        scope.on_finish(self._finish)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector."""
        mean_ME = x_NE.view(-1, self._spec.merge**2, self._spec.width).mean(1)
        projected: torch.Tensor = self._project(self._norm.norm(mean_ME))
        return projected

    def _finish(self) -> None:
        self._project = bind_linear(self._scope, self._weight.take().T.contiguous(), None)


@dataclass(frozen=True, kw_only=True)
class GatedLayers:
    """Windows side by side, a norm of the window if there is one, a linear layer whose second half
    gates its first, and one more. `inner`: outputs of the first; `eps`: of the norm, None: there is
    none."""

    width: int
    outputs: int
    merge: int
    inner: int
    eps: float | None = None
    module: str = "multi_modal_projector"

    def build(self, scope: Scope) -> GatedProjector:
        """See ProjectorSpec."""
        return GatedProjector(scope / self.module, self)


class GatedProjector:
    """x_NE -> y_MF by GatedLayers: silu(gate) times the rest (Shazeer 2020)."""

    def __init__(self, scope: Scope, spec: GatedLayers) -> None:
        self._window = spec.width * spec.merge**2
        self._norm = None
        if spec.eps is not None:
            self._norm = LAYER.build(scope / "layernorm", self._window, eps=spec.eps)
        self._up = WholeLinear(scope / "linear_1", self._window, spec.inner, bias=True)
        self._down = WholeLinear(scope / "linear_2", spec.inner // 2, spec.outputs, bias=True)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector."""
        x_MI = x_NE.view(-1, self._window)
        if self._norm is not None:
            x_MI = self._norm.norm(x_MI)
        value, gate = self._up.project(x_MI).chunk(2, dim=1)
        return self._down.project(F.silu(gate) * value)

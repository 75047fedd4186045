"""The feed-forward part of a decoder layer: what a layer asks of it, the gated MLP,
down(act(gate(x)) * up(x)), and the plain one, down(act(up(x))). Experts are another kind behind the
same face."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Protocol

import torch
import torch.nn.functional as F

from headrace.back.kernels.activation.op import OP as ACTIVATION
from headrace.back.kernels.activation.op import Activation, ActivationProblem
from headrace.back.kernels.gated_act.op import OP, GatedAct, GatedActProblem
from headrace.back.layers.linear import ColumnLinear, MergedTensor, RowLinear
from headrace.back.layers.norm import RMSNorm, SplitRMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial, all_reduce
from headrace.back.parallel.shard import Part, local_size


class FeedForward(Protocol):
    """What a decoder layer asks of its second branch. T tokens, E hidden size."""

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it: then x is what goes into that norm."""
        ...

    def forward_into(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done, a Partial where the ranks' sum
        is still to be taken."""
        ...


@dataclass(frozen=True, kw_only=True)
class FeedForwardPlace:
    """Where a feed-forward stands in its layer. `width`: E; `inner` and `activation` are the
    family's usual ones. `norm` stands before it, `adds`: y goes into the residual as it is."""

    width: int
    inner: int
    activation: str
    norm: RMSNorm | None = None
    adds: bool = False


class FeedForwardSpec(Protocol):
    """A kind of feed-forward as data of its layer; `build` makes it on this rank."""

    def build(self, scope: Scope, place: FeedForwardPlace) -> FeedForward:
        """`scope` is the layer's."""
        ...


@dataclass(frozen=True, kw_only=True)
class GatedMLPSpec:
    """A dense gated MLP. `merged` names the checkpoint tensor that holds gate and up, if they are
    one there, else `gate` and `up` do; `down` the one that leads back; `name` is the module in the
    layer, empty where there is none. `inner`: its own, where it is not the family's usual one.
    `gate_scale`, `down_scale`: what these are multiplied with. `sparsity`: see LargestGates; 0: all
    count. `down_bias`: whether what leads back has a bias, None: as `bias` says. `inner_norm`: of
    the inner values, its name and its epsilon. `transposed`: weights are stored as [inputs,
    outputs]."""

    name: str = "mlp"
    bias: bool = False
    transposed: bool = False
    merged: str | MergedTensor | None = None
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    inner: int | None = None
    gate_scale: float = 1.0
    down_scale: float = 1.0
    sparsity: float = 0.0
    inner_norm: tuple[str, float] | None = None
    down_bias: bool | None = None

    def build(self, scope: Scope, place: FeedForwardPlace) -> FeedForward:
        """See FeedForwardSpec."""
        place = replace(place, inner=self.inner or place.inner)
        return GatedMLP(
            scope / self.name if self.name else scope,
            place,
            bias=self.bias,
            down_bias=self.down_bias,
            merged=self.merged,
            names=(self.gate, self.up, self.down),
            scales=(self.gate_scale, self.down_scale),
            sparsity=self.sparsity,
            inner_norm=self.inner_norm,
            transposed=self.transposed,
        )


GATED_MLP = GatedMLPSpec()


class GatedMLP:
    """x_TE -> y_TE. `merged` names the checkpoint tensor that holds gate and up, if they are one
    there (Phi-3), or says how; `names`: those of gate, up and down; `scales`: what gate and down
    are multiplied with; `down_bias`: the one that leads back has a bias, None: as `bias` says. If
    `norms`, x is what goes into the norm before it."""

    def __init__(
        self,
        scope: Scope,
        place: FeedForwardPlace,
        *,
        bias: bool = False,
        down_bias: bool | None = None,
        merged: str | MergedTensor | None = None,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        scales: tuple[float, float] = (1.0, 1.0),
        sparsity: float = 0.0,
        inner_norm: tuple[str, float] | None = None,
        transposed: bool = False,
    ) -> None:
        (gate, up, down), inner = names, place.inner
        parts = (Part(gate, inner, inner, scale=scales[0]), Part(up, inner, inner))
        self._gate_up = ColumnLinear(
            scope,
            place.width,
            parts,
            bias=bias,
            merged=merged if isinstance(merged, str) else None,
            tensors=(merged,) if isinstance(merged, MergedTensor) else (),
            transposed=transposed,
            norm=place.norm,
            activation=None if sparsity else place.activation,
        )
        self._inner_norm = None
        if inner_norm is not None:
            name, eps = inner_norm
            self._inner_norm = SplitRMSNorm(scope / name, parts[0], eps=eps)
        self._largest = LargestGates(scope, parts[0], sparsity) if sparsity else None
        self._down = RowLinear(
            scope / down,
            parts[0],
            place.width,
            bias=bias if down_bias is None else down_bias,
            adds=place.adds,
            transposed=transposed,
            scale=scales[1],
            gates=self._gate_up if inner_norm is None else None,
        )
        self._act: GatedAct = not_loaded
        self._scope = scope
        self._activation = place.activation
        scope.on_finish(self._finish)

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._gate_up.norms

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self._down.project(self._inner(x_TE))

    def forward_into(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        return self._down.project_into(self._inner(x_TE), residual_TE)

    def _inner(self, x_TE: torch.Tensor) -> torch.Tensor:
        inner = self._gate_up.project(x_TE)
        if self._largest is not None:
            self._largest.cut(inner)
        inner = inner if self._gate_up.activates else self._act(inner)
        return inner if self._inner_norm is None else self._inner_norm.norm(inner)

    def _finish(self) -> None:
        if self._gate_up.activates:
            return
        problem = GatedActProblem(
            device=self._scope.kind,
            dtype=self._scope.dtype,
            width=self._gate_up.sizes[0],
            activation=self._activation,
        )
        self._act = self._scope.bind(OP, problem)


class LargestGates:
    """Gates lose a bound and are zero below it, which a share `sparsity` of them would be if they
    were normally distributed: mean and deviation are those of a token's gates on all ranks."""

    def __init__(self, scope: Scope, gates: Part, sparsity: float) -> None:
        self._axis, self._width = scope.mesh.tp, gates.size
        self._local = local_size(gates, scope.mesh.tp)
        self._deviations = NormalDist().inv_cdf(sparsity)

    def cut(self, inner_TC: torch.Tensor) -> None:
        """Changes the gates, which come first in `inner_TC`."""
        gate_TI = inner_TC[:, : self._local]
        wide_TI = gate_TI.float()
        mean_T1 = self._mean(wide_TI)
        variance_T1 = self._mean((wide_TI - mean_T1).square())
        bound_T1 = mean_T1 + variance_T1.sqrt() * self._deviations
        gate_TI.copy_((wide_TI - bound_T1).relu_())

    def _mean(self, x_TI: torch.Tensor) -> torch.Tensor:
        return all_reduce(x_TI.sum(1, keepdim=True), self._axis) / self._width


@dataclass(frozen=True, kw_only=True)
class SummedSpec:
    """Two feed-forwards of the same tokens, side by side: experts, and an MLP that stands beside
    their module, of any width."""

    experts: FeedForwardSpec
    beside: FeedForwardSpec

    def build(self, scope: Scope, place: FeedForwardPlace) -> FeedForward:
        """See FeedForwardSpec."""
        experts = self.experts.build(scope, replace(place, norm=None, adds=True))
        beside = self.beside.build(scope, replace(place, norm=None, adds=True))
        return Summed(experts, beside, adds=place.adds)


class Summed:
    """x_TE -> the sum of both: see SummedSpec."""

    norms = False

    def __init__(self, experts: FeedForward, beside: FeedForward, *, adds: bool) -> None:
        self._experts, self._beside, self._adds = experts, beside, adds

    def forward_into(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual."""
        one_TE = self._experts.forward_into(x_TE, residual_TE)
        assert one_TE is not None
        sum_TE = one_TE.share if isinstance(one_TE, Partial) else one_TE
        other_TE = self._beside.forward_into(x_TE, sum_TE)
        if other_TE is not None:
            sum_TE += other_TE.share if isinstance(other_TE, Partial) else other_TE
        assert isinstance(one_TE, Partial) == isinstance(other_TE, Partial), "one is no share"
        return one_TE.total() if isinstance(one_TE, Partial) and not self._adds else one_TE


@dataclass(frozen=True, kw_only=True)
class PlainMLPSpec:
    """An MLP without a gate. `name`: its module; "": its weights are the layer's own. `transposed`:
    weights are stored as [inputs, outputs]. `inner`: its own, where it is not the family's usual
    one."""

    name: str = "mlp"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: bool = False
    transposed: bool = False
    inner: int | None = None

    def build(self, scope: Scope, place: FeedForwardPlace) -> FeedForward:
        """See FeedForwardSpec."""
        place = replace(place, inner=self.inner or place.inner)
        scope = scope / self.name if self.name else scope
        activation = PARAMETRIC.get(place.activation, ElementwiseActivation)
        return PlainMLP(scope, self, place, activation(scope, place.activation))


class PlainMLP:
    """x_TE -> y_TE. If `norms`, x is what goes into the norm before it."""

    def __init__(
        self,
        scope: Scope,
        spec: PlainMLPSpec,
        place: FeedForwardPlace,
        activation: ElementwiseActivation | Xielu,
    ) -> None:
        part = Part(spec.up, place.inner, place.inner)
        self._up = ColumnLinear(
            scope,
            place.width,
            (part,),
            bias=spec.bias,
            transposed=spec.transposed,
            norm=place.norm,
        )
        self._down = RowLinear(
            scope / spec.down,
            part,
            place.width,
            bias=spec.bias,
            adds=place.adds,
            transposed=spec.transposed,
        )
        self._activation = activation

    @property
    def norms(self) -> bool:
        """Whether the norm before is part of it."""
        return self._up.norms

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self._down.project(self._activation.apply(self._up.project(x_TE)))

    def forward_into(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        inner_TI = self._activation.apply(self._up.project(x_TE))
        return self._down.project_into(inner_TI, residual_TE)


class ElementwiseActivation:
    """x_TI -> y_TI by op activation."""

    def __init__(self, scope: Scope, activation: str) -> None:
        self.apply: Activation = not_loaded
        self._scope = scope
        self._problem = ActivationProblem(
            device=scope.kind, dtype=scope.dtype, activation=activation
        )
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self.apply = self._scope.bind(ACTIVATION, self._problem)


class Xielu:
    """xIELU (Huang and Schlag 2024, equations 5 and 6): a parabola for positive x, expm1 with its
    own slope for others. The checkpoint holds what softplus turns into the two slopes, and beta and
    eps beside them."""

    def __init__(self, scope: Scope, activation: str) -> None:
        scope, names = scope / "act_fn", ("alpha_p", "alpha_n")
        self._slopes = [scope.param(name, (1,), init="zeros") for name in names]
        self._beta = scope.param("beta", (), init="ones")
        self._eps = scope.param("eps", (), init="zeros")
        self._values: tuple[torch.Tensor, ...] = ()
        scope.on_finish(self._finish)

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        """y_TI."""
        above, below, beta, eps = self._values
        x = x_TI.float()
        negative = (torch.expm1(torch.minimum(x, eps)) - x) * below
        return (torch.where(x > 0, above * x * x, negative) + beta * x).to(x_TI.dtype)

    def _finish(self) -> None:
        above, below = (F.softplus(slope.take().float()) for slope in self._slopes)
        beta, eps = self._beta.take().float(), self._eps.take().float()
        self._values = above, below + beta, beta, eps


PARAMETRIC: dict[str, type[Xielu]] = {"xielu": Xielu}
"""Activations with parameters of their own."""

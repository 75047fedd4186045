"""Norms: their kind (`NormSpec`) and their place in a layer (`NormPlacement`) as data, root mean
square and layer norms.

Weights are float32, what the checkpoint leaves off them is added once at load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from headrace.back.kernels.layer_norm.op import ADD_OP as ADD_LAYER_NORM
from headrace.back.kernels.layer_norm.op import OP as LAYER_NORM
from headrace.back.kernels.layer_norm.op import LayerNormProblem
from headrace.back.kernels.linear_quant.rows import FixedScale
from headrace.back.kernels.rms_norm.op import ADD_OP, OP, AddNorm, Norm, RMSNormProblem
from headrace.back.kernels.rms_norm_quant.op import OP as QUANT_OP
from headrace.back.kernels.rms_norm_quant.op import RMSNormQuantProblem
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial, all_reduce
from headrace.back.parallel.param import WeightPiece
from headrace.back.parallel.shard import Part, Shard, local_size


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A kind of norm as data of the layer it stands in; `build` makes it on this rank.

    layer        a layer norm: it takes the mean away (else the root mean square alone)
    bias         a layer norm adds one
    offset       the checkpoint holds w - offset
    weighted     False: neither weight nor bias
    scale        what a root mean square norm's result is multiplied with
    eps          its own, where it is not that of the norms around it
    """

    layer: bool = False
    bias: bool = False
    offset: float = 0.0
    weighted: bool = True
    scale: float = 1.0
    eps: float | None = None

    def build(self, scope: Scope, width: int, *, eps: float) -> RMSNorm | LayerNorm:
        """The norm whose tensors are `scope / "weight"` and "bias"."""
        eps = eps if self.eps is None else self.eps
        if not self.layer:
            return RMSNorm(
                scope,
                width,
                eps=eps,
                offset=self.offset,
                weighted=self.weighted,
                scale=self.scale,
            )
        assert self.scale == 1.0, self
        return LayerNorm(
            scope,
            width,
            eps=eps,
            bias=self.bias,
            offset=self.offset,
            weighted=self.weighted,
        )


RMS = NormSpec()
RMS_UNIT_OFFSET = NormSpec(offset=1.0)
RMS_NO_WEIGHT = NormSpec(weighted=False)
LAYER = NormSpec(layer=True, bias=True)
LAYER_NO_BIAS = NormSpec(layer=True)
LAYER_UNIT_OFFSET = NormSpec(layer=True, bias=True, offset=1.0)
LAYER_NO_WEIGHT = NormSpec(layer=True, weighted=False)


@dataclass(frozen=True, kw_only=True)
class NormPlacement:
    """Where a layer's norms stand: checkpoint names within the layer; None: there is no such norm.

    Every branch is: norm before, attention or MLP, norm after, added to the residual. `parallel`:
    both branches read the residual that the layer begins with, and the MLP the norm before the
    attention if it has none of its own."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None
    parallel: bool = False


PRE = NormPlacement(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
POST = NormPlacement(
    after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
)
SANDWICH = NormPlacement(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
PARALLEL = NormPlacement(before_attention="input_layernorm", parallel=True)
PARALLEL_TWO_NORMS = replace(PRE, parallel=True)


class BlockNorm(Protocol):
    """A norm of a layer's input or of a branch: `norm(x_TE)`; `add_norm(x_TE, residual_TE)` first
    adds x into the residual, `sum_norm(partial_TE, residual_TE)` the sum of the ranks' shares."""

    @property
    def norm(self) -> Norm:
        """y_TE of x_TE."""
        ...

    @property
    def add_norm(self) -> AddNorm:
        """y_TE of the residual, which has x_TE in it then."""
        ...

    def sum_norm(self, partial: Partial, residual_TE: torch.Tensor, /) -> torch.Tensor:
        """The same for shares of ranks."""
        ...


class BlockNormSpec(Protocol):
    """A kind of norm of a layer: NormSpec and others."""

    def build(self, scope: Scope, width: int, *, eps: float) -> BlockNorm:
        """The norm whose tensors lie below `scope`."""
        ...


class RMSNorm:
    """`norm(x)` norms the last dimension; `add_norm(x_TE, residual_TE)` first adds x into the
    residual, `sum_norm(partial_TE, residual_TE)` the sum of the ranks' shares.

    `offset`: the checkpoint holds w - offset (Gemma: w - 1). `weight_E` float32 is there after
    loading, for ops that fuse the norm with what follows it.
    """

    def __init__(
        self,
        scope: Scope,
        width: int,
        *,
        eps: float,
        offset: float = 0.0,
        weighted: bool = True,
        scale: float = 1.0,
    ) -> None:
        self.norm: Norm = not_loaded
        self.add_norm: AddNorm = not_loaded
        self.weight_E = torch.empty(0)
        self.eps = eps
        self._scale = scale
        self._scope = scope
        self._offset = offset
        self._problem = RMSNormProblem(device=scope.kind, dtype=scope.dtype, width=width, eps=eps)
        init = "zeros" if offset else "ones"
        self._weight = scope.param("weight", (width,), init=init) if weighted else None
        scope.on_finish(self._finish)

    @property
    def fusible(self) -> RMSNorm:
        """The norm, where a GEMM behind it may do it in one."""
        return self

    def _finish(self) -> None:
        self.weight_E = self._loaded()
        if self._scale != 1.0:
            self.weight_E = self.weight_E * self._scale
        self.norm = self._scope.bind(OP, self._problem, self.weight_E)
        self.add_norm = self._scope.bind(ADD_OP, self._problem, self.weight_E)

    def _loaded(self) -> torch.Tensor:
        """The weight [E] float32, without the scale."""
        if self._weight is None:
            return torch.ones(self._problem.width, device=self._scope.device)
        return self._weight.take_float(self._offset)

    def quantize_output(
        self, group: int | None, *, below: int | None = None, fixed: FixedScale | None = None
    ) -> bool:
        """Has `norm` and `add_norm` give QuantizedRows (linear_quant/rows.py) from now on, for the
        one GEMM that reads them; `below`: for fewer rows only; `fixed`: the scale of all rows.
        False if no kernel does."""
        if self._scope.mesh.sequence_rows:  # ranks gather rows between the norm and the GEMM
            return False
        if "norm-quant" in self._scope.unfused:
            return False
        problem = RMSNormQuantProblem(**vars(self._problem), group=group, fixed=fixed is not None)
        quantized_rows = self._scope.bind_fused(QUANT_OP, problem, self.weight_E, fixed)
        if quantized_rows is None:
            return False
        norm, add_norm = self.norm, self.add_norm
        if below is None:
            self.norm, self.add_norm = lambda x_TE: quantized_rows(x_TE, None), quantized_rows
            return True
        self.norm = lambda x_TE: quantized_rows(x_TE, None) if len(x_TE) < below else norm(x_TE)
        self.add_norm = lambda x_TE, residual_TE: (
            quantized_rows(x_TE, residual_TE) if len(x_TE) < below else add_norm(x_TE, residual_TE)
        )
        return True

    def sum_norm(self, partial: Partial, residual_TE: torch.Tensor) -> torch.Tensor:
        """See the class; the residual may be of this rank's rows alone. In one kernel where there
        is one for the message; but sums that must not depend on its size (`ordered`) are always
        followed by the same norm."""
        share_TE, axis = partial.share, partial.axis
        if share_TE.shape[0] != residual_TE.shape[0]:
            return partial.normed_in_parts(self.add_norm, residual_TE)
        fuses = not axis.ordered and "all-reduce-norm" not in self._scope.unfused
        if axis.summing is not None and fuses and axis.summing.takes(share_TE):
            return axis.summing.add_norm(share_TE, residual_TE, self.weight_E, self.eps)
        return self.add_norm(partial.total(), residual_TE)


class ScaledNorm:
    """`norm(x)`: what `norm` gives, times a factor."""

    def __init__(self, scope: Scope, norm: RMSNorm, factor: float) -> None:
        self.norm: Norm = not_loaded
        self._scope, self._norm, self._factor = scope, norm, factor
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        weight_E = self._norm.weight_E
        problem = RMSNormProblem(
            device=self._scope.kind,
            dtype=self._scope.dtype,
            width=weight_E.shape[0],
            eps=self._norm.eps,
        )
        self.norm = self._scope.bind(OP, problem, weight_E * self._factor)


class SplitRMSNorm:
    """A norm over a width that the ranks share (queries or keys of all heads, as in OLMo 2): the
    mean square is taken over all ranks. x_TW -> y_TW with W the local width of `part`."""

    def __init__(self, scope: Scope, part: Part, *, eps: float) -> None:
        self.norm: Norm = not_loaded
        self._scope = scope
        self._part = part
        self._eps = eps
        self._weight = scope.param(
            "weight",
            (part.size,),
            shard=Shard(axis="tp", dim=0, parts=(part,)),
            init="ones",
        )
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        weight_W, axis = self._weight.take_float(), self._scope.mesh.tp
        if axis.size == 1:
            problem = RMSNormProblem(
                device=self._scope.kind,
                dtype=self._scope.dtype,
                width=self._part.size,
                eps=self._eps,
            )
            self.norm = self._scope.bind(OP, problem, weight_W)
            return
        summed = local_size(self._part, axis) * axis.size

        def norm(x_TW: torch.Tensor) -> torch.Tensor:
            wide = x_TW.float()
            squares_T1 = all_reduce(wide.pow(2).sum(-1, keepdim=True), axis)
            return (wide * torch.rsqrt(squares_T1 / summed + self._eps) * weight_W).to(x_TW.dtype)

        self.norm = norm


class LayerNorm:
    """`norm(x)`: (x - mean) / sqrt(variance + eps) * w + b over the last dimension (Ba et al.
    2016); `add_norm` and `sum_norm` as of RMSNorm."""

    fusible = None
    """No GEMM does it."""

    def __init__(
        self,
        scope: Scope,
        width: int,
        *,
        eps: float,
        bias: bool = True,
        offset: float = 0.0,
        weighted: bool = True,
    ) -> None:
        self.norm: Norm = not_loaded
        self.add_norm: AddNorm = not_loaded
        self._scope = scope
        self._offset = offset
        self._problem = LayerNormProblem(
            device=scope.kind, dtype=scope.dtype, width=width, eps=eps, bias=bias and weighted
        )
        init = "zeros" if offset else "ones"
        self._weight = scope.param("weight", (width,), init=init) if weighted else None
        self._bias = scope.param("bias", (width,), init="zeros") if self._problem.bias else None
        scope.on_finish(self._finish)

    def sum_norm(self, partial: Partial, residual_TE: torch.Tensor) -> torch.Tensor:
        """Adds the sum of the ranks' shares into the residual and norms that."""
        return self.add_norm(partial.total(), residual_TE)

    def _finish(self) -> None:
        if self._weight is None:
            weight_E = torch.ones(self._problem.width, device=self._scope.device)
        else:
            weight_E = self._weight.take_float(self._offset)
        weights = weight_E[None], None if self._bias is None else self._bias.take_float()
        self.norm = self._scope.bind(LAYER_NORM, self._problem, *weights)
        self.add_norm = self._scope.bind(ADD_LAYER_NORM, self._problem, *weights)


class HeadsLayerNorm:
    """A layer norm without bias over each head, each with a weight of its own: x_THD -> y_THD.
    `part`: how the heads are split over the ranks. The weights are one checkpoint tensor [H, D],
    or [H * D] if `flat`, or a tensor [D] for each head, `listed` under that name with its number
    in it."""

    def __init__(
        self,
        scope: Scope,
        part: Part,
        *,
        eps: float,
        listed: str | None = None,
        flat: bool = False,
    ) -> None:
        heads, width = part.units, part.size // part.units
        rows = Part(part.name, heads, heads)
        pieces = None
        if listed is not None:
            names = [scope.name(f"{listed}.{head}.weight") for head in range(heads)]
            pieces = tuple(
                WeightPiece(name=name, shape=(width,), offset=head * width)
                for head, name in enumerate(names)
            )
        self.norm: Norm = not_loaded
        self._scope = scope
        self._width = width
        self._eps = eps
        flat = flat or pieces is not None
        shape = (heads * width,) if flat else (heads, width)
        shard = Shard(axis="tp", dim=0, parts=(part if flat else rows,))
        self._weight = scope.param("weight", shape, pieces=pieces, shard=shard, init="ones")
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        weight_HD = self._weight.take_float().view(-1, self._width)
        problem = LayerNormProblem(
            device=self._scope.kind,
            dtype=self._scope.dtype,
            width=self._width,
            eps=self._eps,
            bias=False,
            heads=weight_HD.shape[0],
        )
        self.norm = self._scope.bind(LAYER_NORM, problem, weight_HD, None)


class HeadsRMSNorm:
    """The root mean square norm of each head, each with a weight of its own: x_THD -> y_THD.
    `part`: how the heads are split over the ranks. The weights are one checkpoint tensor [H, D]."""

    def __init__(self, scope: Scope, part: Part, *, eps: float) -> None:
        heads, width = part.units, part.size // part.units
        shard = Shard(axis="tp", dim=0, parts=(Part(part.name, heads, heads),))
        self.norm: Norm = not_loaded
        self._scope, self._eps = scope, eps
        self._weight = scope.param("weight", (heads, width), shard=shard, init="ones")
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        weight_HD = self._weight.take_float()
        width = weight_HD.shape[1]
        problem = RMSNormProblem(
            device=self._scope.kind, dtype=self._scope.dtype, width=width, eps=self._eps
        )
        plain = self._scope.bind(OP, problem, torch.ones(width, device=self._scope.device))
        weight_HD = weight_HD.to(self._scope.dtype)
        self.norm = lambda x_THD: plain(x_THD) * weight_HD

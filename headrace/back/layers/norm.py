"""Root mean square norms (weights in float32, Gemma's 1 added once at load), and encoders' layer
norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.back.kernels.rms_norm.op import ADD_OP, OP, AddNorm, Norm, RMSNormProblem
from headrace.back.kernels.rms_norm_quant.op import OP as QUANT_OP
from headrace.back.kernels.rms_norm_quant.op import RMSNormQuantProblem
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.collectives import Partial, all_reduce
from headrace.back.parallel.shard import Part, Shard, local_size


class RMSNorm:
    """`norm(x)` norms the last dimension; `add_norm(x_TE, residual_TE)` first adds x into the
    residual, `sum_norm(partial_TE, residual_TE)` the sum of the ranks' shares.

    `unit_offset`: the checkpoint holds w - 1 (Gemma). `weight_E` float32 is there after loading,
    for ops that fuse the norm with what follows it.
    """

    def __init__(self, scope: Scope, width: int, *, eps: float, unit_offset: bool = False) -> None:
        self.norm: Norm = not_loaded
        self.add_norm: AddNorm = not_loaded
        self.weight_E = torch.empty(0)
        self.eps = eps
        self._scope = scope
        self._offset = 1.0 if unit_offset else 0.0
        self._problem = RMSNormProblem(device=scope.kind, dtype=scope.dtype, width=width, eps=eps)
        self._weight = scope.param("weight", (width,), init="zeros" if unit_offset else "ones")
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self.weight_E = self._weight.take().float() + self._offset
        self.norm = self._scope.bind(OP, self._problem, self.weight_E)
        self.add_norm = self._scope.bind(ADD_OP, self._problem, self.weight_E)

    def quantize_output(self, group: int | None, *, below: int | None = None) -> bool:
        """Has `norm` and `add_norm` give QuantizedRows (linear_quant/rows.py) from now on, for the
        one GEMM that reads them; `below`: for fewer rows only. False if no kernel does."""
        problem = RMSNormQuantProblem(**vars(self._problem), group=group)
        quantized_rows = self._scope.bind_fused(QUANT_OP, problem, self.weight_E)
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
        """See the class. In one kernel where there is one for the message; but sums that must not
        depend on its size (`ordered`) are always followed by the same norm."""
        share_TE, axis = partial.share, partial.axis
        if axis.summing is not None and not axis.ordered and axis.summing.takes(share_TE):
            return axis.summing.add_norm(share_TE, residual_TE, self.weight_E, self.eps)
        return self.add_norm(partial.total(), residual_TE)


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
        weight_W, axis = self._weight.take().float(), self._scope.mesh.tp
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
    2016)."""

    def __init__(self, scope: Scope, width: int, *, eps: float, bias: bool = True) -> None:
        self._eps = eps
        self._width = width
        self._weight_E = torch.empty(0)
        self._bias_E: torch.Tensor | None = None
        self._weight = scope.param("weight", (width,), init="ones")
        self._bias = scope.param("bias", (width,), init="zeros") if bias else None
        scope.on_finish(self._finish)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return F.layer_norm(x, (self._width,), self._weight_E, self._bias_E, self._eps)

    def _finish(self) -> None:
        self._weight_E = self._weight.take()
        self._bias_E = None if self._bias is None else self._bias.take()

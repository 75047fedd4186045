"""Which op multiplies by a loaded weight, of whatever form, with what stands around it.

T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from headrace.back.kernels.fused_linear.op import OP as OP_FUSED
from headrace.back.kernels.fused_linear.op import FusedLinear, FusedLinearProblem
from headrace.back.kernels.linear.op import OP, Linear, LinearProblem
from headrace.back.kernels.linear_blocks.layout import BlockWeight
from headrace.back.kernels.linear_blocks.op import OP as OP_BLOCKS
from headrace.back.kernels.linear_blocks.op import LinearBlocksProblem, many_rows
from headrace.back.kernels.linear_fp8.layout import Fp8Weight
from headrace.back.kernels.linear_fp8.op import OP as OP_FP8
from headrace.back.kernels.linear_fp8.op import LinearFp8Problem
from headrace.back.kernels.linear_int4.layout import Int4Weight
from headrace.back.kernels.linear_int4.op import OP as OP_INT4
from headrace.back.kernels.linear_int4.op import LinearInt4Problem
from headrace.back.kernels.linear_int8.layout import Int8Weight
from headrace.back.kernels.linear_int8.op import OP as OP_INT8
from headrace.back.kernels.linear_int8.op import LinearInt8Problem
from headrace.back.kernels.linear_quant.layout import PackedWeight
from headrace.back.kernels.linear_quant.op import OP as OP_QUANT
from headrace.back.kernels.linear_quant.op import LinearQuantProblem
from headrace.back.kernels.op import Op
from headrace.back.layers.adapters import AdaptedLinear
from headrace.back.layers.norm import RMSNorm
from headrace.back.layers.scope import Scope

OnGpu = Fp8Weight | Int4Weight | Int8Weight
Weight = torch.Tensor | PackedWeight | BlockWeight | OnGpu
Bound = TypeVar("Bound")


def bind_fused(
    scope: Scope,
    weight_OI: Weight,
    bias_O: torch.Tensor | None,
    *,
    norm: RMSNorm | None = None,
    activation: str | None = None,
    add: bool = False,
    **left: Any,
) -> FusedLinear | None:
    """The GEMM with what is around it in one kernel, if there is one. `left`: what of it is done by
    the layer behind or before (linear_fp8/op.py), which not all kernels know."""
    if isinstance(weight_OI, PackedWeight | BlockWeight) or "linear" in scope.unfused:
        return None
    norm_weight = norm.weight_E if norm else None
    if isinstance(weight_OI, OnGpu):
        op, quantized = gemm_of(weight_OI, **_facts(scope, bias_O), activation=activation)
        whole = replace(quantized, eps=norm.eps if norm else None, add=add, **left)
        bind = scope.bind_if_served if left else scope.bind_fused
        return bind(op, whole, weight_OI, bias_O, norm_weight)
    outputs, inputs = weight_OI.shape
    problem = FusedLinearProblem(
        device=scope.kind,
        dtype=scope.dtype,
        inputs=inputs,
        outputs=outputs,
        bias=bias_O is not None,
        eps=norm.eps if norm else None,
        activation=activation,
        add=add,
    )
    return scope.bind_fused(OP_FUSED, problem, weight_OI, bias_O, norm_weight)


def bind_gemm(
    scope: Scope,
    weight_OI: Weight,
    bias_O: torch.Tensor | None,
    activation: str | None,
    *,
    norm: RMSNorm | None,
) -> Linear | None:
    """The GEMM, with an activation only if a kernel does both. Of a quantized weight it reads the
    quantized values that the norm before leaves (`RMSNorm.quantize_output`), if there are kernels
    for both."""
    if activation is not None and "linear" in scope.unfused:
        return None
    if isinstance(weight_OI, torch.Tensor | OnGpu):
        if activation is None:
            return bind_linear(scope, weight_OI, bias_O)
        return bind_fused(scope, weight_OI, bias_O, activation=activation)
    if norm is not None and (isinstance(weight_OI, BlockWeight) or weight_OI.reads_quantized_rows):
        blocks = isinstance(weight_OI, BlockWeight)
        group, fixed = (weight_OI.x_group, None) if blocks else (None, weight_OI.fixed)
        gemm, plain_from = _bind_quantized(
            scope, scope.bind_fused, weight_OI, bias_O, activation=activation, quantized_rows=True
        )
        if gemm is not None and norm.quantize_output(group, below=plain_from, fixed=fixed):
            return gemm
    if activation is None:
        return bind_linear(scope, weight_OI, bias_O)
    return _bind_quantized(scope, scope.bind_fused, weight_OI, bias_O, activation=activation)[0]


def _bind_quantized(
    scope: Scope,
    bind: Callable[..., Bound],
    weight: PackedWeight | BlockWeight,
    bias_O: torch.Tensor | None,
    **asked: Any,
) -> tuple[Linear | Bound, int | None]:
    """The GEMM, by `bind` of the scope, and from how many rows on x is left as it is
    (LinearBlocksProblem). A row's bits depend on how many there are then: not where they must not,
    and not for logits."""
    asked |= _facts(scope, bias_O)
    free = not scope.deterministic and not asked.get("wide", False)
    many = many_rows(weight) if free and isinstance(weight, BlockWeight) else None
    if many is not None:
        op, problem = gemm_of(weight, **asked, plain_from=many)
        if gemm := scope.bind_if_served(op, problem, weight, bias_O):
            return gemm, many
    op, problem = gemm_of(weight, **asked)
    return bind(op, problem, weight, bias_O), None


def bind_linear(
    scope: Scope,
    weight_OI: Weight,
    bias_O: torch.Tensor | None,
    *,
    shared: bool = False,
    wide: bool = False,
) -> Linear:
    """The GEMM with a loaded weight; `shared` if the plain weight stays in use elsewhere, `wide` if
    the result is to be float32."""
    if isinstance(weight_OI, PackedWeight | BlockWeight):
        return _bind_quantized(scope, scope.bind, weight_OI, bias_O, wide=wide)[0]
    op, problem = gemm_of(weight_OI, **_facts(scope, bias_O), shared=shared, wide=wide)
    return scope.bind(op, problem, weight_OI, bias_O)


def bind_adapted(
    scope: Scope, weight_OI: Weight, bias_O: torch.Tensor | None, adapted: AdaptedLinear | None
) -> Linear:
    """The GEMM, with what its rows' adapters add where it has slots."""
    gemm = bind_linear(scope, weight_OI, bias_O)
    return gemm if adapted is None else adapted.add_to(gemm, scope.bind, weight_OI, bias_O)


def _facts(scope: Scope, bias_O: torch.Tensor | None) -> dict[str, Any]:
    return {"device": scope.kind, "dtype": scope.dtype, "bias": bias_O is not None}


def gemm_of(
    weight: Weight,
    *,
    device: str,
    dtype: torch.dtype,
    bias: bool = False,
    shared: bool = False,
    wide: bool = False,
    activation: str | None = None,
    quantized_rows: bool = False,
    plain_from: int | None = None,
) -> tuple[Op[Any], Any]:
    """The op that multiplies by this kind of weight, and the problem."""
    new: dict[str, Any] = {"device": device, "dtype": dtype, "wide": wide, "bias": bias}
    if isinstance(weight, PackedWeight | BlockWeight):
        new |= {"quantized_rows": quantized_rows, "inputs": weight.inputs, "activation": activation}
    if isinstance(weight, PackedWeight):
        new |= {"outputs": weight.outputs, "form": weight.form, "fixed": weight.fixed is not None}
        return OP_QUANT, LinearQuantProblem(**new)
    if isinstance(weight, BlockWeight):
        return OP_BLOCKS, LinearBlocksProblem(**new, kinds=weight.kinds, plain_from=plain_from)
    if isinstance(weight, OnGpu):
        new |= {"inputs": weight.inputs, "outputs": weight.outputs, "group": weight.group}
        new["activation"] = activation
    if isinstance(weight, Fp8Weight):
        return OP_FP8, LinearFp8Problem(**new, fixed=weight.input_scale_1 is not None)
    if isinstance(weight, Int8Weight):
        return OP_INT8, LinearInt8Problem(**new, **weight.facts)
    if isinstance(weight, Int4Weight):
        return OP_INT4, LinearInt4Problem(**new, **weight.facts)
    outputs, inputs = weight.shape
    return OP, LinearProblem(**new, inputs=inputs, outputs=outputs, shared=shared)

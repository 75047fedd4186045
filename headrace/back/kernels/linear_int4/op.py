"""A linear layer with a weight of 4-bit numbers, with what a decoder layer puts around it: y =
act(norm(x) W^T + b), or added into the residual. For GPUs; CPUs read such weights in panels
(linear_blocks).

`bind(problem, weight, bias_O | None, norm_weight_I | None)` returns `f(x_TI, residual_TY | None) ->
y_TY`, in the order of kernels/fused_linear. T tokens, I inputs, O outputs, Y = O, or O / 2 with an
activation.

The weight's numbers are rounded to the dtype of x once, and multiplied in float32: the same however
many tokens there are and wherever they are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.gated_act.op import GatedActProblem
from headrace.back.kernels.gated_act.op import bind_reference as bind_activation
from headrace.back.kernels.linear.op import checked_size
from headrace.back.kernels.linear_int4.layout import ROWS, Int4Weight, dequantize, empty, write
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    load_kernel,
    random_tensor,
    sample_generator,
)
from headrace.back.kernels.rms_norm.op import RMSNormProblem, bind_norm

CHECKED_ROWS = (1, 5, 20, 40, 100)
Int4Linear = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LinearInt4Problem:
    """`dtype` is that of x, bias, scales and result. `group`: inputs that share a scale, None: all.
    `minima`: each scale has one. `floats`: numbers are e2m1, not integers. `ordered`: inputs lie in
    another order than in x. `wide`: y is float32; with nothing around it only. `eps` of the norm
    before, `activation` after; None: none."""

    device: str
    dtype: torch.dtype
    inputs: int
    outputs: int
    group: int | None = 128
    minima: bool = False
    floats: bool = False
    ordered: bool = False
    bias: bool = False
    wide: bool = False
    eps: float | None = None
    activation: str | None = None
    add: bool = False

    @property
    def results(self) -> int:
        """Y."""
        return self.outputs if self.activation is None else self.outputs // 2


def int4_refusal(dtype: torch.dtype) -> str | None:
    """Why no kernel of ours can serve on this machine's GPU, whatever the weight's size, if so."""
    kernel = load_kernel(OP.kernels[0])
    if isinstance(kernel, str):
        return kernel
    return kernel.supports(LinearInt4Problem(device="cuda", dtype=dtype, inputs=128, outputs=128))


def norm_problem(problem: LinearInt4Problem) -> RMSNormProblem:
    """The norm before, on its own."""
    assert problem.eps is not None
    return RMSNormProblem(
        device=problem.device, dtype=problem.dtype, width=problem.inputs, eps=problem.eps
    )


def activation_problem(problem: LinearInt4Problem) -> GatedActProblem:
    """The activation after, on its own."""
    assert problem.activation is not None
    return GatedActProblem(
        device=problem.device,
        dtype=problem.dtype,
        width=problem.results,
        activation=problem.activation,
    )


def bind_reference(
    problem: LinearInt4Problem,
    weight: Int4Weight,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None = None,
) -> Int4Linear:
    """The definition, products in float32."""
    norm = activate = None
    if problem.eps is not None:
        assert norm_weight_I is not None, "a norm has a weight"
        norm = bind_norm(norm_problem(problem), norm_weight_I)
    if problem.activation is not None:
        activate = bind_activation(activation_problem(problem))

    def linear(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        x_TI = x_TI if norm is None else norm(x_TI)
        y_TO = x_TI.float() @ dequantize(weight, problem.dtype).float().T
        y_TO = y_TO if bias_O is None else y_TO + bias_O.float()
        if problem.wide:
            return y_TO
        y_TY = y_TO.to(problem.dtype) if activate is None else activate(y_TO.to(problem.dtype))
        return y_TY if residual_TY is None else residual_TY.add_(y_TY)

    return linear


def random_weight(problem: LinearInt4Problem, generator: torch.Generator) -> Int4Weight:
    """Integers over their whole range; scales of about 1 / 8 of a usual weight."""
    outputs, inputs, group = problem.outputs, problem.inputs, problem.group
    new = {"dtype": torch.float32, "device": problem.device, "generator": generator}
    groups = 1 if group is None else -(-inputs // group)
    weight = empty(
        outputs, inputs, group, minima=problem.minima, dtype=problem.dtype, device=problem.device,
        floats=problem.floats,
    )  # fmt: skip
    step = ROWS * max(1, (1 << 24) // (ROWS * inputs))
    for first in range(0, outputs, step):
        rows = min(step, outputs - first)
        values = (random_tensor(rows, inputs, **new) * 4 + 8).round_().clamp_(0, 15)
        scales = random_tensor(rows, groups, **new).abs_().add_(0.5) / (4 * inputs**0.5)
        minima = None
        if problem.minima:
            minima = scales * (random_tensor(rows, groups, **new) + 7.5)
        if problem.floats:
            scales = torch.exp2(scales.log2().round())
        write(weight, first // ROWS, values, scales, minima)
    if problem.ordered:
        order_I = torch.randperm(inputs, generator=generator, device=generator.device)
        weight = replace(weight, order_I=order_I.to(weight.device, torch.int32))
    return weight


def sample_of(problem: LinearInt4Problem, rows: tuple[int, ...]) -> Sample:
    """Inputs of the problem's shape, for each of these numbers of tokens."""
    generator = sample_generator(problem.device)
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    weight = random_weight(problem, generator)
    bias = random_tensor(problem.outputs, **new) if problem.bias else None
    norm = None
    if problem.eps is not None:
        norm = random_tensor(problem.inputs, **{**new, "dtype": torch.float32})

    def arguments(count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        residual = random_tensor(count, problem.results, **new) if problem.add else None
        return random_tensor(count, problem.inputs, **new), residual

    first, *more = (arguments(count) for count in rows)
    return Sample(
        problem=problem, weights=(weight, bias, norm), arguments=first, further=tuple(more)
    )


def _sample(problem: LinearInt4Problem) -> Sample:
    """All inputs, some outputs."""
    size = checked_size(problem.results)
    outputs = size if problem.activation is None else 2 * size
    return sample_of(replace(problem, outputs=outputs), CHECKED_ROWS)


OP: Op[LinearInt4Problem] = Op(
    name="linear_int4",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=("headrace.back.kernels.linear_int4.triton_linear_int4:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

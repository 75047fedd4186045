"""A linear layer with a weight of 8-bit integers, with what a decoder layer puts around it: y =
act(norm(x) W^T + b), or added into the residual. For GPUs; CPUs read such weights in panels
(linear_quant, linear_blocks).

`bind(problem, weight, bias_O | None, norm_weight_I | None)` returns `f(x_TI, residual_TY | None) ->
y_TY`, in the order of kernels/fused_linear. T tokens, I inputs, O outputs, Y = O, or O / 2 with an
activation.

Activations stay as they are; products are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.gated_act.op import GatedActProblem
from headrace.back.kernels.gated_act.op import bind_reference as bind_activation
from headrace.back.kernels.linear.op import checked_size
from headrace.back.kernels.linear_int8.layout import Int8Weight, dequantize, empty
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

STREAMED_TOKENS = 64
"""The kernels that stream the weight take up to so many."""
CHECKED_ROWS = (1, 5, 20, 40, STREAMED_TOKENS + 16)
Int8Linear = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LinearInt8Problem:
    """`dtype` is that of x, bias and result. `group`: inputs that share a scale, None: all. `wide`:
    y is float32; with nothing around it only. `eps` of the norm before, `activation` after; None:
    none."""

    device: str
    dtype: torch.dtype
    inputs: int
    outputs: int
    group: int | None = None
    bias: bool = False
    wide: bool = False
    eps: float | None = None
    activation: str | None = None
    add: bool = False

    @property
    def results(self) -> int:
        """Y."""
        return self.outputs if self.activation is None else self.outputs // 2


def int8_refusal(dtype: torch.dtype) -> str | None:
    """Why no kernel of ours can serve on this machine's GPU, whatever the weight's size, if so."""
    kernel = load_kernel(OP.kernels[0])
    if isinstance(kernel, str):
        return kernel
    return kernel.supports(LinearInt8Problem(device="cuda", dtype=dtype, inputs=128, outputs=128))


def norm_problem(problem: LinearInt8Problem) -> RMSNormProblem:
    """The norm before, on its own."""
    assert problem.eps is not None
    return RMSNormProblem(
        device=problem.device, dtype=problem.dtype, width=problem.inputs, eps=problem.eps
    )


def activation_problem(problem: LinearInt8Problem) -> GatedActProblem:
    """The activation after, on its own."""
    assert problem.activation is not None
    return GatedActProblem(
        device=problem.device,
        dtype=problem.dtype,
        width=problem.results,
        activation=problem.activation,
    )


def bind_reference(
    problem: LinearInt8Problem,
    weight: Int8Weight,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None = None,
) -> Int8Linear:
    """The definition, products in float32."""
    norm = activate = None
    if problem.eps is not None:
        assert norm_weight_I is not None, "a norm has a weight"
        norm = bind_norm(norm_problem(problem), norm_weight_I)
    if problem.activation is not None:
        activate = bind_activation(activation_problem(problem))

    def linear(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        x_TI = x_TI if norm is None else norm(x_TI)
        y_TO = x_TI.float() @ dequantize(weight).T
        y_TO = y_TO if bias_O is None else y_TO + bias_O.float()
        if problem.wide:
            return y_TO
        y_TY = y_TO.to(problem.dtype) if activate is None else activate(y_TO.to(problem.dtype))
        return y_TY if residual_TY is None else residual_TY.add_(y_TY)

    return linear


def random_weight(problem: LinearInt8Problem, generator: torch.Generator) -> Int8Weight:
    """Integers over their whole range; products are about 1."""
    weight = empty(problem.outputs, problem.inputs, problem.group, device=problem.device)
    new = {"dtype": torch.float32, "device": problem.device, "generator": generator}
    step = 1 + (1 << 24) // problem.inputs
    for first in range(0, problem.outputs, step):
        values = weight.values_OI[first : first + step]
        values.copy_((random_tensor(*values.shape, **new) * 40).round_().clamp_(-128, 127))
    spread = random_tensor(*weight.scales_OG.shape, **new).abs_().add_(0.5)
    weight.scales_OG.copy_(spread / (40 * problem.inputs**0.5))
    return weight


def sample_of(problem: LinearInt8Problem, rows: tuple[int, ...]) -> Sample:
    """Inputs of the problem's shape, for each of these numbers of tokens."""
    generator = sample_generator(problem.device)
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    bias = random_tensor(problem.outputs, **new) if problem.bias else None
    norm = None
    if problem.eps is not None:
        norm = random_tensor(problem.inputs, **{**new, "dtype": torch.float32})

    def arguments(count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        residual = random_tensor(count, problem.results, **new) if problem.add else None
        return random_tensor(count, problem.inputs, **new), residual

    first, *more = (arguments(count) for count in rows)
    weights = random_weight(problem, generator), bias, norm
    return Sample(problem=problem, weights=weights, arguments=first, further=tuple(more))


def _sample(problem: LinearInt8Problem) -> Sample:
    """All inputs, some outputs."""
    size = checked_size(problem.results)
    outputs = size if problem.activation is None else 2 * size
    return sample_of(replace(problem, outputs=outputs), CHECKED_ROWS)


OP: Op[LinearInt8Problem] = Op(
    name="linear_int8",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=("headrace.back.kernels.linear_int8.triton_linear_int8:KERNEL",),
    sample=_sample,
    # Where the whole weight is dequantized its numbers are rounded to the dtype.
    tolerance=lambda problem: max(float_tolerance(problem.dtype), 4e-3),
)

"""A linear layer with a weight of e4m3 numbers, with what a decoder layer puts around it: y =
act(norm(x) W^T + b), or added into the residual. For GPUs; CPUs read such weights in panels
(linear_quant).

`bind(problem, weight, bias_O | None, norm_weight_I | None)` returns `f(x_TI, residual_TY | None) ->
y_TY`, in the order of kernels/fused_linear. T tokens, I inputs, O outputs, Y = O, or O / 2 with an
activation.

Fewer than `quantized_from` tokens multiply the weight as they are. More are quantized themselves,
each token by its own scale (or each `group` inputs of it), for the tensor cores to multiply e4m3
by e4m3: turning a weight's numbers into floats takes more time than reading them (H200, 4096 to
24,576 with an activation, 32 tokens: 80 us where 23 read it). The result may be rounded to the
dtype before the activation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.gated_act.op import GatedActProblem
from headrace.back.kernels.gated_act.op import bind_reference as bind_activation
from headrace.back.kernels.linear.op import checked_size
from headrace.back.kernels.linear_fp8.layout import (
    FLOAT8,
    Fp8Weight,
    dequantize,
    dequantize_rows,
    quantize_rows,
)
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
Fp8Linear = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LinearFp8Problem:
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
    def quantized_from(self) -> int:
        """Tokens. Groups stay with the kernels for plain tokens as far as these go."""
        return 2 if self.group is None else STREAMED_TOKENS + 1

    @property
    def results(self) -> int:
        """Y."""
        return self.outputs if self.activation is None else self.outputs // 2


def fp8_refusal(dtype: torch.dtype) -> str | None:
    """Why no kernel of ours can serve on this machine's GPU, whatever the weight's size, if so."""
    kernel = load_kernel(OP.kernels[0])
    if isinstance(kernel, str):
        return kernel
    return kernel.supports(LinearFp8Problem(device="cuda", dtype=dtype, inputs=128, outputs=128))


def norm_problem(problem: LinearFp8Problem) -> RMSNormProblem:
    """The norm before, on its own."""
    assert problem.eps is not None
    return RMSNormProblem(
        device=problem.device, dtype=problem.dtype, width=problem.inputs, eps=problem.eps
    )


def activation_problem(problem: LinearFp8Problem) -> GatedActProblem:
    """The activation after, on its own."""
    assert problem.activation is not None
    return GatedActProblem(
        device=problem.device,
        dtype=problem.dtype,
        width=problem.results,
        activation=problem.activation,
    )


def bind_reference(
    problem: LinearFp8Problem,
    weight: Fp8Weight,
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None = None,
) -> Fp8Linear:
    """The definition, products in float32."""
    norm = activate = None
    if problem.eps is not None:
        assert norm_weight_I is not None, "a norm has a weight"
        norm = bind_norm(norm_problem(problem), norm_weight_I)
    if problem.activation is not None:
        activate = bind_activation(activation_problem(problem))

    def linear(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        x_TI = x_TI if norm is None else norm(x_TI)
        if len(x_TI) < problem.quantized_from:
            wide_TI = x_TI.float()
        else:
            wide_TI = dequantize_rows(quantize_rows(x_TI, problem.group), problem.group)
        y_TO = wide_TI @ dequantize(weight).T
        y_TO = y_TO if bias_O is None else y_TO + bias_O.float()
        if problem.wide:
            return y_TO
        y_TY = y_TO.to(problem.dtype) if activate is None else activate(y_TO.to(problem.dtype))
        return y_TY if residual_TY is None else residual_TY.add_(y_TY)

    return linear


def random_weight(
    outputs: int, inputs: int, group: int | None, *, device: str, generator: torch.Generator
) -> Fp8Weight:
    """Normal numbers of all magnitudes below 448; scales of about 1 / 100 of a usual weight."""
    new = {"dtype": torch.float32, "device": device, "generator": generator}
    values = (random_tensor(outputs, inputs, **new) * 100).clamp_(-448, 448).to(FLOAT8)
    groups = 1 if group is None else -(-inputs // group)
    scales = random_tensor(outputs, groups, **new).abs_().add_(0.5) / (100 * inputs**0.5)
    return Fp8Weight(values, scales, group)


def sample_of(problem: LinearFp8Problem, rows: tuple[int, ...]) -> Sample:
    """Inputs of the problem's shape, for each of these numbers of tokens."""
    generator = sample_generator(problem.device)
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    weight = random_weight(
        problem.outputs, problem.inputs, problem.group, device=problem.device, generator=generator
    )
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


def _sample(problem: LinearFp8Problem) -> Sample:
    """All inputs, some outputs."""
    size = checked_size(problem.results)
    outputs = size if problem.activation is None else 2 * size
    return sample_of(replace(problem, outputs=outputs), CHECKED_ROWS)


OP: Op[LinearFp8Problem] = Op(
    name="linear_fp8",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=("headrace.back.kernels.linear_fp8.triton_linear_fp8:KERNEL",),
    sample=_sample,
    # A token's value half-way between two e4m3 numbers may become either: 1 / 16 of one product.
    tolerance=lambda problem: max(float_tolerance(problem.dtype), 4e-3),
)

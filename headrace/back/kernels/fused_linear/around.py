"""What a decoder layer puts around a GEMM, whatever holds the weight's numbers: the problem that
describes it, what references compute, and the samples of self-checks.

`bind(problem, weight, bias_O | None, norm_weight_I | None)` of such an op returns `f(x_TI,
residual_TY | None) -> y_TY`. T tokens, I inputs, O outputs, Y = O, or O / 2 with an activation. In
this order, each where the problem names it:

    eps          x is normed over its inputs (kernels/rms_norm; the weight is float32), not in place
    activation   the first half of the outputs gates the second (kernels/gated_act)
    add          the result is added into `residual_TY` in place, and that is returned
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from headrace.back.kernels.gated_act.op import GatedActProblem
from headrace.back.kernels.gated_act.op import bind_reference as bind_activation
from headrace.back.kernels.linear.op import checked_size
from headrace.back.kernels.op import Op, Sample, load_kernel, random_tensor, sample_generator
from headrace.back.kernels.rms_norm.op import RMSNormProblem, bind_norm

LayerGemm = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
RandomWeight = Callable[[Any, torch.Generator], Any]
P = TypeVar("P", bound="LayerProblem")


@dataclass(frozen=True, kw_only=True)
class LayerProblem:
    """`dtype` is that of x, bias and result. `eps` of the norm before, `activation` after, None:
    none."""

    device: str
    dtype: torch.dtype
    inputs: int
    outputs: int
    bias: bool = False
    eps: float | None = None
    activation: str | None = None
    add: bool = False

    @property
    def results(self) -> int:
        """Y."""
        return self.outputs if self.activation is None else self.outputs // 2

    @property
    def result_dtype(self) -> torch.dtype:
        """Of y."""
        return self.dtype


@dataclass(frozen=True, kw_only=True)
class QuantizedLayerProblem(LayerProblem):
    """`group`: inputs that share a scale of the weight, None: all. `wide`: y is float32; with
    nothing around it only."""

    group: int | None = None
    wide: bool = False

    @property
    def result_dtype(self) -> torch.dtype:
        """Of y."""
        return torch.float32 if self.wide else self.dtype


def norm_problem(problem: LayerProblem) -> RMSNormProblem:
    """The norm before, on its own."""
    assert problem.eps is not None
    return RMSNormProblem(
        device=problem.device, dtype=problem.dtype, width=problem.inputs, eps=problem.eps
    )


def activation_problem(problem: LayerProblem) -> GatedActProblem:
    """The activation after, on its own."""
    assert problem.activation is not None
    return GatedActProblem(
        device=problem.device,
        dtype=problem.dtype,
        width=problem.results,
        activation=problem.activation,
    )


def bind_around(
    problem: LayerProblem,
    gemm: Callable[[torch.Tensor], torch.Tensor],
    bias_O: torch.Tensor | None,
    norm_weight_I: torch.Tensor | None,
) -> LayerGemm:
    """A reference: the stages around a GEMM x_TI -> y_TO one after the other, each rounded to the
    dtype but for the bias, which is added to the GEMM's own numbers."""
    norm = activate = None
    if problem.eps is not None:
        assert norm_weight_I is not None, "a norm has a weight"
        norm = bind_norm(norm_problem(problem), norm_weight_I)
    if problem.activation is not None:
        activate = bind_activation(activation_problem(problem))

    def layer(x_TI: torch.Tensor, residual_TY: torch.Tensor | None = None) -> torch.Tensor:
        y_TO = gemm(x_TI if norm is None else norm(x_TI))
        y_TO = y_TO if bias_O is None else y_TO + bias_O.float()
        y_TY = y_TO.to(problem.result_dtype)
        y_TY = y_TY if activate is None else activate(y_TY)
        if not problem.add:
            return y_TY
        assert residual_TY is not None
        return residual_TY.add_(y_TY)

    return layer


def sample_of(problem: LayerProblem, weight_of: RandomWeight, rows: tuple[int, ...]) -> Sample:
    """Inputs of the problem's shape, for each of these numbers of tokens."""
    generator = sample_generator(problem.device)
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    weight = weight_of(problem, generator)
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


def some_outputs(problem: P) -> P:
    """The problem with all inputs and few outputs."""
    size = checked_size(problem.results)
    return replace(problem, outputs=size if problem.activation is None else 2 * size)


def gpu_refusal(
    op: Op[Any], problem: type[QuantizedLayerProblem], dtype: torch.dtype
) -> str | None:
    """Why an op's kernel cannot serve on this machine's GPU, whatever the weight's size, if so."""
    kernel = load_kernel(op.kernels[0])
    if isinstance(kernel, str):
        return kernel
    return kernel.supports(problem(device="cuda", dtype=dtype, inputs=128, outputs=128))

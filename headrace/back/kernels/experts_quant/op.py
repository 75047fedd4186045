"""The experts of a mixture with packed weights: op `experts` where each matrix is one that a linear
layer would read (kernels/linear_quant, kernels/linear_blocks).

`bind(problem, parts, up_bias_XI, down_bias_XE)` returns `f(x_TE, expert_TK, weight_TK) -> y_TE`.
`parts` are PackedExperts that lie one behind the other: experts are numbered through them. Symbols,
activations and biases are those of op `experts`.

x is quantized as those linear layers do it, and so are inner values, after they are rounded to
`dtype`. Sums of products of quantized values are exact; all else is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headrace.back.kernels.experts.op import (
    Experts,
    ExpertsProblem,
    each_expert,
    with_absent,
)
from headrace.back.kernels.experts_quant.layout import (
    ROW_FORMS,
    ExpertPanels,
    ExpertsKind,
    PackedExperts,
    empty_panels,
)
from headrace.back.kernels.linear_blocks import op as linear_blocks
from headrace.back.kernels.linear_blocks.layout import LAYOUTS, BlockLayout
from headrace.back.kernels.linear_quant import op as linear_quant
from headrace.back.kernels.linear_quant.layout import PackedWeight
from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

FLIPPED = 4e-3
"""An inner value that another order of sums rounds to the next quantized value moves a result by up
to this share of the largest one."""


@dataclass(frozen=True, kw_only=True)
class ExpertsQuantProblem:
    """The mixture, and what its experts are packed as, in order."""

    mixture: ExpertsProblem
    kinds: tuple[ExpertsKind, ...]


def bind_reference(
    problem: ExpertsQuantProblem,
    parts: tuple[PackedExperts, ...],
    up_bias_XI: torch.Tensor | None = None,
    down_bias_XE: torch.Tensor | None = None,
) -> Experts:
    """The reference: an expert at a time, by the references of linear layers."""
    mixture = problem.mixture
    places = [(part, i) for part in parts for i in range(len(part))]

    def up(expert: int, x_PE: torch.Tensor) -> torch.Tensor:
        part, i = places[expert]
        return torch.cat([_product(m, i, x_PE) for m in (part.gate, part.up)], dim=1)

    def down(expert: int, inner_PI: torch.Tensor) -> torch.Tensor:
        part, i = places[expert]
        return _product(part.down, i, inner_PI.to(mixture.dtype))

    return each_expert(mixture, up, down, (up_bias_XI, down_bias_XE))


def _product(panels: ExpertPanels, expert: int, x_PI: torch.Tensor) -> torch.Tensor:
    """float32 [P, O]."""
    matrix = panels.matrix(expert)
    common = {"device": "cpu", "dtype": x_PI.dtype, "inputs": panels.inputs, "wide": True}
    linear: Callable[[torch.Tensor], torch.Tensor]
    if isinstance(matrix, PackedWeight):
        rows = linear_quant.LinearQuantProblem(**common, outputs=panels.outputs, form=matrix.form)
        linear = linear_quant.bind_reference(rows, matrix, None)
    else:
        blocks = linear_blocks.LinearBlocksProblem(**common, kinds=matrix.kinds)
        linear = linear_blocks.bind_reference(blocks, matrix, None)
    return linear(x_PI)


def _sample(problem: ExpertsQuantProblem) -> Sample:
    """Few tokens, and more; experts without any, one that all go to."""
    generator, whole = sample_generator(), problem.mixture
    blocks = max((_block(form) for kind in problem.kinds for form in _forms(kind)), default=1)
    width, inner = (
        size if size < 2 * blocks else blocks + size % blocks for size in (whole.width, whole.inner)
    )
    kinds = tuple(
        replace(kind, experts=max(3, min(kind.experts, 6)) if i == 0 else min(kind.experts, 2))
        for i, kind in enumerate(problem.kinds)
    )
    count = sum(kind.experts for kind in kinds)
    slots = min(whole.slots, count - 1)
    mixture = replace(whole, width=width, inner=inner, experts=count, slots=slots)
    new = {"dtype": whole.dtype, "device": whole.device, "generator": generator}
    x_TE = random_tensor(40, width, **new)
    biases: tuple[torch.Tensor | None, ...] = (None, None)
    if whole.bias:
        biases = tuple(random_tensor(count, size, **new) for size in (2 * inner, width))
    others = torch.rand(40, count - 2, generator=generator).argsort(1)[:, : slots - 1]
    order = torch.cat((torch.zeros(40, 1), others + 1), dim=1)  # all to the first, none to the last
    expert_TK = with_absent(whole, order.to(torch.int32))
    weight_TK = torch.rand(40, slots, generator=generator)
    few = (x_TE[:3], expert_TK[:3].contiguous(), weight_TK[:3].contiguous())
    small = replace(problem, mixture=mixture, kinds=kinds)
    return Sample(
        problem=small,
        weights=(random_experts(small, generator), *biases),
        arguments=(x_TE, expert_TK, weight_TK),
        further=(few,),
    )


def random_experts(
    problem: ExpertsQuantProblem, generator: torch.Generator
) -> tuple[PackedExperts, ...]:
    """Quantized values over their whole range."""
    width, inner = problem.mixture.width, problem.mixture.inner
    return tuple(
        PackedExperts(
            gate=_random_panels(kind.gate, kind.experts, inner, width, generator),
            up=_random_panels(kind.up, kind.experts, inner, width, generator),
            down=_random_panels(kind.down, kind.experts, width, inner, generator),
        )
        for kind in problem.kinds
    )


def _random_panels(
    form: str, experts: int, outputs: int, inputs: int, generator: torch.Generator
) -> ExpertPanels:
    panels = empty_panels(form, experts, outputs, inputs)
    for i in range(experts):
        matrix = panels.matrix(i)
        if isinstance(matrix, PackedWeight):
            rows = linear_quant.LinearQuantProblem(
                device="cpu", dtype=torch.float32, inputs=inputs, outputs=outputs, form=matrix.form
            )
            source = linear_quant.random_weight(rows, generator).panels
        else:
            source = _random_blocks(LAYOUTS[form], outputs, inputs, generator)
        panels.panels_XPB[i].copy_(source)
    return panels


def _random_blocks(
    layout: BlockLayout, outputs: int, inputs: int, generator: torch.Generator
) -> torch.Tensor:
    """Panels with scales so small that products are about 1."""
    panels = linear_blocks.random_segment(layout, outputs, inputs, generator).panels
    header = panels.view(-1, layout.block_bytes)[:, : layout.header_bytes].view(layout.dtype)
    bits = layout.bits if layout.levels is None else 8
    largest = (1 << (bits - 1)) * (64 if layout.two_level else 1)
    header.copy_(header.float() * (64 / largest * inputs**-0.5))
    return panels


def _forms(kind: ExpertsKind) -> tuple[str, str, str]:
    return kind.gate, kind.up, kind.down


def _block(form: str) -> int:
    return 128 if form in ROW_FORMS else max(128, LAYOUTS[form].block)


OP: Op[ExpertsQuantProblem] = Op(
    name="experts_quant",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, reads_host=True
    ),
    kernels=("headrace.back.kernels.experts_quant.native:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: max(float_tolerance(problem.mixture.dtype), FLIPPED),
)

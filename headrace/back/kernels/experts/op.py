"""The experts of a mixture: each token through the gated MLPs it is sent to, and their weighted
sum.

`bind(problem, up_XIE, down_XEI, up_bias_XI, down_bias_XE)` returns `f(x_TE, expert_TK, weight_TK)
-> y_TE`. T tokens, E `width`, X `experts` (shared ones among them), K slots of a token (op
`route`), I `inner`. The weights are [X, 2I, E] (gates, then ups) and [X, E, I]; biases may be None.

    h = act(gate x) * (up x)        y[t] = sum over k of weight[t, k] * down[expert[t, k]] h

`clamp` c > 0 bounds gates from above and ups from both sides before the product. The activation
"swiglu_oai" is gate * sigmoid(1.702 gate) * (up + 1) (gpt-oss); "swiglu_step" is silu, where c
bounds its result and not the gate (Step-3.5); "situ" is sigmoid(gate) * 4 tanh(gate / 4) * 25
tanh(up / 25) (Kimi K3, Inkling 2). Any number of tokens may go to one expert, and none
to another; sums are float32, and inner values are rounded to `dtype`.

With an `absent` problem a slot may have no expert, which is id -1, and adds nothing: the expert is
another rank's. A token may have no other slots.

With a `beside` problem f takes a fourth argument or None: (more [T, K, 2I], float32, added to gates
and ups in front of the activation; inner [T, K, I], which takes the rounded inner values), for what
low-rank adapters add; inner values of slots without an expert are left as they were.

With an `adds` problem, which has nothing beside, f takes residual_TE as its last argument: y is
added into it in place, and it is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.kernels.op import (
    Kernel,
    Op,
    Sample,
    float_tolerance,
    random_tensor,
    sample_generator,
)

Experts = Callable[..., torch.Tensor]
Beside = tuple[torch.Tensor, torch.Tensor]
"""See the top of the file."""
SWIGLU_OAI = "swiglu_oai"
SWIGLU_STEP = "swiglu_step"
SITU = "situ"
OAI_ALPHA = 1.702
SITU_BOUNDS = (4.0, 25.0)
"""Of gates and of ups, in all published models."""


@dataclass(frozen=True, kw_only=True)
class ExpertsProblem:
    """`dtype` is that of x, the weights and y; `experts` and `inner` are this rank's. `beside`,
    `absent`, `adds`: see the top of the file."""

    device: str
    dtype: torch.dtype
    experts: int
    slots: int
    width: int
    inner: int
    activation: str = "silu"
    clamp: float = 0.0
    bias: bool = False
    beside: bool = False
    absent: bool = False
    adds: bool = False


def check_beside(problem: ExpertsProblem, beside: Beside, tokens: int) -> None:
    """Asserts what kernels rely on."""
    more_TKI, inner_TKI = beside
    assert more_TKI.shape == (tokens, problem.slots, 2 * problem.inner), more_TKI.shape
    assert inner_TKI.shape == (tokens, problem.slots, problem.inner), inner_TKI.shape
    assert more_TKI.dtype == torch.float32 and inner_TKI.dtype == problem.dtype, inner_TKI.dtype
    assert more_TKI.is_contiguous() and inner_TKI.is_contiguous()


def bind_reference(
    problem: ExpertsProblem,
    up_XIE: torch.Tensor,
    down_XEI: torch.Tensor,
    up_bias_XI: torch.Tensor | None = None,
    down_bias_XE: torch.Tensor | None = None,
) -> Experts:
    """The reference: an expert at a time."""
    dtype = problem.dtype

    def up(expert: int, x_PE: torch.Tensor) -> torch.Tensor:
        return F.linear(x_PE.float(), up_XIE[expert].float())

    def down(expert: int, inner_PI: torch.Tensor) -> torch.Tensor:
        return F.linear(inner_PI.to(dtype).float(), down_XEI[expert].float())

    return each_expert(problem, up, down, (up_bias_XI, down_bias_XE))


ExpertProduct = Callable[[int, torch.Tensor], torch.Tensor]
"""Of an expert's number and its rows."""


def each_expert(
    problem: ExpertsProblem,
    up: ExpertProduct,
    down: ExpertProduct,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Experts:
    """Experts by their products: up of x [P, E], down of activated inner values, float32 [P, I];
    both give float32."""
    up_bias_XI, down_bias_XE = biases

    def experts(
        x_TE: torch.Tensor,
        expert_TK: torch.Tensor,
        weight_TK: torch.Tensor,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        y_TE = torch.zeros(x_TE.shape, dtype=torch.float32, device=x_TE.device)
        for expert in expert_TK.unique().tolist():
            if expert < 0:
                continue
            at_P, slot_P = (expert_TK == expert).nonzero(as_tuple=True)
            up_PI = up(expert, x_TE[at_P])
            up_PI = up_PI if up_bias_XI is None else up_PI + up_bias_XI[expert].float()
            if beside is not None:
                up_PI = up_PI + beside[0][at_P, slot_P]
            inner_PI = activated(problem, up_PI)
            if beside is not None:
                beside[1][at_P, slot_P] = inner_PI.to(problem.dtype)
            down_PE = down(expert, inner_PI)
            down_PE = down_PE if down_bias_XE is None else down_PE + down_bias_XE[expert].float()
            y_TE.index_add_(0, at_P, down_PE * weight_TK[at_P, slot_P][:, None])
        return y_TE.to(x_TE.dtype)

    def into(*arguments: torch.Tensor) -> torch.Tensor:
        *chosen, residual_TE = arguments
        return residual_TE.add_(experts(*chosen))

    return into if problem.adds else experts


def activated(problem: ExpertsProblem, up_PI: torch.Tensor) -> torch.Tensor:
    """float32 [P, 2I] (gates, then ups) to [P, I]."""
    gate, up = up_PI.chunk(2, dim=1)
    if problem.activation == SWIGLU_STEP:
        return F.silu(gate).clamp(max=problem.clamp) * up.clamp(-problem.clamp, problem.clamp)
    if problem.clamp:
        gate, up = gate.clamp(max=problem.clamp), up.clamp(-problem.clamp, problem.clamp)
    if problem.activation == SWIGLU_OAI:
        return gate * (OAI_ALPHA * gate).sigmoid() * (up + 1)
    if problem.activation == SITU:
        of_gate, of_up = SITU_BOUNDS
        return gate.sigmoid() * of_gate * (gate / of_gate).tanh() * of_up * (up / of_up).tanh()
    act = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
    }[problem.activation]
    return act(gate) * up


def _sample(problem: ExpertsProblem) -> Sample:
    """Few tokens, and more; experts without any, one that all go to."""
    generator = sample_generator()
    small = replace(
        problem,
        width=min(problem.width, 128 + problem.width % 64),
        inner=min(problem.inner, 64 + problem.inner % 64),
        experts=max(3, min(problem.experts, 9)),
    )
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    x = random_tensor(70, small.width, **new)
    up = random_tensor(small.experts, 2 * small.inner, small.width, **new) * small.width**-0.5
    down = random_tensor(small.experts, small.width, small.inner, **new) * small.inner**-0.5
    biases: tuple[torch.Tensor | None, ...] = (None, None)
    if problem.bias:
        biases = tuple(random_tensor(*weight.shape[:2], **new) for weight in (up, down))
    slots = min(problem.slots, small.experts - 1)
    others = torch.rand(70, small.experts - 2, generator=generator).argsort(1)[:, : slots - 1]
    order = torch.cat((torch.zeros(70, 1), others + 1), dim=1)  # all to the first, none to the last
    expert = with_absent(problem, order.to(device=problem.device, dtype=torch.int32))
    weight = torch.rand(70, slots, generator=generator).to(problem.device)
    residual = (random_tensor(*x.shape, **new),) if problem.adds else ()
    arguments = (x, expert, weight, *residual)
    return Sample(
        problem=replace(small, slots=slots),
        weights=(up, down, *biases),
        arguments=arguments,
        further=(tuple(one[:3].clone() for one in arguments),),
    )


Biases = tuple[torch.Tensor | None, torch.Tensor | None]


def of_three(problem: ExpertsProblem) -> ExpertsProblem:
    """The problem's own sizes with three experts, of which `arguments_of` leaves one out."""
    return replace(problem, experts=3, slots=min(2, problem.slots))


def biases_of(problem: ExpertsProblem, generator: torch.Generator) -> Biases:
    """Random ones, if there are any."""
    if not problem.bias:
        return None, None
    new = {"dtype": problem.dtype, "device": problem.device, "generator": generator}
    up, down = (
        random_tensor(problem.experts, size, **new) for size in (2 * problem.inner, problem.width)
    )
    return up, down


def arguments_of(
    problem: ExpertsProblem, tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """x, experts and weights of so many tokens, of three experts of which nobody chose the second,
    and a residual where one is added to; the generator is the device's."""
    device = problem.device
    order = torch.rand(tokens, 2, generator=generator, device=device).argsort(1) * 2
    expert_TK = with_absent(problem, order[:, : problem.slots].int().contiguous())
    weight_TK = torch.rand(expert_TK.shape, generator=generator, device=device)
    new = {"dtype": problem.dtype, "device": device, "generator": generator}
    chosen = random_tensor(tokens, problem.width, **new), expert_TK, weight_TK
    return (*chosen, random_tensor(tokens, problem.width, **new)) if problem.adds else chosen


def with_absent(problem: ExpertsProblem, expert_TK: torch.Tensor) -> torch.Tensor:
    """Some slots lose their experts, if they may: some of some tokens, and all of one."""
    if problem.absent:
        expert_TK[::3, -1] = -1
        expert_TK[1::4, 0] = -1
        expert_TK[2:3] = -1
    return expert_TK


OP: Op[ExpertsProblem] = Op(
    name="experts",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, reads_host=True
    ),
    kernels=(
        "headrace.back.kernels.experts.native:KERNEL",
        "headrace.back.kernels.experts.triton_hopper:KERNEL",
        "headrace.back.kernels.experts.triton_experts:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: float_tolerance(problem.dtype),
)

"""An op takes the best kernel that supports the problem and agrees with the reference, and says why not the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.back.kernels.op import Kernel, Op, PutOff, Sample, SelfCheckFailed, load_kernel
from headrace.base.errors import ConfigError

Double = Callable[[torch.Tensor], torch.Tensor]


def reference(problem: int) -> Double:
    return lambda x: 2 * x


def sample(problem: int) -> Sample:
    return Sample(problem=problem, weights=(), arguments=(torch.arange(1.0, 1 + problem),))


def kernel(
    bind: Callable[[int], Any], supports: Callable[[int], str | None] = lambda problem: None
) -> Kernel[int]:
    return Kernel(name="fast", supports=supports, bind=bind)


@pytest.fixture
def op_of() -> Iterator[Callable[..., Op[int]]]:
    """Makes an op whose kernels come from modules, as real ones do."""
    made = []

    def make(**kernels: Kernel[int]) -> Op[int]:
        for name, one in kernels.items():
            module = ModuleType(f"headrace_test_kernels_{name}")
            module.__dict__["KERNEL"] = one
            sys.modules[module.__name__] = module
            made.append(module.__name__)
        return Op(
            name="double",
            reference=Kernel(name="torch", supports=lambda problem: None, bind=reference),
            kernels=[f"headrace_test_kernels_{name}:KERNEL" for name in kernels],
            sample=sample,
            tolerance=lambda problem: 1e-6,
        )

    yield make
    for name in made:
        del sys.modules[name]


def test_the_first_kernel_that_supports_the_problem_is_taken(op_of: Any) -> None:
    op = op_of(
        narrow=kernel(reference, lambda problem: "too wide" if problem > 4 else None),
        wide=kernel(reference),
    )
    assert op.choose(4).rejected == ()
    wide = op.choose(5)
    assert wide.rejected == (("headrace_test_kernels_narrow", "too wide"),)
    assert torch.equal(wide.bind()(torch.ones(1)), torch.full((1,), 2.0))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda problem: lambda x: 2.1 * x,
        lambda problem: lambda x: (2 * x).double(),
        lambda problem: lambda x: torch.full_like(x, float("nan")),
        lambda problem: lambda x: (2 * x)[None],
        lambda problem: lambda x: x.mul_(2),
    ],
    ids=["value", "dtype", "nan", "shape", "writes-its-input"],
)
def test_a_kernel_that_disagrees_with_the_reference_is_not_used(op_of: Any, wrong: Any) -> None:
    """REG-121."""
    choice = op_of(corrupted=kernel(wrong)).choose(3)
    assert choice.kernel.name == "torch"
    ((_, reason),) = choice.rejected
    assert reason.startswith("self-check failed: error ")


def test_a_kernel_whose_module_is_missing_is_a_reason_not_a_broken_import() -> None:
    """PLT-07."""
    answer = load_kernel("headrace.back.kernels.no_such_module:KERNEL")
    assert isinstance(answer, str) and "no_such_module" in answer


def test_a_choice_is_made_once_per_problem(op_of: Any) -> None:
    bound = []
    op = op_of(counted=kernel(lambda problem: bound.append(problem) or reference(problem)))
    assert op.choose(3) is op.choose(3)
    assert bound == [3]
    assert [choice.problem for choice in op.choices()] == [3]


def test_infinities_must_lie_where_the_reference_has_them(op_of: Any) -> None:
    def infinite(problem: int) -> Double:
        return lambda x: torch.where(x > 2, float("inf"), 2 * x)

    op = op_of(fast=kernel(infinite))
    assert op.error(kernel(infinite), 2) == 0.0
    assert op.error(kernel(infinite), 3) == float("inf")


def test_checks_that_are_put_off_are_made_together(op_of: Any) -> None:
    """Choosing runs no kernel; afterwards each runs once while kernels compile, and once to be checked. From then on a
    check is made at once."""
    ran: list[int] = []

    def counted(problem: int) -> Double:
        return lambda x: (ran.append(problem), 2 * x)[1]

    op = op_of(fast=kernel(counted))
    with PutOff() as checks:
        assert [op.choose(problem).kernel.name for problem in (3, 4)] == ["fast", "fast"]
        assert ran == []
        checks.ask()
        assert ran == [3, 4]
        checks.make()
        assert ran == [3, 4, 3, 4]
        op.choose(5)
        assert ran == [3, 4, 3, 4, 5]
    op.choose(3)
    assert ran == [3, 4, 3, 4, 5], "a choice is remembered"


def test_after_a_failed_check_that_was_put_off_each_is_chosen_anew(op_of: Any) -> None:
    """REG-121: a wrong kernel does not stay bound because its check came late."""
    wrong = kernel(lambda problem: lambda x: (2 if problem < 4 else 3) * x)
    op = op_of(fast=wrong)
    with PutOff() as checks:
        assert op.choose(3).kernel.name == op.choose(5).kernel.name == "fast"
    with pytest.raises(SelfCheckFailed):
        checks.make()
    assert op.choose(3).kernel.name == "fast"
    chosen = op.choose(5)
    assert chosen.kernel.name == "torch" and "self-check failed" in chosen.rejected[0][1]


def test_where_rows_must_be_invariant_only_kernels_that_say_so_are_taken(op_of: Any) -> None:
    """ENG-17: a quicker kernel is passed over by name, and without any the op does not serve."""
    fixed = Kernel(name="fixed", supports=lambda problem: None, bind=reference, invariant=True)
    op = op_of(quick=kernel(reference), slow=fixed)
    choice = op.choose(3, invariant=True)
    assert choice.kernel is fixed and "depend on the batch" in choice.rejected[0][1]
    assert op.choose(3).kernel.name == "fast" and len(op.choices()) == 2
    with pytest.raises(ConfigError, match="--deterministic: no kernel of double"):
        op_of(lone=kernel(reference)).choose(3, invariant=True)


def test_every_call_of_a_sample_is_compared(op_of: Any) -> None:
    """A kernel may go another way for other sizes."""

    def bind(problem: int) -> Double:
        return lambda x: 2 * x if len(x) == problem else 3 * x

    op = op_of(fast=kernel(bind))
    assert op.choose(4).kernel.name == "fast"
    further = ((torch.arange(1.0, 3.0),),)
    op.sample = lambda problem: replace(sample(problem), further=further)
    choice = op.choose(3)
    assert choice.kernel.name == "torch"
    assert "self-check failed" in choice.rejected[0][1]

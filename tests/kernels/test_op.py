"""An op takes the best kernel that supports the problem and agrees with the reference, and says why
not the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from headrace.back.kernels.op import (
    DeferredChecks,
    Kernel,
    Op,
    PlanCheck,
    Sample,
    SelfCheckFailed,
    decisions,
    load_kernel,
    release_scratch,
    scratch_weight,
)
from headrace.base.errors import ConfigError, StartError

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
    """PLT-07. REG-120."""
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


class Largest(TorchFunctionMode):
    """Sees the bytes of the largest result that is no view."""

    bytes = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.bytes = max(self.bytes, result.nbytes)
        return result


def test_comparing_large_arguments_takes_a_bounded_part_of_memory(op_of: Any) -> None:
    """A cache among the arguments is compared too: as a whole in float64 that took eight times its size. QNT-09."""
    size = 1 << 21
    cache = torch.zeros(2, size // 2).bfloat16()
    cache[0, 0], cache[1, -1] = float("nan"), 3.0

    def written(problem: int) -> Callable[[torch.Tensor], None]:
        return lambda x: None

    def elsewhere(problem: int) -> Callable[[torch.Tensor], None]:
        return lambda x: [x.view(-1)[-2:].fill_(3.0), None][1]

    op = Op(
        name="double",
        reference=Kernel(name="torch", supports=lambda problem: None, bind=written),
        kernels=[],
        sample=lambda problem: Sample(problem=problem, weights=(), arguments=(cache.clone(),)),
        tolerance=lambda problem: 0.0,
    )
    with Largest() as largest:
        assert op.error(kernel(written), 1) == 0.0
    assert largest.bytes <= size * 8 // 2, "not as a whole in float64"
    assert op.error(kernel(elsewhere), 1) == 1.0


def test_checks_that_are_put_off_are_made_together(op_of: Any) -> None:
    """Choosing runs no kernel; afterwards each runs once while kernels compile, and once to be
    checked. From then on a check is made at once."""
    ran: list[int] = []

    def counted(problem: int) -> Double:
        return lambda x: (ran.append(problem), 2 * x)[1]

    op = op_of(fast=kernel(counted))
    with DeferredChecks() as checks:
        assert [op.choose(problem).kernel.name for problem in (3, 4)] == ["fast", "fast"]
        assert ran == []
        checks.compile()
        assert ran == [3, 4]
        checks.run()
        assert ran == [3, 4, 3, 4]
        op.choose(5)
        assert ran == [3, 4, 3, 4, 5]
    op.choose(3)
    assert ran == [3, 4, 3, 4, 5], "a choice is remembered"


def test_after_a_failed_check_that_was_put_off_each_is_chosen_anew(op_of: Any) -> None:
    """REG-121: a wrong kernel does not stay bound because its check came late."""
    wrong = kernel(lambda problem: lambda x: (2 if problem < 4 else 3) * x)
    op = op_of(fast=wrong)
    with DeferredChecks() as checks:
        assert op.choose(3).kernel.name == op.choose(5).kernel.name == "fast"
    with pytest.raises(SelfCheckFailed):
        checks.run()
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
    lone = op_of(lone=kernel(reference))
    assert lone.choose(3, invariant=True, must=False).kernel is lone.reference
    with pytest.raises(ConfigError, match="--deterministic: no kernel of double"):
        lone.choose(3, invariant=True)


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


def failing(problem: int) -> Double:
    def run(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory\nof a long trace")

    return run


def test_a_kernel_that_cannot_run_is_passed_over_with_its_reason(op_of: Any) -> None:
    choice = op_of(broken=kernel(failing), second=kernel(reference)).choose(3)
    assert choice.kernel.name == "fast"
    ((name, reason),) = choice.rejected
    assert name.endswith("broken")
    assert reason == "self-check failed: RuntimeError: out of resource: shared memory"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("too small"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_lack_of_device_memory_is_no_kernels_fault(op_of: Any, error: Exception) -> None:
    """Nor of other last bits: another kernel would be chosen while a device is full."""

    def bind(problem: int) -> Double:
        raise error

    with pytest.raises(torch.OutOfMemoryError):
        op_of(fast=kernel(bind)).choose(3)


def test_after_a_failed_deferred_check_the_next_choice_knows_without_checking(op_of: Any) -> None:
    """The model is built again with checks deferred as before: what failed is not met again."""
    runs: list[str] = []

    def wrong(problem: int) -> Double:
        return lambda x: (runs.append("wrong"), 3 * x)[1]

    op = op_of(first=kernel(wrong), second=kernel(reference))
    with DeferredChecks() as checks:
        assert op.choose(3).kernel.bind is wrong
    with pytest.raises(SelfCheckFailed):
        checks.run()
    with DeferredChecks() as again:
        assert op.choose(3).kernel.bind is reference
    again.run()
    assert runs == ["wrong"] and "self-check failed" in op.choose(3).rejected[0][1]


def plans_of(*scales: float, skipped: list[str] | None = None) -> Callable[[int], list[PlanCheck]]:
    """A plan for each scale; only 2 is right."""

    def plans(problem: int) -> list[PlanCheck]:
        return [
            PlanCheck(
                name=f"times {scale}",
                sample=lambda: sample(100 * problem),
                bind=lambda problem, scale=scale: lambda x: scale * x,
                skip=None
                if skipped is None
                else lambda why, scale=scale: skipped.append(f"{scale}"),
            )
            for scale in scales
        ]

    return plans


def test_every_plan_of_a_kernel_is_checked_and_one_that_fails_takes_the_kernel(op_of: Any) -> None:
    whole = replace(kernel(reference), plans=plans_of(2.0, 2.0))
    broken = replace(kernel(reference), plans=plans_of(2.0, 2.5))
    assert op_of(whole=whole).choose(3).kernel is whole
    choice = op_of(broken=broken).choose(3)
    assert choice.kernel.name == "torch" and "times 2.5: self-check" in choice.rejected[0][1]


@pytest.mark.parametrize("deferred", [False, True])
def test_a_plan_that_can_be_done_without_is_skipped_and_reported(
    op_of: Any, deferred: bool
) -> None:
    skipped: list[str] = []
    fast = replace(kernel(reference), plans=plans_of(2.0, 2.5, 3.0, skipped=skipped))
    op = op_of(fast=fast)
    if deferred:
        with DeferredChecks() as checks:
            op.choose(3)
        with pytest.raises(SelfCheckFailed):
            checks.run()
    choice = op.choose(3)
    assert choice.kernel is fast and set(skipped) == {"2.5", "3.0"}
    assert [name for name, _ in choice.rejected][:2] == ["fast times 2.5", "fast times 3.0"]
    (decision,) = decisions([choice])
    assert "fast times 2.5: self-check failed" in decision.why


def test_what_a_kernel_notes_of_its_shapes_is_said_once(op_of: Any) -> None:
    noted = replace(
        kernel(reference), note=lambda problem: "measured" if problem > 3 else "modelled"
    )
    op = op_of(fast=noted)
    (decision,) = decisions([op.choose(3), op.choose(4), op.choose(5)])
    assert decision.why == "3 shapes; modelled; measured"


def test_weights_of_checks_share_their_memory_until_it_is_released() -> None:
    large = scratch_weight(30, 4, dtype=torch.float32, device="cpu")
    again = scratch_weight(3, 4, dtype=torch.float32, device="cpu")
    assert again.shape == (3, 4) and again.data_ptr() == large.data_ptr()
    assert large.std() == pytest.approx(1 / 64, rel=0.3)
    release_scratch()
    fresh = scratch_weight(30, 4, dtype=torch.float32, device="cpu")
    assert fresh.data_ptr() != large.data_ptr() and torch.equal(fresh, large)
    release_scratch()


@pytest.mark.parametrize("deferred", [False, True])
def test_a_kernel_that_makes_the_device_unusable_ends_the_start_by_name(
    op_of: Any, deferred: bool
) -> None:
    """Nothing can be computed in this process any more: passing the kernel over would blame the
    next one."""

    def faulty(problem: int) -> Double:
        def run(x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        return run

    op = op_of(bad=kernel(faulty), good=kernel(reference))
    checks = DeferredChecks()
    with pytest.raises(StartError, match=r"double\.fast for 4 .*illegal memory access"):
        if deferred:
            with checks:
                op.choose(4)
            checks.run()
        else:
            op.choose(4)

"""What an op is: a reference in PyTorch, kernels beside it, and the choice between them.

`Op.choose(problem)` asks each kernel in rank order whether it supports the problem, checks the
first that does against the reference, and returns a `KernelChoice` that says what was taken and why
the others were not. It runs once per distinct problem, at load. What a layer keeps is the plain
callable that `KernelChoice.bind` returns: at use there is no dispatch left. Kernels are named
"module:attribute" and imported on choosing, so a kernel whose library is missing is a reason, never
a broken import.

A check runs what the model will run. Where a kernel has several plans (tile sizes, splits) it names
them in `Kernel.plans`, each with inputs of the problem's own shape; other kernels are checked on
the op's sample, a slice of that shape. A kernel or plan that does not compile, fails or disagrees
with the reference is passed over with that as its reason: a start goes on without it. Only a lack
of device memory is not a kernel's fault and is raised.

With `invariant` (`--deterministic`) only kernels that say so of themselves are considered, the
reference too; if none is left the op cannot serve, and that is an error.

A module's KERNEL says `supports` and `bind(problem, *weights)`, which returns a callable with
exactly the signature of what the reference's `bind` returns."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from headrace.base.config.resolved import Decision
from headrace.base.errors import ConfigError, StartError

GPU_MODULES = "triton_"
"""Modules of this prefix hold kernels for GPUs; a CPU's problem does not import them: Triton alone
takes 0.3 s."""

VARIES = "a row's bits depend on the batch"
MORE_KERNELS: dict[str, Sequence[str]] = {}
"""By op: those of a package's platform (platforms/foreign.py), which are asked before ours."""
P = TypeVar("P", bound=Hashable)
Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Kernel(Generic[P]):
    """One way to compute an op.

    supports   None if the problem can be computed, else one line that says why not; looks at the
               problem only
    bind       (problem, *weights) -> callable; may repack the weights, after which the caller drops
               its own
    note       what the table of decisions says of a problem beside the kernel's name
    reads_host whether it reads arrays of the step on the host: such a step cannot be replayed from
               a graph
    host_pairs from how many pairs of a prompt's query and a position on a step is launched by
               itself, for the arrays on the host that the kernel asks for; None: it asks for none
    plans      problem -> each distinct way in which the kernel will run it, to be checked one by
               one; None: it runs as on the op's sample
    invariant  whether a row's result is the same bits whatever rows are beside it, however many
               they are, and however its sequence is cut into steps
    """

    name: str
    supports: Callable[[P], str | None]
    bind: Callable[..., Function]
    plans: Callable[[P], Sequence[PlanCheck]] | None = None
    note: Callable[[P], str] = lambda problem: ""
    reads_host: bool = False
    host_pairs: int | None = None
    invariant: bool = False


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Small inputs: what `bind` takes, and what the bound callable takes. `problem` may be a
    smaller one of the same kind (its sizes have the same remainders), so that a check takes
    microseconds. `further`: arguments of calls for which a kernel may go another way; what they
    return is compared."""

    problem: Any
    weights: tuple[Any, ...]
    arguments: tuple[Any, ...]
    further: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlanCheck:
    """One plan of a kernel, to be compared with the reference before it is used.

    name    of the plan, for the reason
    sample  makes inputs of the shapes that the plan is for; kept only while it is checked
    bind    as `Kernel.bind`, but always by this plan
    skip    goes on without the plan, for the reason given: the kernel has others. None: a plan that
            fails takes its kernel with it
    """

    name: str
    sample: Callable[[], Sample]
    bind: Callable[..., Function]
    skip: Callable[[str], None] | None = None


@dataclass(frozen=True)
class KernelChoice(Generic[P]):
    """The kernel chosen for a problem. `rejected` holds (kernel, reason) of every better-ranked
    one."""

    op: str
    problem: P
    kernel: Kernel[P]
    why: str
    rejected: tuple[tuple[str, str], ...]

    def bind(self, *weights: Any) -> Function:
        """The callable a layer keeps."""
        return self.kernel.bind(self.problem, *weights)


class Op(Generic[P]):
    """A reference and its kernels, best first.

    name        as printed in decisions
    reference   supports every problem; correct first, fast where PyTorch is
    kernels     "module:attribute" of each Kernel, best first
    sample      problem -> Sample for the self-check, seeded; writes of the callable into its
                arguments are compared too
    tolerance   problem -> largest error against the reference, relative to the largest magnitude of
                the output
    outputs     for callables that write into structures: what of a sample to compare afterwards
                (None: what is returned, and every tensor among the arguments)
    """

    def __init__(
        self,
        *,
        name: str,
        reference: Kernel[P],
        kernels: Sequence[str],
        sample: Callable[[P], Sample],
        tolerance: Callable[[P], float],
        outputs: Callable[[Sample], list[torch.Tensor]] | None = None,
    ) -> None:
        self.name = name
        self.reference = reference
        self.kernels = tuple(kernels)
        self.sample = sample
        self.tolerance = tolerance
        self._outputs = outputs
        self._choices: dict[tuple[P, bool], KernelChoice[P]] = {}
        self._failures: dict[tuple[Kernel[P], P], str] = {}
        self._skipped: dict[tuple[Kernel[P], P], dict[str, str]] = {}

    def choose(self, problem: P, *, invariant: bool = False, must: bool = True) -> KernelChoice[P]:
        """The best kernel that supports the problem and agrees with the reference, of the
        `invariant` ones if asked (ConfigError if one `must` serve); remembered per problem."""
        key = problem, invariant
        if key not in self._choices:
            self._choices[key] = self._decide(problem, invariant=invariant)
        choice = self._choices[key]
        if invariant and must and not choice.kernel.invariant:
            why = "; ".join(": ".join(one) for one in choice.rejected) or "there is none"
            what = f"no kernel of {self.name} gives a row the same bits in every batch"
            text = f"--deterministic: {what} for {problem} ({why})"
            raise ConfigError(text, field="deterministic")
        return choice

    def choices(self) -> list[KernelChoice[P]]:
        """Every choice made so far in this process, for the table of decisions."""
        return list(self._choices.values())

    def error(self, kernel: Kernel[P], problem: P) -> float:
        """The kernel's largest error on the sample, relative to the largest magnitude; inf if a
        value is not finite where the reference's is, or shapes or dtypes differ."""
        return self._error(kernel.bind, lambda: self.sample(problem))

    def failures(self, kernel: Kernel[P], problem: P) -> list[tuple[str, str]]:
        """Checks the kernel for the problem: (plan, why it cannot be used) of each plan that it
        must do without, under the name "" if the kernel itself cannot be used."""
        limit = self.tolerance(problem)
        if kernel.plans is None:
            sample = partial(self.sample, problem)
            where = f"{kernel.name} for {problem}"
            reason = self._reason(where, lambda: self._error(kernel.bind, sample), limit)
            return [("", reason)] if reason else []
        failures = []
        for plan in kernel.plans(problem):
            where = f"{kernel.name}, plan {plan.name}, for {problem}"
            reason = self._reason(where, partial(self._error, plan.bind, plan.sample), limit)
            if reason is None:
                continue
            if plan.skip is None:
                return [("", f"{plan.name}: {reason}")]
            plan.skip(reason)
            failures.append((plan.name, reason))
        return failures

    def launch(self, kernel: Kernel[P], problem: P) -> None:
        """Launches what the check will, for its kernels to be compiled; what fails here fails there
        too, and is reported then."""
        sample = partial(self.sample, problem)
        calls = [(kernel.bind, sample)]
        if kernel.plans is not None:
            calls = [(plan.bind, plan.sample) for plan in kernel.plans(problem)]
        for bind, make_sample in calls:
            call = partial(self._run, bind)
            self._reason(kernel.name, lambda run=call, new=make_sample: bool(run(new())), 1)

    def record(self, kernel: Kernel[P], problem: P, failures: list[tuple[str, str]]) -> bool:
        """Keeps what a check has shown, for choices to come; whether the kernel goes on without a
        plan that it had before, and so by plans that may not have been checked."""
        skipped = self._skipped.setdefault((kernel, problem), {})
        before = len(skipped)
        for plan, reason in failures:
            if plan:
                skipped.setdefault(plan, reason)
            else:
                self._failures[kernel, problem] = reason
        return len(skipped) > before and (kernel, problem) not in self._failures

    def forget(self, problem: P) -> None:
        """Drops the choices made for a problem; failures stay known."""
        for invariant in (False, True):
            self._choices.pop((problem, invariant), None)

    def _reason(self, where: str, error_of: Callable[[], float], limit: float) -> str | None:
        try:
            error = error_of()
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            if isinstance(error, torch.OutOfMemoryError) or any(w in first for w in _NO_MEMORY):
                raise torch.OutOfMemoryError(first) from error  # no kernel's fault
            if re.search(_DEVICE_IS_LOST + "|unspecified launch failure", first):
                lost = f"kernel {self.name}.{where} made the device unusable in its self-check: "
                raise StartError(lost + first[:200]) from error
            return f"self-check failed: {type(error).__name__}: {first[:200]}"
        return None if error <= limit else f"self-check failed: error {error:.2e} of {limit:.2e}"

    def _error(self, bind: Callable[..., Function], sample: Callable[[], Sample]) -> float:
        ours, reference = self._run(bind, sample()), self._run(self.reference.bind, sample())
        return max(
            (_difference(one, other) for one, other in zip(ours, reference, strict=True)),
            default=0.0,
        )

    def _run(self, bind: Callable[..., Function], sample: Sample) -> list[torch.Tensor]:
        function = bind(sample.problem, *sample.weights)
        values: list[Any] = []
        for arguments in (sample.arguments, *sample.further):
            result = function(*arguments)
            values += result if isinstance(result, tuple) else (result,)
        if self._outputs is not None:
            return self._outputs(sample)
        return [v for v in (*values, *sample.arguments) if isinstance(v, torch.Tensor)]

    def _decide(self, problem: P, *, invariant: bool) -> KernelChoice[P]:
        rejected: list[tuple[str, str]] = []
        for target in (*MORE_KERNELS.get(self.name, ()), *self.kernels):
            kernel, reason = self._consider(target, problem, invariant=invariant)
            if kernel is not None:
                for plan, why in self._skipped.get((kernel, problem), {}).items():
                    rejected.append((f"{kernel.name} {plan}", why))
                return KernelChoice(
                    self.name, problem, kernel, kernel.note(problem), tuple(rejected)
                )
            rejected.append((_label(target), reason))
        return KernelChoice(self.name, problem, self.reference, "", tuple(rejected))

    def _consider(
        self, target: str, problem: P, *, invariant: bool
    ) -> tuple[Kernel[P] | None, str]:
        if _label(target).startswith(GPU_MODULES) and getattr(problem, "device", None) == "cpu":
            return None, "runs on GPUs only"
        kernel = load_kernel(target)
        if isinstance(kernel, str):
            return None, kernel
        if invariant and not kernel.invariant:
            return None, VARIES
        reason = kernel.supports(problem)
        if reason is not None:
            return None, reason
        key = kernel, problem
        if key in self._failures:
            return None, self._failures[key]
        if _deferred is not None:
            _deferred.append((self, kernel, problem))
            return kernel, ""
        while self.record(kernel, problem, self.failures(kernel, problem)):
            pass  # what takes the place of a plan is checked too
        release_scratch()
        return (None, self._failures[key]) if key in self._failures else (kernel, "")


_NO_MEMORY = ("out of memory", "STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")
"""Libraries and the driver say so: how full a device is must choose no kernel, and no last bits."""
_DEVICE_IS_LOST = "illegal memory access|misaligned address|illegal instruction|device-side assert"
"""Faults after which a device refuses everything that this process asks for."""
_deferred: list[tuple[Op[Any], Kernel[Any], Any]] | None = None


class SelfCheckFailed(Exception):
    """Deferred self-checks have failed: what was bound is to be made anew."""


class DeferredChecks:
    """Self-checks that are run together, once all is chosen, so that their kernels compile beside
    each other: while it is entered, `choose` takes the first kernel that supports a problem and has
    not failed before. One at a time in a process."""

    def __init__(self) -> None:
        self._checks: list[tuple[Op[Any], Kernel[Any], Any]] = []

    def __enter__(self) -> DeferredChecks:
        global _deferred
        assert _deferred is None, "self-checks are deferred already"
        _deferred = self._checks
        return self

    def __exit__(self, *error: object) -> None:
        global _deferred
        _deferred = None

    def compile(self) -> None:
        """Launches what the checks will, where kernels are compiled and not launched."""
        for op, kernel, problem in self._checks:
            op.launch(kernel, problem)

    def run(self) -> None:
        """Runs the checks; none is deferred from now on. If one fails, all choices made are
        forgotten and SelfCheckFailed is raised: what was bound is to be made anew, without what
        failed."""
        self.__exit__()
        checks, self._checks = self._checks, []
        failures = [
            (op, kernel, problem, op.failures(kernel, problem)) for op, kernel, problem in checks
        ]
        release_scratch()
        if not any(of_kernel for *_, of_kernel in failures):
            return
        for op, kernel, problem, of_kernel in failures:
            op.record(kernel, problem, of_kernel)
            op.forget(problem)
        raise SelfCheckFailed

    def forget(self) -> None:
        """Forgets the choices whose checks were deferred."""
        for op, _, problem in self._checks:
            op.forget(problem)


def decisions(choices: Iterable[KernelChoice[Any]]) -> tuple[Decision, ...]:
    """One decision per op and kernel: for how many problems, and why better-ranked kernels were
    passed over."""
    merged: dict[tuple[str, str, tuple[tuple[str, str], ...]], dict[Any, str]] = {}
    for choice in choices:
        key = (choice.op, choice.kernel.name, choice.rejected)
        merged.setdefault(key, {})[choice.problem] = choice.why
    return tuple(
        Decision(f"kernel.{op}", "auto", kernel, _why(problems, rejected))
        for (op, kernel, rejected), problems in merged.items()
    )


def _why(problems: dict[Any, str], rejected: tuple[tuple[str, str], ...]) -> str:
    shapes = f"{len(problems)} shape{'s' if len(problems) > 1 else ''}"
    notes = dict.fromkeys(why for why in problems.values() if why)  # once each
    reasons = dict.fromkeys(f"{name}: {reason}" for name, reason in rejected)
    return "; ".join((shapes, *notes, *reasons))


def load_kernel(target: str) -> Kernel[Any] | str:
    """Imports "module:attribute"; a module that cannot be imported gives the reason instead."""
    module, _, attribute = target.partition(":")
    try:
        kernel = getattr(importlib.import_module(module), attribute)
    except (ImportError, OSError) as error:
        return f"cannot be imported ({error})"
    assert isinstance(kernel, Kernel), f"{target} is {type(kernel).__name__}, not a Kernel"
    return kernel


def _label(target: str) -> str:
    return target.partition(":")[0].rpartition(".")[2]


_COMPARED = 1 << 20  # numbers at a time: what is compared may be a whole cache


def _difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    if ours.shape != reference.shape or ours.dtype != reference.dtype:
        return float("inf")
    error, scale = 0.0, 1e-6
    for pair in zip(*(x.reshape(-1).split(_COMPARED) for x in (ours, reference)), strict=True):
        left, right = (one.double() for one in pair)
        finite = right.isfinite()
        special = (x.masked_fill(finite, 0.0).nan_to_num() for x in (left, right))
        if not torch.equal(left.isfinite(), finite) or not torch.equal(*special):
            return float("inf")
        if finite.any():
            scale = max(scale, right.masked_fill_(~finite, 0.0).abs().max().item())
            error = max(error, left.masked_fill_(~finite, 0.0).sub_(right).abs_().max().item())
    return error / scale


def float_tolerance(dtype: torch.dtype) -> float:
    """Relative error allowed for one op: a few units in the last place of the dtype, and of fp32
    accumulation."""
    return {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]


def sample_generator(device: str = "cpu") -> torch.Generator:
    """The seeded generator of self-check inputs."""
    return torch.Generator(device=device).manual_seed(20)


def random_tensor(
    *shape: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> torch.Tensor:
    """Normal values, drawn on the generator's device."""
    values = torch.randn(*shape, generator=generator, device=generator.device)
    return values.to(device=device, dtype=dtype)


_scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}
_SCRATCH_SCALE = 1 / 64


def scratch_weight(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normal values of deviation 1/64 in a shape of the model's own, contiguous. All weights of the
    checks share their memory, so that a check of a large shape costs no more than its launch."""
    count = math.prod(shape)
    key = device, dtype
    if key not in _scratch or len(_scratch[key]) < count:
        _scratch.pop(key, None)
        values = torch.empty(count, dtype=dtype, device=device)
        values.normal_(0.0, _SCRATCH_SCALE, generator=sample_generator(device))
        _scratch[key] = values
    return _scratch[key][:count].view(*shape)


def release_scratch() -> None:
    """Lets the memory of `scratch_weight` go, to the device's other users too."""
    devices = {device for device, _ in _scratch}
    _scratch.clear()
    if "cuda" in devices and torch.cuda.is_available():
        torch.cuda.empty_cache()

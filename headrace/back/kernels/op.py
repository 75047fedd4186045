"""What an op is: a reference in PyTorch, kernels beside it, and the choice between them.

`Op.choose(problem)` asks each kernel in rank order whether it supports the problem, checks the
first that does against the reference on small inputs (REG-121), and returns a `Choice` that says
what was taken and why the others were not. It runs once per distinct problem, at load. What a layer
keeps is the plain callable that `Choice.bind` returns: at use there is no dispatch left. Kernels
are named "module:attribute" and imported on choosing, so a kernel whose library is missing is a
reason, never a broken import (PLT-07).

With `invariant` (`--deterministic`) only kernels that say so of themselves are considered, the
reference too; if none is left the op cannot serve, and that is an error.

A kernel module defines `KERNEL = Kernel(name=..., supports=..., bind=...)`; `bind(problem,
*weights)` returns a callable with exactly the signature of what the reference's `bind` returns.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from headrace.base.config.resolved import Decision
from headrace.base.errors import ConfigError

GPU_MODULES = "triton_"
"""Modules of this prefix hold kernels for GPUs; a CPU's problem does not import them: Triton alone takes 0.3 s."""

VARIES = "a row's bits depend on the batch"

P = TypeVar("P", bound=Hashable)
Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Kernel(Generic[P]):
    """One way to compute an op.

    supports   None if the problem can be computed, else one line that says why not; looks at the
               problem only
    bind       (problem, *weights) -> callable; may repack the weights, after which the caller drops
               its own
    reads_host whether it reads arrays of the step on the host: such a step cannot be replayed from
               a graph
    invariant  whether a row's result is the same bits whatever rows are beside it, however many
               they are, and however its sequence is cut into steps
    """

    name: str
    supports: Callable[[P], str | None]
    bind: Callable[..., Function]
    reads_host: bool = False
    invariant: bool = False


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Small inputs: what `bind` takes, and what the bound callable takes. `problem` may be a smaller
    one of the same kind (its sizes have the same remainders), so that a check takes microseconds.
    `further`: arguments of calls for which a kernel may go another way; what they return is compared."""

    problem: Any
    weights: tuple[Any, ...]
    arguments: tuple[Any, ...]
    further: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True)
class Choice(Generic[P]):
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
        self._choices: dict[tuple[P, bool], Choice[P]] = {}

    def choose(self, problem: P, *, invariant: bool = False) -> Choice[P]:
        """The best kernel that supports the problem and agrees with the reference, of the
        `invariant` ones if asked; remembered per problem."""
        key = problem, invariant
        if key not in self._choices:
            self._choices[key] = self._decide(problem, invariant=invariant)
        return self._choices[key]

    def choices(self) -> list[Choice[P]]:
        """Every choice made so far in this process, for the table of decisions."""
        return list(self._choices.values())

    def error(self, kernel: Kernel[P], problem: P) -> float:
        """The kernel's largest error on the sample, relative to the largest magnitude; inf if a
        value is not finite where the reference's is, or shapes or dtypes differ."""
        return max(
            (
                _difference(ours, reference)
                for ours, reference in zip(
                    self._run(kernel, self.sample(problem)),
                    self._run(self.reference, self.sample(problem)),
                    strict=True,
                )
            ),
            default=0.0,
        )

    def _run(self, kernel: Kernel[P], sample: Sample) -> list[torch.Tensor]:
        function = kernel.bind(sample.problem, *sample.weights)
        values: list[Any] = []
        for arguments in (sample.arguments, *sample.further):
            result = function(*arguments)
            values += result if isinstance(result, tuple) else (result,)
        if self._outputs is not None:
            return self._outputs(sample)
        return [v for v in (*values, *sample.arguments) if isinstance(v, torch.Tensor)]

    def _decide(self, problem: P, *, invariant: bool) -> Choice[P]:
        rejected: list[tuple[str, str]] = []
        for target in self.kernels:
            kernel, reason = self._consider(target, problem, invariant=invariant)
            if kernel is not None:
                return Choice(self.name, problem, kernel, "best ranked", tuple(rejected))
            rejected.append((_label(target), reason))
        if invariant and not self.reference.invariant:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
            raise ConfigError(
                f"--deterministic: no kernel of {self.name} gives a row the same bits in every batch for {problem}"
                f" ({reasons or 'there is none'})",
                field="deterministic",
            )
        return Choice(self.name, problem, self.reference, "no kernel was left", tuple(rejected))

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
        if _put_off is not None:
            _put_off.append((self, kernel, problem))
            return kernel, ""
        return (None, reason) if (reason := self._failing(kernel, problem)) else (kernel, "")

    def _failing(self, kernel: Kernel[P], problem: P) -> str | None:
        error, limit = self.error(kernel, problem), self.tolerance(problem)
        return (
            None
            if error <= limit
            else f"self-check failed: error {error:.2e} of at most {limit:.2e}"
        )


_put_off: list[tuple[Op[Any], Kernel[Any], Any]] | None = None


class SelfCheckFailed(Exception):
    """A self-check that was put off has failed."""


class PutOff:
    """Self-checks that are made together, once all is chosen, so that their kernels compile beside each other: while
    it is entered, `choose` takes the first kernel that supports a problem. One at a time in a process."""

    def __init__(self) -> None:
        self._checks: list[tuple[Op[Any], Kernel[Any], Any]] = []

    def __enter__(self) -> PutOff:
        global _put_off
        assert _put_off is None, "self-checks are put off already"
        _put_off = self._checks
        return self

    def __exit__(self, *error: object) -> None:
        global _put_off
        _put_off = None

    def ask(self) -> None:
        """Launches what the checks will, where kernels are compiled and not launched."""
        for op, kernel, problem in self._checks:
            op._run(kernel, op.sample(problem))

    def make(self) -> None:
        """Makes the checks; none is put off from now on. If one fails, all choices made are forgotten and
        SelfCheckFailed is raised: what was bound is to be made anew, and then each check decides."""
        self.__exit__()
        if not any(op._failing(kernel, problem) for op, kernel, problem in self._checks):
            return
        self.forget()
        raise SelfCheckFailed

    def forget(self) -> None:
        """Forgets the choices whose checks were put off."""
        for op, _, problem in self._checks:
            for invariant in (False, True):
                op._choices.pop((problem, invariant), None)


def decisions(choices: Iterable[Choice[Any]]) -> tuple[Decision, ...]:
    """One decision per op and kernel: for how many problems, and why better-ranked kernels were passed over."""
    merged: dict[tuple[str, str, tuple[tuple[str, str], ...]], set[Any]] = {}
    for choice in choices:
        key = (choice.op, choice.kernel.name, choice.rejected)
        merged.setdefault(key, set()).add(choice.problem)
    return tuple(
        Decision(f"kernel.{op}", "auto", kernel, _why(len(problems), rejected))
        for (op, kernel, rejected), problems in merged.items()
    )


def _why(num_problems: int, rejected: tuple[tuple[str, str], ...]) -> str:
    shapes = f"{num_problems} shape{'s' if num_problems > 1 else ''}"
    if not rejected:
        return shapes
    reasons = dict.fromkeys(f"{name}: {reason}" for name, reason in rejected)  # once each
    return "; ".join((shapes, *reasons))


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


def _difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    if ours.shape != reference.shape or ours.dtype != reference.dtype:
        return float("inf")
    if reference.numel() == 0:
        return 0.0
    left, right = ours.double(), reference.double()
    if not torch.equal(torch.isfinite(left), torch.isfinite(right)):
        return float("inf")
    finite = torch.isfinite(right)
    if not torch.equal(left[~finite].nan_to_num(), right[~finite].nan_to_num()):
        return float("inf")
    left, right = left[finite], right[finite]
    if right.numel() == 0:
        return 0.0
    scale = max(right.abs().max().item(), 1e-6)
    return (left - right).abs().max().item() / scale


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

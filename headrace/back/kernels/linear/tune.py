"""Measures GEMMs on this machine's GPU and finds the plans that table.py keeps.

Every launch of a chain reads another weight. A GEMM is timed with what a decoder layer puts around
it: the norm before (one token only), the activation and the addition after; the library's figure is
of the GEMM and the addition alone, so that the launches it needs besides are counted in its favour
as SPARED_US each. From LARGE on the activation is in the library's chain, and chains are replayed
until the board draws what it may (LOAD_US), as it does in such steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.kernels.gated_act.op import GatedActProblem
from headrace.back.kernels.gated_act.triton_gated_act import bind as bind_activation
from headrace.back.kernels.linear import stream, wide
from headrace.back.kernels.linear.table import (
    MAX_FEW,
    GemmPlan,
    Measured,
    measured,
    padded,
    shape_name,
    user_file,
    write,
)
from headrace.back.kernels.linear.time_model import GemmDevice
from headrace.back.kernels.linear.triton_small import Gemm, launcher, unfit
from headrace.back.kernels.triton.timing import copies, each_us, graph_of, replay_us

SWEEPS = {1: (1,), 8: (2, 4, 8, 16), 32: (32,), 64: (64,)}
"""Numbers of tokens that share a sweep (of the first one), since the kernel pads them to one
size."""
LARGE = (*range(128, 513, 64), *range(768, 2049, 256), 4096, 8192)
"""Numbers of tokens measured each by itself, of gated GEMMs: no other has a kernel of ours
there."""
LOAD_US = 100_000
SPARED_US = 2.0
FINALISTS = 4
LEAST_PROGRAMS = 40
STREAMED = ((128, 4), (128, 8), (256, 2), (256, 3), (256, 4))
"""Inputs of a step and stages that are tried."""


@dataclass(frozen=True, kw_only=True)
class GemmShape:
    """One GEMM of a model. `outputs` counts gates too, if it is `gated`."""

    outputs: int
    inputs: int
    norm: bool = False
    gated: bool = False
    add: bool = False

    @property
    def key(self) -> str:
        """Its name in tables."""
        return shape_name(self.outputs, self.inputs, gated=self.gated)


def candidates(shape: GemmShape, tokens: int) -> Iterator[GemmPlan]:
    """The plans that are tried."""
    if tokens >= LARGE[0]:
        for m, stages in wide.STAGES.items():
            n = 2 * sum(wide.RESULTS)
            yield GemmPlan(
                kernel="wide", m=m, n=n, k=wide.K, warps=4, stages=stages, group=wide.GROUP
            )
        return
    if tokens == 1:
        ks = (1024, 2048, 4096)
        for n, k, warps, ahead in itertools.product((2, 4, 8), ks, (4, 8), (0, 1)):
            values = n * k // (32 * warps)
            if k <= 2 * shape.inputs and 8 <= values <= 64 and (not ahead or 2 * k <= shape.inputs):
                yield GemmPlan(kernel="gemv", n=n, k=k, warps=warps, stages=1, prefetch=ahead)
        return
    splits = (1,) if shape.outputs > 8192 else (1, 2, 4)
    plain = itertools.product((32,), (128, 256), splits, (3, 5), (False,))
    swapped = itertools.product((64,), (64, 128, 256), splits, (4, 6), (True,))
    for n, k, split, stages, swap in (*plain, *swapped):
        tiles = (shape.outputs // (2 if shape.gated else 1)) / n
        tile_bytes = (2 if shape.gated else 1) * n * k * 2 + max(16, tokens) * k * 2
        if stages * tile_bytes > 200_000 or shape.inputs / split < 2 * k:
            continue
        if tiles * split < LEAST_PROGRAMS or (split > 1 and tiles * split > 600):
            continue
        yield GemmPlan(
            kernel="skinny", n=n, k=k, warps=4, stages=stages, split=split, prefetch=2, swap=swap
        )
    for (k, stages), per_sm in itertools.product(STREAMED, (1, 2)):
        taken = stream.shared_bytes(k=k, stages=stages, tokens=tokens, gated=shape.gated)
        if 60_000 < taken * per_sm < 220_000:
            yield GemmPlan(kernel="stream", n=64, k=k, warps=4, stages=stages, split=per_sm)


class GemmTrial:
    """The tensors of one shape, and the chains to be timed."""

    def __init__(self, shape: GemmShape, dtype: torch.dtype, *, count: int | None = None) -> None:
        self.shape = shape
        number = count or copies(dtype.itemsize * shape.outputs * shape.inputs)
        scale = shape.inputs**-0.5

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, device="cuda", dtype=dtype)

        self.weights = [random(shape.outputs, shape.inputs).mul_(scale) for _ in range(number)]
        self._norm = torch.rand(shape.inputs, device="cuda") + 0.5 if shape.norm else None
        most = LARGE[-1] if self.sizes else MAX_FEW
        self.x = random(most, shape.inputs)
        self._y = random(most, shape.outputs // (2 if shape.gated else 1))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of tokens of LARGE that are to be measured."""
        activation = "silu" if self.shape.gated else ""
        gemm = Gemm(weight_OI=self.weights[0], activation=activation, add=self.shape.add)
        return () if "wide" in unfit(gemm) else LARGE

    def ours(self, plan: GemmPlan, tokens: int) -> list[Callable[[], object]]:
        """A chain by a plan."""
        x, y = self.x[:tokens], self._y[:tokens]
        around = Gemm(
            weight_OI=self.weights[0],
            norm_I=self._norm if tokens == 1 else None,
            eps=1e-6,
            activation="silu" if self.shape.gated else "",
            add=self.shape.add,
        )
        runs = [launcher(replace(around, weight_OI=w), plan, padded(tokens)) for w in self.weights]
        return [lambda run=run: run(x, y) for run in runs]

    def library(self, tokens: int) -> list[Callable[[], object]]:
        """The same chain by the library."""
        x, y = self.x[:tokens], self._y[:tokens]
        if self.shape.add:
            return [lambda w=w: y.addmm_(x, w.t()) for w in self.weights]
        if tokens >= LARGE[0] and self.shape.gated:
            activate = bind_activation(
                GatedActProblem(device="cuda", dtype=x.dtype, width=y.shape[1], activation="silu")
            )
            return [lambda w=w: activate(F.linear(x, w)) for w in self.weights]
        return [lambda w=w: F.linear(x, w) for w in self.weights]

    def tried(self, tokens: int) -> list[tuple[float, GemmPlan]]:
        """Every candidate by rising microseconds."""
        timed = []
        for plan in candidates(self.shape, tokens):
            try:
                timed.append((each_us(self.ours(plan, tokens), replays=3), plan))
            except Exception as error:
                if "out of resource" not in str(error):
                    raise
        return sorted(timed, key=lambda pair: pair[0])

    def best(
        self, tokens: int, tried: list[tuple[float, GemmPlan]]
    ) -> tuple[float, list[tuple[float, GemmPlan]], GemmPlan | None]:
        """The library's microseconds, the finalists', and the plan to keep (None: the
        library's)."""
        library_us = each_us(self.library(tokens))
        plans = [plan for _, plan in tried[:FINALISTS]]
        if tokens > 1:
            plans.append(replace(plans[0], prefetch=0))
        finals = sorted(
            ((each_us(self.ours(plan, tokens)), plan) for plan in plans), key=lambda pair: pair[0]
        )
        spared = SPARED_US * (self.shape.gated + (self.shape.norm and tokens == 1))
        return library_us, finals, finals[0][1] if finals[0][0] < library_us + spared else None

    def best_large(
        self, tokens: int
    ) -> tuple[float, list[tuple[float, GemmPlan]], GemmPlan | None]:
        """The same for a number of LARGE, under load."""
        library_us = loaded_us(self.library(tokens))
        finals = sorted(
            ((loaded_us(self.ours(plan, tokens)), plan) for plan in candidates(self.shape, tokens)),
            key=lambda pair: pair[0],
        )
        return library_us, finals, finals[0][1] if finals[0][0] < library_us else None


def loaded_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of one call of a chain that is replayed for LOAD_US."""
    graph = graph_of(calls)
    once_us = replay_us(graph, replays=2)
    return replay_us(graph, replays=max(7, int(LOAD_US / once_us))) / len(calls)


def measure_missing(
    shapes: Iterable[tuple[GemmShape, torch.dtype]],
    device: GemmDevice,
    say: Callable[[str], None],
) -> int:
    """Measures the shapes that no table of this GPU holds and keeps each in the user's table as
    soon as it is known. Returns how many were measured."""
    count = 0
    for shape, dtype in shapes:
        if shape.key in measured(device):
            continue
        write(user_file(device), device, tune([shape], dtype, say))
        count += 1
    return count


def tune(shapes: Iterable[GemmShape], dtype: torch.dtype, say: Callable[[str], None]) -> Measured:
    """The plans of these shapes on the current GPU; `say` hears of each."""
    table: Measured = {}
    for shape in shapes:
        trial = GemmTrial(shape, dtype)
        plans = table.setdefault(shape.key, {})
        tried: dict[int, list[tuple[float, GemmPlan]]] = {}
        for swept, sizes in SWEEPS.items():
            tried |= dict.fromkeys(sizes, trial.tried(swept))
        for tokens in (*tried, *trial.sizes):
            library_us, finals, plans[tokens] = (
                trial.best(tokens, tried[tokens]) if tokens in tried else trial.best_large(tokens)
            )
            say(f"{shape.key}, {tokens} tokens: {finals[0][0]:.1f} us (library {library_us:.1f})")
    return table

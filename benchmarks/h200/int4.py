"""Layers with weights of 4-bit integers on one H200: whether they are right, and how long each plan takes.

    python -m benchmarks.h200.int4 --out int4.json [--parts check,sweep,chain,rows] [--budget 170]

"check" compares the kernels with their definition on the layers of Qwen3-8B. "sweep" times the plans of
kernels/linear_int4/stream.py, the tiles, and the library's GEMM behind a dequantized weight, each in a chain of
recorded launches over so many weights that no cache helps; plans compile in many processes first. "chain" times the
layers of a model one after the other, by the plans that are shipped; "rows" times them for one token by the plans of
the layers, each layer's in turn beside the best of the others. It ends within about its budget of seconds, with
what was measured until then.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.shapes import BYTES_PER_S
from headrace.back.kernels.linear_int4 import op, stream, triton_linear_int4, triton_tiles_int4
from headrace.back.kernels.linear_int4.layout import Int4Weight
from headrace.back.kernels.linear_int4.stream import Int4Gemm, StreamPlan
from headrace.back.kernels.triton.room import shared_bytes
from headrace.back.kernels.triton.timing import copies, each_us

LAYERS = {
    "qkv": {"outputs": 6144, "inputs": 4096, "eps": 1e-6},
    "o": {"outputs": 4096, "inputs": 4096, "add": True},
    "gate_up": {"outputs": 24576, "inputs": 4096, "eps": 1e-6, "activation": "silu"},
    "down": {"outputs": 4096, "inputs": 12288, "add": True},
}
"""Of Qwen3-8B."""
TOKENS = (1, 8, 16, 32, 64, 128, 256)
LIBRARY_TOKENS = (64, 128, 192, 256, 384, 512)
PROCESSES = 14


def problem_of(name: str, group: int | None, minima: bool) -> op.LinearInt4Problem:
    """A layer of the model."""
    return op.LinearInt4Problem(
        device="cuda", dtype=torch.bfloat16, group=group, minima=minima, **LAYERS[name]
    )


@dataclass(eq=False)
class Trial:
    """A layer with several weights, which launches take in turn."""

    problem: op.LinearInt4Problem
    weights: list[Int4Weight]
    norm_I: torch.Tensor | None

    @classmethod
    def of(cls, problem: op.LinearInt4Problem, count: int | None = None) -> Trial:
        """With random weights."""
        weight, _, norm = op.sample_of(problem, (1,)).weights
        count = count or copies(weight.num_bytes)
        weights = [
            replace(weight, words_NBW=weight.words_NBW.clone(), scales_NBSR=weight.scales_NBSR)
            for _ in range(count)
        ]
        return cls(problem, weights, norm)

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x and y."""
        new = {"dtype": torch.bfloat16, "device": "cuda"}
        return torch.randn(tokens, self.problem.inputs, **new), torch.zeros(
            tokens, self.problem.results, **new
        )

    def streams(self, plan: StreamPlan, tokens: int) -> list[Callable[[], object]]:
        """One launch of each weight by a plan, of one token with the norm."""
        x, y = self.inputs(tokens)
        calls = []
        for weight in self.weights:
            gemm = Int4Gemm(
                weight=weight,
                norm_I=self.norm_I if plan.tokens == 1 else None,
                eps=1e-6,
                activation=self.problem.activation,
                add=self.problem.add,
            )
            run = stream.bind(gemm, plan)
            calls.append(lambda run=run: run(x, y))
        return calls

    def tiles(self, tokens: int, most: int) -> list[Callable[[], object]]:
        """The same by the tiles of any GPU."""
        x, y = self.inputs(tokens)
        activation, add = self.problem.activation or "", self.problem.add
        return [
            lambda weight=weight: triton_tiles_int4.multiply(
                x, weight, None, y, activation=activation, add=add, most_tokens=most
            )
            for weight in self.weights
        ]

    def library(self, tokens: int) -> list[Callable[[], object]]:
        """The same with the weight dequantized for the library."""
        x, y = self.inputs(tokens)
        problem = replace(self.problem, eps=None)
        residual = y if problem.add else None
        many = [triton_linear_int4._many(problem, weight, None) for weight in self.weights]
        return [lambda run=run: run(x, residual) for run in many]

    def floor_us(self, tokens: int) -> float:
        """Microseconds to move weight, x and y once."""
        other = 2 * tokens * (self.problem.inputs + self.problem.results)
        return 1e6 * (self.weights[0].num_bytes + other) / BYTES_PER_S


def candidates(name: str, tokens: int) -> Iterator[StreamPlan]:
    """Plans that are tried for a number of tokens."""
    gated = "activation" in LAYERS[name]
    every = (3, 5, 8) if tokens == 1 else (4, 6)
    sizes = (tokens,) if tokens <= 64 else (64, 128)
    programs = (1, 2, 3, 4) if tokens == 1 else (1, 2, 3) if tokens <= 64 else (1, 2)
    pairs = (True,) if gated or tokens > 64 else (True, False)
    for m, stages, per_sm, pair in product(sizes, every, programs, pairs):
        yield StreamPlan(stages=stages, per_sm=per_sm, tokens=m, pair=pair)
    if tokens == 1:
        for depth, per_sm, pair in product((1, 2, 4), (1, 2, 3), pairs):
            yield rows_plan(depth, per_sm, pair)


def rows_plan(depth: int, per_sm: int, pair: bool) -> StreamPlan:
    """One token by triton_rows_int4.py."""
    return StreamPlan(stages=3, per_sm=per_sm, tokens=1, pair=pair, depth=depth)


def fits(trial: Trial, plan: StreamPlan) -> bool:
    """Whether so many programs fit a multiprocessor."""
    gemm = Int4Gemm(weight=trial.weights[0], activation=trial.problem.activation)
    return stream.shared_bytes(gemm, plan) * plan.per_sm <= shared_bytes()


def _compile(task: tuple[str, int, int | None, bool, list[StreamPlan]]) -> None:
    name, tokens, group, minima, plans = task
    trial = Trial.of(problem_of(name, group, minima), count=1)
    for plan in plans:
        try:
            trial.streams(plan, tokens)[0]()
        except Exception as error:
            print("compile", name, tokens, plan, type(error).__name__, str(error)[:200], flush=True)
    torch.cuda.synchronize()


def check(group: int | None, minima: bool) -> list[dict[str, Any]]:
    """Largest errors of each layer, relative to the largest magnitude."""
    rows = []
    for name in LAYERS:
        problem = problem_of(name, group, minima)
        for tokens in (1, 5, 16, 33, 64, 100, 300):
            begin = time.perf_counter()
            sample = op.sample_of(problem, (tokens,))
            x, residual = sample.arguments
            given = None if residual is None else residual.clone()
            expected = op.bind_reference(problem, *sample.weights)(x, given).double()
            streamed = triton_linear_int4._streams(problem, Int4Gemm(weight=sample.weights[0]))
            try:
                y = triton_linear_int4.bind(problem, *sample.weights)(x, residual).double()
                wrong = float((y - expected).abs().max() / expected.abs().max())
            except Exception as error:
                wrong = float("inf")
                print(name, tokens, type(error).__name__, str(error)[:300], flush=True)
            rows.append({"layer": name, "tokens": tokens, "error": wrong, "streamed": streamed})
            print(rows[-1], round(time.perf_counter() - begin, 1), flush=True)
    return rows


def sweep(group: int | None, minima: bool, end: float) -> list[dict[str, Any]]:
    """Microseconds of every plan; the best first."""
    problems = {name: problem_of(name, group, minima) for name in LAYERS}
    small = {name: Trial.of(problem, count=1) for name, problem in problems.items()}
    plans = {
        (name, tokens): [plan for plan in candidates(name, tokens) if fits(small[name], plan)]
        for tokens in TOKENS
        for name in LAYERS
    }
    tasks = [
        (name, tokens, group, minima, every[i::4])
        for (name, tokens), every in plans.items()
        for i in range(4)
    ]
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        list(pool.imap_unordered(_compile, tasks, chunksize=1))
    print("compiled", sum(map(len, plans.values())), "in", time.perf_counter() - begin, flush=True)
    rows: list[dict[str, Any]] = []
    trials = {name: Trial.of(problem) for name, problem in problems.items()}
    for tokens in sorted({*TOKENS, *LIBRARY_TOKENS}):
        for name, trial in trials.items():
            if time.perf_counter() > end:
                print("the budget is spent before", name, tokens, flush=True)
                return rows
            ways: list[tuple[str, dict[str, Any], Callable[[], list[Callable[[], object]]]]] = [
                ("stream", asdict(plan), lambda p=plan, t=trial, n=tokens: t.streams(p, n))
                for plan in plans.get((name, tokens), ())
            ]
            if tokens in LIBRARY_TOKENS:
                ways.append(("library", {}, lambda t=trial, n=tokens: t.library(n)))
            if tokens in (1, 64, 128):
                ways.append(("tiles", {}, lambda t=trial, n=tokens: t.tiles(n, min(n, 128))))
            found = []
            for kind, plan, calls in ways:
                try:
                    found.append((each_us(calls(), replays=3), kind, plan))
                except Exception as error:
                    print(
                        name, tokens, kind, plan, type(error).__name__, str(error)[:200], flush=True
                    )
            found.sort(key=lambda one: one[0])
            floor = trial.floor_us(tokens)
            rows.append(
                {
                    "layer": name, "tokens": tokens, "floor_us": round(floor, 2),
                    "ways": [(round(us, 2), kind, plan) for us, kind, plan in found],
                }
            )  # fmt: skip
            best = {kind: (us, plan) for us, kind, plan in reversed(found)}
            print(name, tokens, f"floor {floor:.1f}", best, flush=True)
    return rows


def chain(group: int | None, minima: bool, layers: int = 12) -> list[dict[str, Any]]:
    """Microseconds of a model's layers one after the other, without attention: as many weights as no cache holds."""
    trials = {name: Trial.of(problem_of(name, group, minima), count=layers) for name in LAYERS}
    rows = []
    for tokens in (1, 2, 8, 16, 32, 64):
        calls: list[Callable[[], object]] = []
        for i in range(layers):
            for trial in trials.values():
                layer = triton_linear_int4.bind(trial.problem, trial.weights[i], None, trial.norm_I)
                x, y = trial.inputs(tokens)
                residual = y if trial.problem.add else None
                calls.append(lambda layer=layer, x=x, residual=residual: layer(x, residual))
        us = each_us(calls) * len(LAYERS)
        floor = sum(trial.floor_us(tokens) for trial in trials.values())
        rows.append({"tokens": tokens, "layer_us": us, "floor_us": floor})
        print(rows[-1], flush=True)
    return rows


def rows(group: int | None, minima: bool, layers: int = 12) -> list[dict[str, Any]]:
    """The same of one token by each pair of plans; the best first."""
    each_layer = {name: Trial.of(problem_of(name, group, minima), count=layers) for name in LAYERS}
    plain = [rows_plan(*numbers) for numbers in product((2, 4), (1, 2, 3), (True, False))]
    plain += [StreamPlan(stages=3, per_sm=2, tokens=1), rows_plan(1, 2, True)]
    gated = [rows_plan(depth, per_sm, True) for depth, per_sm in product((1, 2, 4), (1, 2, 3))]
    gated += [StreamPlan(stages=3, per_sm=3, tokens=1)]
    tasks = [
        (name, 1, group, minima, plans[i::3])
        for name in LAYERS
        for plans in ((gated if "activation" in LAYERS[name] else plain),)
        for i in range(3)
    ]
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        list(pool.imap_unordered(_compile, tasks, chunksize=1))

    def us(chosen: dict[str, StreamPlan]) -> float:
        by_layer = [trial.streams(chosen[name], 1) for name, trial in each_layer.items()]
        calls = [call for layer in zip(*by_layer, strict=True) for call in layer]
        for call in calls[: len(LAYERS)]:
            call()
        return each_us(calls, replays=5) * len(LAYERS)

    found = []
    best = {name: gated[-1] if "activation" in LAYERS[name] else plain[-2] for name in LAYERS}
    for _ in range(2):
        for name in LAYERS:
            tried = gated if "activation" in LAYERS[name] else plain
            times = []
            for plan in tried:
                try:
                    times.append((us({**best, name: plan}), plan))
                except Exception as error:
                    print(name, plan, type(error).__name__, str(error)[:200], flush=True)
            times.sort(key=lambda one: one[0])
            found += [{"layer": name, "layer_us": one, "plan": asdict(plan)} for one, plan in times]
            best[name] = times[0][1]
            for one, plan in times[:4]:
                print("rows", name, round(one, 2), asdict(plan), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="check,chain,sweep")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--minima", action="store_true")
    parser.add_argument("--budget", type=float, default=170.0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    end = time.perf_counter() + given.budget
    result: dict[str, Any] = {}
    for part in given.parts.split(","):
        begin = time.perf_counter()
        if part == "check":
            result[part] = check(given.group, given.minima)
        elif part == "chain":
            result[part] = chain(given.group, given.minima)
        elif part == "rows":
            result[part] = rows(given.group, given.minima)
        else:
            result[part] = sweep(given.group, given.minima, end)
        print(part, "took", round(time.perf_counter() - begin, 1), flush=True)
        given.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

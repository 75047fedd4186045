"""Plans of the recurrences' kernels over chunks beside each other: microseconds of each kernel of a call, its error
against the kernel that goes token by token, and from how many tokens of a row on chunks are quicker.
`python -m benchmarks.lab.chunks [--seconds 90] [--only gated_delta]`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.h200.recurrent import PROMPTS, problems, prompts, seconds
from headrace.back.kernels.gated_delta import triton_chunks as delta_chunks
from headrace.back.kernels.gated_delta import triton_gated_delta
from headrace.back.kernels.gated_delta.op import GatedDeltaProblem
from headrace.back.kernels.gated_delta.triton_chunks import ChunkPlan
from headrace.back.kernels.ssd_scan import triton_chunks as ssd_chunks
from headrace.back.kernels.ssd_scan import triton_ssd_scan
from headrace.back.kernels.triton.ahead import compiling
from headrace.back.kernels.triton.compilers import expected

LENGTHS = (8, 16, 32, 64, 128)


def modules(problem: Any) -> tuple[Any, Any]:
    """That of the chunks and that of the tokens."""
    if isinstance(problem, GatedDeltaProblem):
        return delta_chunks, triton_gated_delta
    return ssd_chunks, triton_ssd_scan


def variants(problem: Any) -> list[ChunkPlan]:
    """The plan that ships first, then one thing after the other changed, then several."""
    ships = modules(problem)[0].plan_of(problem)
    delta = isinstance(problem, GatedDeltaProblem)
    changes = [{}, *({"columns": columns} for columns in (16, 64, 128))]
    changes += [{"stages": stages} for stages in (1, 2, 4)]
    changes += [{"warps": 8}, {"chunk": 32}]
    if delta:
        changes += [{"product_warps": 4}, {"product_warps": 8}, {"chunk": 32, "columns": 64}]
    changes += [
        {"columns": columns, "stages": stages, "warps": warps}
        for warps, columns, stages in product((4, 8), (64, 32), (2, 3))
    ]
    if delta and problem.per_channel:  # its states are gone through as those of one gate are
        changes = [{}, {"product_warps": 4}, {"chunk": 32}, {"chunk": 32, "product_warps": 4}]
    return list(dict.fromkeys(replace(ships, **changed) for changed in changes))


def kernel_us(call: Any) -> str:
    """Microseconds of each kernel of a call, by the profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found = [
        (one.key, one.device_time_total) for one in seen.key_averages() if one.device_time_total
    ]
    return ", ".join(f"{name[:24]} {us:.0f}" for name, us in found)


def error(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> str:
    """Of y and of the state, relative to the largest magnitude."""
    pairs = ((one.float(), other.float()) for one, other in zip(ours, theirs, strict=True))
    return " / ".join(f"{float((a - b).abs().max() / b.abs().max()):.1e}" for a, b in pairs)


def result(bound: Any, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """y and the state behind a call that began with zeros."""
    *inputs, state, rows = arguments
    own = torch.zeros_like(state)
    return bound(*inputs, own, rows), own


def lengths(name: str, problem: Any, weights: Any, sample: Any) -> None:
    """Rows of few tokens each, by tokens and by chunks."""
    chunks, tokens = modules(problem)
    plan = replace(chunks.plan_of(problem), least=1)
    by_chunks = chunks.bind_with(problem, *weights, plan=plan)
    by_tokens = tokens.bind(problem, *weights)
    for count in (1, 32):
        for length in LENGTHS:
            some = prompts(sample, count, length, "cuda")
            both = (partial(bound, *some) for bound in (by_tokens, by_chunks))
            us = " ".join(f"{1e6 * seconds(call, 'cuda'):.0f}" for call in both)
            print(f"{name}: {count} x {length}: tokens, chunks: {us}", flush=True)


def bound_plans(problem: Any, weights: Any, plans: list[ChunkPlan]) -> list[Any]:
    """The kernels of each plan."""
    chunks, _ = modules(problem)
    return [chunks.bind_with(problem, *weights, plan=plan) for plan in plans]


def compile_all(chosen: dict[str, Any]) -> None:
    """All kernels beside each other, by processes if the cache folder is empty."""
    with expected("cuda"), compiling():
        for _, problem in chosen.values():
            chunks, _ = modules(problem)
            sample = chunks.long_sample(problem)
            shortest = replace(chunks.plan_of(problem), least=1)
            for bound in bound_plans(problem, sample.weights, [*variants(problem), shortest]):
                bound(*sample.arguments)


def main() -> None:
    """Prints a line for each plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--only", default="", help="ops whose name holds this")
    asked = parser.parse_args()
    chosen = {name: one for name, one in problems("cuda").items() if asked.only in name}
    began = time.monotonic()
    compile_all(chosen)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    for place, (name, (op, problem)) in enumerate(chosen.items()):
        until = time.monotonic() + asked.seconds / len(chosen)
        chunks, tokens = modules(problem)
        sample = op.sample(problem)
        weights = chunks.long_sample(problem).weights
        by_tokens = tokens.bind(problem, *weights)
        lengths(name, problem, weights, sample.arguments)
        many = {each: prompts(sample.arguments, *each, "cuda") for each in PROMPTS}
        wanted = {each: result(by_tokens, some) for each, some in many.items()}
        for plan in variants(problem):
            if time.monotonic() > until:
                break
            try:
                bound = chunks.bind_with(problem, *weights, plan=plan)
                for each, some in many.items():
                    off = error(result(bound, some), wanted[each])
                    call = partial(bound, *some)
                    us, parts = 1e6 * seconds(call, "cuda"), kernel_us(call)
                    print(
                        f"{place} {name} {each}: {us:.0f} us, error {off}: {plan}: {parts}",
                        flush=True,
                    )
            except Exception as failed:
                first = next(iter(str(failed).splitlines()), "")
                print(f"{name}: {plan}: {type(failed).__name__}: {first[:200]}", flush=True)


if __name__ == "__main__":
    main()

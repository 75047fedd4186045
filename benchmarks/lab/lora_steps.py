"""Ways to add adapters to the linear layers of a decode step, in graphs of their base products: what each adds.

    python -m benchmarks.lab.lora_steps [--cases 8x16,32x64a,32x64] [--ways "A;B"] [--rounds 3] [--out FILE]

The products of LAYERS layers of an 8B model with 32 rows, one behind the other, with and without adapters;
milliseconds of all 36 layers, the difference being what adapters cost a step. Every way's result is held against the
reference first; `--rounds 0` does that alone, so that several may compile side by side.
What was chosen: kernels/lora_linear/triton_lora_slots.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from headrace.back.kernels.linear.op import OP as LINEAR
from headrace.back.kernels.linear.op import LinearProblem
from headrace.back.kernels.lora_linear import triton_lora_linear, triton_lora_slots
from headrace.back.kernels.lora_linear.op import (
    LoraLinearProblem,
    LoraWeights,
    bind_reference,
)
from headrace.back.kernels.lora_linear.triton_lora_slots import SlotTiles
from headrace.back.kernels.triton.timing import graph_of, replay_us

ROWS, LAYERS, OF = 32, 9, 36
BF16, DEVICE = torch.bfloat16, "cuda"
LINEARS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (12288, 12288)),
    "down": (12288, (4096,)),
}
CASES = {
    "8x16": (8, 16, tuple(LINEARS)),
    "32x64a": (32, 64, ("qkv", "o")),
    "32x64": (32, 64, tuple(LINEARS)),
}
Way = Callable[
    [LoraLinearProblem, LoraWeights, Callable[[torch.Tensor], torch.Tensor]],
    Callable[..., torch.Tensor],
]


def behind(bind: Callable[..., Callable[..., None]]) -> Way:
    """A way that adds behind the product."""

    def way(problem: LoraLinearProblem, weights: LoraWeights, gemm: Callable) -> Callable:
        add = bind(problem, weights)

        def project(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            y = gemm(x)
            add(x, y, slots)
            return y

        return project

    return way


def by_slot(**tiles: int) -> Way:
    return behind(lambda p, w: triton_lora_slots.bind_by_slot(p, w, SlotTiles(**tiles)))


def dense(problem: LoraLinearProblem, weights: LoraWeights, gemm: Callable) -> Callable:
    """z of all slots by the library, then the expansion."""
    rows = weights.a_SKI.view(-1, problem.inputs)
    expand = triton_lora_slots.bind_expand(problem, weights, SlotTiles(), of_all=True)

    def project(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        z = F.linear(x, rows)
        y = gemm(x)
        expand(z, y, slots)
        return y

    return project


def beside(problem: LoraLinearProblem, weights: LoraWeights, gemm: Callable) -> Callable:
    """The shrinking on a stream of its own, beside the product."""
    tiles = SlotTiles()
    shrink = triton_lora_slots.bind_shrink(problem, weights, tiles)
    splits, _ = triton_lora_slots.splits_of(problem, tiles)
    expand = triton_lora_slots.bind_expand(problem, weights, tiles, splits=splits)
    side = torch.cuda.Stream()

    def project(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            z = shrink(x, slots)
        y = gemm(x)
        here.wait_stream(side)
        expand(z, y, slots)
        return y

    return project


WAYS: dict[str, Way] = {
    "by row (now)": behind(triton_lora_linear.bind),
    "by slot": by_slot(),
    "by slot, 128 outputs": by_slot(outputs=128),
    "by slot, 8 warps": by_slot(outputs=512, warps=8),
    "by slot, 256 inputs": by_slot(inputs=256, splits=32),
    "dense": dense,
    "beside": beside,
}
_chosen: dict[tuple[int, int], object] = {}


def chosen(inputs: int, outputs: int):
    key = inputs, outputs
    if key not in _chosen:
        _chosen[key] = LINEAR.choose(
            LinearProblem(device=DEVICE, dtype=BF16, inputs=inputs, outputs=outputs)
        )
    return _chosen[key]


def weights_of(problem: LoraLinearProblem) -> LoraWeights:
    slots, parts, rank = problem.slots, len(problem.parts), problem.rank
    new = {"dtype": BF16, "device": DEVICE}
    return LoraWeights(
        a_SKI=torch.empty((slots, parts * rank, problem.inputs), **new).normal_(
            std=problem.inputs**-0.5
        ),
        b_SRO=torch.empty((slots, rank, problem.outputs), **new).normal_(std=rank**-0.5),
        scale_SP=torch.ones((slots, parts), device=DEVICE),
        rank_SP=torch.full((slots, parts), rank, dtype=torch.int32, device=DEVICE),
    )


def measure(case: str, rounds: int, ways: list[str]) -> Iterator[dict[str, object]]:
    slots, rank, names = CASES[case]
    slot_T = (torch.arange(ROWS, dtype=torch.int32, device=DEVICE) % slots) + 1
    xs = {n: torch.randn(ROWS, n, dtype=BF16, device=DEVICE) for n in (4096, 12288)}
    layers = []
    for _ in range(LAYERS if rounds else 1):
        for name, (inputs, parts) in LINEARS.items():
            w = torch.empty((sum(parts), inputs), dtype=BF16, device=DEVICE).normal_(
                std=inputs**-0.5
            )
            gemm = chosen(inputs, sum(parts)).bind(w, None)
            problem = weights = None
            if name in names:
                problem = LoraLinearProblem(
                    device=DEVICE, dtype=BF16, inputs=inputs, parts=parts, rank=rank, slots=slots
                )
                weights = weights_of(problem)
            layers.append((name, inputs, gemm, problem, weights))
    for _, inputs, gemm, _, _ in layers[: len(LINEARS)]:
        gemm(xs[inputs])
    graphs = {}
    if rounds:
        graphs["base"] = graph_of([lambda g=g, i=i: g(xs[i]) for _, i, g, _, _ in layers])
    for title in ways:
        try:
            calls = []
            for number, (name, inputs, gemm, problem, weights) in enumerate(layers):
                if problem is None:
                    calls.append(lambda g=gemm, i=inputs: g(xs[i]))
                    continue
                project = WAYS[title](problem, weights, gemm)
                if number < len(LINEARS):
                    expected = gemm(xs[inputs]).clone()
                    bind_reference(problem, weights)(xs[inputs], expected, slot_T)
                    for _ in range(2):
                        got = project(xs[inputs], slot_T)
                    torch.cuda.synchronize()
                    error = float(
                        (got.float() - expected.float()).abs().max() / expected.float().abs().max()
                    )
                    assert error < 1.5e-2, (title, name, error)
                calls.append(lambda p=project, i=inputs: p(xs[i], slot_T))
            if rounds:
                graphs[title] = graph_of(calls)
        except Exception as error:  # the others are to be known all the same
            yield {"case": case, "way": title, "error": f"{type(error).__name__}: {error}"[:300]}
            torch.cuda.synchronize()
    times: dict[str, list[float]] = {title: [] for title in graphs}
    for _ in range(rounds):
        for title, graph in graphs.items():
            times[title].append(replay_us(graph) * OF / LAYERS / 1e3)
    if not rounds:
        return
    base = statistics.median(times["base"])
    for title, each in times.items():
        ms = statistics.median(each)
        yield {"case": case, "way": title, "ms": round(ms, 3), "adds_ms": round(ms - base, 3)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--ways", default=";".join(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    ways = given.ways.split(";")
    for case in given.cases.split(","):
        for row in measure(case, given.rounds, ways):
            print(json.dumps(row), flush=True)
            if given.out:
                with given.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

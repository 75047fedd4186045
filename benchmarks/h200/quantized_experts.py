"""Experts with quantized weights on one H200: each step's kernels, the rates of their GEMMs, and whole decode steps.

    python -m benchmarks.h200.quantized_experts --parts kernels,steps --out experts.json [--budget 60]

kernels: microseconds of the whole op (dispatch, both grouped GEMMs, combination) at uniform routing by the plan that is
taken and by those next to it, in a chain of recorded launches over routings whose experts no cache holds; error:
against the definition, for few tokens. steps: decode of qwen3-30b-a3b-fp8 and of gpt-oss-20b with experts in MXFP4
(offline.py), dummy weights, uniform routing. It ends within about its budget of seconds, with what was measured until
then.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.h200 import offline
from benchmarks.h200.mixtures import error, inputs_of
from benchmarks.h200.routing import uniform_routing
from benchmarks.h200.shapes import BYTES_PER_S, EXPERTS_ALONE, FLOPS, QUANTIZATION, write_model
from headrace.back.kernels.experts.op import ExpertsProblem, biases_of
from headrace.back.kernels.experts_fp8 import op as fp8
from headrace.back.kernels.experts_fp8 import triton_experts_fp8
from headrace.back.kernels.experts_int4 import op as int4
from headrace.back.kernels.experts_int4 import triton_experts_int4
from headrace.back.kernels.experts_int4.layout import Int4Form
from headrace.back.kernels.triton.timing import each_us
from headrace.back.layers.scope import Scope

NEW: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
A3B = ExpertsProblem(**NEW, experts=128, slots=8, width=2048, inner=768)
OSS = ExpertsProblem(
    **NEW,
    experts=32,
    slots=4,
    width=2880,
    inner=2880,
    activation="swiglu_oai",
    clamp=7.0,
    bias=True,
)
CASES: dict[str, fp8.ExpertsFp8Problem | int4.ExpertsInt4Problem] = {
    "30B-A3B fp8": fp8.ExpertsFp8Problem(mixture=A3B, group=None),
    "gpt-oss-20b mxfp4": int4.ExpertsInt4Problem(mixture=OSS, form=Int4Form(32, floats=True)),
    "30B-A3B fp8 in blocks": fp8.ExpertsFp8Problem(mixture=A3B, group=128),
    "30B-A3B int4-g128": int4.ExpertsInt4Problem(mixture=A3B, form=Int4Form(128)),
}
TOKENS = (1, 2, 4, 8, 32, 64, 128, 256, 512, 1024, 4096, 16384)
FP8_FLOPS = 2 * FLOPS
MOST_CHECKED = 64
"""Tokens that are compared with the definition, an expert at a time."""


def plans_of(problem: Any, tokens: int) -> dict[str, Callable[..., Any]]:
    """The plan that is taken, first, and those that may be better; by name."""
    if isinstance(problem, fp8.ExpertsFp8Problem):
        streamed = triton_experts_fp8.streams(problem)
        first = triton_experts_fp8.plan_for(problem, tokens, streamed=streamed)
        others = [
            triton_experts_fp8.Fp8Plan(regime=regime, m=m)
            for m in (16, 32, 64, 128)
            for regime in ("stream", "tiles")
            if m < 128 or regime == "tiles"
        ]
        if tokens <= 8:
            others.append(triton_experts_fp8.Fp8Plan(regime="few"))
        bind: Callable[..., Any] = triton_experts_fp8.bind
    else:
        first = triton_experts_int4.plan_for(problem.mixture, tokens)
        others, bind = list(triton_experts_int4.PLANS), triton_experts_int4.bind
    mean = tokens * problem.mixture.slots / problem.mixture.experts
    near = [
        one for one in others if one != first and (not one.m or mean / 4 <= one.m <= 16 + 8 * mean)
    ]
    return {_name(plan): partial(bind, always=plan) for plan in (first, *near)}


def _name(plan: Any) -> str:
    return f"{getattr(plan, 'regime', 'stream')} {plan.m}"


def kernels(until: float) -> Iterator[dict[str, Any]]:
    """A row for each case and number of tokens, most wanted first."""
    for name, problem in CASES.items():
        module = fp8 if isinstance(problem, fp8.ExpertsFp8Problem) else int4
        generator = torch.Generator(device="cuda").manual_seed(1)
        mixture = problem.mixture
        experts = module.random_experts(problem, generator)
        weights = experts, *biases_of(mixture, generator)
        one_bytes = experts.num_bytes / mixture.experts
        reference = module.bind_reference(problem, *weights)
        for tokens in TOKENS:
            if time.monotonic() > until:
                return
            inputs = [inputs_of(mixture, tokens, seed) for seed in range(4)]
            distinct = sum(len(one[1].unique()) for one in inputs) / len(inputs)
            flops = tokens * mixture.slots * 6 * mixture.width * mixture.inner
            rate = FP8_FLOPS if module is fp8 else FLOPS
            row: dict[str, Any] = {
                "case": name, "tokens": tokens, "distinct": distinct,
                "floor_us": round(max(distinct * one_bytes / BYTES_PER_S, flops / rate) * 1e6, 1),
            }  # fmt: skip
            expected = reference(*inputs[0]) if tokens <= MOST_CHECKED else None
            for label, bind in plans_of(problem, tokens).items():
                row[label] = _measured(bind, problem, weights, inputs, expected, row, label)
            first = next(iter(plans_of(problem, tokens)))
            if isinstance(row[first], float):
                row["TFLOP/s"] = round(flops / row[first] / 1e6)
            yield row


def _measured(
    bind: Callable[..., Any],
    problem: Any,
    weights: tuple[Any, ...],
    inputs: list[tuple[torch.Tensor, ...]],
    expected: torch.Tensor | None,
    row: dict[str, Any],
    label: str,
) -> float | str:
    try:
        run = bind(problem, *weights)
        found = run(*inputs[0])
        if expected is not None:
            row[f"{label} error"] = round(error(found, expected), 5)
        return round(each_us([partial(run, *one) for one in inputs * 2], replays=5), 1)
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"[:300]


@contextmanager
def experts_alone(shape: str) -> Iterator[None]:
    """Only experts are quantized, where a shape's published weights are so."""
    if shape not in EXPERTS_ALONE:
        yield
        return
    with patch.object(Scope, "quantized_gemm", lambda scope, weight: weight):
        yield


def steps(shape: str, out: dict[str, Any], *, requests: bool) -> None:
    """Decode steps and prefill of one shape, 512 requests if asked, and which kernels it took."""
    with tempfile.TemporaryDirectory() as folder, uniform_routing(shape), experts_alone(shape):
        engine = offline.make_engine(
            write_model(Path(folder), shape), quantization=QUANTIZATION[shape]
        )
    facts = engine.executor.facts
    out["start_s"], out["start_parts_s"] = engine.start_s, facts.start_s
    out["decisions"] = [list(one) for one in facts.decisions]
    for one in out["decisions"]:
        if "experts" in str(one):
            print(one, flush=True)
    print("start", round(engine.start_s, 1), facts.start_s, flush=True)
    try:
        out["steps"] = offline.steps(engine, shape, [])
        out["prefill"] = offline.prefill(engine, shape)
        if requests:
            out["offline"] = offline.offline(engine, shape)
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="kernels,steps")
    parser.add_argument("--shapes", default="qwen3-30b-a3b-fp8,gpt-oss-20b")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the kernels")
    parser.add_argument("--requests", action="store_true", help="512 of them too, of each shape")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    try:
        if "kernels" in given.parts.split(","):
            rows = found["kernels"] = []
            for row in kernels(time.monotonic() + given.budget):
                rows.append(row)
                print(json.dumps(row), flush=True)
        if "steps" in given.parts.split(","):
            for shape in given.shapes.split(","):
                steps(shape, found.setdefault(shape, {}), requests=given.requests)
    finally:
        if given.out:
            given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

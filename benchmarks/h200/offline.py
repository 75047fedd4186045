"""Decode steps, prefill, throughput and the gap between steps on one H200: one engine per shape, all figures in turn.

    python -m benchmarks.h200.offline --shape qwen3-8b --out results.json [--parts steps,prefill,offline,gap,drawn]

Figures are those of `headrace bench latency` and `bench throughput` (their code), on dummy bfloat16 weights (those of
qwen3-8b-fp8 become e4m3 while loading), prefix caching off, greedy, fixed lengths. Mixtures route uniformly
(routing.py): the experts that a batch reads are those that the floor counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.h200.routing import distinct_experts, uniform_ranks, uniform_routing
from benchmarks.h200.shapes import (
    OFFLINE_BARS,
    PREFILL_BARS,
    QUANTIZATION,
    STEP_BARS,
    device_name,
    prefill_bound,
    step_floor_ms,
    write_model,
)
from headrace.base.config.tree import (
    DeviceOptions,
    KVOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
)
from headrace.base.wire.request import RowSampling
from headrace.bench.latency import latency
from headrace.bench.offline import OfflineEngine
from headrace.bench.report import markdown_table, versions
from headrace.bench.throughput import throughput
from headrace.launch.facts import resolve_options

OUTPUT = 256


def make_engine(
    folder: Path,
    *,
    tensor_parallel: int = 1,
    kv_dtype: Any = "auto",
    kv_memory: Any = "auto",
    deterministic: bool = False,
    quantization: Any = "none",
    gpu_memory: Any = "auto",
    offload_experts: Any = 0,
) -> OfflineEngine:
    """The engine under test: the peers' limits."""
    options = Options(
        model=ModelOptions(
            model=str(folder),
            load_format="dummy",
            max_model_len=8448,
            deterministic=deterministic,
            quantization=quantization,
        ),
        kv=KVOptions(prefix_caching=False, kv_dtype=kv_dtype, kv_memory=kv_memory),
        scheduler=SchedulerOptions(max_running=512, max_step_tokens=16384),
        device=DeviceOptions(
            tensor_parallel=tensor_parallel, gpu_memory=gpu_memory, offload_experts=offload_experts
        ),
    )
    return OfflineEngine(resolve_options(options))


def steps(
    engine: OfflineEngine, shape: str, extra: list[tuple[int, int]], output: int = OUTPUT
) -> list[dict[str, Any]]:
    """The decode step of each batch, over so many tokens of each row."""
    rows = []
    for batch, prompt in [*STEP_BARS[shape], *extra]:
        begin = time.perf_counter()
        found = latency(
            engine,
            batch_size=batch,
            input_len=prompt,
            output_len=output if prompt < 1024 else min(output, 128),
            iterations=1,
            warmup=1,
        )
        distinct = distinct_experts(shape, batch)
        floor = step_floor_ms(shape, batch=batch, context=prompt + output / 2, distinct=distinct)
        rows.append(
            {
                "shape": shape,
                "batch": batch,
                "prompt": prompt,
                "step_ms": found["decode_step_ms"],
                "distinct": round(distinct, 1),
                "p99_ms": found["decode_step_p99_ms"],
                "floor_ms": floor,
                "of_floor": floor / found["decode_step_ms"],
                "bar_ms": STEP_BARS[shape].get((batch, prompt)),
                "took_s": time.perf_counter() - begin,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def prefill(engine: OfflineEngine, shape: str) -> list[dict[str, Any]]:
    """Prompts alone."""
    rows = []
    for batch, prompt in ((1, 8192), (16, 1024)):
        found = latency(
            engine, batch_size=batch, input_len=prompt, output_len=3, iterations=3, warmup=2
        )
        rate = found["prefill_tok_s"]
        rows.append(
            {
                "shape": shape,
                "batch": batch,
                "prompt": prompt,
                "tok_s": rate,
                "of_bound": rate / prefill_bound(shape),
                "bar": PREFILL_BARS[shape].get((batch, prompt)),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def offline(engine: OfflineEngine, shape: str) -> list[dict[str, Any]]:
    """512 requests at once, about 1024 in, 128 to 512 out."""
    found = throughput(
        engine, num_requests=512, input_len=1024, output_len=320, spread=0.6, temperature=0.0
    )
    row = {"shape": shape, "bar": OFFLINE_BARS.get(shape), **found}
    print(json.dumps(row), flush=True)
    return [row]


RANDOM = {
    "greedy": None,
    "temperature": RowSampling(temperature=0.8),
    "top_k 50": RowSampling(temperature=0.8, top_k=50),
    "top_p 0.9": RowSampling(temperature=0.8, top_p=0.9),
    "top_k 20, top_p 0.95, min_p 0.01": RowSampling(
        temperature=0.8, top_k=20, top_p=0.95, min_p=0.01
    ),
    "greedy, 5 logprobs": RowSampling(temperature=0.0, logprobs=5),
    "temperature, 3 penalties": RowSampling(
        temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2
    ),
    "temperature, 3 penalties, 5 logprobs": RowSampling(
        temperature=0.8,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        logprobs=5,
    ),
}


def drawn(engine: OfflineEngine, shape: str) -> list[dict[str, Any]]:
    """The decode step by how its rows are sampled. Logits of dummy weights are flat: top_p alone keeps most of them."""
    rows = []
    for batch in (1, 32, 256):
        for name, sampling in RANDOM.items():
            found = latency(
                engine,
                batch_size=batch,
                input_len=128,
                output_len=96,
                iterations=1,
                warmup=1,
                sampling=sampling,
            )
            step_ms = found["decode_step_ms"]
            rows.append({"shape": shape, "batch": batch, "sampling": name, "step_ms": step_ms})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def gap(engine: OfflineEngine, shape: str, batches: str) -> list[dict[str, Any]]:
    """`gap_of` each of these batches."""
    return [gap_of(engine, shape, int(batch)) for batch in batches.split(",")]


def gap_of(engine: OfflineEngine, shape: str, batch: int) -> dict[str, Any]:
    """Idle time of the device between steps, by its own profiler: from the end of a step's last kernel to the start of
    the next one's first, in steady decode."""
    import numpy as np
    from torch.profiler import ProfilerActivity, profile

    rng = np.random.default_rng(1)
    for _ in range(2):
        engine.run([engine.request(rng, 128, 40, 0.0) for _ in range(batch)])
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        engine.run([engine.request(rng, 128, 40, 0.0) for _ in range(batch)])
    events = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in seen.profiler.kineto_results.events()
        if "CUDA" in str(event.device_type())
    ]
    kernels = sorted(event for event in events if "emcpy" not in event[2])
    gaps, longest = [], 0
    for start, end, name in kernels:
        if "_update_kernel" in name and longest:
            gaps.append((start - longest) / 1e3)
        longest = max(longest, end)
    row = {
        "shape": shape,
        "batch": batch,
        "gap_us_p50": float(np.median(gaps)) if gaps else None,
        "gap_us_p90": float(np.percentile(gaps, 90)) if gaps else None,
        "steps": len(gaps),
        "kernels": _top(kernels),
    }
    print(json.dumps(row), flush=True)
    return row


def _top(kernels: list[tuple[int, int, str]]) -> list[tuple[str, int, float]]:
    """(name, launches, milliseconds in all) of the kernels that took longest."""
    total: dict[str, list[float]] = {}
    for start, end, name in kernels:
        entry = total.setdefault(name[:90], [0, 0.0])
        entry[0] += 1
        entry[1] += (end - start) / 1e6
    ranked = sorted(total.items(), key=lambda item: -item[1][1])
    return [(name, int(count), round(ms, 3)) for name, (count, ms) in ranked[:24]]


PARTS = {"steps": steps, "prefill": prefill, "offline": offline, "gap": gap, "drawn": drawn}


def _table(rows: list[dict[str, Any]]) -> str:
    header = list(rows[0])
    return markdown_table(
        header, [["" if row[h] is None else row[h] for h in header] for row in rows]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--parts", default="steps,prefill,offline,gap,drawn")
    parser.add_argument(
        "--extra", default="", help="further batch x prompt, such as 64x128,32x1024"
    )
    parser.add_argument(
        "--gap-batches", default="64", help="batches whose gap and kernels are profiled"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--gpu-memory", default="auto")
    parser.add_argument("--offload-experts", default=0)
    parser.add_argument(
        "--output", type=int, default=OUTPUT, help="tokens of a row that steps decode"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    extra = [tuple(map(int, one.split("x"))) for one in given.extra.split(",") if one]
    with (
        tempfile.TemporaryDirectory() as folder,
        uniform_routing(given.shape),
        uniform_ranks(given.shape),
    ):
        engine = make_engine(
            write_model(Path(folder), given.shape),
            tensor_parallel=given.tensor_parallel,
            kv_dtype=given.kv_dtype,
            quantization=QUANTIZATION.get(given.shape, "none"),
            gpu_memory=given.gpu_memory,
            offload_experts=int(given.offload_experts)
            if str(given.offload_experts).isdigit()
            else "auto",
        )
    for batch, _ in STEP_BARS[given.shape]:
        print("distinct experts of a layer,", batch, "rows:", distinct_experts(given.shape, batch))
    facts = engine.executor.facts
    result: dict[str, Any] = {
        "versions": versions() | device_name(),
        "tensor_parallel": given.tensor_parallel,
        "kv_dtype": given.kv_dtype,
        "start_s": engine.start_s,
        "start_parts_s": facts.start_s,
        "kv_bytes": facts.kv_bytes,
        "decisions": [list(d) for d in facts.decisions],
    }
    for line in (result["start_s"], result["start_parts_s"], *result["decisions"]):
        print(line, flush=True)
    steps_of = engine.executor._resident.runner._steps if given.tensor_parallel == 1 else None
    try:
        for part in given.parts.split(","):
            more = {"steps": (extra, given.output), "gap": (given.gap_batches,)}.get(part, ())
            result[part] = PARTS[part](engine, given.shape, *more)
    finally:
        result["graphs"] = (
            [[d.field, d.chosen, d.why] for d in steps_of.decisions] if steps_of else []
        )
        print(result["graphs"], flush=True)
        if given.out:
            given.out.write_text(json.dumps(result, indent=1))
        engine.close()
    for part in ("steps", "prefill"):
        if result.get(part):
            print(_table(result[part]))


if __name__ == "__main__":
    main()

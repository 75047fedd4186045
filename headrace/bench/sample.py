"""Times a few layers of a model, run as an engine with dummy weights; launch/performance_model.py
scales the step times to all layers. The sample's step has all parts of a real one: GEMMs over as
many rows, attention, the head, the host's work.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from msgspec.structs import replace

from headrace.back.models.registry import DTYPES
from headrace.base.config.resolved import Decision, Resolved
from headrace.bench.latency import decode_gaps
from headrace.bench.offline import OfflineEngine, Trace
from headrace.launch.performance_model import ModelCost, SampleTiming
from headrace.launch.plan import build_without_memory, cost_of, with_layers

ROWS = (1, 8, 32)
NUM_INPUT, LEAST_OUTPUT, MOST_OUTPUT = 8, 3, 32
"""The first step computes the prompts, the second is recorded, one or more are replayed."""
ROW_S = 0.02
"""Steps of one row are taken for so long; of more rows as many."""
PROMPTS = (128, 384)
"""Tokens of the prompts that are timed alone: what more of them take is the layers' work."""
PROMPT_RUNS = 2
MAX_LEN = 448
SAMPLE_LAYERS, LEAST_LAYERS = 4, 2
SAMPLE_BYTES = 2 << 30
WHOLE_BYTES = 64 << 20
"""A model as small is run whole: the host's part of its steps does not grow with the layers."""


def run_sample(resolved: Resolved, cost: ModelCost) -> tuple[SampleTiming, tuple[Decision, ...]]:
    """What steps of a sample take on this machine's CPU, and the kernels they ran; `cost` is the
    whole model's."""
    sampled = _sample(resolved, cost)
    engine = OfflineEngine(sampled)
    try:
        rng = np.random.default_rng(0)
        step_s = decode_gaps(_run(engine, rng, 1, LEAST_OUTPUT), 1)[-1]
        begin = time.perf_counter()
        _run(engine, rng, ROWS[-1], LEAST_OUTPUT)  # first use of buffers; the next one is timed
        num_output = min(MOST_OUTPUT, max(LEAST_OUTPUT, int(ROW_S / step_s)))
        traces = [_run(engine, rng, rows, num_output) for rows in ROWS]
        prompts = _prompt_times(engine, rng)
        seconds = time.perf_counter() - begin
        decisions = tuple(Decision(*decision) for decision in engine.core.executor.facts.decisions)
    finally:
        engine.close()
    model = sampled.engine.model
    bare = build_without_memory(model, block_tokens=sampled.engine.kv.block_tokens)
    return SampleTiming(
        cost=cost_of(bare, dtype=DTYPES[model.dtype]),
        context=NUM_INPUT + num_output // 2,
        steps=tuple(
            (rows, statistics.median(decode_gaps(trace, rows)[1:].tolist()))
            for rows, trace in zip(ROWS, traces, strict=True)
        ),
        prompts=prompts,
        seconds=seconds,
    ), decisions


def _run(engine: OfflineEngine, rng: np.random.Generator, rows: int, num_output: int) -> Trace:
    return engine.run([engine.request(rng, NUM_INPUT, num_output, 0.0) for _ in range(rows)])


def _prompt_times(
    engine: OfflineEngine, rng: np.random.Generator
) -> tuple[tuple[int, float], tuple[int, float]]:
    """(tokens, seconds to the first token) of a short and a long prompt, the fastest of a few; one
    before them touches the buffers."""

    def once(tokens: int) -> float:
        trace = engine.run([engine.request(rng, tokens, 1, 0.0)])
        return min(trace.first_s.values()) - trace.start_s

    short, long = PROMPTS
    once(long)
    return (short, min(once(short) for _ in range(PROMPT_RUNS))), (
        long,
        min(once(long) for _ in range(PROMPT_RUNS)),
    )


def _num_layers(cost: ModelCost) -> int:
    all_layers = len(cost.kv_layers)
    if cost.weight_bytes <= WHOLE_BYTES:
        return all_layers
    small = cost.weight_bytes / all_layers * SAMPLE_LAYERS < SAMPLE_BYTES
    return min(all_layers, SAMPLE_LAYERS if small else LEAST_LAYERS)


def _sample(resolved: Resolved, cost: ModelCost) -> Resolved:
    """The engine of a few layers, on the CPU, as large as the runs need it."""
    spec = resolved.engine
    model = with_layers(spec.model, _num_layers(cost))
    row_tokens = NUM_INPUT + MOST_OUTPUT
    blocks = 2 * ROWS[-1] * -(-row_tokens // spec.kv.block_tokens) + MAX_LEN
    engine = replace(
        spec,
        model=replace(model, max_model_len=MAX_LEN),
        kv=replace(spec.kv, prefix_caching=False, num_blocks=blocks, memory_bytes=None),
        scheduler=replace(
            spec.scheduler, max_running=ROWS[-1], max_step_tokens=2 * ROWS[-1] * NUM_INPUT
        ),
        device=replace(
            spec.device, device="cpu", executor="inline", tensor_parallel=1, memory_bytes=None
        ),
        grammar=None,
    )
    return replace(resolved, engine=engine)

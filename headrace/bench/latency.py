"""`bench latency`: one batch of equal requests at a time; prefill rate, decode step, start.

prefill_tok_s   input tokens of the batch / time from submission to the last first token
decode_step_ms  median time between steps once every request decodes
decode_tok_s    batch size / decode_step_ms
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from headrace.base.errors import ConfigError
from headrace.base.wire.request import RowSampling
from headrace.bench.offline import OfflineEngine, Trace


def decode_gaps(trace: Trace, batch_size: int) -> np.ndarray:
    """Seconds between consecutive steps that produced a token for every request of the batch."""
    times = np.asarray(trace.times_s)
    full = np.asarray(trace.num_tokens) == batch_size
    return np.diff(times)[full[1:] & full[:-1]]


def latency(
    engine: OfflineEngine,
    *,
    batch_size: int,
    input_len: int,
    output_len: int,
    iterations: int,
    warmup: int,
    seed: int = 0,
    sampling: RowSampling | None = None,
) -> dict[str, Any]:
    """Runs the batch `warmup + iterations` times and reports medians over the counted ones.
    `sampling`: how each request is sampled, by a seed of its own; None: greedily."""
    rng = np.random.default_rng(seed)
    prefill_s, gaps, walls = [], [], []
    for number in range(warmup + iterations):
        requests = [engine.request(rng, input_len, output_len, 0.0) for _ in range(batch_size)]
        if sampling is not None:
            requests = [
                replace(one, sampling=replace(sampling, seed=one.sampling.seed)) for one in requests
            ]
        trace = engine.run(requests)
        if number < warmup:
            continue
        prefill_s.append(max(trace.first_s.values()) - trace.start_s)
        gaps.append(decode_gaps(trace, batch_size))
        walls.append(trace.wall_s)
    steps = np.concatenate(gaps)
    if not len(steps):
        raise ConfigError(
            f"--output-len {output_len}: the {batch_size} requests never decode together; give more output or "
            "a larger --max-step-tokens"
        )
    step_s = float(np.median(steps))
    return {
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "iterations": iterations,
        "prefill_s": float(np.median(prefill_s)),
        "prefill_tok_s": batch_size * input_len / float(np.median(prefill_s)),
        "decode_step_ms": step_s * 1e3,
        "decode_step_p99_ms": float(np.percentile(steps, 99)) * 1e3,
        "decode_tok_s": batch_size / step_s,
        "latency_s": float(np.median(walls)),
    }

"""`bench throughput`: everything queued at once, lengths drawn around their means; tokens and
requests per second."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.bench.offline import OfflineEngine


def draw_lengths(rng: np.random.Generator, mean: int, spread: float, count: int) -> np.ndarray:
    """Whole lengths uniform in mean * (1 - spread) .. mean * (1 + spread), at least 1."""
    low, high = round(mean * (1 - spread)), round(mean * (1 + spread))
    return np.maximum(1, rng.integers(low, high + 1, count))


def throughput(
    engine: OfflineEngine,
    *,
    num_requests: int,
    input_len: int,
    output_len: int,
    spread: float,
    temperature: float,
    seed: int = 0,
) -> dict[str, Any]:
    """Runs one load after a warm-up of two short requests."""
    rng = np.random.default_rng(seed)
    engine.run([engine.request(rng, min(input_len, 32), 4, temperature) for _ in range(2)])
    inputs = draw_lengths(rng, input_len, spread, num_requests)
    outputs = draw_lengths(rng, output_len, spread, num_requests)
    requests = [
        engine.request(rng, int(i), int(o), temperature)
        for i, o in zip(inputs, outputs, strict=True)
    ]
    trace = engine.run(requests)
    generated, prompt = int(sum(trace.num_tokens)), int(inputs.sum())
    return {
        "num_requests": num_requests,
        "input_len": input_len,
        "output_len": output_len,
        "spread": spread,
        "wall_s": trace.wall_s,
        "output_tok_s": generated / trace.wall_s,
        "total_tok_s": (generated + prompt) / trace.wall_s,
        "req_s": num_requests / trace.wall_s,
    }

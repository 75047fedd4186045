"""A core and its executor in this process, driven step by step: what `bench latency` and `bench
throughput` measure.

No text and no sockets: random token ids in, token ids out, so that the figures are the engine's
own. Every request has a fixed length (`ignore_eos`); prefix caching is off unless asked for, so
that a repeated run does not read a cache.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np

from headrace.back.executor.choose import make_executor
from headrace.base.config.resolved import Resolved
from headrace.base.errors import EngineError
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore


class Trace(msgspec.Struct):
    """When tokens came out: one entry per step that produced any, in monotonic seconds."""

    times_s: list[float] = []
    num_tokens: list[int] = []
    first_s: dict[int, float] = {}
    start_s: float = 0.0
    end_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """From the first submission to the last token."""
        return self.end_s - self.start_s


class OfflineEngine:
    """The engine of `resolved` in this process. `start_s` is the time its construction took."""

    def __init__(self, resolved: Resolved) -> None:
        begin = time.perf_counter()
        spec = resolved.engine
        self.spec = spec
        self.executor = make_executor(spec)
        self.core = EngineCore(spec, self.executor)
        self.start_s = time.perf_counter() - begin
        self._ids = iter(range(1, 1 << 62))

    def request(
        self, rng: np.random.Generator, num_input: int, num_output: int, temperature: float
    ) -> EngineRequest:
        """A request with a random prompt and a fixed output length."""
        prompt = rng.integers(0, self.spec.model.logits_width, num_input, dtype=np.int32)
        return EngineRequest(
            id=next(self._ids),
            prompt=prompt.astype("<i4").tobytes(),
            stop=StopRules(max_tokens=num_output),
            sampling=RowSampling(temperature=temperature, seed=int(rng.integers(1 << 40))),
        )

    def run(self, requests: list[EngineRequest]) -> Trace:
        """Submits all requests at once and steps until the last has ended."""
        trace = Trace(times_s=[], num_tokens=[], first_s={}, start_s=time.perf_counter())
        for request in requests:
            self.core.add(request)
        left = len(requests)
        while left:
            tokens = self.core.step(wait=True).tokens
            if tokens is None:
                continue
            now = time.perf_counter()
            if len(tokens.ids):
                trace.times_s.append(now)
                trace.num_tokens.append(len(tokens.ids))
                for request_id in tokens.ids.tolist():
                    trace.first_s.setdefault(request_id, now)
            for finished in tokens.finished:
                if finished.error is not None:
                    raise EngineError(f"a benchmark request failed: {finished.error.message}")
            left -= len(tokens.finished)
            trace.end_s = now
        return trace

    def close(self) -> None:
        """Ends the workers."""
        self.core.close()

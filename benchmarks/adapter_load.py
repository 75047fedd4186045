"""What loading an adapter does to those who wait for tokens meanwhile: steps of a running engine in windows
without a load and with one, in turns.

    python -m benchmarks.adapter_load [--model M | --shape S] [--rows 8] [--rank 64] [--windows 12]

All rows decode all the time. In every second window an adapter of random matrices on all linear layers is read from its
folder (`load_adapter`), then a request names it, so that it is put into a slot; then it is unloaded. The time of a
step is what every stream waits for its next token. Bar: the 99th percentile with loads lies at most one median step
above that without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.h200.shapes import write_model
from benchmarks.lora import with_options, write_adapters
from headrace.back.executor.choose import make_executor
from headrace.base.config.tree import Options
from headrace.base.wire.control import Call
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.adapters import Adapters
from headrace.core.core import EngineCore
from headrace.launch.facts import resolve_options

HERE = Path(__file__).parent
NAMES = ("first", "second")


class Crowd:
    """An engine whose rows are always full."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        model = asked.model or str(write_model(folder, asked.shape))
        load = "auto" if asked.model else "dummy"
        options = with_options(
            Options(), "model", model=model, load_format=load, max_model_len=2048
        )
        options = with_options(options, "kv", kv_memory="256MiB", prefix_caching=False)
        adapters = {"enable_lora": True, "max_loras": 2, "max_lora_rank": asked.rank}
        adapters["lora_folders"] = (str(folder),)
        options = with_options(options, "adapters", **adapters)
        spec = resolve_options(options).engine
        write_adapters(spec, folder, NAMES, asked.rank, "all")
        executor = make_executor(spec)
        assert spec.model.adapters is not None
        held = Adapters(spec.model.adapters, executor.adapt)
        self.core = EngineCore(spec, executor, hooks=[held], adapters=held)
        self.folder, self.rows, self.ids = folder, asked.rows, 0
        self.bytes = (folder / NAMES[0] / "adapter_model.safetensors").stat().st_size
        self.load_s: list[float] = []
        self._rng = np.random.default_rng(0)
        self._running: set[int] = set()
        self._loading_since = 0.0

    def add(self, tokens: int, adapter: str = "") -> int:
        """A request of so many tokens."""
        self.ids += 1
        prompt = self._rng.integers(10, 4000, 32).astype("<i4").tobytes()
        stop, greedy = StopRules(max_tokens=tokens), RowSampling(temperature=0.0)
        self.core.add(
            EngineRequest(id=self.ids, prompt=prompt, stop=stop, sampling=greedy, adapter=adapter)
        )
        return self.ids

    def step(self) -> float | None:
        """Seconds of a step of all rows; None of another."""
        while len(self._running) < self.rows:
            self._running.add(self.add(1200))
        began = time.perf_counter()
        output = self.core.step(wait=True)
        took = time.perf_counter() - began
        for reply in output.replies:
            assert reply.error is None, reply.error
            self.load_s.append(time.perf_counter() - self._loading_since)
        batch = output.tokens
        if batch is None:
            return None
        for end in batch.finished:
            assert end.error is None, end.error
            self._running.discard(end.id)
        return took if len(batch.tokens) >= self.rows and not batch.finished else None

    def window(self, steps: int, name: str) -> list[float]:
        """Seconds of each of so many steps; an adapter of this name is loaded and used meanwhile."""
        times: list[float] = []
        for number in range(steps):
            if name and number == steps // 10:
                self._loading_since = time.perf_counter()
                self.call("load_adapter", name=name, folder=str(self.folder / name))
            if name and number == steps // 2:
                self.add(2, adapter=name)
            if (took := self.step()) is not None:
                times.append(took)
        if name:
            self.call("unload_adapter", name=name)
        return times

    def call(self, operation: str, **arguments: Any) -> None:
        """An operation of administration."""
        self.core.call(Call(number=1, operation=operation, arguments=arguments))


def facts(times: list[float]) -> dict[str, float]:
    """Milliseconds."""
    cut = statistics.quantiles(times, n=100)
    return {
        "steps": len(times),
        "p50_ms": round(1e3 * cut[49], 3),
        "p99_ms": round(1e3 * cut[98], 3),
        "max_ms": round(1e3 * max(times), 3),
    }


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--windows", type=int, default=12, help="of each kind")
    parser.add_argument("--steps", type=int, default=200, help="of a window")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        crowd = Crowd(asked, Path(folder))
        crowd.window(asked.steps, "")
        calm: list[float] = []
        loaded: list[float] = []
        for number in range(asked.windows):
            calm += crowd.window(asked.steps, "")
            loaded += crowd.window(asked.steps, NAMES[number % 2])
        without, beside = facts(calm), facts(loaded)
        result = {
            "model": asked.model or asked.shape,
            "rows": asked.rows,
            "rank": asked.rank,
            "adapter_mb": round(crowd.bytes / 1e6, 1),
            "loads": len(crowd.load_s),
            "load_median_ms": round(1e3 * statistics.median(crowd.load_s), 1),
            "without": without,
            "with_loads": beside,
            "p99_more_steps": round((beside["p99_ms"] - without["p99_ms"]) / without["p50_ms"], 2),
        }
        print(json.dumps(result, indent=1))
        crowd.core.close()


if __name__ == "__main__":
    main()

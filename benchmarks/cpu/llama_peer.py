"""The same load as `headrace bench latency`, run by llama.cpp through llama-cpp-python's low-level interface: one JSON
object on one line.

    python benchmarks/cpu/llama_peer.py MODEL.gguf --batch-size 8 --input-len 128 --output-len 32 --threads 2

Greedy over the full logits, as many sequences as streams in one batch per step; prompts in batches of at most 512
tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

UBATCH = 512


def fill(batch: Any, rows: list[tuple[int, int, int, bool]]) -> None:
    """Rows of (token, position, sequence, whether its logits are wanted)."""
    batch.n_tokens = len(rows)
    for i, (token, position, sequence, wanted) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
        batch.seq_id[i][0], batch.logits[i] = sequence, int(wanted)


class Peer:
    """A loaded model and a context for `streams` sequences."""

    def __init__(self, path: str, *, streams: int, length: int, threads: int) -> None:
        import llama_cpp

        self._c = c = llama_cpp
        c.llama_backend_init()
        model = c.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = c.llama_model_load_from_file(path.encode(), model)
        assert self._model, path
        context = c.llama_context_default_params()
        context.n_ctx, context.n_seq_max = streams * length, streams
        context.n_batch = context.n_ubatch = UBATCH
        context.n_threads = context.n_threads_batch = threads
        if hasattr(context, "kv_unified"):
            context.kv_unified = False
        self._context = c.llama_init_from_model(self._model, context)
        assert self._context
        self._batch = c.llama_batch_init(UBATCH, 0, 1)
        self._width = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """The greedy tokens of the rows whose logits are wanted."""
        chosen = []
        for first in range(0, len(rows), UBATCH):
            part = rows[first : first + UBATCH]
            fill(self._batch, part)
            status = self._c.llama_decode(self._context, self._batch)
            assert status == 0, status
            for i, row in enumerate(part):
                if row[3]:
                    logits = self._c.llama_get_logits_ith(self._context, i)
                    values = np.ctypeslib.as_array(logits, shape=(self._width,))
                    chosen.append(int(values.argmax()))
        return chosen

    def clear(self) -> None:
        """Forgets all sequences."""
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), ctypes.c_bool(False))

    def run(self, streams: int, num_input: int, num_output: int) -> tuple[float, list[float]]:
        """Seconds of the prefill, and of each decode step."""
        self.clear()
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, self._width, (streams, num_input)).tolist()
        begin = time.perf_counter()
        tokens = self.decode(
            [
                (token, at, stream, at == num_input - 1)
                for stream, prompt in enumerate(prompts)
                for at, token in enumerate(prompt)
            ]
        )
        prefill_s, steps = time.perf_counter() - begin, []
        for number in range(num_output - 1):
            begin = time.perf_counter()
            tokens = self.decode(
                [(t, num_input + number, stream, True) for stream, t in enumerate(tokens)]
            )
            steps.append(time.perf_counter() - begin)
        return prefill_s, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    for flag, default in (("--batch-size", 1), ("--input-len", 128), ("--output-len", 32),
                          ("--iterations", 2), ("--threads", 2)):  # fmt: skip
        parser.add_argument(flag, type=int, default=default)
    given = parser.parse_args()
    begin = time.perf_counter()
    length = -(-(given.input_len + given.output_len) // 256) * 256
    peer = Peer(given.model, streams=given.batch_size, length=length, threads=given.threads)
    peer.run(1, 4, 2)
    first_s = time.perf_counter() - begin
    runs = [
        peer.run(given.batch_size, given.input_len, given.output_len)
        for _ in range(given.iterations)
    ]
    step_s = statistics.median(step for _, steps in runs for step in steps)
    prefill_s = statistics.median(prefill for prefill, _ in runs)
    resident = [
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
    ]
    print(
        json.dumps(
            {
                "prefill_tok_s": given.batch_size * given.input_len / prefill_s,
                "decode_step_ms": step_s * 1e3,
                "decode_tok_s": given.batch_size / step_s,
                "start_s": first_s,
                "peak_mib": int(resident[0].split()[1]) / 1024,
            }
        )
    )


if __name__ == "__main__":
    main()

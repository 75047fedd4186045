"""llama.cpp as one of the engines, through llama-cpp-python's low-level interface (loads: answer.py).

    python benchmarks/cpu/llama_peer.py MODEL.gguf --threads 2

Greedy over the full logits, as many sequences as streams in one batch per step; prompts in batches of at most 512
tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from typing import Any

import llama_cpp as c
import numpy as np
from answer import answer

UBATCH = 512


def fill(batch: Any, rows: list[tuple[int, int, int, bool]]) -> None:
    """Rows of (token, position, sequence, whether its logits are wanted)."""
    batch.n_tokens = len(rows)
    for i, (token, position, sequence, wanted) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
        batch.seq_id[i][0], batch.logits[i] = sequence, int(wanted)


def load(path: str) -> Any:
    """A loaded model."""
    c.llama_backend_init()
    parameters = c.llama_model_default_params()
    parameters.n_gpu_layers = 0
    model = c.llama_model_load_from_file(path.encode(), parameters)
    assert model, path
    return model


class Peer:
    """A context of a loaded model for `streams` sequences."""

    def __init__(self, model: Any, *, streams: int, length: int, threads: int) -> None:
        context = c.llama_context_default_params()
        context.n_ctx, context.n_seq_max = streams * length, streams
        context.n_batch = context.n_ubatch = UBATCH
        context.n_threads = context.n_threads_batch = threads
        if hasattr(context, "kv_unified"):
            context.kv_unified = False
        self._context = c.llama_init_from_model(model, context)
        assert self._context
        self._batch = c.llama_batch_init(UBATCH, 0, 1)
        self._width = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """The greedy tokens of the rows whose logits are wanted."""
        chosen = []
        for first in range(0, len(rows), UBATCH):
            part = rows[first : first + UBATCH]
            fill(self._batch, part)
            status = c.llama_decode(self._context, self._batch)
            assert status == 0, status
            for i, row in enumerate(part):
                if row[3]:
                    logits = c.llama_get_logits_ith(self._context, i)
                    values = np.ctypeslib.as_array(logits, shape=(self._width,))
                    chosen.append(int(values.argmax()))
        return chosen

    def close(self) -> None:
        """Gives the memory back."""
        c.llama_batch_free(self._batch)
        c.llama_free(self._context)

    def clear(self) -> None:
        """Forgets all sequences."""
        c.llama_memory_clear(c.llama_get_memory(self._context), ctypes.c_bool(False))

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
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    model = load(given.model)

    def run(streams: int, num_input: int, num_output: int) -> tuple[float, list[float]]:
        length = -(-(num_input + num_output) // 256) * 256
        peer = Peer(model, streams=streams, length=length, threads=given.threads)
        try:
            peer.run(1, 4, 3)
            return peer.run(streams, num_input, num_output)
        finally:
            peer.close()

    answer(run)


if __name__ == "__main__":
    main()

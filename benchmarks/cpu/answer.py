"""The child's side of a measurement: loads answered one after another by a process that keeps its model loaded.

A line in is `streams tokens_in tokens_out`, a line out one JSON object. Needs nothing but Python: peers run under
interpreters of their own. The parent's side: sessions.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable


def answer(run: Callable[[int, int, int], tuple[float, list[float]]], **facts: object) -> None:
    """Answers every load with figures. run(streams, tokens in, tokens out) -> seconds of the prefill, and of each step
    in which all streams got a token."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is not an answer
    print(json.dumps({"ready": True, **facts}), file=out, flush=True)
    for line in sys.stdin:
        streams, num_input, num_output = map(int, line.split())
        prefill_s, steps = run(streams, num_input, num_output)
        ordered = sorted(steps)
        middle = ordered[len(steps) // 2]
        figures = {
            "prefill_tok_s": streams * num_input / prefill_s,
            "decode_tok_s": streams / middle,
            "decode_step_ms": middle * 1e3,
            "decode_p99_ms": ordered[min(len(steps) - 1, int(0.99 * len(steps)))] * 1e3,
            "prefill_ms": prefill_s * 1e3,
            "output_tok_s": streams * num_output / (prefill_s + sum(steps)),
        }
        print(json.dumps(figures), file=out, flush=True)

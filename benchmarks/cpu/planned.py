"""What `headrace plan` foretells, beside what the engine then does: the same shape, threads and loads, one after the
other."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.cpu.sessions import Peers, Session, commands
from benchmarks.cpu.shapes import Shape

PRECISIONS = ("bf16", "int8", "int4")
PROMPT = 512


def estimated(shape: Shape, precision: str, *, context: int) -> dict[str, Any]:
    """`headrace plan --json`."""
    command = [sys.executable, "-m", "headrace", "plan", "--json", "--model", str(shape.folder),
               "--load-format", "dummy", "--dtype", "bfloat16", "--context", str(context)]  # fmt: skip
    command += [] if precision == "bf16" else ["--quantization", precision]
    done = subprocess.run(command, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def measure(peers: Peers, shape: Shape, *, rounds: int) -> list[dict[str, Any]]:
    """A row per precision and number of streams; the last of a precision is its prefill."""
    rows: list[dict[str, Any]] = []
    num_input, num_output = shape.loads[8]
    context = num_input + num_output // 2
    for precision in PRECISIONS:
        plans = [estimated(shape, precision, context=context) for _ in range(rounds)]
        session = Session(commands(peers, shape, precision)["headrace"])
        session.run(1, 8, 4)
        probe_s = max(plan["probe_s"] for plan in plans)
        for streams, load in shape.loads.items():
            figures = [session.run(streams, *load) for _ in range(rounds)]
            said = [
                p["decode_tok_s"] for plan in plans for p in plan["decode"] if p["batch"] == streams
            ]
            rows.append(
                _row(precision, f"decode, {streams}", probe_s, said, figures, "decode_tok_s")
            )
        figures = [session.run(1, PROMPT, 3) for _ in range(rounds)]
        said = [plan["prefill_tok_s"] for plan in plans]
        rows.append(_row(precision, f"prefill, {PROMPT}", probe_s, said, figures, "prefill_tok_s"))
        session.close()
        print(rows[-4:], flush=True)
    return rows


def _row(
    precision: str, load: str, probe_s: float, said: list[float], found: list[Any], figure: str
) -> dict[str, Any]:
    measured = [one[figure] for one in found if not isinstance(one, str)]
    return {
        "precision": precision,
        "load": load,
        "probe_s": probe_s,
        "estimated": statistics.median(said),
        "measured": statistics.median(measured) if measured else None,
    }

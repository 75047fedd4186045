"""Writes why a row misses its bar into the run that showed it, in engines.json (`--vectors`: engines-vectors.json).

    python -m benchmarks.cpu.reasons bundled "prefill int8 512" "what counters or cycles say of it"

A reason stands in the section it was found for. When the section is measured anew its reasons go, and
the page says of every row that misses that its reason has not been found yet. An empty text takes a
reason out.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.cpu.page import page, tables

STORED, PAGE = tables({"amx_bf16"})


def with_reason(stored: dict[str, Any], shape: str, row: str, text: str) -> dict[str, Any]:
    """The results with the reason beside the row; KeyError if the section was not measured. A row is
    named by its section and what tells it apart: "decode int8 1", "prefill bf16 512", "start"."""
    section = stored[shape][row.split()[0]]
    reasons = {**section.get("reasons", {}), row: text}
    section = {**section, "reasons": {name: why for name, why in reasons.items() if why}}
    return {**stored, shape: {**stored[shape], row.split()[0]: section}}


def main() -> None:
    """Stores the reason and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape")
    parser.add_argument("row")
    parser.add_argument("text")
    parser.add_argument("--vectors", action="store_true", help="of a CPU without matrix tiles")
    arguments = parser.parse_args()
    results, shown = tables(()) if arguments.vectors else (STORED, PAGE)
    stored = with_reason(
        json.loads(results.read_text()), arguments.shape, arguments.row, arguments.text
    )
    results.write_text(json.dumps(stored, indent=1) + "\n")
    shown.write_text(page(stored))


if __name__ == "__main__":
    main()

"""Writes why a row misses its bar into the run that showed it, in engines.json.

    python -m benchmarks.cpu.reasons bundled "prefill int8 512" "what counters or cycles say of it"

A reason stands in the section it was found for. When the section is measured anew its reasons go, and
the page says of every row that misses that its reason has not been found yet. An empty text takes a
reason out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.cpu.page import page

STORED = Path(__file__).with_name("engines.json")
PAGE = Path(__file__).with_name("engines.md")


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
    arguments = parser.parse_args()
    stored = with_reason(
        json.loads(STORED.read_text()), arguments.shape, arguments.row, arguments.text
    )
    STORED.write_text(json.dumps(stored, indent=1) + "\n")
    PAGE.write_text(page(stored))


if __name__ == "__main__":
    main()

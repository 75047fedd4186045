"""Time of the parsers over text that was made to be slow to read (P12, T12): t(2n) / t(n) for every format.

    python -m benchmarks.robustness.parsers --write

Every format of tool calls reads 1 MiB of what mangles any format and of its own calls gone wrong, in one piece; every
format of reasoning its own tags gone wrong, in one piece and in pieces of 7 characters. CPU time of this process, the
least of a few tries; a ratio over the bound is measured again on four times the text, where a machine's noise is a
smaller share and anything but linear a larger one.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import msgspec

from headrace.front.text.parsing.families import (
    REASONING_FAMILIES,
    TOOL_FAMILIES,
    reasoning_family,
    tool_family,
)
from headrace.front.text.parsing.parser import OutputParser
from headrace.front.text.parsing.writing import write_calls

BOUND = 2.3
UNMEASURABLE_S = 0.004
TRIES, GROWTH, MAX_GROWTHS = 8, 4, 2
MIB = 1 << 20
MESSAGES = ("gpt_oss", "inkling")
"""Formats whose whole answer is a row of messages: calls and reasoning are read by one state."""
SCHEMAS = {
    "f": {"s": {"type": "string"}, "a": {"type": "integer"}, "o": {"type": "object"}},
    "g": {},
}
OUT = Path(__file__).with_suffix(".json")
Make = Callable[[int], str]

ADVERSARIAL: list[Make] = [
    lambda n: "<tool_call>" * (n // 11),
    lambda n: "<tool_call>{" * (n // 12),
    lambda n: '<tool_call>{"name": "f", "arguments": ' + "[" * n,
    lambda n: '<tool_call>{"name": "f", "arguments": {"a": "' + "\\\\" * (n // 2),
    lambda n: '<tool_call>{"x": "' + "<tool_call>" * (n // 11),
    lambda n: '<tool_call>[' + '{"name": "f"},' * (n // 14),
    lambda n: '<tool_call>{"name": "' + "f" * n,
    lambda n: "<tool_call><function=f>" + "<parameter=s>\n\n</parameter>" * (n // 28),
    lambda n: "<tool_call><function=f><parameter=s>" + "\n</parameter" * (n // 12),
    lambda n: "<tool_call><function=" + "f" * n,
    lambda n: "<tool_call>f<arg_key>a</arg_key><arg_value>" + "</arg_valu" * (n // 10),
    lambda n: "<think>" + "\n" * n,
    lambda n: "<think>" + "</think" * (n // 7),
    lambda n: " " * n,
    lambda n: "<" * n,
    lambda n: '{"name": "f", "parameters": {}};' * (n // 32),
]  # fmt: skip


class Timing(msgspec.Struct, frozen=True):
    """One text of n and of 2n characters."""

    text: str
    length: int
    once_s: float
    twice_s: float

    @property
    def ratio(self) -> float:
        """t(2n) / t(n), what is too short to be measured taken off."""
        return max(0.0, self.twice_s - UNMEASURABLE_S) / max(self.once_s, 1e-9)


def mangled(family: str) -> list[Make]:
    """What a family's own call becomes when a piece of it is written for ever."""
    row = tool_family(family)
    assert row is not None
    call = row.writing.begin + row.writing.call_begin.replace("{name}", "f").replace("{n}", "0")
    whole = write_calls(row.writing, [("f", {"s": "x"})])
    parameter = write_calls(row.writing, [("f", {"o": 1})]).removeprefix(call)
    ends = [row.writing.call_end[:-1] or "}", "(", ",", "'", "x"]
    ends += [parameter, parameter.partition("1")[0] or "x"]
    return [*(_endless(call, end) for end in ends), _endless("", call[:-1]), _endless("", whole)]


def thought(family: str) -> list[Make]:
    """What a family's reasoning becomes when a piece of it is written for ever."""
    row = reasoning_family(family)
    assert row is not None
    tags = row.tags
    pieces = [tags.open, tags.close, tags.open[:-1], tags.close[:-1], tags.open[0], "\n"]
    pieces += [*tags.frame, *tags.until]
    pieces += [tags.open + "x" + tags.close, tags.close + "\n" + tags.open]
    return [_endless(lead, piece) for lead in (tags.open, "") for piece in pieces]


def _endless(lead: str, piece: str) -> Make:
    return lambda n: lead + piece * (n // len(piece))


def own_thought(family: str) -> str:
    """The reasoning format that goes with a family's calls."""
    names = {row.name for row in REASONING_FAMILIES}
    return family if family in names else "qwen3"


def own_calls(think: str) -> str:
    """The format of calls without which a format of reasoning is not read, else none."""
    return think if think in MESSAGES else "none"


def linear(
    tools: str, think: str, makes: Sequence[Make], length: int, size: int
) -> tuple[list[Timing], list[Timing]]:
    """Timings of all texts of up to `length` characters read `size` at a time, and those over the bound."""
    gc.disable()  # what else the process holds is none of this
    try:
        found = [_timing(tools, think, make, length, size) for make in makes]
    finally:
        gc.enable()
    return found, [one for one in found if one.ratio > BOUND]


def _timing(tools: str, think: str, make: Make, length: int, size: int) -> Timing:
    for growth in range(MAX_GROWTHS + 1):
        long = length * GROWTH**growth
        half, whole = make(long // 2), make(long)
        once = twice = math.inf
        for _ in range(TRIES):
            once = min(once, _seconds(tools, think, half, size))
            twice = min(twice, _seconds(tools, think, whole, size))
            timing = Timing(make(64)[:80], long, once, twice)
            if timing.ratio <= BOUND:
                return timing
    return timing


def _seconds(tools: str, think: str, text: str, size: int) -> float:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    family, reasoning = tool_family(tools), reasoning_family(think)
    numbers = count()
    parser = OutputParser(
        reasoning=None if reasoning is None else reasoning.tags,
        tools=None if family is None else family.grammar,
        schemas=SCHEMAS,
        new_id=lambda: f"call_{next(numbers)}",
    )
    begin = time.process_time()
    for piece in pieces:
        parser.push(piece)
    parser.finish()
    return time.process_time() - begin


def _row(
    name: str, what: str, size: int, result: tuple[list[Timing], list[Timing]]
) -> dict[str, object]:
    found, over = result
    worst = max(found, key=lambda one: one.ratio)
    slowest = max(found, key=lambda one: one.twice_s / one.length)
    return {
        "format": name,
        "read": what,
        "characters_at_once": size,
        "texts": len(found),
        "over_the_bound": len(over),
        "worst_ratio": round(worst.ratio, 2),
        "worst_text": worst.text,
        "slowest_s_per_mib": round(slowest.twice_s / slowest.length * MIB, 3),
    }


def main() -> None:
    """Measures all formats."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--write", action="store_true", help=f"write {OUT.name}")
    given = options.parse_args()
    began = time.monotonic()
    rows = []
    for tools in (family.name for family in TOOL_FAMILIES):
        makes = [*ADVERSARIAL, *mangled(tools)]
        rows.append(_row(tools, "calls", MIB, linear(tools, own_thought(tools), makes, MIB, MIB)))
        print(rows[-1], flush=True)
    for think in (family.name for family in REASONING_FAMILIES):
        for size in (MIB, 7):
            result = linear(own_calls(think), think, thought(think), MIB, size)
            rows.append(_row(think, "reasoning", size, result))
            print(rows[-1], flush=True)
    document = {
        "bound": BOUND,
        "unmeasurable_s": UNMEASURABLE_S,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "seconds": round(time.monotonic() - began),
        "over_the_bound": sum(bool(row["over_the_bound"]) for row in rows),
        "rows": rows,
    }
    if given.write:
        OUT.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")
    print(f"{len(rows)} rows, over the bound: {document['over_the_bound']}")


if __name__ == "__main__":
    main()

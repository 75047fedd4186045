"""How often each line of headrace runs. Run as a program it serves plain requests on a core of its own and prints the
counts as JSON, file -> line -> times: `python -m tests.api.lines OPTIONS [CAPTURED LAYER]`.

What is counted here has one order of events: the caller steps the core and waits for each step, a clock ticks by calls.
So the counts of two runs are equal to the last one, on any machine under any load, and a difference is the feature's.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np

import headrace

PACKAGE = str(Path(headrace.__file__).parent) + os.sep
NUM_TOKENS = 12
Lines = dict[str, dict[str, int]]
"""File below headrace/ -> number of a line -> how often it ran."""


class LineCounter:
    """Counts in every thread that starts while it is installed, as long as `counting`."""

    def __init__(self) -> None:
        self._on = False
        self._ran: Counter[tuple[str, int]] = Counter()

    @contextmanager
    def installed(self) -> Iterator[None]:
        earlier = sys.gettrace()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        yield
        sys.settrace(earlier)
        threading.settrace(None)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._ran.clear()
        self._on = True
        yield
        self._on = False

    def lines(self) -> Lines:
        """Of the last `counting`."""
        found: Lines = {}
        for (name, line), times in sorted(self._ran.items()):
            found.setdefault(name.removeprefix(PACKAGE), {})[str(line)] = times
        return found

    def _enter(self, frame: FrameType, event: str, argument: object) -> object:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> object:
        if self._on and event == "line":
            self._ran[frame.f_code.co_filename, frame.f_lineno] += 1
        return self._line


def more(there: Lines, here: Lines) -> Lines:
    """What runs there and not, or not as often, here."""
    found: Lines = {}
    for name, lines in there.items():
        for line, times in lines.items():
            if times > (known := here.get(name, {}).get(line, 0)):
                found.setdefault(name, {})[line] = times - known
    return found


def core_lines(options: dict[str, object], *layers: int) -> Lines:
    """Of one greedy request on the bundled model, after two that were there for what runs once."""
    from headrace.back.executor.choose import make_executor
    from headrace.base.config.tree import Options
    from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
    from headrace.core.core import EngineCore
    from headrace.launch.facts import resolve_options

    counter = LineCounter()
    spec = resolve_options(msgspec.convert(options, Options)).engine
    with counter.installed():
        core = EngineCore(spec, make_executor(spec), clock=map(float, count()).__next__)
        for number in range(3):
            request = EngineRequest(
                id=number,
                prompt=np.arange(100, 140, dtype="<i4").tobytes(),
                stop=StopRules(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS),
                sampling=RowSampling(temperature=0.0, capture_layers=layers),
            )
            with counter.counting():
                core.add(request)
                while core.has_work:
                    batch = core.step(wait=True).tokens
                    ends = [] if batch is None else batch.finished
                    assert all(end.reason == "length" for end in ends), ends
        core.close()
    return counter.lines()


if __name__ == "__main__":
    print(json.dumps(core_lines(json.loads(sys.argv[1]), *map(int, sys.argv[2:]))))

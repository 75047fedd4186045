"""How a child process begins: `python -m headrace.launch.begin MODULE ...` is `python -m MODULE ...`, its imports made
with the collector off. One that was started early (early.py) then waits for its arguments."""

from __future__ import annotations

import importlib
import signal
import sys

from headrace.base.collector import adopt, put_off
from headrace.launch.early import WAITS


def main() -> int:
    """Runs MODULE's `main` with the arguments behind its name; 0 at once where none come."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # see tie_to_parent
    adopt()
    with put_off():
        module = importlib.import_module(sys.argv[1])
    del sys.argv[1]
    if sys.argv[1:] == [WAITS]:
        given = sys.stdin.buffer.read().decode()
        if not given:
            return 0
        sys.argv[1:] = given.split("\0")
    return int(module.main())


if __name__ == "__main__":
    raise SystemExit(main())

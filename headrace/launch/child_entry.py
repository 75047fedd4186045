"""Entry point of child processes: `python -m headrace.launch.child_entry MODULE ...` runs
`python -m MODULE ...` with garbage collection off during the imports. A prestarted process
(prestart.py) then reads its arguments from standard input."""

from __future__ import annotations

import importlib
import signal
import sys

from headrace.base.gc_pause import collection_paused, own_process
from headrace.launch.prestart import ARGUMENTS_LATER, IMPORT


def main() -> int:
    """Runs MODULE's `main` with the arguments after its name; 0 at once if none arrive."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # see tie_to_parent
    own_process()
    with collection_paused():
        module = importlib.import_module(sys.argv[1])
    del sys.argv[1]
    if sys.argv[1:] == [ARGUMENTS_LATER]:
        arguments = _read_arguments()
        if not arguments:
            return 0
        sys.argv[1:] = arguments.split("\0")
    return int(module.main())


def _read_arguments() -> str:
    """What the parent writes: modules to import meanwhile, then the arguments; "" if it left."""
    while (line := sys.stdin.buffer.readline()).startswith(IMPORT):
        with collection_paused():
            importlib.import_module(line.removeprefix(IMPORT).decode().strip())
    return (line + sys.stdin.buffer.read()).decode()


if __name__ == "__main__":
    raise SystemExit(main())

"""How a child process begins: `python -m headrace.launch.begin MODULE ...` is `python -m MODULE ...`, its imports made
with the collector off."""

from __future__ import annotations

import importlib
import sys

from headrace.base.collector import adopt, put_off


def main() -> int:
    """Runs MODULE's `main` with the arguments behind its name."""
    adopt()
    with put_off():
        module = importlib.import_module(sys.argv[1])
    del sys.argv[1]
    return int(module.main())


if __name__ == "__main__":
    raise SystemExit(main())

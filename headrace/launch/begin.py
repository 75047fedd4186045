"""How a child process begins: `python -m headrace.launch.begin [--torch] MODULE ...` is `python -m MODULE ...`, its
imports made with the collector off.

With --torch the process will want torch's libraries: another thread maps and relocates them (a sixth of what importing
torch takes) while this one imports what comes before; that work lets go of the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import sys
import threading
from pathlib import Path

from headrace.base.collector import adopt, put_off


def main() -> int:
    """Runs MODULE's `main` with the arguments behind its name."""
    adopt()
    if sys.argv[1] == "--torch":
        del sys.argv[1]
        threading.Thread(target=_map_torch, name="map-torch", daemon=True).start()
    with put_off():
        module = importlib.import_module(sys.argv[1])
    del sys.argv[1]
    return int(module.main())


def _map_torch() -> None:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return
    library = Path(found.origin).parent / "lib" / "libtorch_cpu.so"
    with contextlib.suppress(OSError):  # then `import torch` loads it, or says why it cannot
        ctypes.CDLL(str(library))


if __name__ == "__main__":
    raise SystemExit(main())

"""Run in a process of its own: loads a checkpoint with quantization and prints, in bytes, the
largest memory it held of its own while loading (over what it held before), what the packed model
takes, and its largest layer as it is stored."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch
from msgspec.structs import replace

from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.base import heap
from tests.models.oracle import BLOCK_TOKENS, model_spec


def own_bytes() -> int:
    """Private memory in use: pages of the checkpoint's file are the system's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10


def load(folder: Path, kind: str, quantization: str) -> dict[str, int]:
    """The figures of one load."""
    spec = model_spec(folder, dtype="bfloat16")
    spec = replace(spec, format=kind, quantization=quantization)
    _, report = load_model(spec, mesh=Mesh(), device=torch.device("cpu"), block_tokens=BLOCK_TOKENS)
    return {"weights": report.weight_bytes}


def main() -> None:
    """Loads twice: the first time brings in what is imported on use, the second is measured."""
    small, folder, kind, quantization = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    load(small, kind, quantization)
    heap.trim()  # what that left free would be counted as let go
    before, peak, done = own_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, own_bytes())
            done.wait(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    facts = load(folder, kind, quantization)
    done.set()
    thread.join()
    peak = max(peak, own_bytes())  # the thread may have had no turn at the end
    print(json.dumps({"peak": peak - before, **facts}))


if __name__ == "__main__":
    main()

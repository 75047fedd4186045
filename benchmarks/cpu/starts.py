"""Start to first token of a server from a checkpoint in the file cache, its imports alone, and what it holds then.

The checkpoint (random weights in bf16, safetensors) is made on first use. Memory is the proportional share (PSS) of all
processes of the server once the first token is out, and the sum of their peaks: the KV pool is kept small, so that
hardly any of it hides what else is held. It is shared with whoever else has the same libraries mapped: nothing else
that uses torch must run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cpu.shapes import BUNDLED, Shape
from headrace.bench.startup import _first_token, free_port, wait_ready

KV_BYTES = 64 << 20
IMPORTS = {
    "supervisor": ("headrace.cli.main", "headrace.cli.serve"),
    "engine": (
        "headrace.launch.core_process",
        "headrace.back.executor.inline",
        "headrace.back.models.load",
    ),
    "API": ("headrace.front.server.process",),
}
"""Process -> what it imports, as launch/child_entry.py does. The first two follow one another; the third is beside."""


def make_checkpoint(shape: Path, folder: Path) -> None:
    """Writes the shape with random weights unless it is there."""
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def measure(shape: Shape, *, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Rows of "start" and of "memory"."""
    folder = shape.checkpoint
    make_checkpoint(shape.folder, folder)
    for file in folder.glob("*.safetensors"):
        file.read_bytes()
    starts, memory = [], []
    for precision in ("bf16", "int8", "int4"):
        options = ["--model", str(folder), "--tokenizer", str(BUNDLED), "--dtype", "bfloat16"]
        options += ["--max-model-len", "512", "--kv-memory", str(KV_BYTES)]
        options += [] if precision == "bf16" else ["--quantization", precision]
        runs = [start_once(options) for _ in range(rounds)]
        first = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        starts.append(
            {"precision": precision, **{k: first[k] for k in ("ready_s", "first_token_s")}}
        )
        memory.append({"precision": precision, "weight_bytes": weight_bytes(options), "kv_bytes": KV_BYTES,
                       "held_bytes": first["held_bytes"], "peak_bytes": first["peak_bytes"]})  # fmt: skip
        print(starts[-1], memory[-1], flush=True)
    spent = {name: imports(modules, rounds) for name, modules in IMPORTS.items()}
    starts[0] |= {"imports_s": spent["supervisor"] + spent["engine"], "api_imports_s": spent["API"],
                  "torch_s": imports(("torch",), rounds)}  # fmt: skip
    return {"start": starts, "memory": memory}


def imports(modules: tuple[str, ...], rounds: int) -> float:
    """Seconds that importing modules takes in a fresh process, the collector off."""
    code = "import gc, sys, time; gc.disable(); begin = time.perf_counter()\n"
    code += "".join(f"import {name}\n" for name in modules) + "print(time.perf_counter() - begin)"
    found = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        found.append(float(done.stdout))
    return statistics.median(found)


def weight_bytes(options: list[str]) -> int:
    """What the model's weights take, each once."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "plan", "--json", *options],
        capture_output=True,
        text=True,
    )
    return int(json.loads(done.stdout)["weight_bytes"])


def start_once(options: list[str]) -> dict[str, float]:
    """A fresh server: seconds since its start, and bytes of all its processes."""
    port = free_port()
    command = [sys.executable, "-m", "headrace", "serve", *options]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--port", str(port), "--log-level", "error"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        base = f"http://127.0.0.1:{port}"
        wait_ready(base, process, begin + 120)
        ready_s = time.perf_counter() - begin
        _first_token(base)
        first_s = time.perf_counter() - begin
        held, peak = memory_of(process.pid)
        return {
            "ready_s": ready_s,
            "first_token_s": first_s,
            "held_bytes": held,
            "peak_bytes": peak,
        }
    finally:
        process.terminate()
        process.wait(30)


def memory_of(pid: int) -> tuple[int, int]:
    """Proportional share now, and the sum of the largest resident sets, of a process and its children."""
    family = psutil.Process(pid)
    members = [family, *family.children(recursive=True)]
    held = sum(member.memory_full_info().pss for member in members)
    return held, sum(_peak(member.pid) for member in members)


def _peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

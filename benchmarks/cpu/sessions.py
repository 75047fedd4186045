"""Engines as processes that stay loaded and answer one load after another (answer.py), and which of them are here.

Loading once lets all engines take turns on every row within minutes. An engine that waits computes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu.shapes import HERE, Shape

GGUF = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Where the other engines are. `files` is a folder of SHAPE-BF16.gguf, -Q8_0.gguf, -Q4_0.gguf (make_gguf.py),
    SHAPE-openvino-PRECISION/ (openvino_peer.py) and SHAPE-onnx-PRECISION/ (onnx_peer.py); `python` an interpreter that
    has their packages; empty or missing: not there."""

    files: str
    python: str
    llama_server: str
    threads: int

    def gguf(self, shape: Shape, precision: str) -> Path | None:
        """The file of a shape at a precision, if it is there."""
        return self._there(f"{shape.name}-{GGUF[precision]}.gguf")

    def folder(self, shape: Shape, engine: str, precision: str) -> Path | None:
        """An engine's own folder of a shape, if it is there."""
        return self._there(f"{shape.name}-{engine}-{precision}")

    def _there(self, name: str) -> Path | None:
        path = Path(self.files) / name
        return path if self.files and path.exists() else None


class Session:
    """One engine with its model loaded; `failed` says why it gives no more figures."""

    def __init__(self, command: list[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the session
        self.failed = ""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            cwd=HERE.parents[1], env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        )  # fmt: skip
        self._read()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def run(self, streams: int, num_input: int, num_output: int) -> dict[str, float] | str:
        """The figures of one load, or why there are none."""
        if not self.failed:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(f"{streams} {num_input} {num_output}\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                pass
            found = self._read()
            if not self.failed:
                return found
        return self.failed

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        self.failed = f"fails: {(said or ['nothing said'])[-1][:80]}"
        return {}

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._errors.close()


def commands(peers: Peers, shape: Shape, precision: str) -> Mapping[str, list[str]]:
    """Engine -> the command of its session at a precision, for all engines that are here."""
    threads = ["--threads", str(peers.threads)]
    quantized = [] if precision == "bf16" else ["--quantization", precision]
    found = {
        "headrace": [
            sys.executable,
            "-m",
            "benchmarks.cpu.headrace_session",
            str(shape.folder),
            *threads,
            *quantized,
        ]
    }
    for name, (script, module, path) in {
        "llama.cpp": ("llama", "llama_cpp", peers.gguf(shape, precision)),
        "openvino": ("openvino", "openvino_genai", peers.folder(shape, "openvino", precision)),
        "onnxruntime": ("onnx", "onnxruntime_genai", peers.folder(shape, "onnx", precision)),
    }.items():
        if path is not None and _has(peers.python, module):
            found[name] = [peers.python, str(HERE / f"{script}_peer.py"), str(path), *threads]
    if precision == "bf16":
        found["transformers"] = [
            sys.executable, str(HERE / "transformers_peer.py"), str(shape.folder), *threads,
        ]  # fmt: skip
    return found


def _has(python: str, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0

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

HERE = Path(__file__).resolve().parent
SHAPE = HERE.parent / "models" / "qwen3-0.6b"
GGUF = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Where the other engines are: PREFIX-BF16.gguf and so on (make_gguf.py), an interpreter that has their packages,
    llama-server, and the folder of an int4 model (onnx_peer.py); empty: not there."""

    gguf: str
    python: str
    llama_server: str
    onnx: str
    threads: int


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


def commands(peers: Peers, precision: str) -> Mapping[str, list[str]]:
    """Engine -> the command of its session at a precision, for all engines that are here."""
    threads = ["--threads", str(peers.threads)]
    quantized = [] if precision == "bf16" else ["--quantization", precision]
    found = {
        "headrace": [
            sys.executable,
            "-m",
            "benchmarks.cpu.headrace_session",
            str(SHAPE),
            *threads,
            *quantized,
        ]
    }
    file = f"{peers.gguf}-{GGUF[precision]}.gguf"
    if peers.gguf and Path(file).exists():
        for name, module in (("llama.cpp", "llama_cpp"), ("openvino", "openvino_genai")):
            if _has(peers.python, module):
                script = HERE / f"{name.partition('.')[0]}_peer.py"
                found[name] = [peers.python, str(script), file, *threads]
    if precision == "int4" and peers.onnx and _has(peers.python, "onnxruntime_genai"):
        found["onnxruntime"] = [peers.python, str(HERE / "onnx_peer.py"), peers.onnx, *threads]
    if precision == "bf16":
        found["transformers"] = [
            sys.executable, str(HERE / "transformers_peer.py"), str(SHAPE), *threads,
        ]  # fmt: skip
    return found


def _has(python: str, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0

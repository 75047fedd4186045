"""The CPU path beside other engines, in turn (A B A B), medians; writes benchmarks/cpu/engines.md.

    python -m benchmarks.cpu.run --write [--rounds 2] [--only decode,prefill,server,start,limits]
        [--gguf PREFIX --peer-python PYTHON] [--transformers]

PREFIX-BF16.gguf, -Q8_0.gguf, -Q4_0.gguf: the same shape for llama.cpp (make_gguf.py); PYTHON: an interpreter that has
llama-cpp-python. Engines that are not there are left out. Every measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.platforms.cpu import usable_cores
from headrace.bench.report import markdown_table, versions
from headrace.bench.serve import Load, run_load
from headrace.bench.startup import free_port, startup, wait_ready

HERE = Path(__file__).resolve().parent
SHAPE = HERE.parent / "models" / "qwen3-0.6b"
TOKENIZER = HERE.parents[1] / "demo" / "model"
PRECISIONS = {"bf16": ("", "BF16"), "int8": ("int8", "Q8_0"), "int4": ("int4", "Q4_0")}
WEIGHT_GB = {"bf16": 1.192, "int8": 0.597, "int4": 0.335}  # read once per step, the head included
DECODES = {1: (64, 48), 8: (64, 32), 32: (64, 24)}  # streams -> tokens in, out
PROMPTS = (512, 2048)


def child(command: list[str], *, timeout_s: float = 600) -> dict[str, float] | str:
    """The JSON object a command prints last, with its peak memory; or why there is none."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"no result within {timeout_s:.0f} s"
    lines = out.strip().splitlines()
    if process.returncode or not lines:
        return f"status {process.returncode}: {(errors.strip().splitlines() or ['nothing said'])[-1][:120]}"
    return dict(json.loads(lines[-1]))


class Engines:
    """What can be measured here: name -> (precision, streams, tokens in, out) -> figures."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.threads = usable_cores()
        self.runs: dict[str, Callable[[str, int, int, int], dict[str, float] | str]] = {
            "headrace": self._headrace
        }
        self._gguf, self._python = given.gguf, given.peer_python
        if given.gguf:
            self.runs["llama.cpp"] = self._llama
        if given.transformers:
            self.runs["transformers"] = self._transformers

    def _headrace(self, precision: str, streams: int, num_input: int, num_output: int) -> Any:
        quantized = PRECISIONS[precision][0]
        command = [
            sys.executable,
            "-m",
            "headrace",
            "bench",
            "latency",
            "--json",
            "--model",
            str(SHAPE),
        ]
        command += ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "4096"]
        command += ["--threads", str(self.threads), *_shape(streams, num_input, num_output)]
        return child([*command, *(["--quantization", quantized] if quantized else [])])

    def _llama(self, precision: str, streams: int, num_input: int, num_output: int) -> Any:
        path = f"{self._gguf}-{PRECISIONS[precision][1]}.gguf"
        command = [self._python, str(HERE / "llama_peer.py"), path, "--threads", str(self.threads)]
        return child([*command, *_shape(streams, num_input, num_output)])

    def _transformers(self, precision: str, streams: int, num_input: int, num_output: int) -> Any:
        if precision != "bf16":
            return "bf16 only"
        script = HERE.parent / "throughput" / "transformers_peer.py"
        return child(
            [sys.executable, str(script), str(SHAPE), *_shape(streams, num_input, num_output)]
        )


def _shape(streams: int, num_input: int, num_output: int) -> list[str]:
    return ["--batch-size", str(streams), "--input-len", str(num_input), "--output-len", str(num_output),
            "--iterations", "2"]  # fmt: skip


def median_of(
    engines: Engines, figure: str, rounds: int, precision: str, shape: tuple[int, int, int]
) -> dict[str, float | str]:
    """Engine -> median of a figure over the rounds, or why there is none."""
    seen: dict[str, list[float]] = {name: [] for name in engines.runs}
    refused: dict[str, str] = {}
    for _ in range(rounds):
        for name, run in engines.runs.items():
            result = "" if name in refused else run(precision, *shape)
            if isinstance(result, str):
                refused.setdefault(name, result)
            else:
                seen[name].append(float(result[figure]))
    return {name: statistics.median(seen[name]) if seen[name] else refused[name] for name in seen}


def limits(threads: int) -> dict[str, float]:
    """What the machine gives at this moment: reading GB/s, and bf16 GFLOP/s of one large product."""
    import torch

    from headrace.back.kernels.linear.native import bind_with
    from headrace.back.kernels.linear.op import LinearProblem
    from headrace.back.kernels.probe.native import read_gb_per_s

    library = load()
    assert isinstance(library, NativeLibrary), library
    library.set_threads(threads)
    weight, x = torch.randn(4096, 4096).bfloat16(), torch.randn(512, 4096).bfloat16()
    problem = LinearProblem(device="cpu", dtype=torch.bfloat16, inputs=4096, outputs=4096)
    product, best_s = bind_with(library, problem, weight, None), float("inf")
    torch.set_num_threads(threads)
    theirs_s = float("inf")
    for _ in range(8):
        begin = time.perf_counter()
        product(x)
        middle = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        best_s, theirs_s = min(best_s, middle - begin), min(theirs_s, time.perf_counter() - middle)
    flop = 2 * 512 * 4096 * 4096
    return {
        "read GB/s": read_gb_per_s(library),
        "bf16 GFLOP/s, native": flop / best_s / 1e9,
        "bf16 GFLOP/s, torch": flop / theirs_s / 1e9,
    }


def compared(figures: dict[str, float | str]) -> list[str]:
    """Cells: ours, the others, and ours over the fastest of them."""
    others = [v for name, v in figures.items() if name != "headrace" and isinstance(v, float)]
    ours = figures["headrace"]
    ratio = f"{ours / max(others):.2f}" if others and isinstance(ours, float) else "-"
    return [*(f"{v:,.1f}" if isinstance(v, float) else v for v in figures.values()), ratio]


def engine_tables(engines: Engines, given: argparse.Namespace, kinds: list[str]) -> list[str]:
    """The tables of decode and prefill."""
    names = list(engines.runs)
    pages = []
    if "decode" in kinds:
        rows = []
        for precision in given.precisions.split(","):
            for streams, (num_input, num_output) in DECODES.items():
                bound = limits(engines.threads)["read GB/s"] / WEIGHT_GB[precision] * streams
                shape = (streams, num_input, num_output)
                figures = median_of(engines, "decode_tok_s", given.rounds, precision, shape)
                ours = figures["headrace"]
                share = f"{ours / bound:.0%}" if isinstance(ours, float) and streams == 1 else "-"
                rows.append([precision, streams, *compared(figures), share])
                print(rows[-1], flush=True)
        header = ["precision", "streams", *names, "ours / fastest other", "share of reading"]
        pages += ["## Decode, tokens per second", "", markdown_table(header, rows), ""]
    if "prefill" in kinds:
        rows = []
        for precision in given.precisions.split(","):
            for num_input in PROMPTS:
                shape = (1, num_input, 2)
                figures = median_of(engines, "prefill_tok_s", given.rounds, precision, shape)
                rows.append([precision, num_input, *compared(figures)])
                print(rows[-1], flush=True)
        header = ["precision", "prompt", *names, "ours / fastest other"]
        pages += ["## Prefill, tokens per second", "", markdown_table(header, rows), ""]
    return pages


def server_table(users: int = 16) -> list[str]:
    """A server with closed loops of 256 tokens in and 128 out."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "headrace",
        "serve",
        "--model",
        str(SHAPE),
        "--load-format",
        "dummy",
    ]
    command += ["--max-model-len", "2048", "--no-prefix-caching", "--port", str(port)]
    command += ["--tokenizer", str(TOKENIZER), "--dtype", "bfloat16"]
    rows = []
    for precision in ("bf16", "int8"):
        extra = ["--quantization", "int8"] if precision == "int8" else []
        with subprocess.Popen([*command, *extra], stderr=subprocess.DEVNULL) as process:
            base = f"http://127.0.0.1:{port}"
            wait_ready(base, process, time.perf_counter() + 120)  # type: ignore[arg-type]
            load = {
                "base_url": base,
                "endpoint": "completions",
                "token_ids": 1000,
                "timeout_s": 300.0,
            }
            load |= {"input_words": 256, "output_tokens": 128, "spread": 0.0, "concurrency": users}
            found = run_load(Load(**load, num_requests=2 * users, seed=1))  # type: ignore[arg-type]
            process.terminate()
        itl = found["itl_ms"]
        rows.append([precision, f"{found['output_tok_s']:,.0f}", f"{itl['p50']:.0f} / {itl['p99']:.0f}",
                     f"{found['ttft_ms']['p50']:.0f}"])  # fmt: skip
        print(rows[-1], flush=True)
    header = ["precision", "output tok/s", "ITL p50 / p99 ms", "TTFT p50 ms"]
    return [
        "## Server, 16 streams of 256 tokens in and 128 out",
        "",
        markdown_table(header, rows),
        "",
    ]


def start_table() -> list[str]:
    """Start to first token, warm file cache, and what the engine's process holds then."""
    options = [
        str(SHAPE),
        "--load-format",
        "dummy",
        "--max-model-len",
        "2048",
        "--tokenizer",
        str(TOKENIZER),
    ]
    rows = []
    for precision, extra in (
        ("bf16", []),
        ("int8", ["--quantization", "int8"]),
        ("int4", ["--quantization", "int4"]),
    ):
        found = startup([*options, "--dtype", "bfloat16", *extra], iterations=3)
        rows.append([precision, f"{found['ready_s']:.2f}", f"{found['first_token_s']:.2f}"])
        print(rows[-1], flush=True)
    header = ["precision", "ready s", "first token s"]
    return ["## Start of a server, dummy weights", "", markdown_table(header, rows), ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="limits,decode,prefill,server,start")
    parser.add_argument("--precisions", default="bf16,int8,int4")
    parser.add_argument("--gguf", default=os.environ.get("GGUF", ""))
    parser.add_argument("--peer-python", default=os.environ.get("PEER_PYTHON", sys.executable))
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    kinds, engines = given.only.split(","), Engines(given)
    facts = ", ".join(f"{k} {v}" for k, v in versions().items())
    page = [
        "# The CPU path beside other engines",
        "",
        "Made by `python -m benchmarks.cpu.run --write`: Qwen3-0.6B shape, random weights, greedy, engines in turn in",
        f"processes of their own, medians of {given.rounds} rounds. Compare within a row: the machine is shared.",
        f"{engines.threads} threads; {facts}. Load average at the start: {os.getloadavg()[0]:.1f}.",
        "",
    ]
    if "limits" in kinds:
        found = limits(engines.threads)
        page += [
            "Limits: " + ", ".join(f"{name} {value:,.0f}" for name, value in found.items()) + ".",
            "",
        ]
        print(page[-2], flush=True)
    page += engine_tables(engines, given, kinds)
    page += server_table() if "server" in kinds else []
    page += start_table() if "start" in kinds else []
    print("\n".join(page))
    if given.write:
        (HERE / "engines.md").write_text("\n".join(page))


if __name__ == "__main__":
    main()

"""Start-up beside transformers: `python -m benchmarks.startup [--iterations 3] [--write]`.

From the start of the process until the first token has arrived. "First": no compiled bytecode and no cache of ours, as
after an installation (the native kernels are built by the installation; the disk's page cache cannot be emptied here).
"Warm": the median of the starts after it. transformers loads the same folder in a process of its own and generates one
token, without a server; for the dummy both make random weights.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.bench.report import markdown_table, versions
from headrace.bench.startup import startup

HERE = Path(__file__).resolve().parent
BUNDLED = HERE.parent / "demo" / "model"
MODELS = {
    "bundled model": (BUNDLED, ()),
    "Qwen3-0.6B shape, dummy": (
        HERE / "models" / "qwen3-0.6b",
        ("--load-format", "dummy", "--max-model-len", "2048", "--tokenizer", str(BUNDLED)),
    ),
}
PEER = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
folder, dummy = sys.argv[1], sys.argv[2] == "dummy"
if dummy:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
else:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=1, do_sample=False)
"""


@contextmanager
def fresh_caches() -> Iterator[None]:
    """Nothing is compiled or cached yet, for this process's children."""
    names = ("PYTHONPYCACHEPREFIX", "HEADRACE_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {name: f"{folder}/{name.lower()}" for name in names}
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def peer_s(folder: Path, *, dummy: bool) -> float:
    """Seconds of one whole process of transformers."""
    command = [sys.executable, "-c", PEER, str(folder), "dummy" if dummy else "weights"]
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def measure(folder: Path, options: tuple[str, ...], iterations: int) -> list[float]:
    """first ready, warm ready, warm first token; transformers' first and warm whole run."""
    with fresh_caches():
        ours = startup([str(folder), "--dtype", "bfloat16", *options], iterations=iterations + 1)
        peers = [peer_s(folder, dummy=bool(options)) for _ in range(iterations + 1)]
    return [
        *(ours[name] for name in ("first_run_ready_s", "ready_s", "first_token_s")),
        *(peers[0], statistics.median(peers[1:])),
    ]


def main() -> None:
    """Prints the table, and writes it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    rows = [
        [name, *measure(folder, options, given.iterations)]
        for name, (folder, options) in MODELS.items()
    ]
    header = (
        *("model", "first start: ready", "warm: ready", "warm: first token"),
        *("transformers, first", "transformers, warm"),
    )
    page = "\n".join(
        [
            "# Start-up in seconds, beside transformers",
            "",
            f"Made by `python -m benchmarks.startup --write`: median of {given.iterations} warm starts, on a shared"
            " machine.",
            "Ours: a whole server, until its first answer over HTTP. transformers: load and one token, no server.",
            ", ".join(f"{name} {value}" for name, value in versions().items()) + ".",
            "",
            markdown_table(header, rows),
            "",
        ]
    )
    print(page)
    if given.write:
        (HERE / "startup.md").write_text(page)


if __name__ == "__main__":
    main()

"""Blocks of the KV cache between a GPU and files in host memory, and what a prompt that comes again saves by them.

    python -m benchmarks.h200.kv_files --out kv-files.json [--parts carry,prompts]

carry: GB/s of orders of so many blocks of Qwen3-8B's caches, by both layouts, medians of five. prompts: ms to the
first token of `headrace serve --kv-store-path` with dummy weights of Qwen3-8B: computed, read from files behind an
emptied prefix cache, and found in the prefix cache; medians of three prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.h200.server import stop
from benchmarks.h200.shapes import SHAPES, device_name, write_model
from headrace.back.attention.forms import HeadsForm
from headrace.back.runner.kv_layout import lay_out
from headrace.back.runner.memory import KVCounts, KVMemory
from headrace.back.transfer.kv_files import KVFiles
from headrace.base.wire.slots import KVOrder
from headrace.bench.report import versions
from headrace.bench.startup import free_port, wait_ready

NUM_BLOCKS = 4096
BLOCK_TOKENS = 16
SHAPE = "qwen3-8b"
ADMIN_KEY = "benchmark"


def carried(order: str, count: int, folder: Path) -> dict[str, Any]:
    """Rates of saving and loading `count` blocks that lie anywhere."""
    shape, device = SHAPES[SHAPE], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    form = {"kv_heads": shape["num_key_value_heads"], "head_dim": shape["head_dim"]}
    caches = [HeadsForm(cache=i, **form) for i in range(shape["num_hidden_layers"])]
    layout = lay_out(caches, block_tokens=BLOCK_TOKENS, dtype=torch.bfloat16, order=order)
    memory = KVMemory(layout, KVCounts(num_blocks=NUM_BLOCKS), device=device)
    files, seconds = KVFiles(None, device, 0), dict[str, list[float]](save=[], load=[])
    files.fingerprint = "none"
    for _ in range(6):
        blocks = (tuple(random.sample(range(NUM_BLOCKS), count)),)
        for action in seconds:
            begin = time.perf_counter()
            reply = files.carry_out(
                KVOrder(action=action, path=str(folder / "kv"), blocks=blocks), memory, None
            )
            seconds[action].append(time.perf_counter() - begin)
            assert reply.error is None, reply.error
    rates = {
        action: reply.num_bytes / statistics.median(some[1:]) / 1e9
        for action, some in seconds.items()
    }
    return {"layout": order, "blocks": count, "GB": reply.num_bytes / 1e9} | rates


def first_token_ms(client: httpx.Client, prompt: list[int]) -> float:
    """Until one answer of one token is there."""
    body = {"model": SHAPE, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    begin = time.perf_counter()
    client.post("/v1/completions", json=body).raise_for_status()
    return (time.perf_counter() - begin) * 1e3


def forget(client: httpx.Client, length: int) -> None:
    """Empties the prefix cache, once what is being written (1 GB/s and more) has been."""
    time.sleep(0.5 + length * 147_456 / 1e9)
    client.post("/reset_prefix_cache").raise_for_status()


def prompts(model: Path, store: Path, lengths: list[int]) -> list[dict[str, Any]]:
    """First tokens of prompts that come for the first, the second and the third time."""
    port = free_port()
    command = [sys.executable, "-m", "headrace", "serve", "--model", str(model), "--load-format"]
    command += ["dummy", "--max-model-len", "40960", "--port", str(port), "--served-model-name"]
    command += [SHAPE, "--admin-key", ADMIN_KEY, "--kv-store-path", str(store)]
    process = subprocess.Popen([*command, "--kv-store-after", "1"])
    base, rows = f"http://127.0.0.1:{port}", []
    client = httpx.Client(base_url=base, headers={"x-api-key": ADMIN_KEY}, timeout=60)
    wait_ready(base, process, time.perf_counter() + 150)
    try:
        vocabulary = SHAPES[SHAPE]["vocab_size"] - 2000
        first_token_ms(client, [5] * 3000)
        for length in lengths:
            times: dict[str, list[float]] = {"computed": [], "read": [], "cached": []}
            for _ in range(3):
                prompt = [random.randrange(vocabulary) for _ in range(length)]
                times["computed"].append(first_token_ms(client, prompt))
                forget(client, length)
                times["read"].append(first_token_ms(client, prompt))
                times["cached"].append(first_token_ms(client, prompt))
            row = {name: statistics.median(some) for name, some in times.items()}
            rows.append({"tokens": length} | row | {"all": times})
            print(rows[-1], flush=True)
        metrics = client.get("/metrics").text
        print(
            *(
                line
                for line in metrics.splitlines()
                if "kv_restored" in line or "kv_stored" in line
            ),
            sep="\n",
        )
    finally:
        stop(process)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="carry,prompts")
    parser.add_argument("--blocks", default="16,256,2048")
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    random.seed(0)
    result: dict[str, Any] = {"versions": versions() | device_name(), "cores": os.cpu_count()}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as name,
        tempfile.TemporaryDirectory() as model,
    ):
        if "carry" in options.parts:
            result["carry"] = []
            for count in map(int, options.blocks.split(",")):
                for order in ("layers", "blocks"):
                    result["carry"].append(carried(order, count, Path(name)))
                    print(result["carry"][-1], flush=True)
        if "prompts" in options.parts:
            folder = write_model(Path(model), SHAPE)
            lengths = [int(one) for one in options.lengths.split(",")]
            result["prompts"] = prompts(folder, Path(name), lengths)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

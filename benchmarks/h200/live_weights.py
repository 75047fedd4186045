"""Weights that leave a GPU and come back, and new ones from a trainer, at the size of qwen3-8b.

    python -m benchmarks.h200.live_weights --out live.json [--repeats 3] [--parts sleep,push]
    python -m benchmarks.h200.live_weights --write live.json     makes live_weights.md of it

sleep, wake: the engine's own, all it holds on the GPU (weights to host memory and back; then a new KV cache and
runner). lent: a trainer's process lends its memory on the same GPU, one push of everything. nccl: a trainer on a
second GPU broadcasts all tensors in one buffer; left out where there is one GPU. The first push goes through a second
model (back/transfer/shadow.py) and has a row of its own; so did all broadcasts of the table's. Where a push's time
went: in seconds, by phase. Behind each push eight requests are answered whole.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch

from benchmarks.h200.offline import make_engine
from benchmarks.h200.shapes import SHAPES, write_model
from headrace.back.executor.inline import InlineExecutor
from headrace.base.wire.weights import Group, Layout, SharedMemory, WeightOrder
from headrace.bench.offline import OfflineEngine
from headrace.bench.report import markdown_table, versions

HERE = Path(__file__).parent
SHAPE = "qwen3-8b"
BARS = {"wake": (40.0, "GB/s or more"), "lent": (0.25, "s or less"), "nccl": (0.5, "s or less")}
LENDER = """
import sys, msgspec, torch
from headrace.back.transfer.handles import lend
buffer = torch.empty(int(sys.argv[1]) // 2, dtype=torch.bfloat16, device="cuda:0").normal_(std=0.02)
torch.cuda.synchronize()
print(msgspec.json.encode(lend(buffer.view(torch.uint8))).decode(), flush=True)
sys.stdin.readline()
"""
TRAINER = """
import sys, torch
from headrace.back.transfer.groups import broadcast, join
from headrace.base.wire.weights import Group
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
members = join(Group(name="trainer", address="127.0.0.1", port=int(sys.argv[2]), backend="nccl"), 0, device)
buffer = torch.empty(int(sys.argv[1]) // 2, dtype=torch.bfloat16, device=device).normal_(std=0.02)
for _ in range(int(sys.argv[3])):
    broadcast(buffer.view(torch.uint8), members)
torch.cuda.synchronize()
sys.stdin.readline()
"""


def layout_of(config: dict[str, Any]) -> Layout:
    """All tensors of a Qwen3 by their names on the hub."""
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    layer = {
        "self_attn.q_proj": [heads, width], "self_attn.k_proj": [groups, width],
        "self_attn.v_proj": [groups, width], "self_attn.o_proj": [width, heads],
        "self_attn.q_norm": [size], "self_attn.k_norm": [size], "input_layernorm": [width],
        "post_attention_layernorm": [width], "mlp.gate_proj": [inner, width],
        "mlp.up_proj": [inner, width], "mlp.down_proj": [width, inner],
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], width]}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.norm.weight": [width], "lm_head.weight": [config["vocab_size"], width]}
    return Layout(
        names=list(shapes), dtypes=["bfloat16"] * len(shapes), shapes=list(shapes.values())
    )


def num_bytes(layout: Layout) -> int:
    """Of all tensors."""
    return sum(2 * int(np.prod(shape)) for shape in layout.shapes)


def answered(engine: OfflineEngine) -> None:
    """Eight requests, which must end with all their tokens."""
    rng = np.random.default_rng(0)
    trace = engine.run([engine.request(rng, 128, 16, 0.0) for _ in range(8)])
    assert sum(trace.num_tokens) == 8 * 16, trace.num_tokens


def slept(executor: InlineExecutor, size: int) -> Iterator[dict[str, Any]]:
    """Once to sleep and awake."""
    began = time.perf_counter()
    executor.park()
    parked = time.perf_counter()
    held = torch.cuda.memory_allocated()
    resident = executor._resident
    copy = resident._copy
    assert copy is not None
    bytes_held, spent = copy.num_bytes, list[float]()

    def timed(back: Callable[[], None] = copy.back) -> None:
        start = time.perf_counter()
        back()
        spent.append(time.perf_counter() - start)

    waking = time.perf_counter()
    with patch.object(copy, "back", timed):
        executor.unpark()
    yield {
        "what": "sleep", "seconds": parked - began, "gb_per_s": bytes_held / (parked - began) / 1e9,
        "left_bytes": held,
    }  # fmt: skip
    yield {"what": "wake", "seconds": spent[0], "gb_per_s": bytes_held / spent[0] / 1e9}
    yield {"what": "wake, with a new runner", "seconds": time.perf_counter() - waking}


@contextmanager
def lent(size: int) -> Iterator[dict[str, SharedMemory]]:
    """Memory of another process."""
    command = [sys.executable, "-c", LENDER, str(size)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as lender:
        assert lender.stdout is not None and lender.stdin is not None
        yield msgspec.json.decode(lender.stdout.readline(), type=dict[str, SharedMemory])
        lender.stdin.close()


def pushed(engine: OfflineEngine, order: WeightOrder, what: str, size: int) -> dict[str, Any]:
    """One push between steps, with requests behind it."""
    assert isinstance(engine.executor, InlineExecutor)
    began = time.perf_counter()
    reply = engine.executor.weigh(order).result(120)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    assert reply.error is None, reply.error
    answered(engine)
    return {
        "what": what, "seconds": seconds, "gb_per_s": size / seconds / 1e9, "phases": reply.seconds
    }  # fmt: skip


def measure(repeats: int, parts: list[str]) -> Iterator[dict[str, Any]]:
    """Every row, one after the other."""
    layout = layout_of(SHAPES[SHAPE])
    size = num_bytes(layout)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(write_model(Path(folder), SHAPE), kv_memory="8GiB")
    assert isinstance(engine.executor, InlineExecutor)
    answered(engine)
    for _ in range(repeats if "sleep" in parts else 0):
        yield from slept(engine.executor, size)
        answered(engine)
    with lent(size) as handles:
        order = WeightOrder(action="push", way="handles", layout=layout, handles=handles, last=True)
        for number in range(repeats + 1):
            row = pushed(engine, order, "lent", size)
            yield row if number else row | {"what": "lent, the first"}
    if torch.cuda.device_count() > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-c", TRAINER, str(size), str(port), str(repeats + 1)]
        with subprocess.Popen(command, stdin=-1) as trainer:
            group = Group(name="trainer", address="127.0.0.1", port=port, backend="nccl")
            joined = engine.executor.weigh(WeightOrder(action="join", group=group)).result(120)
            assert joined.error is None, joined.error
            order = WeightOrder(
                action="push", way="group", layout=layout, group=group, packed=True, last=True
            )
            for number in range(repeats + 1):
                row = pushed(engine, order, "nccl", size)
                yield row if number else row | {"what": "nccl, the first"}
            assert trainer.stdin is not None
            trainer.stdin.close()
    engine.close()


def table(found: dict[str, Any]) -> str:
    """Medians by kind."""
    rows = []
    kinds = dict.fromkeys(row["what"] for row in found["rows"])
    for kind in kinds:
        some = [row for row in found["rows"] if row["what"] == kind]
        seconds = statistics.median(row["seconds"] for row in some)
        rates = [row["gb_per_s"] for row in some if "gb_per_s" in row]
        rate = statistics.median(rates) if rates else None
        bar = ""
        if (bare := kind.partition(" (")[0]) in BARS:
            limit, words = BARS[bare]
            value = rate if "GB/s" in words else seconds
            assert value is not None
            met = value >= limit if "GB/s" in words else value <= limit
            bar = f"{limit:g} {words}: {'met' if met else 'missed'}"
        spent = [
            f"{name} {statistics.median(row['phases'][name] for row in some):.3f}"
            for name in some[0].get("phases", ())
        ]
        told = "" if rate is None else f"{rate:.1f}"
        rows.append([kind, len(some), f"{seconds:.3f}", told, bar, ", ".join(spent)])
    return markdown_table(["what", "times", "median s", "GB/s", "bar", "where it went"], rows)


def main() -> None:
    """Measures, or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", default="sleep,push")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    if args.write:
        found = json.loads(args.write.read_text())
        told = ", ".join(f"{key} {value}" for key, value in found["versions"].items())
        text = f"# Live weights\n\n{(__doc__ or '').split(chr(10) * 2)[-1].strip()}\n\n{told}.\n\n{table(found)}\n"
        (HERE / "live_weights.md").write_text(text)
        return
    found = {"versions": versions(), "rows": []}
    for row in measure(args.repeats, args.parts.split(",")):
        print(json.dumps(row), flush=True)
        found["rows"].append(row)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

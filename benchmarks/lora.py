"""What low-rank adapters cost a decode step: rows of several adapters against the same engine
without any, in paired turns.

    python -m benchmarks.lora [--model M | --shape S] [--rows 8] [--adapters 4] [--rank 16]
                              [--targets all | attention] [--turns 9] [--out FILE]
    python -m benchmarks.lora --write     puts what results hold into lora.md

Three engines over the same dummy weights: without adapters, with slots that no row uses, and with
rows that have adapters of random matrices on all linear layers, as many rows each. Turns
alternate, so that what else a machine does strikes all; a turn is the median of its decode steps.
CPU time of the process stands beside wall time, as shared machines have other work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.h200.shapes import write_model
from headrace.back.executor.choose import make_executor
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import Options
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.adapters import Adapters
from headrace.core.core import EngineCore
from headrace.launch.facts import resolve_options
from headrace.launch.plan import build_without_memory

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE / "lora.md"
TARGETS: dict[str, tuple[str, ...]] = {
    "all": (),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
"""Which linear layers have adapters; (): all."""
PROMPT, ANSWER = 32, 48
WARM = 8
"""Decode steps of a turn that are not counted: sizes are recorded meanwhile."""


class Bench:
    """An engine; `names`: the adapters its rows take in turns."""

    def __init__(self, spec: EngineSpec, folder: Path, names: tuple[str, ...]) -> None:
        self.names = names
        executor = make_executor(spec)
        adapters = None
        if spec.model.adapters is not None:
            adapters = Adapters(spec.model.adapters, executor.adapt)
        hooks = [] if adapters is None else [adapters]
        self.core = EngineCore(spec, executor, hooks=hooks, adapters=adapters)
        for name in names:
            assert adapters is not None
            adapters.load_now(name, str(folder / name), trusted=True)
        self._ids = 0

    def turn(self, prompts: list[np.ndarray]) -> tuple[list[float], list[float]]:
        """Seconds and processor seconds of each step that decoded all rows: of the first turn few or
        none, as adapters come into their slots one after the other."""
        for row, prompt in enumerate(prompts):
            self._ids += 1
            adapter = self.names[row % len(self.names)] if self.names else ""
            self.core.add(
                EngineRequest(
                    id=self._ids,
                    prompt=prompt.astype("<i4").tobytes(),
                    stop=StopRules(max_tokens=ANSWER),
                    sampling=RowSampling(temperature=0.0),
                    adapter=adapter,
                )
            )
        wall, cpu, left = [], [], len(prompts)
        while left:
            if not self.core.has_work:
                time.sleep(self.core.idle_s or 0.0)
                continue
            begin, spent = time.perf_counter(), time.process_time()
            batch = self.core.step(wait=True).tokens
            took, used = time.perf_counter() - begin, time.process_time() - spent
            if batch is None:
                continue
            if len(batch.tokens) == len(prompts):
                wall.append(took)
                cpu.append(used)
            assert all(end.error is None for end in batch.finished), batch.finished
            left -= len(batch.finished)
        return wall, cpu


def write_adapters(
    spec: EngineSpec, folder: Path, names: tuple[str, ...], rank: int, targets: str
) -> None:
    """Random adapters for linear layers of the model, all alike, in PEFT's layout."""
    ends = TARGETS[targets]
    model = build_without_memory(spec.model, block_tokens=spec.kv.block_tokens)
    assert model.adapters is not None
    modules = {
        name: module
        for linear in model.adapters.linears
        for name, module in linear.modules.items()
        if not ends or name.endswith(ends)
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for module, sizes in modules.items():
        for half, shape in (("A", (rank, sizes.inputs)), ("B", (sizes.outputs, rank))):
            values = 0.02 * torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = values.bfloat16()
    file = folder / "adapter_model.safetensors"
    save_file(tensors, file)
    for name in names:  # the same numbers: how many bytes are read is what counts
        (folder / name).mkdir()
        (folder / name / file.name).hardlink_to(file)
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": list(ends) or "all-linear",
        }
        (folder / name / "adapter_config.json").write_text(json.dumps(config))


def measured(asked: argparse.Namespace) -> dict[str, Any]:
    """Medians of all turns."""
    folder = Path(tempfile.mkdtemp())
    model = asked.model or str(write_model(folder, asked.shape))
    options = Options()
    options = with_options(options, "model", model=model, load_format="dummy", max_model_len=2048)
    options = with_options(options, "kv", kv_memory=asked.kv_memory, prefix_caching=False)
    plain = resolve_options(options).engine
    options = with_options(
        options, "adapters", enable_lora=True, max_loras=asked.adapters, max_lora_rank=asked.rank
    )
    adapted = resolve_options(options).engine
    names = tuple(f"adapter-{i}" for i in range(asked.adapters))
    write_adapters(adapted, folder, names, asked.rank, asked.targets)
    benches = {
        "base": Bench(plain, folder, ()),
        "slots unused": Bench(adapted, folder, ()),
        "adapters": Bench(adapted, folder, names),
    }
    rng = np.random.default_rng(0)
    width = plain.model.logits_width
    prompts = [rng.integers(10, width, PROMPT, dtype=np.int64) for _ in range(asked.rows)]
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in benches}
    for turn in range(asked.turns + 1):
        for name, bench in benches.items():
            both = bench.turn(prompts)
            if turn:
                wall, cpu = (1e3 * statistics.median(one[WARM:]) for one in both)
                turns[name].append((wall, cpu))
    for bench in benches.values():
        bench.core.close()
    return {
        "model": asked.shape if not asked.model else Path(asked.model).name,
        "device": plain.device.device,
        "threads": plain.device.threads,
        "rows": asked.rows,
        "num_adapters": asked.adapters,
        "rank": asked.rank,
        "targets": asked.targets,
        **{
            name: {
                "ms": statistics.median(ms for ms, _ in each),
                "cpu_ms": statistics.median(cpu for _, cpu in each),
                "times": statistics.median(
                    ms / base for (ms, _), (base, _) in zip(each, turns["base"], strict=True)
                ),
                "cpu_times": statistics.median(
                    ms / base for (_, ms), (_, base) in zip(each, turns["base"], strict=True)
                ),
            }
            for name, each in turns.items()
        },
    }


def with_options(options: Options, group: str, **changes: Any) -> Options:
    changed = msgspec.structs.replace(getattr(options, group), **changes)
    return msgspec.structs.replace(options, **{group: changed})


HEAD = """# Adapters

Made by `python -m benchmarks.lora --write`: a decode step with adapters on all linear layers (or those of
attention), against the same engine without any; medians of paired turns, dummy weights. `slots unused`: a server that
takes
adapters, whose rows have none. CPU ms: processor time of the process per step; on CPUs it is what
counts, as the machine did other things too.

"""
COLUMNS = (
    *("model, device", "rows", "adapters x rank", "base ms", "slots unused", "with adapters"),
    *("times base", "CPU ms base", "with adapters", "times base"),
)


def page() -> str:
    """What the results hold."""
    rows = []
    for path in sorted(RESULTS.glob("lora-*.json")):
        one = json.loads(path.read_text())
        base, unused, adapters = (one[name] for name in ("base", "slots unused", "adapters"))
        where = f"{one['model']}, {one['device']}"
        on = "" if one.get("targets", "all") == "all" else f", {one['targets']}"
        where += f", {one['threads']} thread(s)" if one["device"] == "cpu" else ""
        rows.append(
            f"| {where} | {one['rows']} | {one['num_adapters']} x {one['rank']}{on} | {base['ms']:.2f} | "
            f"{unused['ms']:.2f} | {adapters['ms']:.2f} | {adapters['times']:.2f} | {base['cpu_ms']:.2f} | "
            f"{adapters['cpu_ms']:.2f} | {adapters['cpu_times']:.2f} |"
        )
    head = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
    return HEAD + head + "\n".join(rows) + "\n"


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=TARGETS, default="all")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--kv-memory", default="256MiB")
    parser.add_argument("--out", type=Path, help="results/lora-*.json are in the page")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.write:
        PAGE.write_text(page())
        return
    result = measured(asked)
    print(json.dumps(result, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A step that verifies drafts beside a plain decode step, in turn on one engine: one GPU, dummy weights.

    python -m benchmarks.h200.verify [--shape qwen3-8b] [--rows 1,8,64] [--drafts 1,3,7] [--contexts 128,1024]
                                     [--turns 5] [--steps 40] [--out FILE]

All rows of a step have the same context and the same number of drafts; the plans are made by hand, so that nothing but
the step is timed: as many as `--steps` are launched one behind the other, the next before the result of the last is
read. The floor of a verifying step is that of a plain one where the weights are read once: what `times` is above 1 are
more queries of attention, more columns of the products, and the drafter. Whole answers: benchmarks/speculative.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.h200.shapes import write_model
from headrace.back.executor.inline import InlineExecutor
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import (
    KVOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
    SpeculationOptions,
)
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import NO_DRAFTS, RowStart, StepPlan
from headrace.bench.report import markdown_table, versions
from headrace.launch.facts import resolve_options

CHUNK = 8192
"""Prompt tokens of a step."""
NONE = np.zeros(0, np.int32)


def spec_of(model: str, drafts: int, rows: int, longest: int) -> EngineSpec:
    """An engine that verifies so many drafts in so many rows."""
    options = Options(
        model=ModelOptions(model=model, load_format="dummy", max_model_len=longest),
        kv=KVOptions(prefix_caching=False),
        scheduler=SchedulerOptions(
            max_running=rows,
            max_step_tokens=CHUNK,
            speculative_config=SpeculationOptions(
                method="ngram", num_speculative_tokens=drafts, adaptive=False
            ),
        ),
    )
    return resolve_options(options).engine


def plan_of(rows: np.ndarray, tokens: int, computed: int, **more: Any) -> StepPlan:
    """A step in which each of these rows has so many query tokens behind `computed` ones."""
    columns: dict[str, Any] = {
        "ends": NONE, "starts": [], "block_group": NONE, "block_row": NONE, "block_index": NONE,
        "block_id": NONE, "sample": np.ones(rows.size, bool), "drafts": NO_DRAFTS,
    }  # fmt: skip
    return StepPlan(
        step=-1,
        rows=rows,
        num_tokens=np.full(rows.size, tokens, np.int32),
        num_computed=np.full(rows.size, computed, np.int32),
        **(columns | more),
    )


class Steps:
    """Rows with their prompts computed, and steps over them."""

    def __init__(self, executor: InlineExecutor, *, rows: int, context: int, drafts: int) -> None:
        self._executor, self._context = executor, context
        self._rows = np.arange(rows, dtype=np.int32)
        block_tokens = executor.facts.block_tokens
        blocks = -(-(context + 2 + drafts) // block_tokens)
        motif = np.arange(100, 132, dtype=np.int32)  # which drafts are looked up in
        prompt = np.resize(motif, context)
        at_once = max(1, CHUNK // context)
        for first in range(0, rows, at_once):
            mine = self._rows[first : first + at_once]
            starts = [
                RowStart(row=int(row), request=-1, tokens=prompt, num_prompt=context, num_computed=0,
                         sampling=RowSampling(temperature=0.0))
                for row in mine
            ]  # fmt: skip
            updates = {
                "block_group": np.zeros(mine.size * blocks, np.int32),
                "block_row": np.repeat(mine, blocks),
                "block_index": np.tile(np.arange(blocks, dtype=np.int32), mine.size),
                "block_id": 1 + np.arange(
                    first * blocks, (first + mine.size) * blocks, dtype=np.int32
                ),
            }  # fmt: skip
            executor.submit(plan_of(mine, context, 0, starts=starts, **updates)).result()

    def step_ms(self, drafts: int, count: int) -> float:
        """Milliseconds of a step with so many drafts in each row, of `count` in a row."""
        plan = plan_of(self._rows, 1 + drafts, self._context)
        if drafts:
            plan = replace(plan, drafts=np.full(self._rows.size, drafts, np.int32))
        pending = self._executor.submit(plan)
        begin = 0.0
        for i in range(count + 4):
            behind, pending = pending, self._executor.submit(plan)
            behind.result()
            if i == 3:
                begin = time.perf_counter()
        pending.result()
        return 1000 * (time.perf_counter() - begin) / (count + 1)

    def end(self) -> None:
        """Gives the rows back."""
        self._executor.submit(plan_of(NONE, 1, 0, ends=self._rows)).result()


def measured(given: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """A line for each number of rows and context."""
    rows, drafts, contexts = (
        [int(word) for word in words.split(",")]
        for words in (given.rows, given.drafts, given.contexts)
    )
    spec = spec_of(model, max(drafts), max(rows), max(contexts) + 64)
    executor, lines = InlineExecutor(spec), []
    for context in contexts:
        for count in rows:
            steps = Steps(executor, rows=count, context=context, drafts=max(drafts))
            kinds = [0, *drafts]
            turns = [
                [steps.step_ms(kind, given.steps) for kind in kinds] for _ in range(1 + given.turns)
            ][1:]  # the first records
            steps.end()
            line: dict[str, Any] = {"rows": count, "context": context}
            line["plain_ms"] = statistics.median(turn[0] for turn in turns)
            for place, kind in enumerate(drafts, start=1):
                line[f"{kind}_ms"] = statistics.median(turn[place] for turn in turns)
                line[f"{kind}_times"] = statistics.median(turn[place] / turn[0] for turn in turns)
            lines.append(line)
            print(json.dumps(line), flush=True)
    executor.close()
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """The lines as a page shows them."""
    header = list(lines[0])
    cells = [
        [f"{value:.3f}" if isinstance(value, float) else value for value in line.values()]
        for line in lines
    ]
    return markdown_table(header, cells)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--model", help="a folder with config.json, in the place of a shape")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--drafts", default="1,3,7")
    parser.add_argument("--contexts", default="128,1024")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or str(write_model(Path(folder), given.shape))
        lines = measured(given, model)
    print(table(lines))
    if given.out:
        result = {"versions": versions(), "shape": given.shape, "lines": lines}
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

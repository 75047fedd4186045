"""What one row with a mask, a bias or banned words costs its step: eight rows of the bundled model,
plain, against seven plain ones and one that asks for something.

    python -m benchmarks.masked_rows [--turns N] [--threads N] [--prompts] [--write]

The core runs in this process, all rows are greedy and equally long, and white space is no part of
the grammar, so that no step jumps. Turns alternate between the kinds, so that what else a machine
does strikes all; the median step counts. Processor time stands beside the clock's. `--prompts`: steps
that have a chunk of a prompt besides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.back.executor.choose import make_executor
from headrace.base.config.tree import Options
from headrace.base.wire.grammar import GRAMMAR_HOOK, Constraint, Regex, pack
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.core.grammar.hook import GrammarHook
from headrace.launch.facts import resolve_options
from headrace.launch.vocabulary import encoder_of, vocabulary_of

PAGE = Path(__file__).with_suffix(".md")
RESULTS = Path(__file__).parent / "results" / "masked_rows.json"
ROWS, PROMPT, ANSWER = 8, 16, 160
CHUNK = 8
"""Tokens of a prompt that stand beside the decodes."""


def kinds(width: int) -> dict[str, dict[str, Any]]:
    """Name -> fields of the one row's request."""
    some = tuple(range(10, width))
    return {
        "plain": {},
        "logit bias": {"sampling": RowSampling(temperature=0.0, logit_bias={7: 2.0, 9: -3.0})},
        "allowed ids": {"sampling": RowSampling(temperature=0.0, allowed_ids=some)},
        "banned words": {"sampling": RowSampling(temperature=0.0, bad_words=((5,), (6, 7, 8)))},
        "min_tokens": {
            "sampling": RowSampling(temperature=0.0, min_tokens=ANSWER, suppressed_ids=(2, 3))
        },
        "grammar": {
            "hook_payloads": {
                GRAMMAR_HOOK: pack(Constraint(grammar=Regex(f"[a-z ]{{{20 * ANSWER}}}")))
            }
        },
    }


def turn(
    core: EngineCore, first_id: int, more: dict[str, Any], *, prompts: bool
) -> list[tuple[float, float]]:
    """When each step of decodes of all rows had ended: seconds by the clock, and of the
    processor. `prompts`: of those that have a chunk of a prompt besides."""
    plain = {"sampling": RowSampling(temperature=0.0)}
    for row in range(ROWS):
        fields = plain | (more if row == ROWS - 1 else {})
        prompt = np.arange(row + 3, row + 3 + PROMPT, dtype="<i4").tobytes()
        stop = StopRules(max_tokens=ANSWER)
        core.add(EngineRequest(id=first_id + row, prompt=prompt, stop=stop, **fields))
    if prompts:
        rng = np.random.default_rng(first_id)
        prompt = rng.integers(10, 1000, CHUNK * (ANSWER - 20)).astype("<i4").tobytes()
        stop = StopRules(max_tokens=1)
        core.add(EngineRequest(id=first_id + ROWS, prompt=prompt, stop=stop, **plain))
    counts = dict.fromkeys(range(first_id, first_id + ROWS), 0)
    left = ROWS + prompts
    marks: list[tuple[float, float]] = []
    while left:
        batch = core.step(wait=True).tokens
        if batch is None:
            continue
        for id in batch.ids.tolist():
            if id in counts:
                counts[id] += 1
        assert all(end.error is None for end in batch.finished), batch.finished
        left -= len(batch.finished)
        if left == ROWS + prompts and min(counts.values()) > 0:
            marks.append((time.perf_counter(), time.process_time()))
    return marks


def step_times(marks: list[tuple[float, float]]) -> dict[str, float]:
    """Milliseconds of a step."""
    wall, cpu = np.diff(np.array(marks), axis=0).T
    return {"step_ms": 1000 * float(np.median(wall)), "cpu_ms": 1000 * float(np.mean(cpu))}


def measured(turns: int, threads: int | None, *, prompts: bool) -> dict[str, Any]:
    """The medians of all turns, by kind."""
    options = Options()
    if prompts:
        limits = {"max_step_tokens": ROWS + CHUNK, "max_running": ROWS + 1}
        scheduler = msgspec.structs.replace(options.scheduler, **limits)
        options = msgspec.structs.replace(options, scheduler=scheduler)
    if threads is not None:
        device = msgspec.structs.replace(options.device, threads=threads)
        options = msgspec.structs.replace(options, device=device)
    spec = resolve_options(options).engine
    assert spec.grammar is not None
    load = partial(vocabulary_of, spec.grammar.tokenizer_path, spec.model)
    hook = GrammarHook(load, encoder=partial(encoder_of, spec.grammar.tokenizer_path))
    core = EngineCore(spec, make_executor(spec), hooks=[hook])
    asked = kinds(spec.model.logits_width)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in asked}
    for i in range(turns + 1):  # the first compiles the grammar and records the steps
        for k, (name, more) in enumerate(asked.items()):
            first_id = 1 + (ROWS + 1) * (i * len(asked) + k)
            marks = turn(core, first_id, more, prompts=prompts)
            if i:
                results[name].append(step_times(marks))
    core.close()
    lines = {
        name: {key: statistics.median(one[key] for one in times) for key in times[0]}
        for name, times in results.items()
    }
    return {
        "device": spec.device.device,
        "threads": spec.device.threads,
        "model": spec.model.name,
        "lines": lines,
    }


def page(measures: dict[str, dict[str, Any]]) -> str:
    """masked_rows.md."""
    lines = [
        "# Rows with masks, biases and banned words",
        "",
        "`python -m benchmarks.masked_rows --write [--name before]`: eight rows of the bundled model",
        "on a CPU, all greedy; seven are plain, the eighth asks for what the table names. A step's",
        "milliseconds of processor time (by the clock in brackets), medians of turns.",
        "",
        "| the eighth row | " + " | ".join(measures) + " |",
        "|---|" + "---|" * len(measures),
    ]
    for kind in next(iter(measures.values()))["lines"]:
        cells = [
            f"{measure['lines'][kind]['cpu_ms']:.2f} ({measure['lines'][kind]['step_ms']:.2f})"
            for measure in measures.values()
        ]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    first = next(iter(measures.values()))
    lines += ["", f"{first['model']} on {first['threads']} thread(s)."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--prompts", action="store_true", help="steps with a prompt's chunk besides"
    )
    parser.add_argument("--name", default="in the step", help="the column of the table")
    parser.add_argument("--write", action="store_true", help="keep the result and write the page")
    asked = parser.parse_args()
    measure = measured(asked.turns, asked.threads, prompts=asked.prompts)
    print(json.dumps(measure, indent=1))
    if asked.write:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        kept[asked.name] = measure
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(page(kept))


if __name__ == "__main__":
    main()

"""The bundled model with its trained drafters and without, in paired turns, on its own held-out tasks.

    python -m benchmarks.drafters [--turns 3] [--items 8] [--out benchmarks/results/drafters.json]
    python -m benchmarks.drafters --write     makes drafters.md of the result

Greedy, at most 128 tokens an answer, up to 4 drafts; `streams` prompts at a time, each in its chat format. Turns
alternate between the engines, and their tokens are compared. Milliseconds are those of a token once all rows have
their first one; CPU ms: processor time of the process. Accepted: drafts that stand of those that a step verifies for
a row.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np
from tokenizers import Tokenizer

from benchmarks.speculative import RESULTS, Bench
from headrace.base.config.tree import Options, SpeculationOptions
from headrace.bench.held_out import read_items
from headrace.bench.report import markdown_table, versions
from headrace.launch.facts import resolve_options

DEMO = Path(__file__).parents[1] / "demo"
METHODS = ("ngram", "eagle3", "mtp", "dflash", "pard")
RESULT = RESULTS / "drafters.json"
LOADS = {
    "ngram": (("copy", 1), ("json", 1), ("chat", 32)),
    "": (("chat", 1), ("story", 1), ("json", 1), ("chat", 32)),
}
"""By method; "": of the others."""
DRAFTS = 4


def prompts_of(task: str, count: int) -> list[np.ndarray]:
    """Token ids of the first held-out items of a task."""
    tokenizer = Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json"))
    template = jinja2.Environment().from_string((DEMO / "chat_template.jinja").read_text())
    items = read_items()[task][:count]
    texts = (
        template.render(messages=item.messages, tools=item.tools, add_generation_prompt=True)
        for item in items
    )
    return [np.array(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


def engine(method: str | None, streams: int) -> Bench:
    """The bundled model; `method`: how it drafts."""
    options = Options()
    scheduler = msgspec.structs.replace(options.scheduler, max_running=streams)
    if method is not None:
        config = SpeculationOptions(
            method=method,
            model=None if method == "ngram" else str(DEMO / "drafters" / method),
            num_speculative_tokens=6 if method == "ngram" else DRAFTS,
        )
        scheduler = msgspec.structs.replace(scheduler, speculative_config=config)
    kv = msgspec.structs.replace(options.kv, prefix_caching=False)
    options = msgspec.structs.replace(options, scheduler=scheduler, kv=kv)
    return Bench(resolve_options(options).engine)


def turn(bench: Bench, prompts: list[np.ndarray], streams: int) -> dict[str, Any]:
    """Answers all prompts, so many at a time: their tokens and what each took."""
    stops = bench.spec.model.eos_ids
    tokens: list[list[int]] = []
    seconds = cpu_s = 0.0
    behind = 0
    for begin in range(0, len(prompts), streams):
        some = prompts[begin : begin + streams]
        result = bench.run(some, [()] * len(some), stops)
        answers = [result["answers"].get(i, []) for i in range(len(some))]
        tokens += answers
        seconds += result["decode_s"]
        cpu_s += result["decode_cpu_s"]
        behind += result["decode_tokens"]
    return {"tokens": tokens, "ms": 1e3 * seconds / behind, "cpu_ms": 1e3 * cpu_s / behind}


def measured(method: str, turns: int, items: int) -> list[dict[str, Any]]:
    """Medians of the paired turns, a line per load."""
    lines = []
    for task, streams in LOADS.get(method, LOADS[""]):
        plain, drafting = engine(None, streams), engine(method, streams)
        prompts = prompts_of(task, max(items, streams))
        pairs = []
        for number in range(turns + 1):  # the first records the steps
            pair = turn(plain, prompts, streams), turn(drafting, prompts, streams)
            if number:
                pairs.append(pair)
        line: dict[str, Any] = {"method": method, "task": task, "streams": streams}
        speculation = drafting.core.scheduler.speculation
        assert speculation is not None
        stats = speculation.stats
        line["accepted"] = stats.num_accepted_tokens / max(1, stats.num_drafts)
        line["drafted"] = stats.num_draft_tokens / max(1, stats.num_drafts)
        line["same_tokens"] = all(a["tokens"] == b["tokens"] for a, b in pairs)
        for key in ("ms", "cpu_ms"):
            line[f"plain_{key}"] = statistics.median(a[key] for a, _ in pairs)
            line[f"drafting_{key}"] = statistics.median(b[key] for _, b in pairs)
            line[f"times_{key}"] = statistics.median(a[key] / b[key] for a, b in pairs)
        lines.append(line)
        print(json.dumps(line), flush=True)
        plain.core.close()
        drafting.core.close()
    return lines


def page(result: dict[str, Any]) -> str:
    """drafters.md."""
    facts = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
    rows = [
        (
            line["method"],
            line["task"],
            line["streams"],
            *(f"{line[f'{side}_ms']:.2f}" for side in ("plain", "drafting", "times")),
            *(f"{line[f'{side}_cpu_ms']:.2f}" for side in ("plain", "drafting", "times")),
            f"{line['accepted']:.2f} of {line['drafted']:.2f}",
            "yes" if line["same_tokens"] else "no",
        )
        for line in result["lines"]
    ]
    header = ("drafter", "task", "streams", "plain ms", "drafting ms", "times")
    header += ("plain CPU ms", "drafting CPU ms", "times", "accepted", "same tokens")
    return (
        "# Trained drafters of the bundled model\n\nMade by `python -m benchmarks.drafters`, then "
        f"`--write`: a CPU, {facts};\nmilliseconds per token behind the first, medians of "
        f"{result['turns']} paired turns. "
        "Bars: 1.4 times at one stream; no slower than 0.97 times at 32.\n\n"
        + markdown_table(header, rows)
        + "\n"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--items", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.write:
        Path(__file__).with_suffix(".md").write_text(page(json.loads(RESULT.read_text())))
        return
    lines = [
        line for method in given.methods for line in measured(method, given.turns, given.items)
    ]
    result = {"versions": versions(), "turns": given.turns, "lines": lines}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(page(result))


if __name__ == "__main__":
    main()

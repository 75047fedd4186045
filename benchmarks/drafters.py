"""The bundled model with its trained drafters and without, in paired turns, on its own held-out tasks.

    python -m benchmarks.drafters [--turns 5] [--items 16] [--out benchmarks/results/drafters.json]
    python -m benchmarks.drafters --write     makes drafters.md of the result

Greedy, at most 128 tokens an answer, up to 4 drafts (6 of n-grams, 15 of earlier answers); `streams` prompts at a
time, each in its chat format. Turns, each with items of its own as far as there are, alternate between three engines,
forth and back, and their tokens are compared: plain, drafting what pays (the default), and drafting always, which
gives the tokens of a step over what it costs. The first turn, in which steps are recorded and prices learned, does
not count. Milliseconds are those of a token once all rows have their first one; CPU ms: processor time of the
process, by which bars are judged, as machines have other work. Accepted: drafts that stand of those that a step
verifies for a row.
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
METHODS = ("ngram", "suffix", "eagle3", "mtp", "dflash", "pard")
RESULT = RESULTS / "drafters.json"
JSON_AGAIN = "json again"
"""The reference of a JSON item is to be repeated."""
LOADS = {
    "ngram": (("copy", 1), (JSON_AGAIN, 1), ("json", 1), ("copy", 32)),
    "suffix": (("chat", 1), ("story", 1), ("json", 1)),
    "": (("chat", 1), ("story", 1), ("story", 32)),
}
"""By method; "": of the others."""
BARS = {"ngram": 2.0, "": 1.4}
BUSY_BAR = 0.97
"""At 32 streams."""
MORE_DRAFTS = {"ngram": 6, "suffix": 15}
DRAFTS = 4
NOTE = """dflash and pard: 3 items, 3 turns, beside a load of 7 to 20 on two cores. There the first measured
steps of dflash said that drafts do not pay, which takes five tries, of one run in 64, to be unlearned: more
steps than these turns have. In two runs that began otherwise its chats took 2.9 times less.
"""


def prompts_of(task: str, count: int, turn: int = 0) -> list[np.ndarray]:
    """Token ids of held-out items of a task, others in each turn as far as there are."""
    tokenizer = Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json"))
    template = jinja2.Environment().from_string((DEMO / "chat_template.jinja").read_text())
    every = read_items()["json" if task == JSON_AGAIN else task]
    items = [every[(turn * count + i) % len(every)] for i in range(count)]
    if task == JSON_AGAIN:
        items = [msgspec.structs.replace(item, messages=[_again(item.reference)]) for item in items]
    texts = (
        template.render(messages=item.messages, tools=item.tools, add_generation_prompt=True)
        for item in items
    )
    return [np.array(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


def _again(text: str) -> dict[str, str]:
    return {"role": "user", "content": f"Repeat the following text: {text}"}


def engine(method: str | None, streams: int, *, adaptive: bool = True) -> Bench:
    """The bundled model; `method`: how it drafts; `adaptive`: what pays."""
    options = Options()
    scheduler = msgspec.structs.replace(options.scheduler, max_running=streams)
    if method is not None:
        config = SpeculationOptions(
            method=method,
            model=None if method in MORE_DRAFTS else str(DEMO / "drafters" / method),
            num_speculative_tokens=MORE_DRAFTS.get(method, DRAFTS),
            adaptive=adaptive,
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
        benches = {
            "plain": engine(None, streams),
            "drafting": engine(method, streams),
            "always": engine(method, streams, adaptive=False),
        }
        taken, begun = [], _counts(benches["drafting"])
        for number in range(turns + 1):  # the first records the steps
            prompts = prompts_of(task, max(items, streams), number)
            order = list(benches)[:: 1 if number % 2 else -1]
            turn_of = {name: turn(benches[name], prompts, streams) for name in order}
            if number:
                taken.append(turn_of)
            else:
                begun = _counts(benches["drafting"])
        line: dict[str, Any] = {"method": method, "task": task, "streams": streams}
        drafts, drafted, accepted = (
            now - then for now, then in zip(_counts(benches["drafting"]), begun, strict=True)
        )
        line["accepted"], line["drafted"] = accepted / max(1, drafts), drafted / max(1, drafts)
        line["same_tokens"] = all(
            one["tokens"] == each["plain"]["tokens"] for each in taken for one in each.values()
        )
        for key in ("ms", "cpu_ms"):
            for name in benches:
                line[f"{name}_{key}"] = statistics.median(each[name][key] for each in taken)
            for name in ("drafting", "always"):
                line[f"{name}_times_{key}"] = statistics.median(
                    each["plain"][key] / each[name][key] for each in taken
                )
        lines.append(line)
        print(json.dumps(line), flush=True)
        for bench in benches.values():
            bench.core.close()
    return lines


def _counts(bench: Bench) -> tuple[int, int, int]:
    """Drafts, their tokens, and those that stood, since the start."""
    stats = bench.core.scheduler.speculation.stats
    return stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens


def _bar(line: dict[str, Any]) -> str:
    """Of the times in processor time: the least, and whether it was reached; 0.8 of drafting always."""
    if line["streams"] > 1:
        least = BUSY_BAR
    else:
        least = max(BARS.get(line["method"], BARS[""]), 0.8 * line["always_times_cpu_ms"])
    return f"{least:.2f} {'met' if line['drafting_times_cpu_ms'] >= least else 'missed'}"


def page(result: dict[str, Any]) -> str:
    """drafters.md."""
    facts = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
    rows = [
        (
            line["method"],
            line["task"],
            line["streams"],
            *(
                f"{line[f'{side}_ms']:.2f}"
                for side in ("plain", "drafting", "drafting_times", "always_times")
            ),
            *(f"{line[f'{side}_cpu_ms']:.2f}" for side in ("drafting_times", "always_times")),
            f"{line['accepted']:.2f} of {line['drafted']:.2f}",
            _bar(line),
            "yes" if line["same_tokens"] else "no",
        )
        for line in result["lines"]
    ]
    header = ("drafter", "task", "streams", "plain ms", "drafting ms", "times", "always, times")
    header += ("CPU times", "always", "accepted", "bar", "same tokens")
    return (
        "# Trained drafters of the bundled model\n\nMade by `python -m benchmarks.drafters`, then "
        f"`--write`: a CPU, {facts};\nmilliseconds per token behind the first, medians of "
        f"{result['turns']} paired turns, forth and back. "
        "Drafting: what pays, the default; always:\neach step as many as there are, so the tokens of a step "
        "over its cost. Bars, of processor time, as the machine had other work: at one stream 2 times for\n"
        "n-grams and 1.4 for the others, and 0.8 of drafting always; at 32 no slower than 0.97 times.\n\n"
        + markdown_table(header, rows)
        + f"\n\n{NOTE}"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--items", type=int, default=16)
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

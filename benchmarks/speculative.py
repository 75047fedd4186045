"""Tokens per second with and without n-gram drafts, in paired turns, on texts that copy and texts
that do not.

    python -m benchmarks.speculative [--model M | --shape S] [--rows 1,4] [--turns 3] [--drafts 6] [--out FILE]
    python -m benchmarks.speculative --write     puts what results hold into speculative.md

One engine drafts and one does not, both over the same options; turns alternate, so that what else a
machine does strikes both. `copy`: one allowed id, so that what follows is there to be looked up and
each draft stands, whatever the model. `free`: random prompts and the model's own answers. The tokens
of both engines are compared on the way. `--shape`: dummy weights of a shape of benchmarks/h200, both engines
on one GPU. CPU seconds of the process stand beside wall seconds, as
shared machines have other work.
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

from benchmarks.h200.shapes import write_model
from headrace.back.executor.choose import make_executor
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import Options, SpeculationOptions
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.launch.facts import resolve_options

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE / "speculative.md"
PASSAGE, ANSWER = 96, 128
SHAPE_KV = "16GiB"
"""KV memory of each engine, where two share a GPU."""


class Bench:
    """An engine, and what it has written."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.core = EngineCore(spec, make_executor(spec))
        self._ids = 0

    def run(
        self,
        prompts: list[np.ndarray],
        allowed: list[tuple[int, ...]],
        stop_ids: tuple[int, ...] = (),
    ) -> dict[str, Any]:
        """Answers all prompts at once; `allowed`: ids that each answer is made of, empty: any."""
        begin, cpu, first, steps = time.perf_counter(), time.process_time(), self._ids, 0
        for prompt, ids in zip(prompts, allowed, strict=True):
            sampling = RowSampling(temperature=0.0, allowed_ids=ids or None)
            self.core.add(
                EngineRequest(
                    id=self._ids,
                    prompt=prompt.astype("<i4").tobytes(),
                    stop=StopRules(max_tokens=ANSWER, stop_ids=stop_ids),
                    sampling=sampling,
                )
            )
            self._ids += 1
        answers: dict[int, list[int]] = {}
        left, decoding = len(prompts), (0.0, 0.0, 0)
        while left:
            batch = self.core.step(wait=True).tokens
            steps += 1
            if batch is None:
                continue
            for id, token in zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True):
                answers.setdefault(id - first, []).append(token)
            assert all(end.error is None for end in batch.finished), batch.finished
            left -= len(batch.finished)
            if not decoding[2] and len(answers) == len(prompts):
                written = sum(len(answer) for answer in answers.values())
                decoding = time.perf_counter(), time.process_time(), written
        count = sum(len(answer) for answer in answers.values())
        behind = max(1, count - decoding[2])
        return {
            "decode_s": time.perf_counter() - decoding[0],
            "decode_cpu_s": time.process_time() - decoding[1],
            "decode_tokens": behind,
            "answers": answers,
            "steps": steps,
            "tok_s": count / (time.perf_counter() - begin),
            "cpu_ms_per_token": 1000 * (time.process_time() - cpu) / count,
        }


def tasks(rng: np.random.Generator, width: int, rows: int) -> dict[str, tuple[Any, Any]]:
    """Name -> prompts, and the ids that answers are made of."""
    free = [rng.integers(10, width, PASSAGE, dtype=np.int64) for _ in range(rows)]
    # Where one id alone is allowed the answer is that id again and again: each draft stands.
    copy = [np.concatenate([prompt, np.full(8, prompt[0])]) for prompt in free]
    return {
        "copy": (copy, [(int(prompt[0]),) for prompt in free]),
        "free": (free, [()] * rows),
    }


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Medians of all turns, by task and rows."""
    options = Options()
    if given.shape:
        model = str(write_model(Path(tempfile.mkdtemp()), given.shape))
        options = _with(options, "model", model=model, load_format="dummy", max_model_len=4096)
        options = _with(options, "kv", kv_memory=SHAPE_KV)
    elif given.model:
        options = _with(options, "model", model=given.model)
    drafting = SpeculationOptions(method="ngram", num_speculative_tokens=given.drafts)
    specs = [
        resolve_options(_with(options, "scheduler", speculative_config=how)).engine
        for how in (None, drafting)
    ]
    plain, drafted = (Bench(spec) for spec in specs)
    found: list[dict[str, Any]] = []
    for rows in (int(word) for word in given.rows.split(",")):
        turns: dict[str, list[tuple[Any, Any]]] = {"copy": [], "free": []}
        for turn in range(given.turns + 1):  # the first records the steps
            rng = np.random.default_rng(turn)
            for name, work in tasks(rng, plain.spec.model.logits_width, rows).items():
                pair = plain.run(*work), drafted.run(*work)
                same = pair[0]["answers"] == pair[1]["answers"]
                assert same or not specs[0].model.deterministic, (name, rows, turn)
                if turn:
                    turns[name].append((*pair, same))
        for name, pairs in turns.items():
            found.append({"task": name, "rows": rows, **_medians(pairs)})
    for bench in (plain, drafted):
        bench.core.close()
    device = specs[0].device
    return {"device": device.device, "threads": device.threads, "model": specs[0].model.name,
            "drafts": given.drafts, "lines": found}  # fmt: skip


def _medians(pairs: list[Any]) -> dict[str, Any]:
    line: dict[str, Any] = {"same_tokens": all(same for _, _, same in pairs)}
    for key in ("tok_s", "cpu_ms_per_token", "steps"):
        for place, name in ((0, "plain"), (1, "drafted")):
            line[f"{key}_{name}"] = statistics.median(pair[place][key] for pair in pairs)
    line["speedup"] = statistics.median(b["tok_s"] / a["tok_s"] for a, b, _ in pairs)
    return line


def _with(options: Options, group: str, **changes: Any) -> Options:
    import msgspec

    part = msgspec.structs.replace(getattr(options, group), **changes)
    return msgspec.structs.replace(options, **{group: part})


def page(results: list[dict[str, Any]]) -> str:
    """speculative.md."""
    lines = [
        "# N-gram drafts",
        "",
        f"Made by `python -m benchmarks.speculative --write`: {ANSWER} tokens behind {PASSAGE}, medians of",
        "paired turns. `copy` is the best there is (each draft stands); `free` are the model's own answers",
        "to random tokens, which repeat themselves the more the smaller the model is. CPU ms: processor",
        "time of the process per token. On CUDA a verifying step takes other tiles than a decode, so that",
        "without `--deterministic` near ties may fall otherwise.",
        "",
    ]
    if not any(one["device"] == "cuda" for one in results):
        lines += ["On an H200: not run.", ""]
    for one in results:
        lines += [
            f"{one['model']} on {one['device']}, {one['threads']} thread(s), {one['drafts']} drafts"
            f"{one.get('note', '')}:",
            "",
            "| task | rows | tok/s plain | drafted | times | CPU ms plain | drafted | same tokens |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for x in one["lines"]:
            lines.append(
                f"| {x['task']} | {x['rows']} | {x['tok_s_plain']:.0f} | {x['tok_s_drafted']:.0f} |"
                f" {x['speedup']:.2f} | {x['cpu_ms_per_token_plain']:.2f} |"
                f" {x['cpu_ms_per_token_drafted']:.2f} | {'yes' if x['same_tokens'] else 'no'} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--shape", default="", help="such as qwen3-8b")
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.write:
        files = sorted(RESULTS.glob("speculative*.json"))
        PAGE.write_text(page([json.loads(file.read_text()) for file in files]))
        return
    result = measured(given)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(page([result]))


if __name__ == "__main__":
    main()

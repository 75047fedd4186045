"""Whether drafts leave the distribution of answers alone: every drafter with every way to sample, against plain
sampling.

    python -m benchmarks.draft_statistics [--samples 400] [--drafters "ngram;eagle3, sampled"] [--out FILE]
    python -m benchmarks.draft_statistics --write      makes draft_statistics.md of the result

The bundled model continues one text for a few tokens, so many times for each way to sample. Of a pair of engines, one
without drafts, one with a drafter:

    differences   answers with the same seeds that are not equal token by token
    p             of chi-square tests of homogeneity (Pearson 1900) between answers of other seeds, one for the tokens
                  at each place behind the first: the least, times their number. Tokens that fewer than 2 * LEAST
                  answers of both have are one category

Heads that were not trained for the bundled model have random weights, so that hardly a draft stands; a draft model is
the bundled model itself, so that most stand when greedy. "sampled": by `draft_sample_method` probabilistic.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.base.wire.grammar import StructuredOutputs
from headrace.base.wire.request import SamplingParams
from headrace.bench.report import markdown_table, versions
from headrace.front.client.llm import LLM

HERE = Path(__file__).parent
DEMO = HERE.parent / "demo"
RESULT, PAGE = HERE / "results" / "draft_statistics.json", HERE / "draft_statistics.md"
PROMPT = "The cat sat on the mat. The dog sat on the"
TOKENS, DRAFTS, LEAST = 5, 3, 5
OTHER_SEEDS = 1_000_000
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.0, "top_k": 6},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "penalties": {
        **{"temperature": 0.7, "repetition_penalty": 1.2},
        **{"presence_penalty": 0.3, "frequency_penalty": 0.2},
    },
    "logit bias": {"temperature": 0.8},
    "grammar": {
        "temperature": 1.0,
        "structured_outputs": StructuredOutputs(
            regex=" (cat|dog|mat|bed|box|chair)s?( and [a-z]+)?\\."
        ),
    },
}


def chi_square(ours: Sequence[Any], theirs: Sequence[Any], least: int = LEAST) -> float:
    """p of both being drawn from one distribution over categories; 1 where there is one category."""
    one, other = Counter(ours), Counter(theirs)
    total = one + other
    kept = [name for name, count in total.items() if count >= 2 * least]
    pairs = [(one[name], other[name]) for name in kept]
    rest = len(ours) - sum(a for a, _ in pairs), len(theirs) - sum(b for _, b in pairs)
    if sum(rest):
        pairs.append(rest)
    share = len(ours) / (len(ours) + len(theirs))
    expected = [((a + b) * share, (a + b) * (1 - share)) for a, b in pairs]
    value = sum(
        (a - x) ** 2 / x + (b - y) ** 2 / y for (a, b), (x, y) in zip(pairs, expected, strict=True)
    )
    free = len(pairs) - 1
    if not free:
        return 1.0
    halves = torch.tensor([free / 2, value / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def least_p(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Of the tests at all places behind the first, times their number (Bonferroni), at most 1. An
    answer may end before."""

    def at(place: int, answers: Sequence[Sequence[int]]) -> list[int]:
        return [one[place] if place < len(one) else -1 for one in answers]

    tests = [chi_square(at(i, ours), at(i, theirs)) for i in range(1, TOKENS)]
    return min(1.0, len(tests) * min(tests))


def drafters(folder: Path) -> dict[str, dict[str, Any]]:
    """The configurations of all drafters; heads that were not trained are written to the folder."""
    from tests.back.speculative.checkpoints import save_head
    from tests.back.speculative.test_blocks import pard_folder

    more = {"num_speculative_tokens": DRAFTS, "adaptive": False}
    untrained = ("eagle", "medusa", "mlp_speculator", "dflash", "dspark")
    for kind in untrained:
        save_head(folder / kind, "medusa-shared" if kind == "medusa" else kind)
    folders = {
        **{"draft_model": DEMO / "model", "pard": pard_folder(folder / "pard")},
        **{"eagle3": DEMO / "drafters" / "eagle3", "mtp": DEMO / "drafters" / "mtp"},
        **{kind: folder / kind for kind in untrained},
    }
    texts = {
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, **more},
        "suffix": {"method": "suffix", "suffix_decoding_min_token_prob": 0.0, **more},
    }
    heads = {kind: {"method": kind, "model": str(at), **more} for kind, at in folders.items()}
    sampled = {
        f"{kind}, sampled": {**config, "draft_sample_method": "probabilistic"}
        for kind, config in heads.items()
    }
    return texts | heads | sampled


class Answers:
    """An engine's answers."""

    def __init__(self, drafter: dict[str, Any] | None) -> None:
        self._llm = LLM("", speculative_config=drafter, deterministic=True, max_running=8)

    def of(self, way: dict[str, Any], seeds: range) -> list[tuple[int, ...]]:
        """Their tokens, with these seeds."""
        params = [
            SamplingParams(**way, seed=seed, max_tokens=TOKENS, ignore_eos=True) for seed in seeds
        ]
        outputs = self._llm.generate([PROMPT] * len(params), params, progress=False)
        return [tuple(one.outputs[0].token_ids) for one in outputs]

    def close(self) -> None:
        """Ends the engine."""
        self._llm.close()


def biases(plain: Answers, samples: int) -> dict[int, float]:
    """Against the tokens said most, by turns less and more."""
    said = Counter(token for one in plain.of(WAYS["temperature"], range(samples)) for token in one)
    return {token: 1.5 * (-1) ** (1 + i) for i, (token, _) in enumerate(said.most_common(6))}


def measured(names: Sequence[str] | None, samples: int, folder: Path) -> list[dict[str, Any]]:
    """A line for each drafter and way to sample."""
    plain, lines = Answers(None), []
    same = range(samples)
    ways = {**WAYS, "logit bias": {**WAYS["logit bias"], "logit_bias": biases(plain, samples)}}
    mine = {name: plain.of(way, same) for name, way in ways.items()}
    plain.close()
    for number, (drafter, config) in enumerate(drafters(folder).items(), start=1):
        if names and drafter not in names:
            continue
        other = range(number * OTHER_SEEDS, number * OTHER_SEEDS + samples)
        drafting = Answers(config)
        for name, way in ways.items():
            equal = drafting.of(way, same)
            theirs = drafting.of(way, other)
            line = {
                **{"drafter": drafter, "way": name, "samples": samples},
                "differences": sum(a != b for a, b in zip(mine[name], equal, strict=True)),
                "p": least_p(mine[name], theirs),
            }
            lines.append(line)
            print(json.dumps(line), flush=True)
        drafting.close()
    return lines


def page(result: dict[str, Any]) -> str:
    """draft_statistics.md."""
    facts = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
    lines = result["lines"]
    names = list(dict.fromkeys(line["drafter"] for line in lines))
    found = {(line["drafter"], line["way"]): line for line in lines}
    rows = [
        (
            name,
            sum(found[name, way]["differences"] for way in WAYS),
            *(f"{found[name, way]['p']:.3f}" for way in WAYS),
        )
        for name in names
    ]
    low = sorted(line["p"] for line in lines)
    samples = lines[0]["samples"]
    return "\n".join((
        "# Distribution of answers with drafts",
        "",
        f"`python -m benchmarks.draft_statistics`, {samples} answers of each engine and way to sample; {facts}.",
        "The bundled model on a CPU, answers of "
        f"{TOKENS} tokens, up to {DRAFTS} drafts. Differences: answers with the same seeds that",
        "are not equal token by token to those without drafts, over all ways to sample. The other columns: p of",
        "chi-square tests between answers with and without drafts under other seeds: the least of four places, times",
        "four. Sampled: drafts are (draft_sample_method probabilistic). The smallest of these "
        f"{len(low)} is {low[0]:.3f}; the bar is 0.01.",
        "",
        markdown_table(("drafter", "differences", *WAYS), rows),
        "",
    ))  # fmt: skip


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--drafters", default="", help="names, with ; between them")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        PAGE.write_text(page(json.loads(RESULT.read_text())))
        return
    names = [name for name in arguments.drafters.split(";") if name]
    with tempfile.TemporaryDirectory() as folder:
        lines = measured(names, arguments.samples, Path(folder))
    arguments.out.write_text(json.dumps({"versions": versions(), "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()

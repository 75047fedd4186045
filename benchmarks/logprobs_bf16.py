"""Log-probabilities of a bf16 engine against transformers in bf16 and fp32, and where the largest difference is from.

    python -m benchmarks.logprobs_bf16 --write

Every token of texts of this repository's documentation, of the bundled model, whose checkpoint is bf16: none of the
differences is one of weights. Arrangements:

    headrace bf16, fp32       the engine; `--dtype`
    transformers fp32         the reference
    transformers bf16         logits rounded to bf16, as transformers leaves them
    ... with an fp32 head     its hidden states in bf16, logits from them in fp32, as the engine makes them

The table of the largest differences tells the token's logit, how far apart numbers of bf16 lie there (`spacing`), and
what each arrangement makes of the same token.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from benchmarks.robustness.serving import DEMO
from headrace import LLM, SamplingParams

TEXTS = ("README.md", "docs/SERVING.md", "docs/MEDIA.md", "docs/SPECULATION.md", "docs/LORA.md")
PIECE_CHARS, PIECES = 1000, 2
Scores = npt.NDArray[np.float64]


def pieces() -> list[str]:
    """The texts, cut."""
    root = Path(__file__).parents[1]
    found = []
    for name in TEXTS:
        text = (root / name).read_text()
        found += [text[i * PIECE_CHARS :][:PIECE_CHARS] for i in range(PIECES)]
    return [text for text in found if len(text) > PIECE_CHARS // 2]


def ours(dtype: str, ids: list[list[int]]) -> Scores:
    """The engine's log-probability of every token but each text's first."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(str(DEMO), dtype=dtype, max_running=8, kv_memory="256MiB") as llm:
        outputs = llm.generate([list(one) for one in ids], params, progress=False)
    scores = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        scores += [one.token.logprob for one in output.prompt_logprobs if one is not None]
    return np.array(scores)


class Reference:
    """transformers in one dtype: log-probabilities, and the logits they came from."""

    def __init__(self, dtype: torch.dtype, *, fp32_head: bool = False) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype).eval()
        self._head = self.model.lm_head.weight.float() if fp32_head else None

    def __call__(self, ids: list[list[int]]) -> tuple[Scores, Scores]:
        """Of every token but each text's first: log-probability, logit."""
        scores, logits = [], []
        for one in ids:
            tokens = torch.tensor([one])
            with torch.no_grad():
                if self._head is None:
                    made = self.model(tokens).logits[0].float()
                else:
                    made = self.model.model(tokens).last_hidden_state[0].float() @ self._head.T
            target = tokens[0, 1:, None]
            scores.append(made[:-1].double().log_softmax(1).gather(1, target)[:, 0])
            logits.append(made[:-1].gather(1, target)[:, 0].double())
        return torch.cat(scores).numpy(), torch.cat(logits).numpy()


def row(name: str, a: Scores, b: Scores) -> dict[str, Any]:
    """How two arrangements differ."""
    gap = np.abs(a - b)
    return {
        "arrangements": name, "mean": round(float(gap.mean()), 5),
        "rms": round(float(np.sqrt((gap**2).mean())), 5),
        "p99": round(float(np.percentile(gap, 99)), 4), "max": round(float(gap.max()), 4),
    }  # fmt: skip


def spacing(value: float) -> float:
    """How far apart neighbouring numbers of bf16 are there."""
    return float(2.0 ** (math.floor(math.log2(max(abs(value), 2.0**-126))) - 7))


def report() -> dict[str, Any]:
    """The tables."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    ids = [tokenizer(text)["input_ids"] for text in pieces()]
    fp32, logits = Reference(torch.float32)(ids)
    bf16, _ = Reference(torch.bfloat16)(ids)
    head, _ = Reference(torch.bfloat16, fp32_head=True)(ids)
    engine, exact = ours("bfloat16", ids), ours("float32", ids)
    pairs = [
        row("headrace fp32, transformers fp32", exact, fp32),
        row("headrace bf16, transformers fp32", engine, fp32),
        row("transformers bf16, transformers fp32", bf16, fp32),
        row("transformers bf16 with an fp32 head, transformers fp32", head, fp32),
        row("headrace bf16, transformers bf16", engine, bf16),
        row("headrace bf16, transformers bf16 with an fp32 head", engine, head),
    ]
    by_probability = []
    for low, high in ((-1, 0), (-3, -1), (-6, -3), (-10, -6), (-1e9, -10)):
        inside = (fp32 > low) & (fp32 <= high)
        if inside.any():
            errors = [
                float(np.sqrt(((x - fp32)[inside] ** 2).mean())) for x in (engine, bf16, head)
            ]
            by_probability.append({
                "logprob": f"{max(low, -99)} to {high}", "tokens": int(inside.sum()),
                **dict(zip(("headrace", "transformers", "fp32_head"),
                           (round(e, 4) for e in errors), strict=True)),
            })  # fmt: skip
    tokens = np.concatenate([one[1:] for one in ids])
    largest = [
        {
            "token": tokenizer.decode([int(tokens[i])]), "logprob_fp32": round(float(fp32[i]), 3),
            "logit_fp32": round(float(logits[i]), 2), "spacing": spacing(logits[i]),
            "headrace_bf16": round(float(engine[i] - fp32[i]), 4),
            "transformers_bf16": round(float(bf16[i] - fp32[i]), 4),
            "transformers_fp32_head": round(float(head[i] - fp32[i]), 4),
            "headrace_fp32": round(float(exact[i] - fp32[i]), 6),
        }
        for i in np.argsort(-np.abs(engine - fp32))[:8]
    ]  # fmt: skip
    return {
        "tokens": int(fp32.size), "pairs": pairs, "rms_by_probability": by_probability,
        "largest": largest,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    cells = [[repr(x) if head == "token" else str(x) for head, x in r.items()] for r in rows]
    return "\n".join([*lines, *("| " + " | ".join(one) + " |" for one in cells)]) + "\n"


def page(found: dict[str, Any]) -> str:
    """The report as a page."""
    of = {one["arrangements"]: one for one in found["pairs"]}
    engine = of["headrace bf16, transformers fp32"]
    other = of["transformers bf16, transformers fp32"]
    exact = of["headrace fp32, transformers fp32"]
    both = of["headrace bf16, transformers bf16"]
    independent = math.hypot(engine["rms"], other["rms"])
    return "\n".join((
        "# Log-probabilities in bf16\n",
        f"`python -m benchmarks.logprobs_bf16 --write` writes this page: {found['tokens']} tokens of "
        "the documentation, the\nbundled model (a bf16 checkpoint, so no weight is rounded), one CPU.\n",
        table(found["pairs"]),
        f"In fp32 the engine's differ from transformers' by at most {exact['max']:g}: both compute the "
        f"same function. In bf16\nthe engine's differ from fp32 by at most {engine['max']:g} "
        f"(rms {engine['rms']:g}), those of transformers in bf16 by {other['max']:g}\n"
        f"(rms {other['rms']:g}). The difference is that of bf16 arithmetic: each layer's output is "
        "rounded to 8 bits of\nmantissa, in both; transformers rounds the logits too, the engine does "
        "not.\n",
        "Root mean square of the difference from fp32, by the token's log-probability:\n",
        table(found["rms_by_probability"]),
        "The largest differences of the engine, and what the other arrangements make of the same "
        "tokens (each less\nfp32's). `spacing`: how far apart numbers of bf16 lie at the logit. They "
        "stand at improbable tokens, whose logit\nis a small sum of large terms of either sign. They "
        "are noise of rounding, not an error the engine has there:\nengine and transformers in bf16 "
        f"differ from each other by rms {both['rms']:g}, which is what two independent\nerrors of "
        f"their sizes give ({independent:.4f}), and at other tokens transformers errs by more than "
        "the engine at any.\n",
        table(found["largest"]),
    ))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="keep the page beside this script")
    given = parser.parse_args()
    found = report()
    print(json.dumps(found, indent=1))
    if given.write:
        Path(__file__).with_suffix(".md").write_text(page(found))
    of = {one["arrangements"]: one for one in found["pairs"]}
    same = of["headrace fp32, transformers fp32"]["max"] < 1e-3
    engine, other = (
        of[f"{who} bf16, transformers fp32"]["rms"] for who in ("headrace", "transformers")
    )
    return 0 if same and engine <= 1.2 * other else 1


if __name__ == "__main__":
    sys.exit(main())

"""What speculation brings a GPU, with acceptance forced: dummy weights, one GPU.

    python -m benchmarks.h200.drafting [--parts pass,one,many] [--shape qwen3-8b] [--out FILE]
    python -m benchmarks.h200.drafting --write FILE     makes drafting.md of it

pass: a pass of a head of one layer (EAGLE-3) with a vocabulary of 32,000 and with the model's whole one, beside a plain
step: steps that verify 7 drafts and 3, less what the same steps take with n-gram drafts, over the four passes between.
one: tokens per second of one row with 3 drafts of which 2 stand, so 3 tokens a step, drafts from the text. many: of 64
and 256 rows with 4 drafts of which 2 or 3 stand in turn, as the options are by default (`auto`), beside plain decoding.

Dummy weights draft nothing that stands. So rows are allowed one token each, whose drafts all stand, and the drafts
behind those that shall are made wrong on the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.h200.shapes import write_model
from benchmarks.h200.verify import Steps
from benchmarks.speculative import PASSAGE, Bench
from headrace.back.executor.inline import InlineExecutor
from headrace.back.speculative.ngram import NgramDrafter
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import Options, SpeculationOptions
from headrace.bench.report import markdown_table, versions
from headrace.launch.facts import resolve_options

HEAD_VOCABULARY = 32_000
FEW, MANY = 3, 7
"""Drafts of the two steps between which passes are counted."""
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
PASS_BARS = {"32k": 5.5, "whole": 12.0}
"""Per cent of a plain step, by the head's vocabulary."""
BARS = {
    "1 rows, 3 drafts": ("drafted_tok_s", 600.0),
    "64 rows, 4 drafts": ("times", 1.25),
    "256 rows, 4 drafts": ("times", 1.0),
}
"""By part of the result: what is compared, and the least."""
WRONG = 7
"""A token that no row is allowed."""


def spec_of(
    model: str, rows: int, longest: int, drafting: SpeculationOptions | None, kv_memory: str | None
) -> EngineSpec:
    """An engine for so many rows."""
    options = Options()
    changed = {
        "model": {"model": model, "load_format": "dummy", "max_model_len": longest},
        "kv": {"prefix_caching": False, "kv_memory": kv_memory},
        "scheduler": {"max_running": rows, "speculative_config": drafting},
    }
    for group, fields in changed.items():
        part = msgspec.structs.replace(getattr(options, group), **fields)
        options = msgspec.structs.replace(options, **{group: part})
    return resolve_options(options).engine


def write_head(folder: Path, model: str, vocabulary: int) -> str:
    """A head for a model of a shape, of random weights."""
    config = json.loads((Path(model) / "config.json").read_text())
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": vocabulary,
    }
    head = folder / f"head-{vocabulary}"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(config | own))
    save_file(_head_tensors(config, vocabulary), head / "model.safetensors")
    return str(head)


def _head_tensors(config: dict[str, Any], vocabulary: int) -> dict[str, torch.Tensor]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, of_kv = (
        config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads")
    )
    shapes = {
        "fc": (width, 3 * width),
        "lm_head": (vocabulary, width),
        "midlayer.self_attn.q_proj": (heads, 2 * width),
        "midlayer.self_attn.k_proj": (of_kv, 2 * width),
        "midlayer.self_attn.v_proj": (of_kv, 2 * width),
        "midlayer.self_attn.o_proj": (width, heads),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
    }
    norms = ("norm", *(f"midlayer.{name}" for name in NORMS))
    tensors = {
        f"{name}.weight": torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.02, 0.02)
        for name, shape in shapes.items()
    }
    tensors |= {f"{name}.weight": torch.ones(width, dtype=torch.bfloat16) for name in norms}
    if vocabulary != config["vocab_size"]:
        tensors["d2t"] = torch.zeros(vocabulary, dtype=torch.int64)
    return tensors


def passes(model: str, folder: Path) -> dict[str, Any]:
    """Milliseconds of a plain step, and of a pass by the head's vocabulary."""
    whole = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    line: dict[str, Any] = {"part": "pass"}
    steps: dict[str, list[float]] = {}
    for name, vocabulary in (("ngram", 0), ("32k", HEAD_VOCABULARY), ("whole", whole)):
        head = write_head(folder, model, vocabulary) if vocabulary else None
        drafting = SpeculationOptions(
            method="eagle3" if head else "ngram",
            model=head,
            num_speculative_tokens=MANY,
            adaptive=False,
        )
        executor = InlineExecutor(spec_of(model, 1, 1024, drafting, "4GiB"))
        over = Steps(executor, rows=1, context=256, drafts=MANY)
        kinds = (0, FEW, MANY)
        turns = [[over.step_ms(kind, 40) for kind in kinds] for _ in range(6)][1:]
        steps[name] = [statistics.median(turn[i] for turn in turns) for i in range(3)]
        line[name] = dict(zip(("plain_ms", "few_ms", "many_ms"), steps[name], strict=True))
        over.end()
        executor.close()
        del over, executor
        _free()
    text = steps["ngram"]
    for name in ("32k", "whole"):
        own = steps[name]
        pass_ms = ((own[2] - own[1]) - (text[2] - text[1])) / (MANY - FEW)
        line[f"{name}_pass_ms"], line[f"{name}_share"] = pass_ms, pass_ms / text[0]
    return line


def spoiling(stand: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Within it n-gram drafts behind the first `stand(lengths)` of each row are wrong."""
    propose = NgramDrafter.propose

    def spoiled(self: NgramDrafter, row_R, query_start_R1, tables, count_M, most) -> None:
        propose(self, row_R, query_start_R1, tables, count_M, most)
        at_R = row_R.long()
        length_R = tables.length_M.index_select(0, at_R)
        width = tables.tokens_MC.shape[1]
        place_R = (length_R + stand(length_R)).long().clamp_(max=width - 1)
        wrong_R = torch.full_like(row_R, WRONG)
        tables.tokens_MC.index_put_((at_R, place_R), wrong_R)

    return patch.object(NgramDrafter, "propose", spoiled)


def rate(bench: Bench, rows: int, turn: int) -> float:
    """Tokens per second behind the first ones, rows allowed one token each."""
    rng = np.random.default_rng(turn)
    prompts = [rng.integers(10, 90_000, PASSAGE, dtype=np.int64) for _ in range(rows)]
    copied = [np.concatenate([prompt, np.full(8, prompt[0])]) for prompt in prompts]
    done = bench.run(copied, [(int(prompt[0]),) for prompt in prompts])
    return done["decode_tokens"] / done["decode_s"]


def forced(
    model: str, rows: int, drafts: int, stand: Callable[[torch.Tensor], torch.Tensor], turns: int
) -> dict[str, Any]:
    """Tokens per second without and with drafts of which so many stand, in paired turns."""
    drafting = SpeculationOptions(method="ngram", num_speculative_tokens=drafts)
    with spoiling(stand):
        plain, drafted = (
            Bench(spec_of(model, rows, 512, how, "12GiB")) for how in (None, drafting)
        )
        pairs = [(rate(plain, rows, i), rate(drafted, rows, i)) for i in range(turns + 1)][1:]
    speculation = drafted.core.scheduler.speculation.stats
    line = {
        "part": f"{rows} rows, {drafts} drafts",
        "plain_tok_s": statistics.median(pair[0] for pair in pairs),
        "drafted_tok_s": statistics.median(pair[1] for pair in pairs),
        "times": statistics.median(pair[1] / pair[0] for pair in pairs),
        "accepted": speculation.num_accepted_tokens / max(1, speculation.num_drafts),
        "drafted": speculation.num_draft_tokens / max(1, speculation.num_drafts),
    }
    for bench in (plain, drafted):
        bench.core.close()
    del plain, drafted
    _free()
    return line


def page(result: dict[str, Any]) -> str:
    """drafting.md."""
    rows: list[tuple[str, ...]] = []
    for line in result["lines"]:
        if line["part"] == "pass":
            for name, most in PASS_BARS.items():
                share = 100 * line[f"{name}_share"]
                value = f"{line[f'{name}_pass_ms']:.3f} ms, {share:.1f} % of {line['ngram']['plain_ms']:.2f} ms"
                rows.append(
                    (f"a head's pass, {name} vocabulary", value, f"{most} %", _met(share <= most))
                )
            continue
        key, least = BARS[line["part"]]
        value = f"{line['plain_tok_s']:,.0f} -> {line['drafted_tok_s']:,.0f} tok/s, {line['times']:.2f} x"
        value += f" ({line['accepted']:.1f} of {line['drafted']:.1f} stand)"
        rows.append((line["part"], value, f"{least:g} {key}", _met(line[key] >= least)))
    facts = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
    about = (__doc__ or "").partition("makes drafting.md of it")[2].strip()
    table = markdown_table(("what", result["shape"], "bar", ""), rows)
    return f"# Drafts on a GPU\n\n{about}\n\n{facts}.\n\n{table}\n"


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--parts", default="pass,one,many")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rows", default="64,256", help="of the part `many`")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    if given.write:
        Path(__file__).with_suffix(".md").write_text(page(json.loads(given.write.read_text())))
        return
    folder = Path(tempfile.mkdtemp())
    model = str(write_model(folder, given.shape))
    lines: list[dict[str, Any]] = []
    for part in given.parts.split(","):
        if part == "pass":
            lines.append(passes(model, folder))
        elif part == "one":
            lines.append(forced(model, 1, 3, lambda n: torch.full_like(n, 2), given.turns))
        else:
            for rows in (int(word) for word in given.rows.split(",")):
                lines.append(forced(model, rows, 4, lambda n: 2 + (n & 1), given.turns))
        print(json.dumps(lines[-1]), flush=True)
        if given.out:
            result = {"versions": versions(), "shape": given.shape, "lines": lines}
            given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

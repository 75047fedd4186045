"""Mixtures that transformers has no class for, but whose layers are those of one it has: Nemotron 3 Puzzle, whose
layers have experts of their own sizes, and LongCat-Flash-Lite, whose embeddings know n-grams (MOD-17)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.back.models.published_keys import in_common_keys
from headrace.base.errors import CheckpointError
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import describe
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.tensor_parallel_rank import LENGTHS as RANK_LENGTHS
from tests.models.test_parity import (
    LENGTHS,
    SIZES,
    BothModels,
    both_models,
    compare,
    compare_last_tokens,
    tiny_config,
)
from tests.rank_processes import run_ranks

NEAREST, END = 3, 5
"""Tokens of the longest n-gram, and the token that they do not reach back over."""
OWN = {"moe_intermediate_size": 40, "num_experts_per_tok": 3}


def rewritten(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in {**config, **keys}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def puzzle(folder: Path) -> BothModels:
    """Two models' experts in one; the last layer's are its own."""
    config = tiny_config("nemotron-h-experts")
    for key, value in OWN.items():
        setattr(config, key, value)
    other = save_oracle(config, folder, seed=12)
    oracle = save_oracle(tiny_config("nemotron-h-experts"), folder)
    oracle.model.layers[-1] = other.model.layers[-1]
    oracle.save_pretrained(folder)
    kinds = json.loads((folder / "config.json").read_text())["layers_block_type"]
    blocks: list[dict[str, Any]] = [{"block_type": kind} for kind in kinds]
    blocks[-1] |= OWN
    blocks[1] |= {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
    rewritten(
        folder,
        architectures=["NemotronHPuzzleForCausalLM"],
        block_configs=blocks,
        **dict.fromkeys((*OWN, "layers_block_type", "num_hidden_layers")),
    )
    return both_models(folder, oracle)


def longcat(folder: Path) -> BothModels:
    """LongCat-Flash over embeddings that are made of n-grams here, token by token."""
    oracle = save_oracle(tiny_config("longcat-flash"), folder)
    splits, vocabulary = 2, SIZES["vocab_size"]
    width = 64
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(folder / "model.safetensors")
    count = splits * (NEAREST - 1)
    size = width // count
    for i in range(count):
        table = torch.randn(3 * vocabulary + 2 * i + 1, size, generator=generator)
        up = torch.randn(width, size, generator=generator) / size**0.5
        tensors[f"model.ngram_embeddings.embedders.{i}.weight"] = table
        tensors[f"model.ngram_embeddings.post_projs.{i}.weight"] = up
    save_file(tensors, folder / "model.safetensors")
    rewritten(
        folder,
        architectures=["LongcatFlashNgramForCausalLM"],
        model_type="longcat_flash_ngram",
        ngram_vocab_size_ratio=3,
        emb_neighbor_num=NEAREST,
        emb_split_num=splits,
        eos_token_id=END,
    )

    def embedded(row: list[int]) -> torch.Tensor:
        rows = []
        for at, token in enumerate(row):
            first = max((i + 1 for i in range(at) if row[i] == END), default=0)
            total = tensors["model.embed_tokens.weight"][token]
            for i in range(count):
                back = range(min(i // splits + 2, at - first + 1))
                number = sum(row[at - step] * vocabulary**step for step in back)
                name = "model.ngram_embeddings.{}." + f"{i}.weight"
                table = tensors[name.format("embedders")]
                up = tensors[name.format("post_projs")]
                total = total + up @ table[number % (3 * vocabulary + 2 * i + 1)]
            rows.append(total / (1 + count))
        return torch.stack(rows)

    rows = random_rows(vocabulary, LENGTHS)
    rows[0][3] = rows[0][9] = rows[0][10] = END
    with torch.inference_mode():
        theirs = [oracle(inputs_embeds=embedded(row)[None]).logits[0].float() for row in rows]
    return BothModels(rows, theirs, load_ours(model_spec(folder)))


CASES: dict[str, Callable[[Path], BothModels]] = {"puzzle": puzzle, "longcat-lite": longcat}


@pytest.mark.parametrize("case", [pytest.param("puzzle", marks=pytest.mark.slow), "longcat-lite"])
def test_a_checkpoint_has_the_logits_of_transformers_layers(case: str, tmp_path: Path) -> None:
    rows, theirs, ours = CASES[case](tmp_path)
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, theirs, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_last_tokens_alone_have_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    compare_last_tokens(CASES[case](tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_logits_of_one(case: str, tmp_path: Path) -> None:
    ours = CASES[case](tmp_path).ours
    spec = model_spec(tmp_path)
    rows = random_rows(spec.logits_width, RANK_LENGTHS)
    alone = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    run_ranks("tests.models.tensor_parallel_rank", 2, tmp_path / "store", tmp_path)
    for rank in range(2):
        compare(torch.load(tmp_path / f"rank{rank}.pt"), alone, 1e-4)


def test_sizes_of_its_own_that_are_not_of_experts_are_refused() -> None:
    shape = {key: SIZES[key] for key in SIZES if not key.endswith("_id")}
    blocks = [{"block_type": "mamba"}, {"block_type": "attention", "num_key_value_heads": 1}]
    config = {**shape, "architectures": ["NemotronHPuzzleForCausalLM"], "block_configs": blocks}
    located = LocatedModel(path=Path("none"), name="m", format="dummy")
    with pytest.raises(CheckpointError, match="block_configs: 1: num_key_value_heads"):
        describe(located, in_common_keys(config), {}, None)

"""Adapters with magnitudes, of tables and heads, and of experts, as PEFT saves them: rows of several and of none
beside each other have the logits of PEFT's own model (ENG-18, ENG-20), on one rank and as shares of two."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.back.lora.store import AdapterStore
from headrace.base.config.resolved import AdapterSpec
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, oracle_logits, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import SIZES, compare, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CPU = torch.device("cpu")
LENGTHS = (17, 9, 13)
KINDS = ("magnitudes", "tables", "experts")
LINEAR = ["q_proj", "v_proj", "o_proj", "down_proj", "gate_proj"]
ATTENTION = ["q_proj", "q_b_proj", "o_proj"]
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "magnitudes": {"target_modules": LINEAR, "use_dora": True},
    "tables": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "head": {"target_modules": ["lm_head"], "use_dora": True, "use_rslora": True},
    "experts": {"target_modules": ATTENTION, "target_parameters": FUSED},
    "downs": {"target_modules": ATTENTION, "target_parameters": FUSED[1:]},
}
CASES = [
    ("llama-biased-tied", "magnitudes", "tables"),
    ("qwen2", "head", "magnitudes"),
    ("gemma2", "tables", "magnitudes"),
    ("qwen3-moe", "experts", "downs"),
    ("qwen2-moe", "downs", "experts"),
    ("deepseek-v3", "experts", "head"),
]


def spec_of(folder: Path) -> Any:
    adapters = AdapterSpec(slots=2, max_rank=8, kept=4, kinds=KINDS)
    return msgspec.structs.replace(model_spec(folder), adapters=adapters)


def by_peft(model: Any, folder: Path, seed: int, **config: Any) -> Any:
    """The model with an adapter of random matrices, saved in `folder`."""
    peft = pytest.importorskip(
        "peft"
    )  # here: every worker collects this file, and it is slow to import
    rank = 4 + seed
    adapted = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(r=rank, lora_alpha=9, **config)
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude" in name:
                parameter *= torch.rand(parameter.shape, generator=generator) + 0.5
            elif "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.parametrize(("case", "first", "second"), CASES)
def test_rows_have_the_logits_of_pefts_model(
    case: str, first: str, second: str, tmp_path: Path
) -> None:
    oracle = save_oracle(tiny_config(case), tmp_path)
    ours = load_ours(spec_of(tmp_path))
    store = AdapterStore(ours.adapters, CPU)
    models = []
    for slot, kind in enumerate((first, second), start=1):
        models.append(by_peft(oracle, tmp_path / kind, slot, **ADAPTERS[kind]))
        store.read(kind, str(tmp_path / kind))
        store.place(kind, slot)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    how = {"block_tokens": BLOCK_TOKENS, "dtype": torch.float32}
    got = teacher_forced(ours, rows, slots=(1, 0, 2), **how)
    theirs = [
        oracle_logits(model, [row])[0]
        for model, row in zip((models[0], oracle, models[1]), rows, strict=True)
    ]
    compare(got, theirs, 1e-4)
    assert (theirs[0] - oracle_logits(oracle, rows[:1])[0]).abs().max() > 0.05, "it changes nothing"

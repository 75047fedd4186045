"""RWKV 6 and 7 and PLaMo 2, which transformers has no class for, against independent references: teacher-forced logits
of a chunked run, and greedy tokens through the engine in chunks, beside others and behind a snapshot, on recorded
steps."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.errors import CheckpointError
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_mixture import NUM_TOKENS, answers
from tests.models.test_parity import LENGTHS, compare
from tests.models.test_recurrent import engine, prompts_of
from tests.references import (
    alice_ai,
    berrylm,
    deepseek_v41,
    jet_nemotron,
    phi4_flash,
    plamo2,
    rwkv6,
    rwkv7,
    rwkv_hybrid,
)

Tensors = dict[str, torch.Tensor]
CASES: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "rwkv7": (rwkv7, rwkv7.CONFIG),
    "rwkv6": (rwkv6, rwkv6.CONFIG),
    "plamo2": (plamo2, plamo2.CONFIG),
}
ELSEWHERE: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "phi-4-flash": (phi4_flash, phi4_flash.CONFIG),
    "alice-ai": (alice_ai, alice_ai.CONFIG),
    "berrylm": (berrylm, berrylm.CONFIG),
    "deepseek-v41": (deepseek_v41, deepseek_v41.CONFIG),
    "jet-nemotron": (jet_nemotron, jet_nemotron.CONFIG),
}
"""Of which test_reference_decoders.py compares the logits."""

UNRECORDED = ("rwkv6", "plamo2", *ELSEWHERE)
"""They use operations of PyTorch."""


def checkpoint(folder: Path, name: str, **changes: Any) -> tuple[Tensors, dict[str, Any]]:
    module, config = (CASES | ELSEWHERE)[name]
    config = config | changes
    weights = module.tensors(config)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return weights, config


@pytest.mark.parametrize("name", CASES)
def test_it_has_the_logits_of_the_reference(name: str, tmp_path: Path) -> None:
    weights, config = checkpoint(tmp_path, name)
    rows = random_rows(config["vocab_size"], LENGTHS)
    ours = load_ours(model_spec(tmp_path))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, [CASES[name][0].logits(config, weights, row) for row in rows], 1e-4)


def test_qwen_with_layers_of_rwkv_6_has_the_logits_of_its_reference(tmp_path: Path) -> None:
    """Under the names and keys of its published checkpoint."""
    weights = rwkv_hybrid.tensors(rwkv_hybrid.SIX)
    names = {"receptance": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    stored = {}
    for name, one in weights.items():
        for ours, theirs in names.items():
            name = name.replace(f"self_attn.{ours}.", f"self_attn.{theirs}.")
        stored[name] = one
    save_file(stored, tmp_path / "model.safetensors")
    ranks = {
        key: weights[f"model.layers.0.self_attn.{name}"].shape[1]
        for key, name in (
            ("lora_rank_tokenshift", "time_maa_w2"),
            ("lora_rank_decay", "time_decay_w1"),
        )
    }
    sizes = {key: rwkv_hybrid.SIX[key] for key in rwkv_hybrid.SIX if key not in HYBRID}
    config = {"architectures": ["RWKV6Qwen2ForCausalLM"], **sizes, **ranks}
    config |= {"num_attention_heads": 64 // 16, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = random_rows(config["vocab_size"], LENGTHS)
    got = teacher_forced(
        load_ours(model_spec(tmp_path)), rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32
    )
    compare(got, [rwkv_hybrid.logits(rwkv_hybrid.SIX, weights, row) for row in rows], 1e-4)


HYBRID = ("head_size", "wkv_version", "attention_bias")
"""What the published config does not state."""


def slow(*names: str) -> list[Any]:
    """Parameters."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def greedy_of(name: str, weights: Tensors, config: dict[str, Any], prompt: list[int]) -> list[int]:
    row = list(prompt)
    for _ in range(NUM_TOKENS):
        row.append(int((CASES | ELSEWHERE)[name][0].logits(config, weights, row)[-1].argmax()))
    return row[len(prompt) :]


@pytest.mark.parametrize("name", ["rwkv7", *slow("rwkv6", "plamo2", *ELSEWHERE)])
def test_tokens_are_the_references_in_chunks_and_behind_a_snapshot(
    name: str, tmp_path: Path
) -> None:
    """ENG-10: beside another request, and a follow-up that begins from a snapshot."""
    (weights, config), core = checkpoint(tmp_path, name), engine(tmp_path)
    first, second = prompts_of(41, 23)
    prompts = {1: first, 2: second}
    expected = {id: greedy_of(name, weights, config, one) for id, one in prompts.items()}
    assert answers(core, prompts) == (expected, 0)
    follow_up = [*first, *second[:5]]
    behind = {3: greedy_of(name, weights, config, follow_up)}
    assert answers(core, {3: follow_up}) == (behind, 32)
    if isinstance(load(), NativeLibrary) and name not in UNRECORDED:
        replay = core.executor._resident.runner._steps._replay
        assert replay.foreign == () and replay.num_graphs > 0
    core.executor.close()


@pytest.mark.slow
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    (weights, config), core = checkpoint(tmp_path, "plamo2"), engine(tmp_path, num_blocks=7)
    prompts = dict(enumerate(prompts_of(14, 13, 15, 12), start=1))
    expected = {id: greedy_of("plamo2", weights, config, one) for id, one in prompts.items()}
    assert answers(core, prompts)[0] == expected
    assert core.scheduler.num_preemptions > 0
    core.executor.close()


@pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_alone_and_beside_others(name: str, tmp_path: Path) -> None:
    """With --deterministic."""
    checkpoint(tmp_path, name)
    ours = load_ours(replace(model_spec(tmp_path), deterministic=True))
    rows = random_rows(97, (37, 22, 9))
    run = {"block_tokens": BLOCK_TOKENS, "dtype": torch.float32}
    beside, alone = (teacher_forced(ours, some, **run)[0] for some in (rows, rows[:1]))
    assert torch.equal(beside, alone)


def test_shifts_may_lie_in_one_tensor(tmp_path: Path) -> None:
    """As the first converted checkpoints have them."""
    weights, config = checkpoint(tmp_path, "rwkv7")
    stacked = dict(weights)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.attn.x_"
        stacked[f"{at}x"] = torch.stack([stacked.pop(f"{at}{letter}") for letter in "rwkvag"])
    save_file(stacked, tmp_path / "model.safetensors")
    core = engine(tmp_path)
    (prompt,) = prompts_of(9)
    expected = int(rwkv7.logits(config, weights, prompt)[-1].argmax())
    assert answers(core, {1: prompt}, 1) == ({1: [expected]}, 0)
    core.executor.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn": {"layers": [1]}}, "attn is .* null"),
        ({"head_dim": 13}, "head_dim is 13 .* a divisor of hidden_size"),
        ({"value_dim": [48, 96, 48]}, "value_dim is .* hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_what_is_not_built_is_refused_by_key(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, "rwkv7")
    with pytest.raises(CheckpointError, match=words):
        load_ours(model_spec(tmp_path, **changes))

"""The fallback runs other families through transformers' code with our paged attention, or says why it cannot."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from headrace.back.attention.plan import Batch
from headrace.back.models.load import load_model
from headrace.back.models.transformers import TransformersModel
from headrace.back.parallel.mesh import Axis, Mesh
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import CheckpointError, ConfigError
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, oracle_logits, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import LENGTHS, SIZES, compare, tiny_config

MLA = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 6,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("StableLm", {}),
    "starcoder2-window": ("Starcoder2", {"sliding_window": 10}),
    "cohere2": ("Cohere2", {"sliding_window": 12, "tie_word_embeddings": True}),
    "gpt-neox": ("GPTNeoX", {}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "phi": ("Phi", {}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "tanh-moe": (
        "Qwen3Moe",
        {
            **{"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
            **{"head_dim": 8, "hidden_act": "tanh"},
        },
    ),
    "aria": (
        "AriaText",
        {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "head_dim": 8},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "apertus": ("Apertus", {}),
    "deepseek-v3-mla": ("DeepseekV3", MLA),
    "gpt2": ("GPT2", {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 128}),
}


def fallback(folder: Path, **changes: Any) -> ModelSpec:
    """The checkpoint as it runs with --family transformers."""
    return msgspec.structs.replace(model_spec(folder, **changes), family="transformers")


def config(case: str) -> Any:
    name, changes = CASES[case]
    return getattr(transformers, f"{name}Config")(**(SIZES | changes))


@pytest.mark.parametrize("case", CASES)
def test_another_family_equals_transformers_through_paged_attention(
    case: str, tmp_path: Path
) -> None:
    oracle = save_oracle(config(case), tmp_path)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    spec = fallback(tmp_path)
    ours = load_ours(spec)
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(oracle, rows), 1e-4)


@pytest.mark.parametrize("case", ["qwen3-moe", "mixtral", "deepseek-v3-mla", "aria", "tanh-moe"])
def test_experts_run_by_our_kernel_or_a_decision_says_why_not(case: str, tmp_path: Path) -> None:
    oracle = save_oracle(config(case), tmp_path)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    ours = load_ours(fallback(tmp_path))
    (experts,) = [one for one in ours.decisions if one.field == "model.experts"]
    kernels = [one.field for one in ours.decisions if one.field == "kernel.experts"]
    if case == "tanh-moe":
        assert experts.chosen == "transformers" and "activation" in experts.why and not kernels
    else:
        assert experts.chosen == "kernel" and kernels
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(oracle, rows), 1e-4)


def test_the_choice_is_a_decision_with_the_class_and_the_measured_error(tmp_path: Path) -> None:
    save_oracle(config("stablelm"), tmp_path)
    decision = load_ours(fallback(tmp_path)).decisions[0]
    assert (decision.field, decision.chosen) == ("model.family", "transformers")
    assert "StableLmForCausalLM" in decision.why


def test_a_known_family_can_be_forced_through_the_fallback(tmp_path: Path) -> None:
    oracle = save_oracle(tiny_config("mistral-window"), tmp_path)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    spec = fallback(tmp_path)
    ours = load_ours(spec)
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(oracle, rows), 1e-4)
    assert {form.span for form in ours.kv_forms} == {11}


@pytest.mark.parametrize("case", ["qwen3-moe", "apertus"])
def test_the_loader_fills_split_and_scalar_weights(case: str, tmp_path: Path) -> None:
    oracle = save_oracle(config(case), tmp_path)
    rows = random_rows(SIZES["vocab_size"], (9, 14))
    ours, _ = load_model(
        fallback(tmp_path),
        mesh=Mesh(),
        device=torch.device("cpu"),
        block_tokens=BLOCK_TOKENS,
    )
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(oracle, rows), 1e-4)


def test_recurrent_layers_are_refused_with_the_count(tmp_path: Path) -> None:
    save_oracle(
        transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4),
        tmp_path,
    )
    with pytest.raises(CheckpointError, match=r"0 of its 2 layers use attention.*runs as mamba"):
        load_ours(fallback(tmp_path))


def test_position_biases_are_refused_or_caught(tmp_path: Path) -> None:
    save_oracle(
        transformers.BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=6), tmp_path
    )
    with pytest.raises(CheckpointError, match="cannot run"):
        load_ours(fallback(tmp_path))


def test_bfloat16_routing_that_tips_over_is_no_reason_to_refuse(tmp_path: Path) -> None:
    save_oracle(config("mixtral"), tmp_path)
    assert load_ours(fallback(tmp_path, dtype="bfloat16")).decisions[0].chosen == "transformers"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_whose_positions_are_lost_is_caught_by_the_check(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_oracle(config("stablelm"), tmp_path)
    forward = TransformersModel.forward

    def lost(self: TransformersModel, batch: Batch) -> torch.Tensor:
        counted = torch.arange(len(batch.positions_T))
        return forward(self, dataclasses.replace(batch, positions_T=counted))

    monkeypatch.setattr(TransformersModel, "forward", lost)
    with pytest.raises(CheckpointError, match="its logits differ"):
        load_ours(fallback(tmp_path, dtype=dtype))


def test_code_from_the_checkpoint_is_refused_by_key(tmp_path: Path) -> None:
    save_oracle(config("stablelm"), tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_ours(fallback(tmp_path, auto_map={"AutoModelForCausalLM": "evil.Model"}))
    assert caught.value.field == "auto_map"


def test_an_unknown_model_type_is_refused_by_name(tmp_path: Path) -> None:
    save_oracle(config("stablelm"), tmp_path)
    with pytest.raises(CheckpointError, match="'warp_drive'"):
        load_ours(fallback(tmp_path, model_type="warp_drive"))


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    save_oracle(config("stablelm"), tmp_path)
    group: Any = object()
    with pytest.raises(ConfigError, match="tensor_parallel 2"):
        load_ours(fallback(tmp_path), mesh=Mesh(tp=Axis(size=2, group=group)))

"""BEY-40: --diffusion-config, decided; what does not go with models that write blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.base.config.resolved import EngineSpec
from headrace.base.errors import CheckpointError, ConfigError
from headrace.launch.model_facts import ModelFacts
from headrace.launch.resolve import resolve
from tests.launch.test_resolve import CPU, MODEL, options

FOLDER = str(Path(__file__).parent)
SDAR = replace(
    MODEL,
    architecture="SDARForCausalLM",
    family="block_diffusion",
    logits_width=160_000,
    config={"architectures": ["SDARForCausalLM"]},
)
LLADA_2 = replace(SDAR, config={"architectures": ["LLaDA2MoeModelLM"]})
LLADA = replace(
    SDAR,
    family="canvas_diffusion",
    encodes=True,
    config={"architectures": ["LLaDAModelLM"]},
)
DREAM = replace(LLADA, config={"architectures": ["DreamModel"], "mask_token_id": 7})
FAST_DLLM = replace(SDAR, config={"architectures": ["Fast_dLLM_QwenForCausalLM"], "bd_size": 16})


def engine(
    facts: ModelFacts = SDAR, asked: dict[str, Any] | None = None, **groups: Any
) -> EngineSpec:
    scheduler = {} if asked is None else {"scheduler": {"diffusion_config": asked}}
    return resolve(options(**scheduler, **groups), facts, CPU).engine


def test_what_is_not_said_is_as_the_model_was_published() -> None:
    form, kv = engine().denoising, engine().kv
    assert form is not None and kv.block_tokens == 16
    assert (form.length, form.steps, form.threshold, form.mask) == (4, 4, 0.95, 151_669)
    form, kv = engine(LLADA_2).denoising, engine(LLADA_2).kv
    assert form is not None and kv.block_tokens == 32, "a KV block holds whole blocks"
    assert (form.length, form.steps, form.mask) == (32, 32, 156_895)
    form = engine(FAST_DLLM).denoising
    assert form is not None and form.shifted
    assert (form.length, form.part, form.mask) == (16, 8, 151_665)
    own = replace(SDAR, config={**SDAR.config, "block_size": 16, "mask_token_id": 5})
    form = engine(own).denoising
    assert form is not None and (form.length, form.mask) == (16, 5)
    assert engine(MODEL).denoising is None


def test_canvases_are_as_their_samplers_are_called() -> None:
    made = engine(LLADA)
    form = made.denoising
    assert form is not None and (form.length, form.steps, form.canvas) == (32, 32, 512)
    assert (form.threshold, form.order, form.shifted, form.timed) == (1, "confidence", False, False)
    assert made.kv.num_blocks == 1 and made.scheduler.max_step_tokens >= MODEL.max_model_len
    form = engine(DREAM).denoising
    assert form is not None and (form.length, form.steps, form.mask) == (512, 512, 7)
    assert (form.order, form.shifted, form.timed) == ("entropy", True, True)
    form = engine(DREAM, {"canvas_length": 64, "block_length": 32, "steps": 8}).denoising
    assert form is not None and (form.length, form.steps, form.canvas) == (32, 8, 64)


def test_what_is_said_goes_before_it() -> None:
    asked = {"block_length": 8, "steps": 3, "threshold": 0.8, "mask_token_id": 9}
    form = engine(asked=asked).denoising
    assert form is not None
    assert (form.length, form.steps, form.threshold, form.mask) == (8, 3, 0.8, 9)


@pytest.mark.parametrize(
    ("model", "asked", "said"),
    [
        (MODEL, {}, "LlamaForCausalLM does not write blocks"),
        (SDAR, {"block_length": 6}, "block_length is 6; a power of two"),
        (SDAR, {"part_length": 3}, "part_length is 3; it must divide block_length"),
        (SDAR, {"steps": 5}, "steps is 5; a block has 4 tokens"),
        (SDAR, {"mask_token_id": 200_000}, "mask_token_id is 200000; the model knows tokens below"),
        (replace(SDAR, windows=(None, 8)), {}, "sliding windows"),
        (SDAR, {"block_length": 256}, "block_length is 256; a power of two, at most 128"),
        (SDAR, {"canvas_length": 64}, "canvas_length: the blocks of SDARForCausalLM see no later"),
        (LLADA, {"canvas_length": 48}, "block_length is 32; it must divide canvas_length .48."),
        (LLADA, {"part_length": 8}, "part_length: blocks of a canvas have no parts"),
        (DREAM, {"threshold": 0.9}, "threshold is 0.9; with order 'entropy' only 1"),
    ],
)
def test_what_cannot_be_is_refused(model: ModelFacts, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine(model, asked)
    wrong = replace(SDAR, config={**SDAR.config, "mask_token_id": "x"})
    with pytest.raises(CheckpointError, match="mask_token_id"):
        engine(wrong)


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        ({"scheduler": {"speculative_config": {"method": "ngram"}}}, "speculative_config"),
        ({"adapters": {"enable_lora": True}}, "enable_lora"),
        ({"model": {"control_vectors": [__file__]}}, "control_vectors"),
        ({"model": {"control_vector_modules": [f"a={__file__}"]}}, "control_vector_modules"),
        ({"model": {"attention_capture": True}}, "attention_capture"),
        ({"model": {"deterministic": True}}, "deterministic"),
        ({"model": {"enable_prompt_embeds": True}}, "enable_prompt_embeds"),
        ({"model": {"enable_return_routed_experts": True}}, "enable_return_routed_experts"),
        ({"kv": {"slot_save_path": FOLDER}}, "slot_save_path"),
        ({"kv": {"kv_transfer_path": FOLDER}}, "kv_transfer_path"),
    ],
)
def test_features_that_need_tokens_one_by_one_are_refused(groups: Any, field: str) -> None:
    option = f"--{field.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{option} does not go with SDAR, LLaDA,") as refused:
        engine(**groups)
    assert refused.value.field == field


@pytest.mark.parametrize("mode", ["pipeline_parallel", "decode_context_parallel_size"])
def test_ways_to_share_a_model_that_cut_blocks_apart_are_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match="SDAR, LLaDA, Fast-dLLM v2, Dream"):
        engine(device={mode: 2, "tensor_parallel": 2 if mode.startswith("decode") else 1})

"""The Qwen and GLM models that see have transformers' logits: images of odd sizes and video, whole and in chunks
that cut an image, behind a prefix hit, beside text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.media import (
    Family,
    Prompt,
    SeeingEngine,
    compare_answers,
    patches_of,
    save_media_oracle,
)

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
TEXT: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {"num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN3_TOWER = {
    **{**TOWER, "depth": 3, "hidden_size": 32, "intermediate_size": 40},
    **{"out_hidden_size": 48, "num_position_embeddings": 36},
}
HALF = ((0.5,) * 3, (0.5,) * 3)
GLM_TOWER = {
    **{**TOWER, "depth": 2, "hidden_size": 32, "intermediate_size": 40},
    **{"out_hidden_size": 48, "image_size": 24},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


def text(*section: int, **changes: Any) -> dict[str, Any]:
    ropes = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": list(section)}
    if "partial_rotary_factor" in changes:
        ropes["partial_rotary_factor"] = changes.pop("partial_rotary_factor")
    return {**TEXT, "rope_parameters": ropes, **changes}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    vision: dict[str, Any]
    text: dict[str, Any]
    norm: tuple[tuple[float, ...], tuple[float, ...]] = CLIP
    transposed: bool = False
    """As published: transformers writes its experts otherwise."""
    apart: bool = False
    """Each step of a video is an input of its own."""
    soft: bool = False
    """The tokens of a video are those of images."""


CASES = {
    "qwen2-vl": Case(
        name="Qwen2VL",
        vision={**TOWER, "depth": 2, "embed_dim": 32, "mlp_ratio": 2, "hidden_size": 48},
        text=text(2, 1, 3),
    ),
    "qwen2.5-vl": Case(
        name="Qwen2_5_VL",
        vision={
            **{**TOWER, "depth": 3, "hidden_size": 32, "intermediate_size": 40},
            **{"out_hidden_size": 48, "window_size": 16, "fullatt_block_indexes": [1]},
            "tokens_per_second": 2,
        },
        text=text(2, 2, 2),
    ),
    "qwen3-vl": Case(
        name="Qwen3VL",
        vision={**QWEN3_TOWER, "deepstack_visual_indexes": [2, 0]},
        text=text(4, 2, 2, head_dim=16),
        norm=HALF,
        apart=True,
    ),
    "qwen3-vl-moe": Case(
        name="Qwen3VLMoe",
        vision={**QWEN3_TOWER, "deepstack_visual_indexes": [0, 1]},
        text=text(3, 3, 2, head_dim=16, **EXPERTS),
        norm=HALF,
        apart=True,
        transposed=True,
    ),
    "qwen3.5": Case(
        name="Qwen3_5",
        vision=QWEN3_TOWER,
        text=text(2, 1, 1, head_dim=16, partial_rotary_factor=0.5, **DELTA),
        norm=HALF,
        apart=True,
    ),
    "qwen3.5-moe": Case(
        name="Qwen3_5Moe",
        vision=QWEN3_TOWER,
        text=text(
            1,
            2,
            1,
            head_dim=16,
            partial_rotary_factor=0.5,
            **DELTA,
            **EXPERTS,
            shared_expert_intermediate_size=24,
        ),
        norm=HALF,
        apart=True,
    ),
    "glm-4v": Case(
        name="Glm4v",
        vision=GLM_TOWER,
        text=text(1, 1, 1, partial_rotary_factor=0.5),
        apart=True,
        soft=True,
    ),
    "glm-4v-moe": Case(
        name="Glm4vMoe",
        vision=GLM_TOWER,
        text=text(
            1,
            1,
            1,
            partial_rotary_factor=0.5,
            head_dim=12,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            n_shared_experts=1,
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        ),
        apart=True,
        soft=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Seen(Family):
    case: Case

    def inputs(self, prompt: Prompt) -> dict[str, Any]:
        ids = torch.tensor([prompt.ids])
        more: dict[str, Any] = {
            "input_ids": ids,
            "mm_token_type_ids": (ids == 100) + 2 * (ids == 101),
        }
        for one, at in zip(prompt.inputs, prompt.offsets, strict=bool(prompt.offsets)):
            kind = 1 + (one.kind == "video")
            more["mm_token_type_ids"][0, at : at + one.num_tokens] = kind
        more |= patches_of(prompt, self.case.norm, apart=self.case.apart)
        seconds = [one.step_s for one in prompt.inputs if one.kind == "video"]
        if seconds and "tokens_per_second" in self.case.vision:
            more["second_per_grid_ts"] = torch.tensor(seconds)
        return more


def save_case(case: Case, folder: Path) -> Any:
    """The family's oracle, saved as its checkpoints are published."""
    config = getattr(transformers, f"{case.name}Config")(
        vision_config=case.vision,
        text_config=case.text,
        image_token_id=100,
        video_token_id=101,
        vision_start_token_id=102,
        vision_end_token_id=103,
    )
    oracle_class = getattr(transformers, f"{case.name}ForConditionalGeneration")
    oracle = save_media_oracle(oracle_class, config, folder)
    if case.transposed:
        as_published(folder / "model.safetensors")
    return oracle


@pytest.fixture(scope="module", params=CASES)
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seen]:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("model")
    oracle = save_case(case, folder)
    engine = SeeingEngine(folder)
    yield Seen(case=case, folder=folder, oracle=oracle, engine=engine)
    engine.close()


def test_intern_s2_is_qwen_3_5_without_its_time_series(tmp_path: Path) -> None:
    case = CASES["qwen3.5-moe"]
    oracle = save_case(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "interns2_preview_text"
    config |= {"architectures": ["InternS2PreviewForConditionalGeneration"]}
    config |= {"model_type": "intern_s2_preview", "ts_config": {"out_hidden_size": 48}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    unread = ("model.time_series.encoder.weight", "time_series_forecaster.head.weight")
    save_file(load_file(file) | {name: torch.zeros(1) for name in unread}, file)
    engine = SeeingEngine(tmp_path)
    try:
        seen = Seen(case=case, folder=tmp_path, oracle=oracle, engine=engine)
        prompt = two_images(seen)
        compare_answers(engine.run(prompt)[0], seen.expected(prompt))
    finally:
        engine.close()


def as_published(path: Path) -> None:
    """Experts with inputs before outputs."""
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)


def two_images(seen: Seen) -> Prompt:
    prompt = Prompt().text(5, 6, 7, 102).put(seen.pixels(1, (1, 6, 4))).text(103, 8, 9, 102)
    return prompt.put(seen.pixels(2, (1, 2, 10))).text(103, 10, 11, 12)


def with_video(seen: Seen) -> Prompt:
    prompt = Prompt().text(5, 102)
    if not seen.case.soft:  # beside an image transformers takes no video of these families
        prompt.put(seen.pixels(3, (1, 4, 4)))
    prompt.text(103, 8, 102)
    if not seen.case.apart:
        prompt.put(seen.pixels(4, (5, 2, 4), frames=2, step_s=1.3))
    else:
        for step in range(3):
            pixels = seen.pixels(4 + step, (1, 2, 4), frames=2)
            prompt.put(pixels, 100 if seen.case.soft else None).text(30 + step)
    return prompt.text(103, 9, 10)


def test_images_of_odd_sizes(seen: Seen) -> None:
    prompt = two_images(seen)
    compare_answers(seen.engine.run(prompt)[0], seen.expected(prompt))


def test_video_beside_an_image(seen: Seen) -> None:
    prompt = with_video(seen)
    compare_answers(seen.engine.run(prompt)[0], seen.expected(prompt))


def test_text_alone(seen: Seen) -> None:
    prompt = Prompt().text(*range(3, 40))
    compare_answers(seen.engine.run(prompt)[0], seen.expected(prompt))


@pytest.mark.covering(1)
@pytest.mark.parametrize("step_tokens", [5, 9])
def test_chunks_cut_images(seen: Seen, step_tokens: int) -> None:
    """REG-027."""
    engine = seen.engine.with_steps(seen.folder, max_step_tokens=step_tokens)
    for prompt in (two_images(seen), with_video(seen)):
        compare_answers(engine.run(prompt)[0], seen.expected(prompt))


def test_a_prefix_hit_gives_the_same_and_other_pixels_do_not(seen: Seen) -> None:
    engine = seen.engine.with_steps(seen.folder)
    prompt, expected = two_images(seen), seen.expected(two_images(seen), 6)
    for hit in (0, len(prompt.ids) // 8 * 8):
        (answer,) = engine.run(prompt, max_tokens=6, scored=False)
        assert (answer.tokens, answer.num_cached) == (expected.tokens, hit)
    other = two_images(seen)
    other.inputs[1] = seen.pixels(9, (1, 2, 10))
    (answer,) = engine.run(other, max_tokens=6, scored=False)
    assert answer.tokens == seen.expected(other, 6).tokens
    recurrent = "layer_types" in seen.case.text  # whose states are kept where chunks end
    assert answer.num_cached == (0 if recurrent else other.offsets[1] // 8 * 8)
    assert engine.hook.num_reused == 3


@pytest.mark.covering(0)
def test_beside_text_and_each_other_with_recorded_decodes(seen: Seen) -> None:
    """Answers of 12 tokens, most of them by steps that are replayed."""
    engine = seen.engine.with_steps(seen.folder, max_step_tokens=32)
    prompts = [two_images(seen), Prompt().text(*range(3, 30)), with_video(seen), two_images(seen)]
    prompts[3].text(13, 14)
    answers = engine.run(*prompts, max_tokens=12, scored=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == seen.expected(prompt, 12).tokens
    assert seen.engine.executor._resident.runner.facts.graphs.count > 0


def test_an_image_is_encoded_once(seen: Seen) -> None:
    """ENG-23: in two requests at a time, and in one after them. REG-027."""
    engine = seen.engine.with_steps(seen.folder)
    state = seen.engine.executor._resident.runner._state
    before = state.cache.num_encoded
    pixels = seen.pixels(50, (1, 4, 4))
    first = Prompt().text(5, 102).put(pixels).text(103, 6)
    second = Prompt().text(7, 8, 102).put(pixels).text(103, 9, 102).put(pixels).text(103)
    engine.run(first, second, salt="a")
    engine.run(second, salt="b")
    assert state.cache.num_encoded == before + 1


def test_pixels_are_read_to_the_bit(seen: Seen) -> None:
    """Black, white and one changed byte make different answers where random weights see them."""
    black, white, dot = (seen.pixels(1, (1, 2, 2)) for _ in range(3))
    black.values[:], white.values[:], dot.values[:] = 0, 255, 0
    dot.values[3, 2, 0, 3, 3] = 255
    rows = [
        seen.engine.run(Prompt().text(5, 102).put(one).text(103, 6), salt=str(i))[0].logprobs[0]
        for i, one in enumerate((black, white, dot))
    ]
    assert min(np.abs(rows[0] - rows[1]).max(), np.abs(rows[0] - rows[2]).max()) > 1e-3

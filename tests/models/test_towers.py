"""Models whose images have places of their own see as transformers does: LLaVA, Pixtral, Mistral 3, InternVL,
Idefics 3, SmolVLM, LFM2-VL. Whole, in chunks that cut an image, behind a prefix hit, beside text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from headrace.back.parallel.mesh import Mesh
from headrace.base.errors import CheckpointError
from headrace.front.media.processors.families import read_media
from tests.models.media import (
    Answer,
    Pixels,
    Prompt,
    SeeingEngine,
    answer_of,
    compare_answers,
    image,
    save_media_oracle,
    scored_by_runner,
)

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5,) * 3, (0.5,) * 3)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TEXT: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    vision: dict[str, Any]
    text: dict[str, Any]
    norm: tuple[tuple[float, ...], tuple[float, ...]]
    config: dict[str, Any]
    merge: int = 1
    grids: tuple[tuple[int, int, int], ...] = ((1, 4, 4), (1, 4, 4))
    breaks: int = 0
    sized: bool = False
    """The reference takes pictures padded to one size, and their sizes."""
    listed: bool = False
    """It takes the pictures of a text in a dimension of their own."""
    flat: bool = False
    """It takes patches, channels last, padded to one length."""
    more: Callable[[torch.Tensor, int], dict[str, Any]] | None = None
    """What it takes beside ids [1, T] and pixels; the number is that of the placeholder."""
    step_tokens: tuple[int, ...] = (3, 7)
    """Of steps that cut prompts."""
    patch: int = 4
    placed: bool = False
    """It takes patches as `flat`, with their places."""


def text(kind: str, **changes: Any) -> dict[str, Any]:
    return {**TEXT, "model_type": kind, **changes}


FLAT_TOWER = {key: value for key, value in TOWER.items() if key != "image_size"}
FLAT_TEXT = {key: value for key, value in text("lfm2").items() if key != "head_dim"}
FLAT_TEXT["block_auto_adjust_ff_dim"] = False
PIXTRAL = {**TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 64, "hidden_act": "silu"}
CASES = {
    "llava": Case(
        name="Llava",
        vision={**TOWER, "model_type": "clip_vision_model", "projection_dim": 16},
        text=text("llama"),
        norm=CLIP,
        config={"image_token_index": 100},
    ),
    "llava-siglip": Case(
        name="Llava",
        vision={**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        text=text("qwen2"),
        norm=HALF,
        config={"image_token_index": 100, "vision_feature_select_strategy": "full"},
    ),
    "pixtral": Case(
        name="Llava",
        vision=PIXTRAL,
        text=text("mistral", sliding_window=None),
        norm=CLIP,
        config={
            "image_token_index": 100,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        grids=((1, 3, 5), (1, 4, 2)),
        breaks=1,
        sized=True,
    ),
    "mistral3": Case(
        name="Mistral3",
        vision=PIXTRAL,
        text=text("mistral", sliding_window=None),
        norm=CLIP,
        config={"image_token_index": 100},
        merge=2,
        grids=((1, 6, 4), (1, 2, 8)),
        breaks=1,
        sized=True,
    ),
    "internvl": Case(
        name="InternVL",
        vision={
            **{**TOWER, "model_type": "internvl_vision", "use_qk_norm": True},
            **{"image_size": [16, 16], "patch_size": [4, 4]},
        },
        text=text("qwen2"),
        norm=IMAGENET,
        config={"image_token_id": 100},
        merge=2,
        grids=((3, 4, 4), (1, 4, 4)),
    ),
    "idefics3": Case(
        name="Idefics3",
        vision=TOWER,
        text=text("llama"),
        norm=HALF,
        config={"image_token_id": 100, "scale_factor": 2, "pad_token_id": 0},
        merge=2,
        listed=True,
    ),
    "smolvlm": Case(
        name="SmolVLM",
        vision={**TOWER, "image_size": 32},
        text=text("llama"),
        norm=HALF,
        config={"image_token_id": 100, "scale_factor": 4, "pad_token_id": 0},
        merge=4,
        grids=((1, 8, 8), (1, 8, 8)),
        listed=True,
    ),
    "lfm2-vl": Case(
        name="Lfm2Vl",
        vision={**FLAT_TOWER, "num_patches": 36, "vision_use_head": False},
        text={**FLAT_TEXT, "layer_types": ["conv", "full_attention"]},
        norm=HALF,
        config={"image_token_id": 100, "downsample_factor": 2, "projector_hidden_size": 56},
        merge=2,
        grids=((1, 8, 4), (1, 4, 10)),
        flat=True,
    ),
}


def save_case(case: Case, folder: Path) -> Any:
    """The family's oracle, saved as its checkpoints are published."""
    config = getattr(transformers, f"{case.name}Config")(
        vision_config=case.vision, text_config=case.text, tie_word_embeddings=False, **case.config
    )
    oracle_class = getattr(transformers, f"{case.name}ForConditionalGeneration")
    return save_media_oracle(oracle_class, config, folder)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A family's oracle and our engine over the same checkpoint."""

    case: Case
    folder: Path
    oracle: Any
    engine: SeeingEngine

    def pixels(self, seed: int, index: int) -> Pixels:
        case = self.case
        return image(
            seed, case.grids[index], patch=case.patch, merge=case.merge, breaks=case.breaks
        )

    def inputs(self, prompt: Prompt) -> dict[str, Any]:
        """What transformers' processor would give."""
        more: dict[str, Any] = {"input_ids": torch.tensor([prompt.ids])}
        if self.case.more is not None:
            keys = ("image_token_id", "image_token_index")
            token = next(self.case.config[key] for key in keys if key in self.case.config)
            more |= self.case.more(more["input_ids"], token)
        if not prompt.inputs:
            return more
        mean, std = (torch.tensor(one).view(1, 3, 1, 1) for one in self.case.norm)
        pictures = [(one.pictures().float() / 255 - mean) / std for one in prompt.inputs]
        if self.case.placed:
            return {**more, **placed_patches(pictures)}
        if self.case.flat:
            return {**more, **flat_patches(pictures)}
        if self.case.sized:
            height, width = (max(one.shape[dim] for one in pictures) for dim in (2, 3))
            more["image_sizes"] = torch.tensor([one.shape[2:] for one in pictures])
            pictures = [
                F.pad(one, (0, width - one.shape[3], 0, height - one.shape[2])) for one in pictures
            ]
        pixels = torch.cat(pictures)
        return {**more, "pixel_values": pixels[None] if self.case.listed else pixels}

    def expected(self, prompt: Prompt, max_tokens: int = 5) -> Answer:
        return answer_of(self.oracle, prompt, self.inputs(prompt), max_tokens)


def flat_patches(pictures: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Raster order; a mask says what is padding."""
    flat = [
        one[0].unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 3, 4, 0).flatten(0, 1).flatten(1)
        for one in pictures
    ]
    longest = max(len(one) for one in flat)
    return {
        "pixel_values": torch.stack([F.pad(one, (0, 0, 0, longest - len(one))) for one in flat]),
        "spatial_shapes": torch.tensor([[side // 4 for side in one.shape[2:]] for one in pictures]),
        "pixel_attention_mask": torch.stack(
            [(torch.arange(longest) < len(one)).int() for one in flat]
        ),
    }


def placed_patches(pictures: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Raster order; places of padding are -1."""
    flat = flat_patches(pictures)
    places = []
    for one, (height, width) in zip(
        flat["pixel_values"], flat["spatial_shapes"].tolist(), strict=True
    ):
        place = torch.full((len(one), 2), -1)
        count = torch.arange(height * width)
        place[: height * width] = torch.stack((count % width, count // width), dim=1)
        places.append(place)
    return {"pixel_values": flat["pixel_values"], "image_position_ids": torch.stack(places)}


@contextmanager
def opened(case: Case, folder: Path) -> Iterator[Seen]:
    """The case, saved and served from `folder`."""
    oracle = save_case(case, folder)
    engine = SeeingEngine(folder)
    yield Seen(case=case, folder=folder, oracle=oracle, engine=engine)
    engine.close()


@pytest.fixture(scope="module", params=CASES)
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seen]:
    with opened(CASES[request.param], tmp_path_factory.mktemp("model")) as seen:
        yield seen


def two_images(seen: Seen) -> Prompt:
    prompt = Prompt().text(5, 6, 7).put(seen.pixels(1, 0)).text(8, 9)
    return prompt.put(seen.pixels(2, 1)).text(10, 11, 12)


def test_images(seen: Seen) -> None:
    prompt = two_images(seen)
    compare_answers(seen.engine.run(prompt)[0], seen.expected(prompt))


def test_text_alone(seen: Seen) -> None:
    prompt = Prompt().text(*range(3, 40))
    compare_answers(seen.engine.run(prompt)[0], seen.expected(prompt))


@pytest.mark.parametrize("step_tokens", [3, 7])
def test_chunks_cut_images(seen: Seen, step_tokens: int) -> None:
    engine = seen.engine.with_steps(seen.folder, max_step_tokens=step_tokens)
    prompt = two_images(seen)
    compare_answers(engine.run(prompt)[0], seen.expected(prompt))


def test_a_prefix_hit_gives_the_same_and_other_pixels_do_not(seen: Seen) -> None:
    engine = seen.engine.with_steps(seen.folder)
    prompt, expected = two_images(seen), seen.expected(two_images(seen), 6)
    for hit in (0, (len(prompt.ids) - 1) // 8 * 8):
        (answer,) = engine.run(prompt, max_tokens=6, scored=False)
        assert (answer.tokens, answer.num_cached) == (expected.tokens, hit)
    other = two_images(seen)
    other.inputs[1] = seen.pixels(9, 1)
    (answer,) = engine.run(other, max_tokens=6, scored=False)
    assert answer.tokens == seen.expected(other, 6).tokens
    recurrent = "layer_types" in seen.case.text  # whose states are kept where chunks end
    assert answer.num_cached == (0 if recurrent else other.offsets[1] // 8 * 8)


def test_beside_text_and_each_other_with_recorded_decodes(seen: Seen) -> None:
    """Answers of 12 tokens, most of them by steps that are replayed."""
    engine = seen.engine.with_steps(seen.folder, max_step_tokens=32)
    prompts = [two_images(seen), Prompt().text(*range(3, 30)), two_images(seen)]
    prompts[2].text(13, 14)
    answers = engine.run(*prompts, max_tokens=12, scored=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == seen.expected(prompt, 12).tokens
    assert seen.engine.executor._resident.runner.facts.graphs.count > 0


def test_a_checkpoint_s_own_colours_are_honoured(tmp_path: Path) -> None:
    """What its processor's file says goes before what its family has."""
    norm = ((0.3, 0.45, 0.6), (0.2, 0.25, 0.3))
    case = replace(CASES["llava-siglip"], norm=norm)
    oracle = save_case(case, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": norm[0], "image_std": norm[1]})
    )
    spec = read_media(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    assert spec is not None and spec.norm == norm
    seen = Seen(case=case, folder=tmp_path, oracle=oracle, engine=SeeingEngine(tmp_path))
    prompt = two_images(seen)
    expected = np.stack(seen.expected(prompt, 1).prompt_logprobs)
    for image_norm, equal in ((spec.norm, True), (None, False)):
        (ours,) = scored_by_runner(
            tmp_path, [prompt], mesh=Mesh(), chunk=256, max_tokens=1, image_norm=image_norm
        )
        assert (np.abs(np.stack(ours[:-1]) - expected).max() < 1e-4) == equal
    seen.engine.close()


@pytest.mark.parametrize(
    "files", [{"rescale_factor": 1 / 127.5}, {"do_rescale": False}, {"image_std": [0, 1, 1]}]
)
def test_other_ways_of_colours_are_refused(files: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.5] * 3, **files})
    )
    vision = {"image_size": 32, "patch_size": 8}
    config = {"model_type": "paligemma", "image_token_index": 7, "vision_config": vision}
    with pytest.raises(CheckpointError, match=r"rescale_factor|image_std"):
        read_media(tmp_path, config)

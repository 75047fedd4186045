"""The thinkers of Qwen2.5-Omni and Qwen3-Omni answer as transformers' do to images, video and sound in one prompt:
whole, in chunks that cut them, behind a prefix hit, and from a checkpoint that speaks too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from headrace.base.config.media import MediaSpec, ProcessorSettings, SoundSettings, VideoSound
from headrace.base.wire.media import SoundSteps
from headrace.front.media.placeholders import expanded
from headrace.front.media.preparation import _prepared
from headrace.front.media.processing import ProcessedMedia, TowerInput
from headrace.front.media.processors.video_sound import with_sound
from tests.models.media import (
    Family,
    Prompt,
    SeeingEngine,
    answer_of,
    compare_answers,
    patches_of,
    save_media_oracle,
)
from tests.models.test_hearing import BANDS, ENCODER, LINES, PLANES, Sound
from tests.models.test_pictures import Ready
from tests.models.test_qwen_vl import CLIP, EXPERTS, HALF, QWEN3_TOWER, TOWER, text

IMAGE, VIDEO, SOUND, SEES, HEARS = 100, 101, 104, 102, 105
IDS = {"vision_start_token_id": SEES, "audio_start_token_id": HEARS}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    vision: dict[str, Any]
    audio: dict[str, Any]
    text: dict[str, Any]
    steps: SoundSteps
    norm: tuple[tuple[float, ...], tuple[float, ...]]
    more: dict[str, Any]


CASES = {
    "qwen2.5-omni": Case(
        name="Qwen2_5Omni",
        vision={
            **{**TOWER, "depth": 3, "hidden_size": 32, "intermediate_size": 40},
            **{"out_hidden_size": 48, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        audio={**ENCODER, "n_window": 12, "output_dim": 48},
        text=text(2, 2, 2),
        steps=SoundSteps(strides=LINES, pool=2, chunk=24),
        norm=CLIP,
        more={"image_token_index": IMAGE, "video_token_index": VIDEO, "audio_token_index": SOUND},
    ),
    "qwen3-omni": Case(
        name="Qwen3OmniMoe",
        vision={**QWEN3_TOWER, "deepstack_visual_indexes": [2, 0]},
        audio={
            **{**ENCODER, "n_window": 50, "n_window_infer": 200, "output_dim": 48},
            "downsample_hidden_size": 8,
        },
        text=text(3, 3, 2, head_dim=16, **EXPERTS),
        steps=SoundSteps(strides=PLANES, chunk=100),
        norm=HALF,
        more={"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": SOUND},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Omni(Family):
    case: Case

    def sound(self, seed: int, length: int) -> Any:
        frames = np.random.default_rng(seed).normal(size=(length, BANDS)).astype(np.float32)
        return Sound(frames=frames, num_tokens=self.case.steps.tokens(length))

    def inputs(self, prompt: Prompt) -> dict[str, Any]:
        ids = torch.tensor([prompt.ids])
        more: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        more |= patches_of(prompt, self.case.norm)
        if seconds := [one.step_s for one in prompt.inputs if one.kind == "video"]:
            more["video_second_per_grid"] = torch.tensor(seconds)
        sounds: list[Any] = [one for one in prompt.inputs if one.kind == "audio"]
        if sounds:
            longest = max(len(one.frames) for one in sounds)
            frames = [torch.from_numpy(one.frames) for one in sounds]
            filled = [F.pad(one.T, (0, longest - len(one))) for one in frames]
            lengths = torch.tensor([len(one) for one in frames])
            more["input_features"] = torch.stack(filled)
            more["feature_attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
        return more


class TowerSound:
    """A sound with its rows."""

    def __init__(self, heard: Sound) -> None:
        self.kind, self.grid, self.num_tokens = heard.kind, heard.grid, heard.num_tokens
        self.rows = heard.frames.view(np.uint8).reshape(len(heard.frames), -1)


@pytest.fixture(scope="module", params=CASES)
def omni(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Omni]:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("model")
    config = getattr(transformers, f"{case.name}ThinkerConfig")(
        vision_config=case.vision,
        audio_config=case.audio,
        text_config=case.text,
        **IDS,
        **case.more,
    )
    oracle_class = getattr(transformers, f"{case.name}ThinkerForConditionalGeneration")
    oracle = save_media_oracle(oracle_class, config, folder)
    engine = SeeingEngine(folder)
    yield Omni(case=case, folder=folder, oracle=oracle, engine=engine)
    engine.close()


def everything(omni: Omni) -> Prompt:
    """An image, a sound, a video whose steps are further apart in time than it is high or wide, and a sound."""
    prompt = Prompt().text(5, 6, SEES).put(omni.pixels(1, (1, 6, 4))).text(103, 8, HEARS)
    prompt.put(omni.sound(1, 137), SOUND).text(106, 9, SEES)
    prompt.put(omni.pixels(4, (3, 2, 4), frames=2, step_s=1.0)).text(103, 10, 11, HEARS)
    return prompt.put(omni.sound(2, 230), SOUND).text(106, 12, 13)


def test_everything_whole_and_in_chunks(omni: Omni) -> None:
    prompt = everything(omni)
    expected = omni.expected(prompt)
    compare_answers(omni.engine.run(prompt)[0], expected)
    engine = omni.engine.with_steps(omni.folder, max_step_tokens=5)
    compare_answers(engine.run(prompt)[0], expected)


def sounding(omni: Omni) -> tuple[Prompt, Ready]:
    """A video whose sound takes turns with it; the prompt as the reference has it, and as ours is."""
    seen, heard = omni.pixels(4, (3, 2, 4), frames=2, step_s=1.0), omni.sound(2, 230)
    how = VideoSound(per_s=25.0, chunk_s=2.0) if omni.case.name == "Qwen2_5Omni" else None
    settings = ProcessorSettings(
        merge=2, sound=SoundSettings(bands=BANDS, in_video=how or VideoSound(per_s=25.0))
    )
    inputs = [
        TowerInput(
            kind=one.kind, grid=one.grid, rows=one.rows, step_s=1.0, num_tokens=one.num_tokens
        )
        for one in (seen, TowerSound(heard))
    ]
    apart = [ProcessedMedia(inputs=(one,), layout=(0,)) for one in inputs]
    medium = _prepared(with_sound(*apart, settings), "video", b"k" * 32, 0, 2)
    spec = MediaSpec(
        processor="", settings=settings, image_token=IMAGE, video_token=VIDEO, audio_token=SOUND
    )
    written = [5, 6, SEES, HEARS, VIDEO, 106, 103, 10, 11]
    ids, media = expanded(written, [medium], spec, lambda text: [], field="prompt")
    assert sum(one.first > 0 for one in media) >= 2
    prompt = Prompt(ids=ids, inputs=[seen, heard], offsets=[0, 0])
    return prompt, Ready(ids, media)


def test_a_video_and_its_sound(omni: Omni) -> None:
    """Whole, and in chunks that cut its parts (MUL-04)."""
    prompt, ready = sounding(omni)
    inputs = omni.inputs(prompt) | {"use_audio_in_video": True}
    expected = answer_of(omni.oracle, prompt, inputs, 5)
    for step_tokens in (256, 5):
        engine = omni.engine.with_steps(omni.folder, max_step_tokens=step_tokens)
        compare_answers(engine.run(ready)[0], expected)


@pytest.mark.slow
def test_sounds_alone_and_text_alone(omni: Omni) -> None:
    sounds = Prompt().text(5, HEARS).put(omni.sound(1, 37), SOUND).text(106, 8)
    for prompt in (sounds, Prompt().text(*range(3, 40))):
        compare_answers(omni.engine.run(prompt)[0], omni.expected(prompt))


@pytest.mark.slow
def test_a_prefix_hit_and_company(omni: Omni) -> None:
    engine = omni.engine.with_steps(omni.folder, max_step_tokens=64)
    prompt, expected = everything(omni), omni.expected(everything(omni), 12)
    prompts = [prompt, Prompt().text(*range(3, 30)), everything(omni).text(14)]
    answers = engine.run(*prompts, max_tokens=12, scored=False)
    for one, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == omni.expected(one, 12).tokens
    (answer,) = engine.run(prompt, max_tokens=12, scored=False)
    assert (answer.tokens, answer.num_cached) == (expected.tokens, (len(prompt.ids) - 1) // 8 * 8)


@pytest.mark.slow
def test_a_checkpoint_that_speaks_too(omni: Omni, tmp_path: Path) -> None:
    tensors = {
        f"thinker.{name}": value
        for name, value in load_file(omni.folder / "model.safetensors").items()
    }
    tensors["talker.model.norm.weight"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((omni.folder / "config.json").read_text())
    engine = SeeingEngine(tmp_path)
    prompt = everything(omni)
    compare_answers(engine.run(prompt)[0], omni.expected(prompt))
    engine.close()

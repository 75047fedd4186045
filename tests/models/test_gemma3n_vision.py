"""Gemma 3n with images: transformers' model around MobileNet-V5 of tests/references, from pictures to answers; whole,
in chunks that cut an image, beside text, and with sound in the same prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.gemma3n.processing_gemma3n import Gemma3nProcessor

from headrace.back.layers.vision.mobilenet import MobileNetSpec
from headrace.back.models.gemma3n_vision import gemma3n_vision_spec
from headrace.base.config.hf import ConfigReader
from headrace.base.errors import CheckpointError
from headrace.front.media.processors.families import read_media
from tests.front.media.pictures import picture
from tests.models.hearing_cases import gemma3n_config, gemma3n_with_images
from tests.models.media import SeeingEngine, answer_of, compare_answers
from tests.models.oracle import randomize
from tests.models.picture_cases import PictureCase, Theirs
from tests.models.test_hearing import BANDS, Sound
from tests.models.test_pictures import Ready, Shown, given_of

IMAGE, END, SOUND, TEXTS = 100, 99, 102, 99
MARKS = {"<boi>": 97, "\n\n": 98}
PLACES = 256


def build() -> Any:
    """Ids from 99 on are of the towers' tables, and no answer has one."""
    keys = gemma3n_config().to_dict()
    text = {**keys["text_config"], "vocab_size": 104, "vocab_size_per_layer_input": TEXTS}
    config = transformers.Gemma3nConfig(
        text_config=text,
        vision_config={**keys["vision_config"], "vocab_offset": END, "vocab_size": 2},
        audio_config={**keys["audio_config"], "vocab_offset": 101, "vocab_size": 3},
        **{"image_token_id": IMAGE, "audio_token_id": SOUND, "boi_token_id": 97},
        **{"eoi_token_id": END, "boa_token_id": 96, "eoa_token_id": 101},
        audio_soft_tokens_per_image=9,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    oracle = gemma3n_with_images(config).eval()
    randomize(oracle, seed=3)
    with torch.no_grad():
        for weight in oracle.model.vision_tower.parameters():
            if weight.dim() == 4:
                weight.mul_(weight.shape[-1] ** 0.5 / weight[0].numel() ** 0.5)
        oracle.lm_head.weight[TEXTS:] = 0
    return oracle


def theirs_of(pictures: Any) -> Theirs:
    processor = transformers.SiglipImageProcessorPil(
        size={"height": 768, "width": 768}, do_normalize=False, resample=2
    )
    whole = SimpleNamespace(full_image_sequence="\n\n<boi>" + "I" * PLACES + "<eoi>\n\n")
    texts = [Gemma3nProcessor.replace_image_token(whole, {}, i) for i in range(len(pictures))]
    return Theirs(
        given=dict(processor(list(pictures), return_tensors="pt")),
        texts=[one.replace("<eoi>", "I") for one in texts],
    )


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("model")
    oracle = build()
    oracle.save_pretrained(folder)
    files = {"size": {"height": 768, "width": 768}, "do_normalize": False, "resample": 2}
    files |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(files))
    added = [{"id": id, "content": mark} for mark, id in MARKS.items() if id == 97]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    spec = read_media(folder, json.loads((folder / "config.json").read_text()))
    assert spec is not None and spec.audio_token == SOUND and spec.image_token == IMAGE
    engine = SeeingEngine(folder, longest=1024)
    case = PictureCase(name="Gemma3n", config={}, process=lambda a, b: theirs_of(a), marks=MARKS)
    yield Shown(case=case, folder=folder, oracle=oracle, engine=engine, spec=spec)
    engine.close()


@pytest.mark.slow
def test_pictures_are_seen_as_by_the_reference(shown: Shown) -> None:
    pictures = [picture(400, 240, 0), picture(170, 500, 1)]
    media = shown.processed(pictures)
    prompt = shown.prompt(media)
    theirs = theirs_of(pictures)
    assert prompt.ids == shown.expected_ids(theirs)
    expected = answer_of(shown.oracle, prompt, given_of(prompt, theirs), 8)
    compare_answers(shown.engine.run(prompt, max_tokens=8)[0], expected)
    plain = Ready(list(range(3, 30)), ())
    alone = answer_of(shown.oracle, plain, {"input_ids": torch.tensor([plain.ids])}, 8)
    for tokens in (100, 37):
        engine = shown.engine.with_steps(shown.folder, max_step_tokens=tokens)
        answers = engine.run(prompt, plain, max_tokens=8)
        for got, wanted in zip(answers, (expected, alone), strict=True):
            compare_answers(got, wanted)


@pytest.mark.slow
def test_sound_beside_a_picture(shown: Shown) -> None:
    pictures = [picture(120, 100, 2)]
    before = shown.prompt(shown.processed(pictures))
    frames = np.random.default_rng(4).normal(size=(37, BANDS)).astype(np.float32)
    sound = Sound(frames=frames, num_tokens=10)
    ids = [*before.ids, *[SOUND] * 10, 13, 14]
    prompt = Ready(ids, (*before.media, sound.at(len(before.ids))))
    given = {
        **given_of(prompt, theirs_of(pictures)),
        "input_features": torch.from_numpy(frames)[None],
        "input_features_mask": torch.ones(1, len(frames), dtype=torch.bool),
    }
    expected = answer_of(shown.oracle, prompt, given, 5)
    compare_answers(shown.engine.run(prompt)[0], expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architecture", "resnet50"),
        ("model_args", {"depth": 3}),
        ("model_args", {"channel_multiplier": 0}),
        ("model_args", [1]),
        ("hidden_size", 1024),
        ("vocab_offset", 262_145),
    ],
)
def test_other_towers_are_refused_by_key(key: str, value: Any) -> None:
    config, text = ConfigReader({}, "config"), ConfigReader({"hidden_size": 48}, "text")
    named = "eoi_token_id" if key == "vocab_offset" else key
    with pytest.raises(CheckpointError, match=named):
        gemma3n_vision_spec(config, ConfigReader({key: value}, "vision"), text)


def test_its_sizes_are_those_of_the_published_one() -> None:
    config, text = ConfigReader({}, "config"), ConfigReader({"hidden_size": 48}, "text")
    tower = gemma3n_vision_spec(config, ConfigReader({"model_args": None}, "vision"), text).tower
    assert tower == MobileNetSpec()


def test_pictures_of_other_sizes_are_refused(tmp_path: Path) -> None:
    files = {"size": {"height": 512, "width": 768}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(files))
    with pytest.raises(CheckpointError, match="height"):
        read_media(tmp_path, {"model_type": "gemma3n", "image_token_id": 7, "vision_config": {}})

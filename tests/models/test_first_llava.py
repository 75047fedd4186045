"""LLaVA as its authors publish it (MOD-02): transformers' models under the first names and keys, pictures through
transformers' processors."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.base.errors import CheckpointError, InvalidRequest
from headrace.front.media.parts import MediaPart
from headrace.front.media.placeholders import expanded
from headrace.front.media.preparation import MediaPreparer, MediaRequest, _prepared
from headrace.front.media.processing import Sampling
from headrace.front.media.processors.families import PROCESSORS
from tests.front.media.pictures import picture
from tests.models.media import (
    IMAGE,
    VIDEO,
    Answer,
    SeeingEngine,
    answer_of,
    compare_answers,
    save_media_oracle,
)
from tests.models.oracle import load_ours, model_spec
from tests.models.picture_cases import CASES as PICTURES
from tests.models.picture_cases import POINTS
from tests.models.sight import read_spec
from tests.models.test_pictures import BEFORE, BEHIND, Ready, Shown, given_of
from tests.models.test_towers import CASES as TOWERS
from tests.models.test_towers import Seen, save_case, text, two_images

KINDS = ("image", "video")
NAMES = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.vision_tower\.(vision_model\.)?", "model.vision_tower.vision_tower.vision_model."),
    (r"^model\.multi_modal_projector\.linear_1", "model.mm_projector.0"),
    (r"^model\.multi_modal_projector\.linear_2", "model.mm_projector.2"),
)
TEXTS = {
    "llama": "LlavaLlamaForCausalLM",
    "mistral": "LlavaMistralForCausalLM",
    "qwen2": "LlavaQwenForCausalLM",
    "stablelm": "LlavaStableLMForCausalLM",
}


def publish(oracle: Any, folder: Path, **keys: Any) -> None:
    """The oracle's checkpoint in the first layout; the tower's sizes are told, as no such tower has a name."""
    tensors = {}
    for name, tensor in oracle.state_dict().items():
        for pattern, new in NAMES:
            name = re.sub(pattern, new, name)
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")
    reads = json.loads(oracle.config.text_config.to_json_string())
    vision = json.loads(oracle.config.vision_config.to_json_string())
    first = {
        **{"mm_projector_type": "mlp2x_gelu", "mm_vision_tower": "tiny", "vision_config": vision},
        **{"mm_vision_select_layer": -2, "mm_patch_merge_type": "spatial_unpad"},
        **{"architectures": [TEXTS[reads["model_type"]]], "model_type": "llava"},
    }
    (folder / "config.json").write_text(json.dumps({**reads, **first, **keys}))
    (folder / "tokenizer_config.json").write_text('{"unk_token": "<unk>", "eos_token": "</s>"}')
    added = [{"id": IMAGE, "content": "<unk>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ratio, points",
    [
        ("llava-next", "anyres", POINTS),
        ("llava-onevision", "anyres_max_2", POINTS),
        ("llava-onevision-several", "anyres_max_2", POINTS),
    ],
)
def test_tiles_are_seen_under_the_first_names(
    name: str, ratio: str, points: Any, tmp_path: Path
) -> None:
    case = PICTURES[name]
    config, oracle_class = case.build(tmp_path)
    oracle = save_media_oracle(oracle_class, config, tmp_path)
    publish(oracle, tmp_path, image_aspect_ratio=ratio, image_grid_pinpoints=points)
    spec = read_spec(tmp_path)
    moves = name != "llava-next"
    assert spec.written == dict.fromkeys(("image", "video") if moves else ("image",), "<unk>")
    assert spec.video_token == (IMAGE if moves else None)
    engine = SeeingEngine(tmp_path)
    shown = Shown(case=case, folder=tmp_path, oracle=oracle, engine=engine, spec=spec)
    pictures = [picture(*size, seed) for seed, size in enumerate(case.sizes)]
    media = shown.processed(pictures)
    prompt = shown.prompt(media)
    theirs = case.process(pictures, media)
    assert prompt.ids == shown.expected_ids(theirs)
    compare_answers(
        engine.run(prompt, max_tokens=5)[0], answer_of(oracle, prompt, given_of(prompt, theirs), 5)
    )
    if case.clip is not None:
        a_clip_is_seen(shown)
    engine.close()


def a_clip_is_seen(shown: Shown) -> None:
    """Its placeholder is that of images."""
    assert shown.case.clip is not None and shown.spec.video_token == IMAGE
    count = shown.case.num_frames
    frames = [picture(40, 24, seed) for seed in range(count)]
    processor = PROCESSORS.load(shown.spec.processor)(shown.spec.settings)
    medium = processor.video(iter(frames), range(count), Sampling(count, shown.case.rate))
    prepared = _prepared(medium, "video", bytes(32), 0, shown.spec.settings.merge)
    ids, inputs = expanded(
        [*BEFORE, IMAGE, *BEHIND], [prepared], shown.spec, shown.ids_of, field="prompt"
    )
    theirs = shown.case.clip(frames, medium)
    assert ids == shown.expected_ids(theirs, IMAGE)
    given = {"input_ids": torch.tensor([shown.expected_ids(theirs, VIDEO)]), **theirs.given}
    with torch.inference_mode():
        logprobs = shown.oracle(**given).logits[0].float().log_softmax(-1)
    *before, last = list(logprobs.numpy())
    expected = Answer(tokens=[int(last.argmax())], prompt_logprobs=before, logprobs=[last])
    compare_answers(shown.engine.run(Ready(ids, inputs), max_tokens=1)[0], expected)


def test_images_and_video_of_one_placeholder_do_not_go_together(tmp_path: Path) -> None:
    case = PICTURES["llava-onevision"]
    config, oracle_class = case.build(tmp_path)
    oracle = save_media_oracle(oracle_class, config, tmp_path)
    publish(oracle, tmp_path, image_aspect_ratio="anyres_max_2", image_grid_pinpoints=POINTS)
    preparer = MediaPreparer(read_spec(tmp_path), None)
    parts = [
        MediaPart(kind=kind, field=f"messages[0].content[{i}]") for i, kind in enumerate(KINDS)
    ]
    with pytest.raises(InvalidRequest, match=r"content\[1\]: images and video do not go together"):
        asyncio.run(preparer.media_of(parts, MediaRequest()))
    preparer.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral", "stablelm"])
def test_one_square_is_seen_under_the_first_names(kind: str, tmp_path: Path) -> None:
    turned = {"partial_rotary_factor": 0.5} if kind == "stablelm" else {}
    case = replace(TOWERS["llava"], text=text(kind, **turned))
    oracle = save_case(case, tmp_path)
    publish(oracle, tmp_path, image_aspect_ratio="pad", image_grid_pinpoints=None)
    spec = read_spec(tmp_path)
    assert (spec.processor, spec.settings.fit) == ("square", "pad")
    assert spec.settings.pad_color == (122, 116, 104)
    seen = Seen(case=case, folder=tmp_path, oracle=oracle, engine=SeeingEngine(tmp_path))
    prompt = two_images(seen)
    compare_answers(seen.engine.run(prompt)[0], seen.expected(prompt))
    seen.engine.close()


@pytest.mark.parametrize(
    "key, wrong",
    [
        ("mm_projector_type", "linear"),
        ("mm_vision_tower", "somebody/elses-tower"),
        ("mm_use_im_start_end", True),
        ("mm_vision_select_feature", "cls_patch"),
        ("image_aspect_ratio", "highres"),
        ("mm_patch_merge_type", "flat"),
    ],
)
def test_what_is_not_known_is_refused_by_key(key: str, wrong: Any, tmp_path: Path) -> None:
    case = PICTURES["llava-next"]
    config, oracle_class = case.build(tmp_path)
    oracle = save_media_oracle(oracle_class, config, tmp_path)
    keys = {"image_aspect_ratio": "anyres", "image_grid_pinpoints": POINTS, key: wrong}
    publish(oracle, tmp_path, **keys, **({"vision_config": None} if "tower" in key else {}))
    with pytest.raises(CheckpointError) as caught:
        load_ours(model_spec(tmp_path))
    assert caught.value.field == key


def test_sizes_of_tiles_may_be_told_by_their_first_and_last(tmp_path: Path) -> None:
    case = PICTURES["llava-onevision"]
    config, oracle_class = case.build(tmp_path)
    oracle = save_media_oracle(oracle_class, config, tmp_path)
    told = {"image_aspect_ratio": "anyres_max_9", "image_grid_pinpoints": "(1x1),...,(2x3)"}
    publish(oracle, tmp_path, **told)
    settings = read_spec(tmp_path).settings
    assert settings.sizes == ((16, 16), (16, 32), (16, 48), (32, 16), (32, 32), (32, 48))
    assert settings.most_windows == 9 * 16

"""Images through the whole engine, family by family: the tokens that transformers gives for the same prompt."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace import LLM, SamplingParams
from headrace.front.media.processing import Sampling, TowerInput
from headrace.front.media.processors.families import PROCESSORS, read_media
from tests.front.media.folders import write_processors, write_tokenizer
from tests.front.media.pictures import animated, picture
from tests.models import test_qwen_vl, test_towers, vision_cases
from tests.models.media import Pixels, Prompt, save_media_oracle

SIZES = ((40, 24), (61, 43), (17, 90))
MARKS = {
    "llava": "<image>",
    "llava-siglip": "<image>",
    "pixtral": "[IMG]",
    "mistral3": "[IMG]",
    "internvl": "<IMG_CONTEXT>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "gemma3": "<start_of_image>",
    "paligemma": "<image>",
    "gemma4-mutual": "<image>",
}
CASES = {**test_towers.CASES, **vision_cases.CASES}
SOFT = {"gemma3": "<image_soft_token>"}
"""What stands for an image's tokens where the mark in the prompt is another."""
MORE = (
    *("<image>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<img>", "</img>", "<IMG_CONTEXT>"),
    *("<fake_token_around_image>", "<global-img>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)
FILES: dict[str, dict[str, Any]] = {
    "llava": {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
    "llava-siglip": {"size": {"height": 16, "width": 16}, "do_center_crop": False},
    "pixtral": {"size": {"longest_edge": 40}},
    "mistral3": {"size": {"longest_edge": 40}},
    "internvl": {"size": {"height": 16, "width": 16}, "max_patches": 4},
    "idefics3": {"size": {"longest_edge": 32}},
    "smolvlm": {"size": {"longest_edge": 64}},
    "gemma3": {"size": {"height": 24, "width": 24}},
    "paligemma": {"size": {"height": 16, "width": 16}},
    "gemma4-mutual": {"max_soft_tokens": 70},
}
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def text_of(case: Any, ids: dict[str, int]) -> dict[str, Any]:
    eos = ids["<|im_end|>"]
    sizes = [key for key in case.text if key.startswith("vocab_size")]
    return {
        **case.text,
        **dict.fromkeys(sizes, ids[""]),
        "vocab_size": ids[""],
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": ids["<|endoftext|>"],
    }


def pixels_of(one: TowerInput, merge: int) -> Pixels:
    t, h, w = one.grid
    frames = one.rows.shape[1] // (3 * 16)
    return Pixels(
        kind=one.kind,
        grid=one.grid,
        values=np.array(one.rows).reshape(-1, 3, frames, 4, 4),
        num_tokens=t * h * w // merge**2,
        merge=merge,
        step_s=one.step_s,
    )


def answered(folder: Path, parts: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """The prompt's ids and the answer's."""
    with LLM(str(folder), dtype="float32", device="cpu", kv_blocks=256) as llm:
        message = {"role": "user", "content": [*parts, {"type": "text", "text": "the quick fox?"}]}
        (output,) = llm.chat([message], PARAMS, progress=False)
        return output.prompt_ids, output.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKS)
def test_images_alone(name: str, tmp_path: Path) -> None:
    ids = write_tokenizer(tmp_path, mark=MARKS[name], more=MORE)
    case = CASES[name]
    token = ids[SOFT.get(name, MARKS[name])]
    keys = {key: token for key in ("image_token_index", "image_token_id") if key in case.config}
    if name.startswith("gemma4"):  # whose images would else be one
        keys |= {"boi_token_id": ids["<start_of_image>"], "eoi_token_id": ids["<end_of_image>"]}
    if name in SOFT:
        keys["boi_token_index"] = ids[MARKS[name]]
    case = dataclasses.replace(case, text=text_of(case, ids), config={**case.config, **keys})
    oracle = test_towers.save_case(case, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(FILES[name]))
    spec = read_media(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    assert spec is not None and spec.image_token == token
    processor = PROCESSORS.load(spec.processor)(spec.settings)
    seen = test_towers.Seen(case=case, folder=tmp_path, oracle=oracle, engine=None)
    images = [picture(*size, seed=i) for i, size in enumerate(SIZES)]
    parts = [{"type": "image_pil", "image_pil": image} for image in images]
    prompt_ids, tokens = answered(tmp_path, parts)
    inputs = [
        pixels_of(one, spec.settings.merge)
        for image in images
        for one in processor.image(image).inputs
    ]
    assert prompt_ids.count(token) == sum(one.num_tokens for one in inputs)
    assert seen.expected(Prompt(ids=prompt_ids, inputs=inputs), 6).tokens == tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2-vl", "qwen3.5"])
def test_images_and_video(name: str, tmp_path: Path) -> None:
    """MUL-02: the outer marks stay around the blocks of a stamped video. REG-088."""
    ids = write_tokenizer(tmp_path)
    case = test_qwen_vl.CASES[name]
    case = dataclasses.replace(case, text=text_of(case, ids))
    config = getattr(transformers, f"{case.name}Config")(
        vision_config=case.vision,
        text_config=case.text,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    oracle_class = getattr(transformers, f"{case.name}ForConditionalGeneration")
    oracle = save_media_oracle(oracle_class, config, tmp_path)
    write_processors(tmp_path, 4, (64, 48 * 48), (64, 4 * 32 * 32))
    half = [0.5, 0.5, 0.5]
    if case.norm == test_qwen_vl.HALF:
        file = tmp_path / "preprocessor_config.json"
        facts = json.loads(file.read_text()) | {"image_mean": half, "image_std": half}
        file.write_text(json.dumps(facts))
    spec = read_media(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    assert spec is not None
    processor = PROCESSORS.load(spec.processor)(spec.settings)
    image, frames = picture(61, 43), [picture(24, 16, i) for i in range(6)]
    clip = animated(frames, "PNG", 500)
    prompt_ids, tokens = answered(
        tmp_path,
        [{"type": "image_pil", "image_pil": image}, {"type": "video", "video": clip}],
    )
    video = processor.video(iter(frames), range(6), Sampling(6, 2.0))
    inputs = [pixels_of(one, 2) for one in (*processor.image(image).inputs, *video.inputs)]
    seen = test_qwen_vl.Seen(case=case, folder=tmp_path, oracle=oracle, engine=None)
    prompt = Prompt(ids=prompt_ids, inputs=inputs)
    given = seen.inputs(prompt)
    whole = torch.tensor([prompt_ids])
    given["mm_token_type_ids"] = (whole == ids["<|image_pad|>"]) + 2 * (
        whole == ids["<|video_pad|>"]
    )
    assert prompt_ids.count(ids["<|vision_start|>"]) == 2 + (3 if spec.settings.stamped else 0)
    oracle.generation_config.eos_token_id = None
    with torch.inference_mode():
        answer = oracle.generate(**given, max_new_tokens=6, do_sample=False)
    assert answer[0, len(prompt_ids) :].tolist() == tokens

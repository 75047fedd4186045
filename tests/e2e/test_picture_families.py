"""Families of picture_cases.py through the whole engine: the tokens that transformers gives for the same chat."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.front.media.processors.families import PROCESSORS, read_media
from tests.front.media.folders import write_tokenizer
from tests.front.media.pictures import picture
from tests.models.media import save_media_oracle
from tests.models.picture_cases import CASES, PictureCase
from tests.models.test_pictures import rename

SOFT = {
    "llava-next": "<image>",
    "llava-onevision": "<image>",
    "llama4": "<|patch|>",
    "kimi-k25": "<|media_pad|>",
    "ovis2": "<IMG_ATOM>",
    "paddleocr-vl": "<|IMAGE_PLACEHOLDER|>",
    "step3p7": "<im_patch>",
}
"""What an image's tokens are."""
MARK = {"llama4": "<|image|>", "ovis2": "<image>"}
"""What stands for a whole image in a chat, where that is another."""
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def with_ids(case: PictureCase, name: str, ids: dict[str, int]) -> PictureCase:
    """The case with a tokenizer's ids."""
    text = {
        **case.config["text_config"],
        "vocab_size": ids[""],
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    config: dict[str, Any] = {**case.config, "text_config": text}
    for key in ("image_token_id", "image_token_index"):
        if key in config:
            config[key] = ids[SOFT[name]]
    if "visual_indicator_token_ids" in config:
        marks = [mark for mark in case.marks if mark.startswith("<IMG_")]
        config["visual_indicator_token_ids"] = [ids[mark] for mark in marks]
        config["vocab_size"] = ids[""]
    for key in ("video_token_id", "video_token_index"):
        if key in config:
            config[key] = ids["<|video_pad|>"]
    return dataclasses.replace(case, config=config)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOFT)
def test_a_chat_with_an_image_is_answered_as_by_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    more = [SOFT[name], *(mark for mark in case.marks if mark != SOFT[name])]
    ids = write_tokenizer(tmp_path, mark=MARK.get(name, SOFT[name]), more=more)
    case = with_ids(case, name, ids)
    config, oracle_class = case.build(tmp_path)
    oracle = save_media_oracle(oracle_class, config, tmp_path)
    if case.mended is not None:
        case.mended(oracle)
    rename(tmp_path / "model.safetensors", case)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(case.files))
    image = picture(40, 24, 3)
    with LLM(str(tmp_path), dtype="float32", device="cpu", kv_blocks=256) as llm:
        content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "a fox?"}]
        message = {"role": "user", "content": content}
        (output,) = llm.chat([message], PARAMS, progress=False)
    spec = read_media(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    assert spec is not None
    medium = PROCESSORS.load(spec.processor)(spec.settings).image(image)
    theirs = case.process([image], [medium])
    prompt = torch.tensor([output.prompt_ids])
    soft = prompt == ids[SOFT[name]]
    words = theirs.texts[0]
    for mark in case.marks:
        words = words.replace(mark, "")
    assert int(soft.sum()) == words.count("I")
    given = {"mm_token_type_ids": soft.long(), **theirs.given} if theirs.typed else theirs.given
    oracle.generation_config.eos_token_id = None
    with torch.inference_mode():
        answer = oracle.generate(input_ids=prompt, **given, max_new_tokens=6, do_sample=False)
    assert answer[0, prompt.shape[1] :].tolist() == output.outputs[0].token_ids

"""Encoder-decoders that see, through the whole engine: the tokens that transformers gives for the same chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.base.errors import InvalidRequest
from tests.front.media.folders import write_tokenizer
from tests.front.media.pictures import picture
from tests.models.media import save_media_oracle
from tests.models.test_encoder_sight import CASES, Case

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
        ],
    ),
]
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def _stated(case: Case, ids: dict[str, int]) -> Any:
    """Its config, with a tokenizer's ids."""
    config = case.config()
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "decoder"))):
        if part is not None:
            part.vocab_size, part.pad_token_id = ids[""], ids["<|endoftext|>"]
            part.bos_token_id, part.eos_token_id = ids["<s>"], ids["</s>"]
            part.decoder_start_token_id = ids["</s>"]
    if hasattr(config, "image_token_id"):
        config.image_token_id = ids["<image>"]
    return config


def _written(case: Case, folder: Path) -> tuple[Any, dict[str, int]]:
    """The model in `folder`, and a tokenizer without a chat template."""
    ids = write_tokenizer(folder, more=("<s>", "</s>", "<image>", "<loc_7>"))
    facts = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    (folder / "preprocessor_config.json").write_text(json.dumps(case.files))
    return save_media_oracle(case.oracle, _stated(case, ids), folder), ids


def _expected(oracle: Any, given: dict[str, Any], start: list[int]) -> list[int]:
    decoded = list(start)
    with torch.inference_mode():
        for _ in range(6):
            logits = oracle(**given, decoder_input_ids=torch.tensor([decoded])).logits
            decoded.append(int(logits[0, -1].argmax()))
    return decoded[len(start) :]


@pytest.mark.parametrize("device", DEVICES)
def test_a_chat_with_florence(device: str, tmp_path: Path) -> None:
    case = CASES["florence2"]
    oracle, ids = _written(case, tmp_path)
    image = picture(40, 24, 3)
    part = {"type": "image_pil", "image_pil": image}
    with LLM(str(tmp_path), dtype="float32", device=device, kv_blocks=64) as llm:
        content = [part, {"type": "text", "text": "<REGION_TO_OCR><loc_7>"}]
        (output,) = llm.chat([{"role": "user", "content": content}], PARAMS, progress=False)
        prompt = output.prompt_ids
        assert prompt[:18] == [ids["<image>"]] * 17 + [ids["<s>"]]
        assert prompt[-1] == ids["</s>"] and ids["<loc_7>"] in prompt
        given = {"input_ids": torch.tensor([prompt]), "pixel_values": case.pixels([image])}
        assert output.outputs[0].token_ids == _expected(oracle, given, [ids["</s>"]])
        with pytest.raises(InvalidRequest, match="at most 1"):
            llm.chat([{"role": "user", "content": [part, part]}], PARAMS, progress=False)


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_decoder_begins_with_is_the_text_beside_an_image(
    device: str, tmp_path: Path
) -> None:
    case = CASES["donut"]
    oracle, ids = _written(case, tmp_path)
    image = picture(40, 24, 3)
    part = {"type": "image_pil", "image_pil": image}
    given = {"pixel_values": case.pixels([image])}
    with LLM(str(tmp_path), dtype="float32", device=device, kv_blocks=64) as llm:
        for text, start in (("", []), ("<loc_7>", ["<loc_7>"]), ("</s><loc_7>", ["<loc_7>"])):
            content = [part, {"type": "text", "text": text}] if text else [part]
            (chat,) = llm.chat([{"role": "user", "content": content}], PARAMS, progress=False)
            prompt = {"prompt": text, "multi_modal_data": {"image": image}}
            (plain,) = llm.generate([prompt], PARAMS, progress=False)
            begin = [ids[one] for one in ("</s>", *start)]
            expected = _expected(oracle, given, begin)
            assert chat.outputs[0].token_ids == plain.outputs[0].token_ids == expected
        with pytest.raises(InvalidRequest, match="has no image"):
            llm.generate(["a text"], PARAMS, progress=False)

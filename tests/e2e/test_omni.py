"""A checkpoint that speaks, sees and hears, through the whole engine: the thinker's answer to an image and a sound is
transformers'."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.front.media.processors.families import PROCESSORS, read_media
from headrace.front.media.processors.spectrogram import spectrogram
from headrace.launch.config_files import read_config
from tests.api.speech import tone, wav
from tests.front.media.folders import write_tokenizer
from tests.front.media.pictures import picture
from tests.models.media import Prompt, answer_of, save_media_oracle
from tests.models.test_omni import CASES

AUDIO = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
SPEAKS = {"qwen2.5-omni": "Qwen2_5OmniModel", "qwen3-omni": "Qwen3OmniMoeForConditionalGeneration"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_chat_with_an_image_and_a_sound(name: str, tmp_path: Path) -> None:
    ids = write_tokenizer(tmp_path, more=AUDIO)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    heard = "{% elif part.type == 'audio' %}" + "".join(AUDIO) + "{% else %}{{ part"
    written["chat_template"] = written["chat_template"].replace("{% else %}{{ part", heard)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    case = CASES[name]
    config = getattr(transformers, f"{case.name}ThinkerConfig")(
        vision_config=case.vision, audio_config=case.audio, text_config=case.text
    )
    config.image_token_id, config.video_token_id = ids["<|image_pad|>"], ids["<|video_pad|>"]
    config.audio_token_id, config.audio_start_token_id = ids[AUDIO[1]], ids[AUDIO[0]]
    config.vision_start_token_id = ids["<|vision_start|>"]
    config.text_config.vocab_size = ids[""]
    config.text_config.bos_token_id = config.text_config.eos_token_id = None
    oracle_class = getattr(transformers, f"{case.name}ThinkerForConditionalGeneration")
    oracle = save_media_oracle(oracle_class, config, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({f"thinker.{k}": v for k, v in weights.items()}, tmp_path / "model.safetensors")
    thinker = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": [SPEAKS[name]], "thinker_config": thinker, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(whole))

    seen, samples = picture(40, 28, 3), tone(0.4, 300.0)
    spec = read_media(tmp_path, read_config(tmp_path))
    assert spec is not None
    image = PROCESSORS.load(spec.processor)(spec.settings).image(seen).inputs[0]
    sound = spectrogram(samples, spec.settings).inputs[0]
    merged = image.rows.shape[0] // 4
    text = (
        f"<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * merged}<|vision_end|>{AUDIO[0]}"
        f"{AUDIO[1] * sound.num_tokens}{AUDIO[2]}the fox?<|im_end|>\n<|im_start|>assistant\n"
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    prompt = Prompt(ids=tokenizer.encode(text))
    pixels = torch.from_numpy(image.rows.reshape(len(image.rows), 3, 1, 4, 4)).float() / 255
    mean, std = (torch.tensor(one).view(1, 3, 1, 1, 1) for one in case.norm)
    frames = torch.from_numpy(sound.rows.view(np.float32).T.copy())[None]
    inputs = {
        "input_ids": torch.tensor([prompt.ids]),
        "attention_mask": torch.ones(1, len(prompt.ids), dtype=torch.int64),
        "pixel_values": ((pixels - mean) / std).expand(-1, -1, 2, -1, -1).flatten(1),
        "image_grid_thw": torch.tensor([image.grid]),
        "input_features": frames,
        "feature_attention_mask": torch.ones(1, frames.shape[2], dtype=torch.int64),
    }
    expected = answer_of(oracle, prompt, inputs, 8).tokens
    parts = [{"type": "image_pil", "image_pil": seen}, {"type": "audio", "audio": wav(samples)}]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "the fox?"}]}
    with LLM(str(tmp_path), dtype="float32", device="cpu", kv_blocks=256) as llm:
        (chat,) = llm.chat([message], PARAMS, progress=False)
    assert chat.outputs[0].token_ids == expected

"""Moonshine: an encoder over samples of any length. Logits of every position and greedy tokens are transformers', of
sounds of unequal lengths beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.front.media.test_log_mel import sound
from tests.models.listening import answers_to, check_answer
from tests.models.media import save_media_oracle

START, NUM_TOKENS = 1, 10


def config(**more: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 90,
        "hidden_size": 40,
        "intermediate_size": 48,
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2,
        "encoder_num_attention_heads": 2,
        "decoder_num_attention_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    return transformers.MoonshineConfig(**{**sizes, **more})


def wave(seconds: float) -> np.ndarray:
    return (sound(seconds) / 32768.0).astype(np.float32)


def streaming(**more: Any) -> Any:
    inside = {
        **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 2},
        "sliding_windows": [[6, 3], [5, 0]],
    }
    plain = {
        **{"vocab_size": 90, "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0},
        "max_position_embeddings": 1600,
    }
    return transformers.MoonshineStreamingConfig(**plain, encoder_config=inside, **more)


@pytest.mark.parametrize("streams", [False, True])
def test_sounds_of_unequal_lengths(streams: bool, tmp_path: Path) -> None:
    cls = transformers.MoonshineForConditionalGeneration
    if streams:
        cls = transformers.MoonshineStreamingForConditionalGeneration
    oracle = save_media_oracle(cls, streaming() if streams else config(), tmp_path)
    waves = [wave(seconds) for seconds in (0.3, 1.7, 0.9, 2.345)]
    answers = answers_to(tmp_path, waves, [START], width=90, count=NUM_TOKENS)
    for one, answer in zip(waves, answers, strict=True):
        values = torch.from_numpy(one)[None]

        def logits(ids: list[int], values: torch.Tensor = values) -> Any:
            inputs = {"input_values": values, "decoder_input_ids": torch.tensor([ids])}
            if streams:  # windows count with a mask alone; what fills no frame is masked
                left = -values.shape[1] % 80
                inputs["input_values"] = torch.nn.functional.pad(values, (0, left))
                inputs["attention_mask"] = torch.ones(1, values.shape[1] + left).long()
                inputs["attention_mask"][:, values.shape[1] :] = 0
            return oracle(**inputs).logits[0, -1]

        check_answer(answer, [START], logits)

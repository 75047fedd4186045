"""Tiny configurations of more families that hear, in the form of test_hearing.py."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from headrace.base.wire.media import SoundSteps
from tests.models.test_hearing import SOUND, Case, filled, masks
from tests.models.vision_cases import GEMMA4_TEXT, GEMMA4_TOWER

HALVES = ((3, 2, 1),) * 2


def masked_rows(sounds: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """[B, N, bands], of which what is filled up is masked."""
    longest, own = max(map(len, sounds)), [len(one) for one in sounds]
    rows = filled(sounds, longest).transpose(1, 2)
    return {"input_features": rows, "input_features_mask": masks(own, longest).bool()}


def gemma4_config() -> Any:
    audio = {
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"subsampling_conv_channels": [128, 4], "output_proj_dims": 24, "conv_kernel_size": 3},
        **{"attention_chunk_size": 4, "attention_context_left": 5, "attention_logit_cap": 3.0},
        **{"model_type": "gemma4_audio"},
    }
    return transformers.Gemma4Config(
        vision_config=GEMMA4_TOWER,
        audio_config=audio,
        text_config=GEMMA4_TEXT,
        image_token_id=99,
        audio_token_id=SOUND,
    )


CASES = {
    "gemma4": Case(
        config=gemma4_config,
        model="Gemma4",
        steps=SoundSteps(strides=HALVES),
        lengths=(37, 62),
        inputs=masked_rows,
        bands=128,
        typed=True,
    ),
}

"""Tiny configurations of more families that hear, in the form of test_hearing.py."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from headrace.base.wire.media import SoundSteps
from tests.models.test_hearing import SOUND, TEXT, Case, filled, masks
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


def granite_speech_config() -> Any:
    return transformers.GraniteSpeechConfig(
        text_config={**TEXT, "model_type": "granite", "embedding_multiplier": 1.5},
        encoder_config={
            **{"input_dim": 160, "num_layers": 2, "hidden_dim": 32, "num_heads": 2},
            **{"context_size": 8, "max_pos_emb": 12, "conv_kernel_size": 3, "output_dim": 10},
        },
        projector_config={
            **{"model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "intermediate_size": 40, "encoder_hidden_size": 32},
        },
        audio_token_index=SOUND,
        window_size=6,
        downsample_rate=2,
        has_lora_adapter=False,
        tie_word_embeddings=False,
    )


def one_after_another(sounds: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """[B, N, bands]; the reference's encoder knows no filling: sounds of one length."""
    assert len({len(one) for one in sounds}) == 1
    tokens = -(-len(sounds[0]) // 6) * 3
    mask = torch.ones(len(sounds), tokens, dtype=torch.bool)
    return {"input_features": torch.stack(sounds), "input_features_mask": mask}


CASES = {
    "granite-speech": Case(
        config=granite_speech_config,
        model="GraniteSpeech",
        steps=SoundSteps(chunk=6, per_chunk=3),
        lengths=(37, 37),
        inputs=one_after_another,
        bands=160,
    ),
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

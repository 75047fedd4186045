"""Tiny configurations of more families that hear, in the form of test_hearing.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.gemma3n import modeling_gemma3n

from headrace.base.wire.media import SoundSteps
from tests.models.test_hearing import BANDS, LINES, SOUND, TEXT, Case, filled, masks
from tests.models.vision_cases import GEMMA4_TEXT, GEMMA4_TOWER
from tests.references.mobilenet_v5 import MobileNetV5Encoder

HALVES = ((3, 2, 1),) * 2
SEEN, ENDS = SOUND - 1, (SOUND - 2, SOUND + 1)
"""Of Gemma 3n: what stands for an image, and what ends images and sounds."""


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


def gemma3n_config() -> Any:
    text = {
        **{**TEXT, "head_dim": 12, "intermediate_size": [64] * 5, "num_hidden_layers": 5},
        **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "laurel_rank": 4},
        **{
            "vocab_size": SOUND + 3,
            "vocab_size_per_layer_input": ENDS[0],
            "altup_num_inputs": 2,
            "sliding_window": 7,
        },
        **{"activation_sparsity_pattern": [0.0] * 5, "model_type": "gemma3n_text"},
    }
    audio = {
        **{"hidden_size": 32, "conf_num_hidden_layers": 2, "conf_num_attention_heads": 2},
        **{"sscp_conv_channel_size": [6, 4], "conf_conv_kernel_size": 3, "input_feat_size": BANDS},
        **{"conf_attention_chunk_size": 4, "conf_attention_context_left": 5, "vocab_size": 3},
        **{"conf_attention_logit_cap": 3.0, "vocab_offset": SOUND, "conf_reduction_factor": 2},
    }
    return transformers.Gemma3nConfig(
        text_config=text,
        audio_config=audio,
        vision_config={
            **{"hidden_size": 2048, "vocab_size": 2, "vocab_offset": ENDS[0]},
            **{"model_args": {"channel_multiplier": 0.0625}},
        },
        audio_token_id=SOUND,
        image_token_id=SEEN,
        **dict(zip(("eoi_token_id", "eoa_token_id"), ENDS, strict=True)),
        audio_soft_tokens_per_image=9,
    )


class TimmModel(torch.nn.Module):
    """transformers' wrapper of timm's MobileNet-V5."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.timm_model = MobileNetV5Encoder(**(config.model_args or {}))

    def forward(self, pixel_values: torch.Tensor, **more: Any) -> Any:
        return transformers.modeling_outputs.BaseModelOutputWithPooling(
            last_hidden_state=self.timm_model(pixel_values)
        )


def gemma3n_with_images(config: Any) -> Any:
    """Gemma 3n, of whose towers that for images is timm's."""
    build = modeling_gemma3n.AutoModel.from_config

    def from_config(part: Any, **more: Any) -> Any:
        if part.model_type == config.vision_config.model_type:
            return TimmModel(part)
        return build(part, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_gemma3n.AutoModel, "from_config", from_config)
        model = transformers.Gemma3nForConditionalGeneration(config)
    ends = (
        (config.image_token_id, config.eoi_token_id),
        (config.audio_token_id, config.eoa_token_id),
    )

    def with_ends(model: Any, given: Any, named: dict[str, Any]) -> Any:
        """transformers' prompts have a token of its own where a medium ends, ours one more of its places."""
        ids = named["input_ids"]
        if ids.shape[1] > 1:
            before, ids = ids, ids.clone()
            behind = torch.cat((before[:, 1:], before.new_zeros(1, 1)), 1)
            for token, end in ends:
                ids[(before == token) & (behind != token)] = end
        return given, {**named, "input_ids": ids}

    model.model.register_forward_pre_hook(with_ends, with_kwargs=True)
    return model


def granite_speech_plus_config() -> Any:
    plain = granite_speech_config()
    encoder = {**plain.encoder_config.to_dict(), "cat_hidden_layers": [0, 1]}
    projector = {**plain.projector_config.to_dict(), "encoder_hidden_size": 96}
    whole = {**plain.to_dict(), "encoder_config": encoder, "projector_config": projector}
    names = ("model_type", "architectures", "transformers_version")
    return transformers.GraniteSpeechPlusConfig(
        **{key: value for key, value in whole.items() if key not in names}
    )


def audioflamingo3_config() -> Any:
    return transformers.AudioFlamingo3Config(
        audio_config={
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"intermediate_size": 40, "num_mel_bins": BANDS, "max_source_positions": 50},
        },
        text_config={**TEXT, "model_type": "qwen2"},
        audio_token_id=SOUND,
        tie_word_embeddings=False,
    )


def windows_of_silence(
    sounds: list[torch.Tensor], length: int, *, margin: int = 2
) -> dict[str, torch.Tensor]:
    """The margin is silence, which goes on to the end of the window."""
    last = [torch.cat([one, one[-1:].expand(length - len(one), -1)]) for one in sounds]
    own = [len(one) - margin for one in sounds]
    return {"input_features": filled(last, length), "input_features_mask": masks(own, length)}


def glm_asr_config() -> Any:
    return transformers.GlmAsrConfig(
        audio_config={
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"intermediate_size": 128, "num_mel_bins": BANDS},
        },
        text_config={**TEXT, "model_type": "llama", "head_dim": 12},
        audio_token_id=SOUND,
        tie_word_embeddings=False,
    )


def nemotron_config() -> Any:
    tower = {
        **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4},
        **{"max_img_size": 24, "num_cls_tokens": 2, "num_registers": 1, "mlp_ratio": 1.5},
        "video_temporal_patch_size": 2,
    }
    state = {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8}
    kinds = ["full_attention", "mlp"]
    text = {**TEXT, **state, "model_type": "nemotron_h", "layers_block_type": kinds, "head_dim": 12}
    audio = {
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"intermediate_size": 40, "num_mel_bins": BANDS, "subsampling_conv_channels": 6},
        **{"projection_hidden_size": 36, "projection_bias": False},
    }
    return transformers.NemotronH_Omni_Reasoning_V3_Config(
        vision_config=tower,
        text_config=text,
        audio_config=audio,
        projector_hidden_size=40,
        vision_hidden_size=32,
        audio_token_id=SOUND,
        image_token_id=99,
    )


def nemotron_oracle(config: Any) -> Any:
    """RADIO's branches have no factors; transformers 5.23 stores some that are one."""
    oracle = transformers.NemotronH_Omni_Reasoning_V3(config)
    save = oracle.save_pretrained

    def save_pretrained(folder: Any) -> None:
        for layer in oracle.vision_model.encoder.layer:
            for scale in (layer.layer_scale1, layer.layer_scale2):
                scale.lambda1.data.fill_(1.0)
        save(folder)

    oracle.save_pretrained = save_pretrained
    return oracle


def masked_but_the_last(sounds: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    inputs = masked_rows(sounds)
    longest = inputs["input_features"].shape[1]
    return inputs | {"input_features_mask": masks([len(one) - 1 for one in sounds], longest)}


CASES = {
    "nemotron-omni": Case(
        config=nemotron_config,
        model="NemotronH_Omni_Reasoning_V3",
        oracle=nemotron_oracle,
        steps=SoundSteps(strides=((3, 2, 1),) * 3),
        lengths=(40, 65),
        inputs=masked_but_the_last,
        silent=1,
    ),
    "granite-speech-plus": Case(
        config=granite_speech_plus_config,
        model="GraniteSpeechPlus",
        steps=SoundSteps(chunk=6, per_chunk=3),
        lengths=(37, 37),
        inputs=one_after_another,
        bands=160,
    ),
    "audioflamingo3": Case(
        config=audioflamingo3_config,
        model="AudioFlamingo3",
        steps=SoundSteps(strides=LINES, pool=2, margin=2),
        lengths=(39, 62),
        inputs=lambda sounds: windows_of_silence(sounds, 100),
    ),
    "glm-asr": Case(
        config=glm_asr_config,
        model="GlmAsr",
        steps=SoundSteps(strides=LINES, pool=4, margin=3),
        lengths=(39, 62),
        inputs=lambda sounds: windows_of_silence(sounds, 3000, margin=3),
    ),
    "gemma3n": Case(
        config=gemma3n_config,
        model="Gemma3n",
        oracle=gemma3n_with_images,
        steps=SoundSteps(chunk=3000, per_chunk=10),
        lengths=(37, 37),
        inputs=masked_rows,
    ),
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

"""Tiny random models that label frames of sound (CTC), made by transformers, with letters for their labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.lasr.feature_extraction_lasr import LasrFeatureExtractor
from transformers.models.parakeet.feature_extraction_parakeet import ParakeetFeatureExtractor

from headrace.front.media.log_mel import RATE
from tests.models.media import save_media_oracle

LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ETAONIHSRDLUMWCFGYPBVKXJQZ"]
VOCABULARY = {letter: number for number, letter in enumerate(LETTERS)}
SIZES: dict[str, Any] = {
    **{
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 40,
    },
}
WAVE: dict[str, Any] = {
    **SIZES,
    **{"conv_dim": [12] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
    **{"vocab_size": len(LETTERS), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
STABLE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True}


@dataclass(frozen=True, kw_only=True)
class CtcCase:
    """`normal`: samples have mean 0 and deviation 1. `slow`: apart from the gate."""

    model: str
    config: Callable[[], Any]
    normal: bool = True
    slow: bool = False

    @property
    def reads_samples(self) -> bool:
        return not self.model.startswith(
            ("Parakeet", "Lasr", "Granite", "Nemotron", "Wav2Vec2Bert")
        )

    def extractor(self) -> Any:
        if self.model == "GraniteSpeech5ForCTC":  # its own needs torchaudio
            return transformers.SeamlessM4TFeatureExtractor()
        if self.model == "Wav2Vec2BertForCTC":
            return transformers.SeamlessM4TFeatureExtractor(num_mel_bins=80)
        if self.reads_samples:
            return transformers.Wav2Vec2FeatureExtractor(do_normalize=self.normal)
        if self.model == "LasrForCTC":
            return LasrFeatureExtractor(feature_size=16)
        return ParakeetFeatureExtractor(feature_size=16)

    def write(self, folder: Path) -> Any:
        """A checkpoint with its extractor and tokenizer; the reference's model."""
        oracle = save_media_oracle(getattr(transformers, self.model), self.config(), folder)
        for name, buffer in oracle.named_buffers():
            if name.endswith("inv_freq"):  # no weights: that of the config
                dims = 2 * len(buffer)
                buffer.copy_(10_000.0 ** -(torch.arange(0, dims, 2).float() / dims))
        self.extractor().save_pretrained(folder)
        (folder / "vocab.json").write_text(json.dumps(VOCABULARY))
        return oracle

    def logits(
        self, oracle: Any, samples: np.ndarray, frames: np.ndarray | None = None
    ) -> torch.Tensor:
        """[frames, labels] by the reference's extractor and model; `frames`: of another extractor, float32 [N, bands]
        (Parakeet's own takes logarithms of float32 energies near 0)."""
        wave = samples / np.float32(32768.0)
        inputs = self.extractor()(wave, sampling_rate=RATE, return_tensors="pt")
        if self.model == "Wav2Vec2BertForCTC":
            count = int(inputs["attention_mask"].sum())
            assert count == len(frames)
            apart = inputs["input_features"][0, :count] - torch.from_numpy(frames.copy())
            assert apart.abs().max() < 1e-3  # of values that are normalized by band
        if frames is not None and not self.reads_samples:
            inputs = {"input_features": torch.from_numpy(frames.copy())[None]}
            inputs["attention_mask"] = torch.ones(1, len(frames), dtype=torch.bool)
        if self.reads_samples:
            inputs.pop("attention_mask", None)
        with torch.inference_mode():
            found = oracle(**inputs).logits[0]
        if self.reads_samples or self.model == "Wav2Vec2BertForCTC":
            return found
        return found[: int(oracle._get_subsampling_output_length(inputs["attention_mask"].sum(-1)))]


CASES = {
    "wav2vec2": CtcCase(model="Wav2Vec2ForCTC", config=lambda: transformers.Wav2Vec2Config(**WAVE)),
    "wav2vec2-stable": CtcCase(
        model="Wav2Vec2ForCTC", config=lambda: transformers.Wav2Vec2Config(**WAVE, **STABLE)
    ),
    "hubert": CtcCase(
        model="HubertForCTC",
        config=lambda: transformers.HubertConfig(**WAVE, feat_proj_layer_norm=False),
        normal=False,
    ),
    "unispeech": CtcCase(
        model="UniSpeechForCTC",
        config=lambda: transformers.UniSpeechConfig(
            **{**WAVE, **STABLE}, num_ctc_classes=len(LETTERS)
        ),
    ),
    "unispeech-sat": CtcCase(
        model="UniSpeechSatForCTC", config=lambda: transformers.UniSpeechSatConfig(**WAVE)
    ),
    "wavlm": CtcCase(
        model="WavLMForCTC",
        config=lambda: transformers.WavLMConfig(**WAVE, num_buckets=16, max_bucket_distance=20),
    ),
    "data2vec": CtcCase(
        model="Data2VecAudioForCTC",
        config=lambda: transformers.Data2VecAudioConfig(
            **{**WAVE, "num_conv_pos_embeddings": 3, "conv_pos_kernel_size": 5}
        ),
    ),
    "sew": CtcCase(
        model="SEWForCTC",
        config=lambda: transformers.SEWConfig(
            **{**WAVE, "num_conv_pos_embeddings": 15},
            conv_kernel=(10, 3, 3, 3, 3, 2, 2),
            conv_stride=(5, 2, 2, 2, 2, 2, 2),
        ),
    ),
    "wav2vec2-conformer": CtcCase(
        model="Wav2Vec2ConformerForCTC",
        config=lambda: transformers.Wav2Vec2ConformerConfig(**WAVE, conv_depthwise_kernel_size=5),
    ),
    "wav2vec2-conformer-rotary": CtcCase(
        model="Wav2Vec2ConformerForCTC",
        config=lambda: transformers.Wav2Vec2ConformerConfig(
            **WAVE, conv_depthwise_kernel_size=5, position_embeddings_type="rotary"
        ),
        slow=True,
    ),
    "wav2vec2-bert": CtcCase(
        model="Wav2Vec2BertForCTC",
        config=lambda: transformers.Wav2Vec2BertConfig(
            **SIZES,
            vocab_size=len(LETTERS),
            pad_token_id=0,
            conv_depthwise_kernel_size=5,
            left_max_position_embeddings=6,
            right_max_position_embeddings=3,
        ),
    ),
    "granite-speech-5": CtcCase(
        model="GraniteSpeech5ForCTC",
        config=lambda: transformers.GraniteSpeech5CTCConfig(
            vocab_size=len(LETTERS),
            pad_token_id=0,
            encoder_config={
                **{**SIZES, "num_mel_bins": 16, "vocab_size": len(LETTERS), "context_size": 8},
                **{"num_hidden_layers": 4, "conv_kernel_size": 3, "max_position_embeddings": 12},
            },
        ),
    ),
    "lasr": CtcCase(
        model="LasrForCTC",
        config=lambda: transformers.LasrCTCConfig(
            vocab_size=len(LETTERS),
            pad_token_id=0,
            encoder_config={
                **{**SIZES, "num_mel_bins": 16, "subsampling_conv_channels": 6},
                "conv_kernel_size": 4,
            },
        ),
    ),
    "parakeet": CtcCase(
        model="ParakeetForCTC",
        config=lambda: transformers.ParakeetCTCConfig(
            vocab_size=len(LETTERS),
            pad_token_id=0,
            encoder_config={**SIZES, "num_mel_bins": 16, "subsampling_conv_channels": 6},
        ),
    ),
}

TRANSDUCERS = {
    "rnnt": ("ParakeetForRNNT", transformers.ParakeetRNNTConfig, {}),
    "tdt": ("ParakeetForTDT", transformers.ParakeetTDTConfig, {"durations": [0, 1, 2, 3, 4]}),
    "streaming": ("NemotronAsrStreamingForRNNT", transformers.NemotronAsrStreamingConfig, {}),
    "streaming-asked": (
        "Nemotron3_5AsrForRNNT",
        transformers.Nemotron3_5AsrConfig,
        {"num_prompts": 8, "prompt_intermediate_size": 24, "default_prompt_id": 5},
    ),
}


CHUNKS = {"default_num_lookahead_tokens": 2, "sliding_window": 8}
"""Positions in threes, which see two chunks before theirs."""


def transducer(name: str, folder: Path) -> tuple[CtcCase, Any]:
    """A checkpoint of a transducer that says something, and the reference's model."""
    model, config, more = TRANSDUCERS[name]
    inside = CHUNKS if name.startswith("streaming") else {}
    blank = len(LETTERS)
    case = CtcCase(
        model=model,
        config=lambda: config(
            vocab_size=blank + 1,
            blank_token_id=blank,
            decoder_start_token_id=blank,
            pad_token_id=0,
            decoder_hidden_size=24,
            num_decoder_layers=2,
            encoder_config={**SIZES, "num_mel_bins": 16, "subsampling_conv_channels": 6, **inside},
            **more,
        ),
    )
    oracle = case.write(folder)
    if name == "tdt":  # or the reference says the same token of one frame without end
        oracle.joint.head.bias.data[blank + 1] -= 3.0
        oracle.save_pretrained(folder)
    if name.startswith(
        "streaming"
    ):  # the reference's eager attention takes masks for their opposites
        oracle.set_attn_implementation("sdpa")
    oracle.generation_config.decoder_start_token_id = blank
    oracle.generation_config.pad_token_id = 0
    return case, oracle

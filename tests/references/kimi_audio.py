"""Kimi-Audio as it hears, written from its report (Ding et al. 2025), the names of its published tensors and how its
package puts prompts together, without its model files: two streams of tokens, one place after another.

S positions, T tokens, E width of the decoder, D of an encoder.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.references.minicpmo import Encoder, Layer

WINDOW = 480_000
TOKEN = 1280
"""Samples of a window, and of a token of sound."""


class Adaptor(nn.Module):
    def __init__(self, inputs: int, width: int, eps: float) -> None:
        super().__init__()
        first, last = nn.Linear(inputs, width), nn.Linear(width, width)
        self.layers = nn.Sequential(
            first, nn.SiLU(), nn.Dropout(0.0), last, nn.LayerNorm(width, eps=eps)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class SpeechTokenizer(nn.Module):
    """One window of frames [N, M] to ids."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, self.config = config["d_model"], config
        self.conv1 = nn.Conv1d(config["num_mel_bins"], width, 3)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2)
        self.embed_positions = nn.Embedding(config["max_source_positions"], width)
        self.embed_positions2 = nn.Embedding(8, width)  # of what is behind the tokens
        sizes = (width, config["encoder_ffn_dim"], config["encoder_attention_heads"])
        self.layers = nn.ModuleList([Layer(*sizes) for _ in range(config["encoder_layers"])])
        self.codebook = nn.Embedding(config["quantize_vocab_size"], width)

    def forward(self, frames_NM: torch.Tensor, num_real: int) -> torch.Tensor:
        x = F.gelu(self.conv1(F.pad(frames_NM.T[None], (2, 0))))
        x = F.gelu(self.conv2(F.pad(x, (2, 0))))[0].T
        x = x + self.embed_positions.weight[: len(x)]
        place = torch.arange(len(x))
        block = place // self.config["quantize_causal_block_size"]
        seen_SS = (block[:, None] >= block) & (2 * place < num_real)
        for layer in self.layers[: self.config["quantize_position"]]:
            x = layer(x, seen_SS)
        mean_TD = F.avg_pool1d(x.T[None], 4)[0].T
        return torch.cdist(mean_TD, self.codebook.weight).argmin(1)


class Thinker(nn.Module):
    """`hears` and `tells` are kept apart, as their files are."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        keys = ("architectures", "audio_config", "speech_tokenizer_config", "model_type")
        plain = {key: value for key, value in config.items() if key not in keys}
        whole = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**plain))
        self.config, self.model, self.lm_head = config, whole.model, whole.lm_head
        self.model.vq_adaptor = Adaptor(
            config["kimia_adaptor_input_dim"], config["hidden_size"], config["rms_norm_eps"]
        )
        self.hears = Encoder(config["audio_config"])
        self.tells = SpeechTokenizer(config["speech_tokenizer_config"])

    def hear(self, samples: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Of int16 samples: ids of their tokens, and what is added to these."""
        bands = self.config["audio_config"]["num_mel_bins"]
        extractor = transformers.WhisperFeatureExtractor(feature_size=bands)
        ids, rows = [], []
        for at in range(0, len(samples), WINDOW):
            part = samples[at : at + WINDOW] / np.float32(32768.0)
            count = -(-len(part) // TOKEN)
            more: dict[str, Any] = {"sampling_rate": 16_000, "return_tensors": "pt"}
            whole = extractor(part, **more).input_features[0]
            told = extractor(part, padding="longest", pad_to_multiple_of=TOKEN, **more)
            ids.append(self.tells(told.input_features[0].T, -(-len(part) // 160)))
            x_SD = self.hears(whole.T, 1500)[: 4 * count]
            rows.append(self.model.vq_adaptor(x_SD.unflatten(0, (-1, 4)).flatten(1)))
        return torch.cat(ids), torch.cat(rows)

    def forward(
        self, heard_T: torch.Tensor, said_T: torch.Tensor, sounds: list[np.ndarray]
    ) -> torch.Tensor:
        """Logits [T, V] over both streams; sounds stand where the first one has -1."""
        table, ids, rows = self.model.embed_tokens.weight, heard_T.clone(), []
        parts = [self.hear(one) for one in sounds]
        at = heard_T == -1
        if parts:
            ids[at] = torch.cat([one for one, _ in parts]) + self.config["kimia_token_offset"]
            rows = [row for _, row in parts]
        x_TE = table[ids]
        if rows:
            x_TE[at] = (x_TE[at] + torch.cat(rows)) * 2**0.5
        x_TE = x_TE + table[said_T]
        hidden = self.model(inputs_embeds=x_TE[None]).last_hidden_state[0]
        return self.lm_head(hidden)

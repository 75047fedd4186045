"""MiniCPM-o 2.6 and 4.5 as it hears, written from its published configuration, tensor names and Radford et al. 2022,
without the model files of the package.

One part of a sound at a time; S positions, E width of the encoder, F of the decoder.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.self_attn_layer_norm, self.final_layer_norm = (nn.LayerNorm(width) for _ in range(2))
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(width, width, bias=name != "k_proj") for name in names}
        )
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x_SE: torch.Tensor, seen_SS: torch.Tensor) -> torch.Tensor:
        y_SE = self.self_attn_layer_norm(x_SE)
        q, k, v = (
            self.self_attn[f"{one}_proj"](y_SE).unflatten(1, (self.heads, -1)).transpose(0, 1)
            for one in "qkv"
        )
        scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[2])).masked_fill(~seen_SS, -torch.inf)
        y_SE = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x_SE = x_SE + self.self_attn["out_proj"](y_SE)
        return x_SE + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x_SE))))


class Encoder(nn.Module):
    def __init__(self, audio: dict[str, Any]) -> None:
        super().__init__()
        width = audio["d_model"]
        self.conv1 = nn.Conv1d(audio["num_mel_bins"], width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(audio["max_source_positions"], width)
        sizes = (width, audio["encoder_ffn_dim"], audio["encoder_attention_heads"])
        self.layers = nn.ModuleList([Layer(*sizes) for _ in range(audio["encoder_layers"])])
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, frames_NM: torch.Tensor, second: int) -> torch.Tensor:
        """`second`: positions that see each other, and all before them."""
        x = F.gelu(self.conv2(F.gelu(self.conv1(frames_NM.T[None]))))[0].T
        x_SE = x + self.embed_positions.weight[: len(x)]
        number = torch.arange(len(x)) // second
        for layer in self.layers:
            x_SE = layer(x_SE, number[:, None] >= number)
        return self.layer_norm(x_SE)


class Projector(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(inputs, outputs), nn.Linear(outputs, outputs)

    def forward(self, x_SE: torch.Tensor, means: int) -> torch.Tensor:
        y_FS = self.linear2(F.relu(self.linear1(x_SE))).T
        return F.avg_pool1d(y_FS[None], means)[0].T


def parts_of(samples: np.ndarray, bands: int) -> list[torch.Tensor]:
    """Frames of each half minute, as the package's extractor makes them; [N, bands]."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=bands)
    frames = []
    for at in range(0, len(samples), 480_000):
        part = samples[at : at + 480_000] / np.float32(32768.0)
        whole = extractor(part, sampling_rate=16_000, return_tensors="pt").input_features[0]
        frames.append(whole[:, : -(-len(part) // 160)].T)
    return frames


def text_of(num_samples: int, means: int) -> str:
    """What stands for a sound, A for each token and marks around each second."""
    positions = (math.ceil(num_samples / 160) - 1) // 2 + 1
    tokens, second, text = positions // means, 50 // means, ""
    while tokens > 0:
        text += "[" + "A" * min(second, tokens) + "]"
        tokens -= second
    return text

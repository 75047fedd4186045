"""A compact Whisper for training, weights named as in the hub format.

Shapes: B windows, M mel bands, F frames, S = F / 2 positions of the encoder, T tokens, E width, H heads. Matrices of
convolutions are flat ([E, inputs * 3]) so that Muon takes them; export gives them back their shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.hears.tokens import SECONDS, VOCABULARY

LETTERS = 257
"""Classes of the letters' head: bytes, and the blank behind them."""


@dataclass(frozen=True, kw_only=True)
class HearingShape:
    """The sizes, named as in `config.json`."""

    vocab_size: int = VOCABULARY
    num_mel_bins: int = 80
    d_model: int = 160
    encoder_layers: int = 4
    decoder_layers: int = 2
    encoder_attention_heads: int = 5
    decoder_attention_heads: int = 5
    encoder_ffn_dim: int = 448
    decoder_ffn_dim: int = 448
    max_source_positions: int = 50 * SECONDS
    max_target_positions: int = 128


class Attention(nn.Module):
    """Of a width to itself, or to the encoder's; keys have no bias."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, other: Tensor, *, causal: bool = False) -> Tensor:
        q, k, v = (
            proj(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj, y in ((self.q_proj, x), (self.k_proj, other), (self.v_proj, other))
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out_proj(out.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """One layer of either half, norms before each branch."""

    def __init__(self, width: int, heads: int, inner: int, *, decodes: bool) -> None:
        super().__init__()
        self.decodes = decodes
        self.self_attn = Attention(width, heads)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        if decodes:
            self.encoder_attn = Attention(width, heads)
            self.encoder_attn_layer_norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, heard: Tensor | None = None) -> Tensor:
        y = self.self_attn_layer_norm(x)
        x = x + self.self_attn(y, y, causal=self.decodes)
        if heard is not None:
            x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), heard)
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class Convolution(nn.Module):
    """Over three frames."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inputs, self.stride = inputs, stride
        self.weight = nn.Parameter(torch.empty(outputs, inputs * 3))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x_BMF: Tensor) -> Tensor:
        weight = self.weight.view(-1, self.inputs, 3)
        return F.conv1d(x_BMF, weight, self.bias, stride=self.stride, padding=1)


class Encoder(nn.Module):
    """Spectrograms [B, M, F] -> [B, S, E]."""

    def __init__(self, shape: HearingShape) -> None:
        super().__init__()
        width = shape.d_model
        self.conv1 = Convolution(shape.num_mel_bins, width, 1)
        self.conv2 = Convolution(width, width, 2)
        self.embed_positions = nn.Embedding(shape.max_source_positions, width)
        self.layers = nn.ModuleList(
            Layer(width, shape.encoder_attention_heads, shape.encoder_ffn_dim, decodes=False)
            for _ in range(shape.encoder_layers)
        )
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, x_BMF: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(x_BMF)))).transpose(1, 2)
        x = x + self.embed_positions.weight.to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)


class Decoder(nn.Module):
    """Tokens [B, T] over what was heard -> [B, T, E]."""

    def __init__(self, shape: HearingShape) -> None:
        super().__init__()
        width = shape.d_model
        self.embed_tokens = nn.Embedding(shape.vocab_size, width)
        self.embed_positions = nn.Embedding(shape.max_target_positions, width)
        self.layers = nn.ModuleList(
            Layer(width, shape.decoder_attention_heads, shape.decoder_ffn_dim, decodes=True)
            for _ in range(shape.decoder_layers)
        )
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, tokens_BT: Tensor, heard: Tensor) -> Tensor:
        x = self.embed_tokens(tokens_BT) + self.embed_positions.weight[: tokens_BT.shape[1]]
        x = x.to(heard.dtype)
        for layer in self.layers:
            x = layer(x, heard)
        return self.layer_norm(x)


class Inside(nn.Module):
    """Both halves, as the hub names them."""

    def __init__(self, shape: HearingShape) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(shape), Decoder(shape)


class Whisper(nn.Module):
    """The whole model; the output matrix is the embedding. `letters` helps training alone: the encoder's own guess
    of what is written, without which attention finds the sound much later."""

    def __init__(self, shape: HearingShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Inside(shape)
        self.letters = nn.Linear(shape.d_model, LETTERS)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("out_proj.weight", "fc2.weight"))
                nn.init.normal_(parameter, std=0.005 if last else 0.02)
        with torch.no_grad():
            self.model.encoder.embed_positions.weight.copy_(
                sinusoids(shape.max_source_positions, shape.d_model)
            )

    def forward(self, spectrograms: Tensor, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of tokens [B, T, vocabulary] and of letters [B, S, LETTERS]."""
        heard = self.model.encoder(spectrograms)
        x = self.model.decoder(tokens_BT, heard)
        return F.linear(x, self.model.decoder.embed_tokens.weight), self.letters(heard)


def sinusoids(rows: int, width: int) -> Tensor:
    """Positions as Whisper's encoder begins with: sines, then cosines (Radford et al. 2022, section 2.2)."""
    step = math.log(10_000) / (width // 2 - 1)
    angles = torch.arange(rows)[:, None] * torch.exp(-step * torch.arange(width // 2))
    return torch.cat((angles.sin(), angles.cos()), dim=1)

"""Ovis 2.5 and 2.6 as they see, written from Lu et al. 2025 (Ovis2.5), Qwen2.5-VL's windows (Bai et al. 2025, section
2.1.1), the published configuration and tensor names, without the model files of the package. The decoder behind it is
transformers'.

One picture or clip at a time, patches in raster order: t, h, w of a grid, E width of the tower, F of the decoder.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

    def forward(self, x_NE: torch.Tensor, turns_ND: torch.Tensor, seen_NN: torch.Tensor) -> Any:
        y_NE = self.layer_norm1(x_NE)
        q, k, v = (
            self.self_attn[f"{one}_proj"](y_NE).unflatten(1, (self.heads, -1)).transpose(0, 1)
            for one in "qkv"
        )
        q, k = turned(q, turns_ND), turned(k, turns_ND)
        weights = q @ k.transpose(1, 2) / math.sqrt(q.shape[2])
        weights = weights.masked_fill(~seen_NN, -math.inf).softmax(-1)
        x_NE = x_NE + self.self_attn["out_proj"]((weights @ v).transpose(0, 1).flatten(1))
        y_NE = self.mlp["fc1"](self.layer_norm2(x_NE))
        return x_NE + self.mlp["fc2"](F.gelu(y_NE, approximate="tanh"))


def turned(x_HND: torch.Tensor, angles_NR: torch.Tensor) -> torch.Tensor:
    """Each pair (i, i + D / 2) turned by its angle."""
    first, second = x_HND.chunk(2, dim=2)
    cos, sin = angles_NR.cos(), angles_NR.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)


class Eyes(nn.Module):
    """visual_tokenizer and vte."""

    def __init__(self, vision: dict[str, Any], words: int, outputs: int) -> None:
        super().__init__()
        width, patch = vision["hidden_size"], vision["patch_size"]
        self.vision, self.side = vision, vision["image_size"] // patch
        layers = [
            Layer(width, vision["intermediate_size"], vision["num_attention_heads"])
            for _ in range(vision["num_hidden_layers"])
        ]
        tower = {
            "embeddings": nn.ModuleDict(
                {
                    "patch_embedding": nn.Conv2d(3, width, patch, patch),
                    "position_embedding": nn.Embedding(self.side**2, width),
                }
            ),
            "encoder": nn.ModuleDict({"layers": nn.ModuleList(layers)}),
            "post_layernorm": nn.LayerNorm(width),
        }
        plain = words - 4
        head = nn.Sequential(
            nn.Linear(width * vision["hidden_stride"] ** 2, plain, bias=False), nn.LayerNorm(plain)
        )
        inside = nn.ModuleDict({"vision_model": nn.ModuleDict(tower)})
        self.visual_tokenizer = nn.ModuleDict({"vit": inside, "head": head})
        self.vte = nn.Embedding(words, outputs)

    def forward(self, frames: torch.Tensor, kind: str) -> torch.Tensor:
        """frames [t, 3, H, W], values normalized -> rows [tokens, F]."""
        vision, tower = self.vision, self.visual_tokenizer["vit"]["vision_model"]
        x = tower["embeddings"]["patch_embedding"](frames)
        t, width, h, w = x.shape
        table = tower["embeddings"]["position_embedding"].weight
        table = table.view(1, self.side, self.side, width).permute(0, 3, 1, 2)
        x = x + F.interpolate(table, size=(h, w), mode="bicubic", align_corners=False)
        x_NE = x.permute(0, 2, 3, 1).reshape(-1, width)
        at = torch.stack(
            torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")
        )
        step, row, column = at.reshape(3, -1)
        quarter = width // vision["num_attention_heads"] // 4
        frequencies = 10_000.0 ** -(torch.arange(quarter) / quarter)
        angles = torch.cat((row[:, None] * frequencies, column[:, None] * frequencies), dim=1)
        whole = step[:, None] == step
        tile = vision["window_size"] // vision["hidden_stride"] // vision["patch_size"]
        tile *= vision["hidden_stride"]
        window = (row // tile) * 1000 + column // tile
        near = whole & (window[:, None] == window)
        full = [int(one) for one in (vision["fullatt_block_indexes"] or "").split("|") if one]
        for index, layer in enumerate(tower["encoder"]["layers"]):
            x_NE = layer(x_NE, angles, whole if not full or index in full else near)
        s = vision["hidden_stride"]
        x_NE = x_NE.view(t, h // s, s, w // s, s, width).permute(0, 1, 3, 2, 4, 5).flatten(3)
        words = self.visual_tokenizer["head"](x_NE.flatten(0, 2)).softmax(-1)
        rows = words @ self.vte.weight[:-4]
        begin, end = self.vte.weight[-4:].view(2, 2, -1)[0 if kind == "image" else 1]
        return torch.cat((begin[None], rows, end[None]))


def size_of(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Height and width of a resized picture."""
    if height < factor or width < factor:
        if height < width:
            height, width = factor, round(factor / height * width)
        else:
            height, width = round(factor / width * height), factor
    elif max(height, width) / min(height, width) > 200:
        height, width = (200 * width, width) if height > width else (height, 200 * height)
    high, wide = (round(one / factor) * factor for one in (height, width))
    if high * wide > most:
        beta = math.sqrt(height * width / most)
        return tuple(math.floor(one / beta / factor) * factor for one in (height, width))
    if high * wide < least:
        beta = math.sqrt(least / (height * width))
        return tuple(math.ceil(one * beta / factor) * factor for one in (height, width))
    return high, wide

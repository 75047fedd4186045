"""Step-3 as it sees, written from EVA-CLIP's layers (Sun et al. 2023) and the published configuration and tensor names
(stepfun-ai/step3), without the model files of the package. The decoder behind it is tests/references/step3.py.

S patches a side, E width of the tower, F of the decoder.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        width, inner = vision["hidden_size"], vision["intermediate_size"]
        self.heads = vision["num_attention_heads"]
        self.self_attn = nn.ModuleDict(
            {"qkv_proj": nn.Linear(width, 3 * width), "out_proj": nn.Linear(width, width)}
        )
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(width, eps=1e-5) for _ in range(2))

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            one.unflatten(1, (self.heads, -1)).transpose(0, 1)
            for one in self.self_attn["qkv_proj"](x_NE).chunk(3, dim=1)
        )
        weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[2])).softmax(-1)
        y_NE = self.self_attn["out_proj"]((weights @ v).transpose(0, 1).flatten(1))
        x_NE = x_NE + self.layer_norm1(y_NE)
        up = self.mlp["fc1"](x_NE)
        return x_NE + self.layer_norm2(self.mlp["fc2"](up * torch.sigmoid(1.702 * up)))


class Eyes(nn.Module):
    def __init__(self, vision: dict[str, Any], outputs: int) -> None:
        super().__init__()
        width, patch, middle = (
            vision[key] for key in ("hidden_size", "patch_size", "output_hidden_size")
        )
        self.side = vision["image_size"] // patch
        embeddings = {
            "patch_embedding": nn.Conv2d(3, width, patch, patch),
            "position_embedding": nn.Embedding(self.side**2 + 1, width),
        }
        layers = [Layer(vision) for _ in range(vision["num_hidden_layers"])]
        self.vision_model = nn.ModuleDict(
            {
                "embeddings": nn.ModuleDict(embeddings),
                "transformer": nn.ModuleDict({"layers": nn.ModuleList(layers)}),
            }
        )
        row = nn.Parameter(torch.randn(1, width))
        self.vision_model["embeddings"].register_parameter("class_embedding", row)
        self.vit_downsampler = nn.Conv2d(width, middle, 2, 2)
        self.vit_downsampler2 = nn.Conv2d(middle, 2 * middle, 3, 2, 1)
        self.vit_large_projector = nn.Linear(2 * middle, outputs, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[3, H, W], normalized -> rows [tokens, F]."""
        parts = self.vision_model["embeddings"]
        x = parts["patch_embedding"](values[None])
        side = x.shape[2]
        first, table = parts["position_embedding"].weight.split([1, self.side**2])
        table = table.T.unflatten(1, (self.side, self.side))[None]
        if side != self.side:
            table = F.interpolate(table, size=(side, side), mode="bicubic", antialias=True)
        x = (x + table)[0].flatten(1).T
        x = torch.cat((*[parts.class_embedding + first] * 4, x))
        for layer in self.vision_model["transformer"]["layers"]:
            x = layer(x)
        x = x[4:].T.unflatten(1, (side, side))[None]
        x = self.vit_downsampler2(self.vit_downsampler(x))
        return self.vit_large_projector(x[0].flatten(1).T)

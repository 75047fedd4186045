"""DeepSeek-VL2 as it sees, written from Wu et al. 2024 (DeepSeek-VL2, section 3), timm's layout of SigLIP's tower and
the published configuration and tensor names, without the model files of the package. The decoder behind it is
transformers'.

T tiles, S patches a side, E width of the tower, F of the decoder.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}
        )
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

    def forward(self, x_TNE: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x_TNE)).chunk(3, dim=-1)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (q, k, v))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        x_TNE = x_TNE + self.attn["proj"]((weights @ v).transpose(1, 2).flatten(2))
        inner = F.gelu(self.mlp["fc1"](self.norm2(x_TNE)), approximate="tanh")
        return x_TNE + self.mlp["fc2"](inner)


class Eyes(nn.Module):
    """vision, projector and the two learned rows."""

    def __init__(self, vision: dict[str, Any], outputs: int) -> None:
        super().__init__()
        width, patch = vision["width"], vision["patch_size"]
        self.side = vision["image_size"] // patch
        inner = int(width * vision["mlp_ratio"])
        self.vision = nn.ModuleDict(
            {
                "patch_embed": nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch)}),
                "blocks": nn.ModuleList(
                    Block(width, inner, vision["heads"]) for _ in range(vision["layers"])
                ),
                "norm": nn.LayerNorm(width, eps=1e-6),
            }
        )
        self.vision.register_parameter(
            "pos_embed", nn.Parameter(torch.randn(1, self.side**2, width))
        )
        layers = [nn.Linear(4 * width, outputs), nn.GELU(), nn.Linear(outputs, outputs)]
        self.projector = nn.ModuleDict({"layers": nn.Sequential(*layers)})
        self.image_newline = nn.Parameter(torch.randn(outputs))
        self.view_seperator = nn.Parameter(torch.randn(outputs))

    def windows(self, tiles: torch.Tensor) -> torch.Tensor:
        """[T, 3, H, W], values normalized -> [T, L, L, F]."""
        x = self.vision["patch_embed"]["proj"](tiles).flatten(2).transpose(1, 2)
        x = x + self.vision.pos_embed
        for block in self.vision["blocks"]:
            x = block(x)
        x = self.vision["norm"](x).transpose(1, 2).unflatten(2, (self.side, self.side))
        odd = self.side % 2
        x = F.unfold(F.pad(x, (0, odd, 0, odd)), kernel_size=2, stride=2).transpose(1, 2)
        half = (self.side + odd) // 2
        return self.projector["layers"](x).unflatten(1, (half, half))

    def forward(self, whole: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
        """The whole [3, H, W] and its tiles [down, across, 3, H, W] -> rows [tokens, F]."""
        down, across = tiles.shape[:2]
        half = -(-self.side // 2)
        x = self.windows(tiles.flatten(0, 1)).view(down, across, half, half, -1)
        x = x.transpose(1, 2).reshape(down * half, across * half, -1)
        seen = [self._rows(self.windows(whole[None])[0]), self.view_seperator[None], self._rows(x)]
        return torch.cat(seen)

    def _rows(self, x_HWF: torch.Tensor) -> torch.Tensor:
        ends = self.image_newline.expand(x_HWF.shape[0], 1, -1)
        return torch.cat((x_HWF, ends), dim=1).flatten(0, 1)

"""Molmo 1 as it sees, written from Deitke et al. 2024 (Molmo and PixMo, section 2), CLIP's layers and the published
processor's account of squares, orders and marks, without the model and processor files of the package. The decoder
behind it is transformers'.

Pictures are [H, W, 3] of values between 0 and 1, not normalized. S squares, N patches of one in raster order, E width
of the tower, F of the decoder.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

MARGIN = 4
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class Attention(nn.Module):
    def __init__(self, inputs: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv = (nn.Linear(inputs, width) for _ in range(3))
        self.wo = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(one).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, one in ((self.wq, x), (self.wk, seen), (self.wv, seen))
        )
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.wo((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, width, heads)
        self.feed_forward = nn.ModuleDict(
            {"w1": nn.Linear(width, inner), "w2": nn.Linear(inner, width)}
        )
        self.attention_norm, self.ffn_norm = (nn.LayerNorm(width, eps=1e-5) for _ in range(2))

    def forward(self, x_SNE: torch.Tensor) -> torch.Tensor:
        y_SNE = self.attention_norm(x_SNE)
        x_SNE = x_SNE + self.attention(y_SNE, y_SNE)
        up = self.feed_forward["w1"](self.ffn_norm(x_SNE))
        return x_SNE + self.feed_forward["w2"](up * torch.sigmoid(1.702 * up))


class Eyes(nn.Module):
    """vision_backbone."""

    def __init__(self, vision: dict[str, Any], outputs: int, inner: int) -> None:
        super().__init__()
        width, heads = vision["image_emb_dim"], vision["image_num_heads"]
        self.patch = vision["image_patch_size"]
        self.pixels = vision["image_default_input_size"][0]
        self.side = self.pixels // self.patch
        blocks = [
            Block(width, vision["image_mlp_dim"], heads) for _ in range(vision["image_num_layers"])
        ]
        self.image_vit = nn.ModuleDict(
            {
                "patch_embedding": nn.Linear(3 * self.patch**2, width, bias=False),
                "pre_ln": nn.LayerNorm(width, eps=1e-5),
                "transformer": nn.ModuleDict({"resblocks": nn.ModuleList(blocks)}),
            }
        )
        positions = torch.randn(self.side**2 + 1, width)
        self.image_vit.register_parameter("positional_embedding", nn.Parameter(positions))
        self.image_vit.register_parameter("class_embedding", nn.Parameter(torch.randn(width)))
        self.image_pooling_2d = Attention(2 * width, width, heads)
        self.image_projector = nn.ModuleDict(
            {
                "w1": nn.Linear(width, inner, bias=False),
                "w2": nn.Linear(inner, outputs, bias=False),
                "w3": nn.Linear(width, inner, bias=False),
            }
        )
        self.pad_embed = nn.Parameter(torch.randn(2, 2 * width))

    def features(self, squares: torch.Tensor) -> torch.Tensor:
        """[S, N, patch * patch * 3] -> [S, N, 2 E]."""
        vit = self.image_vit
        x = vit["patch_embedding"](squares)
        first = vit.class_embedding.expand(len(x), 1, -1)
        x = vit["pre_ln"](torch.cat((first, x), dim=1) + vit.positional_embedding)
        states = []
        for block in vit["transformer"]["resblocks"]:
            x = block(x)
            states.append(x)
        return torch.cat((states[-2], states[-9]), dim=-1)[:, 1:]

    def pooled(self, squares: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """`seen` [S, N]: the share of each patch that is the picture's -> [S, windows, F]."""
        x = self.features(squares)
        x = x + self.pad_embed[0] * (seen == 0)[..., None]
        x = x + self.pad_embed[1] * ((seen < 1) & (seen != 0))[..., None]
        half = self.side // 2
        x = x.view(len(x), half, 2, half, 2, -1).transpose(2, 3).reshape(len(x) * half**2, 4, -1)
        x = self.image_pooling_2d(x.mean(1, keepdim=True), x)[:, 0]
        gate, up = (self.image_projector[name](x) for name in ("w1", "w3"))
        return self.image_projector["w2"](F.silu(gate) * up).view(len(squares), half**2, -1)

    def forward(self, small: np.ndarray, large: np.ndarray, seen: np.ndarray) -> torch.Tensor:
        """The small square, the large whole, and [H, W] bool of the latter: which pixels are the picture's ->
        rows of the small one's windows, then of the whole's."""
        side, half = self.side, self.side // 2
        step = side - 2 * MARGIN
        down, across = ((n // self.patch - 2 * MARGIN) // step for n in large.shape[:2])
        squares, shares = [self._patches(small)], []
        place = np.zeros((down * step + 2 * MARGIN, across * step + 2 * MARGIN), int)[::2, ::2]
        for i in range(down):
            for j in range(across):
                top, left = i * step, j * step
                y, x = top * self.patch, left * self.patch
                squares.append(self._patches(large[y : y + self.pixels, x : x + self.pixels]))
                shares.append(self._patches(seen[y : y + self.pixels, x : x + self.pixels, None]))
                y0, x0 = (0 if i == 0 else MARGIN // 2), (0 if j == 0 else MARGIN // 2)
                y1 = half if i == down - 1 else half - MARGIN // 2
                x1 = half if j == across - 1 else half - MARGIN // 2
                inner = np.arange(half**2).reshape(half, half) + (len(squares) - 1) * half**2
                place[top // 2 + y0 : top // 2 + y1, left // 2 + x0 : left // 2 + x1] = inner[
                    y0:y1, x0:x1
                ]
        shares.append(np.full_like(shares[0], -1.0))  # they begin one square late
        mean = torch.tensor(MEAN).repeat(self.patch**2)
        std = torch.tensor(STD).repeat(self.patch**2)
        values = (torch.from_numpy(np.stack(squares)).float() - mean) / std
        rows = self.pooled(values, torch.from_numpy(np.stack(shares)).float().mean(-1)).flatten(
            0, 1
        )
        return torch.cat((rows[: half**2], rows[torch.from_numpy(place.ravel())]))

    def _patches(self, square: np.ndarray) -> np.ndarray:
        p, side = self.patch, self.side
        rows = square.reshape(side, p, side, p, -1).transpose(0, 2, 1, 3, 4)
        return rows.reshape(side**2, -1).astype(np.float32)

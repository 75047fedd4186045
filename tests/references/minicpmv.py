"""MiniCPM-V 2.6 to 4.5 as it sees, written from Yao et al. 2024 (MiniCPM-V, section 3.1), its published configuration
and tensor names, without the model files of the package. The decoder behind it is transformers'.

One picture at a time; P patches, Q queries, E width of the tower, F of the decoder.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

    def forward(self, x_PE: torch.Tensor) -> torch.Tensor:
        y_PE = self.layer_norm1(x_PE)
        q, k, v = (
            self.self_attn[f"{one}_proj"](y_PE).unflatten(1, (self.heads, -1)).transpose(0, 1)
            for one in "qkv"
        )
        weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[2])).softmax(-1)
        x_PE = x_PE + self.self_attn["out_proj"]((weights @ v).transpose(0, 1).flatten(1))
        y_PE = self.mlp["fc1"](self.layer_norm2(x_PE))
        return x_PE + self.mlp["fc2"](F.gelu(y_PE, approximate="tanh"))


class Tower(nn.Module):
    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        width, patch = vision["hidden_size"], vision["patch_size"]
        self.side = vision["image_size"] // patch
        self.embeddings = nn.ModuleDict(
            {
                "patch_embedding": nn.Conv2d(3, width, patch, patch),
                "position_embedding": nn.Embedding(self.side**2, width),
            }
        )
        layers = [
            Layer(width, vision["intermediate_size"], vision["num_attention_heads"])
            for _ in range(vision["num_hidden_layers"])
        ]
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.post_layernorm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels [3, H, W] -> [h, w, E]; a patch's place in the table is that of its share of the picture."""
        x = self.embeddings["patch_embedding"](pixels[None])[0]
        rows, columns = (
            torch.tensor([i * self.side // count for i in range(count)]) for count in x.shape[1:]
        )
        places = rows[:, None] * self.side + columns[None]
        x_PE = (x.permute(1, 2, 0) + self.embeddings["position_embedding"](places)).flatten(0, 1)
        for layer in self.encoder["layers"]:
            x_PE = layer(x_PE)
        return self.post_layernorm(x_PE).unflatten(0, x.shape[1:])


class Resampler(nn.Module):
    def __init__(self, queries: int, width: int, inputs: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(queries, width))
        self.kv_proj = nn.Linear(inputs, width, bias=False)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.zeros(width, width))

    def forward(self, x_hwE: torch.Tensor) -> torch.Tensor:
        h, w = x_hwE.shape[:2]
        x_PF = self.ln_kv(self.kv_proj(x_hwE.flatten(0, 1)))
        key_PF = x_PF + torch.from_numpy(sines(h, w, x_PF.shape[1])).to(x_PF)
        y_QF, _ = self.attn(self.ln_q(self.query)[None], key_PF[None], x_PF[None])
        return self.ln_post(y_QF[0]) @ self.proj


def sines(h: int, w: int, width: int) -> np.ndarray:
    """[h * w, F], element by element: of the column in the first half, of the row in the second."""
    table = np.zeros((h, w, width))
    quarter = width // 4
    for row in range(h):
        for column in range(w):
            for i in range(quarter):
                frequency = 10_000.0 ** (-i / quarter)
                for half, place in enumerate((column, row)):
                    table[row, column, half * 2 * quarter + i] = math.sin(place * frequency)
                    table[row, column, (2 * half + 1) * quarter + i] = math.cos(place * frequency)
    return table.reshape(h * w, width)


def grid_of(width: int, height: int, side: int, most: int) -> tuple[int, int] | None:
    """Columns and rows of slices."""
    wanted = min(math.ceil(width * height / side**2), most)
    if wanted <= 1:
        return None
    counts = [one for one in (wanted - 1, wanted, wanted + 1) if 1 < one <= most]
    grids = [(x, n // x) for n in counts for x in range(1, n + 1) if n % x == 0]
    return min(grids, key=lambda grid: abs(math.log(width / height) - math.log(grid[0] / grid[1])))


def slices(picture: Image.Image, side: int, patch: int, most: int) -> list[list[Image.Image]]:
    """The whole in a list of its own, then the rows of slices."""

    def whole(length: float, unit: int) -> int:
        return max(round(length / unit) * unit, unit)

    def fitted(width: float, height: float, upscales: bool) -> tuple[int, int]:
        if width * height > side**2 or upscales:
            ratio = width / height
            height = int(side / math.sqrt(ratio))
            width = int(height * ratio)
        return whole(width, patch), whole(height, patch)

    width, height = picture.size
    grid = grid_of(width, height, side, most)
    small = picture.resize(fitted(width, height, grid is None), Image.Resampling.BICUBIC)
    if grid is None:
        return [[small]]
    columns, rows = grid
    wide, high = fitted(whole(width, columns) / columns, whole(height, rows) / rows, True)
    large = picture.resize((wide * columns, high * rows), Image.Resampling.BICUBIC)
    return [[small]] + [
        [large.crop((x * wide, y * high, (x + 1) * wide, (y + 1) * high)) for x in range(columns)]
        for y in range(rows)
    ]


def text_of(number: int, rows: list[list[Image.Image]], queries: int) -> str:
    """What a picture becomes in a prompt, I for each token."""
    tokens = "I" * queries
    first = f"<image_id>{number}</image_id><image>{tokens}</image>"
    return first + "\n".join(f"<slice>{tokens}</slice>" * len(row) for row in rows[1:])


def pixels_of(picture: Image.Image) -> torch.Tensor:
    values = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
    return (values - 0.5) / 0.5

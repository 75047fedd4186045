"""openPangu-VL, written from the configuration of the published 7B, its tensor names, and Qwen2.5-VL's windows (Bai et
al. 2025): eyes of which several layers are merged and added up, before Llama's decoder with biases and positions in
three axes.

Patches in raster order, N of them; E width of the tower, F of the decoder, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.references.mixture_parts import SIZES, attention_shapes, checkpoint, mlp_shapes, run
from tests.references.plain import Tensors, attended, mlp, norm

IMAGE = 90
AXES = (1, 2, 1, 0)
"""Of the 4 pairs of a head, whose counts are 1, 2 and 1: written out by hand, the last is time's."""
TEXT: dict[str, Any] = {
    **{**SIZES, "vocab_size": 97, "bias": True, "max_position_embeddings": 512},
    "rope_scaling": {"type": "default", "mrope_section": [1, 2, 1], "mrope_interleaved": True},
}
VISION: dict[str, Any] = {
    **{"depth": 4, "num_heads": 2, "hidden_size": 32, "intermediate_size": 40, "patch_size": 4},
    **{"hidden_act": "gelu", "out_hidden_size": 24, "rms_norm_eps": 1e-6, "in_channels": 3},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "in_chans": 3},
    **{"fullatt_block_indexes": [1], "mm_unit_vision_select_layer": [-1, -3]},
}


class Layer(nn.Module):
    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        width, inner = vision["hidden_size"], vision["intermediate_size"]
        self.heads = vision["num_heads"]
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        attention = {"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}
        self.attn = nn.ModuleDict(attention)
        names = ("gate_proj", "up_proj") if vision["hidden_act"] == "silu" else ("up_proj",)
        branch = {name: nn.Linear(width, inner) for name in names}
        self.mlp = nn.ModuleDict({**branch, "down_proj": nn.Linear(inner, width)})

    def forward(self, x: torch.Tensor, angles: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).view(len(x), 3, self.heads, -1).unbind(1)
        q, k = (turned(one, angles[:, None]) for one in (q, k))
        y = F.scaled_dot_product_attention(*(one.transpose(0, 1) for one in (q, k, v)), sees)
        x = x + self.attn["proj"](y.transpose(0, 1).flatten(1))
        h = self.norm2(x)
        up = self.mlp["up_proj"](h)
        inner = F.silu(self.mlp["gate_proj"](h)) * up if "gate_proj" in self.mlp else F.gelu(up)
        return x + self.mlp["down_proj"](inner)


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Eyes(nn.Module):
    def __init__(self, vision: dict[str, Any], outputs: int) -> None:
        super().__init__()
        self.vision, width = vision, vision["hidden_size"]
        patch, inner = vision["patch_size"], vision["out_hidden_size"]
        conv = nn.Conv3d(3, width, (2, patch, patch), (2, patch, patch), bias=False)
        self.patch_embed = nn.ModuleDict({"proj": conv})
        self.blocks = nn.ModuleList([Layer(vision) for _ in range(vision["depth"])])
        self.final_layernorm = nn.RMSNorm(width, eps=1e-6)

        def merger() -> nn.ModuleDict:
            mlp = nn.Sequential(
                nn.Linear(4 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, inner)
            )
            return nn.ModuleDict({"ln_q": nn.RMSNorm(width, eps=1e-6), "mlp": mlp})

        self.merger = nn.ModuleList([merger() for _ in vision["mm_unit_vision_select_layer"]])
        self.vision_projection = nn.ModuleDict({"fc1": nn.Linear(inner, outputs)})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[3, H, W], normalized -> rows [tokens, F]."""
        vision, patch = self.vision, self.vision["patch_size"]
        h, w = (n // patch for n in values.shape[1:])
        x = self.patch_embed["proj"](values[:, None].expand(-1, 2, -1, -1)[None])
        x = x[0].flatten(1).T
        row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        row, column = row.flatten(), column.flatten()
        quarter = vision["hidden_size"] // vision["num_heads"] // 4
        turns = 10_000.0 ** -(torch.arange(quarter) / quarter)
        angles = torch.cat((row[:, None] * turns, column[:, None] * turns), dim=1)
        side = vision["window_size"] // patch
        window = row // side * 1000 + column // side
        near = window[:, None] == window
        seen = []
        for index, layer in enumerate(self.blocks):
            full = index in vision["fullatt_block_indexes"]
            x = layer(x, angles, torch.ones_like(near) if full else near)
            seen.append(self.final_layernorm(x))
        chosen = sorted(vision["mm_unit_vision_select_layer"], reverse=True)
        total = torch.tensor(0.0)
        for merger, index in zip(self.merger, chosen, strict=True):
            y = merger["ln_q"](seen[index]).view(h // 2, 2, w // 2, 2, -1).transpose(1, 2)
            total = total + merger["mlp"](y.flatten(2).flatten(0, 1))
        return self.vision_projection["fc1"](F.silu(total))


def tensors() -> Tensors:
    """A random text under the names that it has alone."""
    biases = {"q": 48, "k": 16, "v": 16, "o": 48}
    own = {f"self_attn.{one}_proj.bias": (size,) for one, size in biases.items()}
    return checkpoint(lambda _: attention_shapes() | own | mlp_shapes("mlp", 40))


def decoded(
    weights: Tensors, ids: list[int], x_TE: torch.Tensor, sizes: list[tuple[int, int]]
) -> torch.Tensor:
    """[T, V]; `sizes`: tokens in height and width of each picture."""
    angles_T1P = _angles(ids, sizes)[:, None]

    def layer(index: int, own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
        h_TE = norm(x_TE, own["input_layernorm.weight"], 1e-5)
        q, k, v = (
            F.linear(
                h_TE, own[f"self_attn.{one}_proj.weight"], own[f"self_attn.{one}_proj.bias"]
            ).unflatten(1, (-1, 8))
            for one in "qkv"
        )
        y_TE = attended(turned(q, angles_T1P), turned(k, angles_T1P), v)
        out = "self_attn.o_proj"
        x_TE = x_TE + F.linear(y_TE, own[f"{out}.weight"], own[f"{out}.bias"])
        return x_TE + mlp(own, "mlp", norm(x_TE, own["post_attention_layernorm.weight"], 1e-5))

    rows = list(range(len(x_TE)))
    return run(TEXT, {**weights, "model.embed_tokens.weight": x_TE}, rows, layer)


def _angles(ids: list[int], sizes: list[tuple[int, int]]) -> torch.Tensor:
    """[T, D/2]: a picture's tokens stand at where it begins, its rows and columns further."""
    places: list[tuple[int, int, int]] = []
    position, pictures = 0, iter(sizes)
    index = 0
    while index < len(ids):
        if ids[index] == IMAGE:
            high, wide = next(pictures)
            places += [
                (position, position + i, position + j) for i in range(high) for j in range(wide)
            ]
            position, index = position + max(high, wide), index + high * wide
            continue
        places.append((position,) * 3)
        position, index = position + 1, index + 1
    speeds = TEXT["rope_theta"] ** (-torch.arange(4) / 4)
    return torch.tensor(places)[:, list(AXES)] * speeds

"""Youtu-VL as it sees, written from SigLIP 2 (Tschannen et al. 2025), Qwen2.5-VL's windows and merger (Bai et al. 2025)
and the published configuration and tensor names, without the model files of the package. The decoder behind it is
transformers'.

Patches in raster order, N of them; E width of the tower, F of the decoder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.references.ovis2_5 import Layer


class Eyes(nn.Module):
    def __init__(self, vision: dict[str, Any], outputs: int) -> None:
        super().__init__()
        self.vision, width, patch = vision, vision["hidden_size"], vision["patch_size"]
        layers = [
            Layer(width, vision["intermediate_size"], vision["num_attention_heads"])
            for _ in range(vision["num_hidden_layers"])
        ]
        tower = {
            "embeddings": nn.ModuleDict({"patch_embedding": nn.Linear(3 * patch**2, width)}),
            "encoder": nn.ModuleDict({"layers": nn.ModuleList(layers)}),
            "post_layernorm": nn.LayerNorm(width, eps=1e-6),
        }
        self.siglip2 = nn.ModuleDict({"vision_model": nn.ModuleDict(tower)})
        whole = width * vision["spatial_merge_size"] ** 2
        mlp = nn.Sequential(nn.Linear(whole, whole), nn.GELU(), nn.Linear(whole, outputs))
        self.merger = nn.ModuleDict({"ln_q": nn.RMSNorm(width, eps=1e-6), "mlp": mlp})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[3, H, W], normalized -> rows [tokens, F]."""
        vision, tower = self.vision, self.siglip2["vision_model"]
        patch, merge = vision["patch_size"], vision["spatial_merge_size"]
        h, w = (n // patch for n in values.shape[1:])
        flat = values.view(3, h, patch, w, patch).permute(1, 3, 2, 4, 0).reshape(h * w, -1)
        x = tower["embeddings"]["patch_embedding"](flat)
        row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        row, column = row.flatten(), column.flatten()
        quarter = vision["hidden_size"] // vision["num_attention_heads"] // 4
        turns = 10_000.0 ** -(torch.arange(quarter) / quarter)
        angles = torch.cat((row[:, None] * turns, column[:, None] * turns), dim=1)
        side = vision["window_size"] // patch
        window = row // side * 1000 + column // side
        near = window[:, None] == window
        for index, layer in enumerate(tower["encoder"]["layers"]):
            full = index in vision["fullatt_block_indexes"]
            x = layer(x, angles, torch.ones_like(near) if full else near)
        x = self.merger["ln_q"](tower["post_layernorm"](x))
        x = x.view(h // merge, merge, w // merge, merge, -1).transpose(1, 2).flatten(2)
        return self.merger["mlp"](x.flatten(0, 1))

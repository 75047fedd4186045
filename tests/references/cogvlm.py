"""CogVLM and CogVLM2, written from Wang et al. 2023 (CogVLM, section 2), Hong et al. 2024 (CogVLM2), EVA-CLIP's layers
(Sun et al. 2023) and the published configuration and tensor names, without the model files of the package.

One prompt at a time: T tokens, E width, S patches a side. `seen_T`: which tokens are images' (their first and last ones
among them).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Gated(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.kv_heads = config.get("num_multi_query_heads", self.heads)
        self.theta = 500_000.0 if "num_multi_query_heads" in config else 10_000.0
        self.eps, dim = config["rms_norm_eps"], width // self.heads
        outputs = (self.heads + 2 * self.kv_heads) * dim
        second = "num_multi_query_heads" in config
        self.self_attn = nn.ModuleDict(
            {
                "vision_expert_query_key_value": nn.Linear(width, outputs, bias=second),
                "vision_expert_dense": nn.Linear(width, width, bias=False),
                "language_expert_query_key_value": nn.Linear(width, outputs, bias=False),
                "language_expert_dense": nn.Linear(width, width, bias=False),
            }
        )
        inner = config["intermediate_size"]
        self.mlp = nn.ModuleDict(
            {name: Gated(width, inner) for name in ("language_mlp", "vision_mlp")}
        )
        self.input_layernorm, self.post_attention_layernorm = Scale(width), Scale(width)

    def forward(self, x: torch.Tensor, expert_T: torch.Tensor, place_T: torch.Tensor) -> Any:
        def either(y: torch.Tensor, module: nn.ModuleDict, name: str) -> torch.Tensor:
            both = [module[f"{kind}_{name}"](y) for kind in ("vision", "language")]
            return torch.where(expert_T[:, None], *both)

        y = rms(x, self.input_layernorm.weight, self.eps)
        qkv = either(y, self.self_attn, "expert_query_key_value")
        dim = x.shape[1] // self.heads
        q, k, v = qkv.view(len(x), -1, dim).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = (turned(one, place_T, self.theta) for one in (q, k))
        k, v = (one.repeat_interleave(self.heads // self.kv_heads, dim=1) for one in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(dim)
        later = torch.ones(len(x), len(x)).triu(1).bool()
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        y = torch.einsum("hts,shd->thd", weights, v).flatten(1)
        x = x + either(y, self.self_attn, "expert_dense")
        y = rms(x, self.post_attention_layernorm.weight, self.eps)
        return x + either(y, self.mlp, "mlp")


def turned(x_THD: torch.Tensor, place_T: torch.Tensor, theta: float) -> torch.Tensor:
    half = x_THD.shape[2] // 2
    angles = place_T[:, None].double() * theta ** -(torch.arange(half).double() / half)
    cos, sin = (one.float()[:, None] for one in (angles.cos(), angles.sin()))
    first, second = x_THD.split(half, dim=2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)


class Block(nn.Module):
    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        width, inner = vision["hidden_size"], vision["intermediate_size"]
        self.heads = vision["num_heads"]
        self.attention = nn.ModuleDict(
            {"query_key_value": nn.Linear(width, 3 * width), "dense": nn.Linear(width, width)}
        )
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})
        self.input_layernorm, self.post_attention_layernorm = (
            nn.LayerNorm(width, eps=vision["layer_norm_eps"]) for _ in range(2)
        )

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            one.unflatten(1, (self.heads, -1)).transpose(0, 1)
            for one in self.attention["query_key_value"](x_NE).chunk(3, dim=1)
        )
        weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[2])).softmax(-1)
        y_NE = self.attention["dense"]((weights @ v).transpose(0, 1).flatten(1))
        x_NE = x_NE + self.input_layernorm(y_NE)
        y_NE = self.mlp["fc2"](F.gelu(self.mlp["fc1"](x_NE)))
        return x_NE + self.post_attention_layernorm(y_NE)


class Eyes(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        vision, outputs = config["vision_config"], config["hidden_size"]
        width, patch, inner = (
            vision["hidden_size"],
            vision["patch_size"],
            config["intermediate_size"],
        )
        self.side = vision["image_size"] // patch
        self.patch_embedding = nn.ModuleDict(
            {
                "proj": nn.Conv2d(3, width, patch, patch),
                "position_embedding": nn.Embedding(self.side**2 + 1, width),
            }
        )
        self.patch_embedding.register_parameter(
            "cls_embedding", nn.Parameter(torch.randn(1, width))
        )
        blocks = [Block(vision) for _ in range(vision["num_hidden_layers"])]
        self.transformer = nn.ModuleDict({"layers": nn.ModuleList(blocks)})
        if "num_multi_query_heads" in config:
            self.conv = nn.Conv2d(width, width, 2, 2)
        self.linear_proj = nn.ModuleDict(
            {
                "linear_proj": nn.Linear(width, outputs, bias=False),
                "norm1": nn.LayerNorm(outputs),
                "dense_h_to_4h": nn.Linear(outputs, inner, bias=False),
                "gate_proj": nn.Linear(outputs, inner, bias=False),
                "dense_4h_to_h": nn.Linear(inner, outputs, bias=False),
            }
        )
        self.boi, self.eoi = (nn.Parameter(torch.randn(1, 1, outputs)) for _ in range(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[3, H, W], normalized -> rows [tokens, F], the two ends among them."""
        x = self.patch_embedding["proj"](values[None])[0].flatten(1).T
        x = torch.cat((self.patch_embedding.cls_embedding, x))
        x = x + self.patch_embedding["position_embedding"].weight
        for block in self.transformer["layers"]:
            x = block(x)
        x = x[1:]
        if hasattr(self, "conv"):
            x = self.conv(x.T.unflatten(1, (self.side, self.side))[None])[0].flatten(1).T
        parts = self.linear_proj
        x = F.gelu(parts["norm1"](parts["linear_proj"](x)))
        x = parts["dense_4h_to_h"](F.silu(parts["gate_proj"](x)) * parts["dense_h_to_4h"](x))
        return torch.cat((self.boi[0], x, self.eoi[0]))


class CogVLM(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(vocabulary, width),
                "layers": nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"])),
                "norm": Scale(width),
                "vision": Eyes(config),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model["embed_tokens"]

    def logits(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """ids [1, T], embeddings [1, T, E] -> [1, T, V]."""
        seen_T, x = ids[0] == self.config["pad_token_id"], x[0]
        next_T = F.pad(seen_T[1:], (0, 1))
        before_T = F.pad(seen_T[:-1], (1, 0))
        within_T = seen_T & next_T & before_T  # neither the first nor the last of an image
        moves_T = ~within_T | ~F.pad(within_T[:-1], (1, 0))
        place_T = moves_T.cumsum(0) - 1
        for layer in self.model["layers"]:
            x = layer(x, seen_T & next_T, place_T)
        return self.lm_head(rms(x, self.model["norm"].weight, self.config["rms_norm_eps"]))[None]

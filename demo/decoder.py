"""A compact Qwen3 decoder for training: packed rows, document mask, weights named as in the hub format.

Only what training needs is here; inference is the engine's business. Every tensor's name in
`state_dict` is the one of `Qwen3ForCausalLM`, so export is a cast to bf16 and a save.

Shapes: B rows, T tokens of a row, C hidden, H query heads, K key heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention inside documents: q [B, H, T, D], k and v [B, K, T, D] -> [B, H, T, D]."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of the model, named as in `config.json`."""

    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 640
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 8192
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-6

    def hub_config(self, *, eos: int, pad: int) -> dict[str, object]:
        """The `config.json` of the shipped model."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(self),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "torch_dtype": "bfloat16",
        }


class Norm(nn.Module):
    """Root mean square norm over the last dim."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention with norms on queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, size = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(wide, shape.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(wide, shape.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(wide, shape.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * size, wide, bias=False)
        self.q_norm = Norm(size, shape.rms_norm_eps)
        self.k_norm = Norm(size, shape.rms_norm_eps)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        B, T, _ = x_BTC.shape
        size = self.shape.head_dim
        q = self.q_norm(self.q_proj(x_BTC).view(B, T, -1, size)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x_BTC).view(B, T, -1, size)).transpose(1, 2)
        v = self.v_proj(x_BTC).view(B, T, -1, size).transpose(1, 2)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer, norms before each half."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Qwen3(nn.Module):
    """The whole model; the output matrix is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        deep = 0.02 / math.sqrt(2 * shape.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=deep if last else 0.02)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, attend: Attend) -> Tensor:
        """Logits [B, T, V] of the next token."""
        cos, sin = rope(positions_BT, self.shape)
        x = self.model.embed_tokens(tokens_BT)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, attend)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def loss(self, tokens: Tensor, targets: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Mean cross entropy over the learnt tokens (targets below 0 do not count)."""
        logits = self(tokens, positions, attend)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


def rope(positions_BT: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, 1, T, D] of the rotary angles, both halves alike."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions_BT.device) / shape.head_dim
    angles = positions_BT[:, None, :, None].float() * shape.rope_theta**-exponents
    doubled = torch.cat((angles, angles), dim=-1)
    return doubled.cos(), doubled.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary angles to [B, H, T, D]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin

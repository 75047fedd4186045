"""NeoBERT in plain PyTorch, by the paper (Le Breton et al. 2025, section 3: pre-RMSNorm, RoPE, SwiGLU) and the keys of
chandar-lab/NeoBERT's config.json; tensors by the names of its checkpoint. T tokens, H heads, D head_dim."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CONFIG: dict[str, Any] = {
    **{"architectures": ["NeoBERTLMHead"], "model_type": "neobert", "vocab_size": 96},
    **{"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "max_length": 40},
    **{"intermediate_size": 60, "norm_eps": 1e-6, "rms_norm": True, "rope": True, "ngpt": False},
    **{"hidden_act": "SwiGLU".lower(), "pad_token_id": 0},
    "auto_map": {"AutoModel": "model.NeoBERT", "AutoModelForMaskedLM": "model.NeoBERTLMHead"},
}
INNER = 40
"""Two thirds of what is stated, a multiple of 8."""


def tiny() -> dict[str, torch.Tensor]:
    """Random tensors of CONFIG."""
    shapes: dict[str, tuple[int, ...]] = {"encoder.weight": (96, 48), "layer_norm.weight": (48,)}
    for layer in range(2):
        at = f"transformer_encoder.{layer}"
        shapes |= {f"{at}.qkv.weight": (144, 48), f"{at}.wo.weight": (48, 48)}
        shapes |= {f"{at}.ffn.w12.weight": (2 * INNER, 48), f"{at}.ffn.w3.weight": (48, INNER)}
        shapes |= {f"{at}.attention_norm.weight": (48,), f"{at}.ffn_norm.weight": (48,)}
    made = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=made) * 0.3 for name, shape in shapes.items()}


def hidden_states(tensors: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """[tokens, width] of one text."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * tensors[f"{name}.weight"]

    x, places = tensors["encoder.weight"][ids], torch.arange(len(ids))
    angles = torch.outer(places, 10_000.0 ** (-torch.arange(0, 8, 2) / 8))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    for layer in range(2):
        at = f"transformer_encoder.{layer}"
        qkv = F.linear(norm(x, f"{at}.attention_norm"), tensors[f"{at}.qkv.weight"])
        q, k, v = qkv.view(len(ids), 6, 24).chunk(3, dim=-1)
        q, k = (
            torch.view_as_real(torch.view_as_complex(one.unflatten(-1, (4, 2)).contiguous()) * turn)
            for one in (q, k)
        )
        scores = torch.einsum("qhd,khd->hqk", q.flatten(-2), k.flatten(-2)) / 8**0.5
        y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + F.linear(y, tensors[f"{at}.wo.weight"])
        gate, up = F.linear(norm(x, f"{at}.ffn_norm"), tensors[f"{at}.ffn.w12.weight"]).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, tensors[f"{at}.ffn.w3.weight"])
    return norm(x, "layer_norm")

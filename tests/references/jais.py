"""Jais in plain PyTorch, by the paper (Sengupta et al. 2023, section 3: GPT-3's decoder, ALiBi, SwiGLU, maximal update
parametrization) and the keys of core42/jais-13b's config.json; tensors by the names of its checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CONFIG: dict[str, Any] = {
    **{"architectures": ["JAISLMHeadModel"], "model_type": "jais", "vocab_size": 97},
    **{"n_embd": 48, "n_layer": 3, "n_head": 6, "n_inner": 80, "n_positions": 128},
    **{"activation_function": "swiglu", "position_embedding_type": "alibi"},
    **{"layer_norm_epsilon": 1e-5, "embeddings_scale": 3.5, "width_scale": 0.4},
    **{"scale_qk_dot_by_d": True, "scale_attn_weights": True, "tie_word_embeddings": True},
    "auto_map": {"AutoModelForCausalLM": "modeling_jais.JAISLMHeadModel"},
}


def tiny() -> dict[str, torch.Tensor]:
    """Random tensors of CONFIG; matrices are [inputs, outputs]."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (97, 48)}
    shapes |= {"ln_f.weight": (48,), "ln_f.bias": (48,)}
    for layer in range(3):
        matrices = {"attn.c_attn": (48, 144), "attn.c_proj": (48, 48), "mlp.c_proj": (80, 48)}
        matrices |= {"mlp.c_fc": (48, 80), "mlp.c_fc2": (48, 80)}
        for name, shape in matrices.items():
            shapes |= {f"h.{layer}.{name}.weight": shape, f"h.{layer}.{name}.bias": shape[1:]}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{name}.weight": (48,), f"h.{layer}.{name}.bias": (48,)}
    made = torch.Generator().manual_seed(4)
    return {
        f"transformer.{name}": torch.randn(shape, generator=made) * 0.2
        for name, shape in shapes.items()
    }


def logits(tensors: dict[str, torch.Tensor], row: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] of one row."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = (tensors[f"transformer.{name}.{one}"] for one in ("weight", "bias"))
        return F.layer_norm(x, (48,), weight, bias, 1e-5)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ tensors[f"transformer.{name}.weight"] + tensors[f"transformer.{name}.bias"]

    words, place = tensors["transformer.wte.weight"], torch.arange(len(row))
    slopes = torch.tensor([2.0**-i for i in (2, 4, 6, 8, 1, 3)])[:, None, None]  # of six heads
    distance = place[None] - place[:, None]
    bias = (slopes * distance).masked_fill(distance > 0, float("-inf"))
    x = words[row] * 3.5
    for layer in range(3):
        qkv = linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn")
        q, k, v = (one.unflatten(1, (6, 8)).transpose(0, 1) for one in qkv.chunk(3, dim=-1))
        y = ((q @ k.transpose(1, 2) / 8 + bias).softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + linear(y, f"h.{layer}.attn.c_proj")
        h = norm(x, f"h.{layer}.ln_2")
        gate = F.silu(linear(h, f"h.{layer}.mlp.c_fc2"))
        x = x + linear(linear(h, f"h.{layer}.mlp.c_fc") * gate, f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ words.T * 0.4

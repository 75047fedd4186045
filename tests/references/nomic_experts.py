"""Nomic Embed 2 in plain PyTorch, by the paper (Nussbaum and Duderstadt 2025: experts in every other layer of a BERT
with rotations, 2 of 8 chosen by softmax, not renormalized) and the keys of nomic-embed-text-v2-moe's config.json;
tensors by the names of its checkpoint. X experts, I inner size."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CONFIG: dict[str, Any] = {
    **{"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 96},
    **{"n_embd": 48, "n_layer": 2, "n_head": 6, "n_inner": 80, "n_positions": 40},
    **{"layer_norm_epsilon": 1e-5, "activation_function": "gelu", "type_vocab_size": 1},
    **{"rotary_emb_base": 500, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False},
    **{"qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "prenorm": False},
    **{"num_experts": 4, "moe_top_k": 2, "moe_every_n_layers": 2, "ffn_div": 1},
    **{"moe_normalize_expert_weights": False, "expert_choice_router": False, "causal": False},
    **{"num_shared_experts": 0, "use_rms_norm": False, "pad_token_id": 1},
}


def tiny() -> dict[str, torch.Tensor]:
    """Random tensors of CONFIG."""
    shapes: dict[str, tuple[int, ...]] = {
        **{"embeddings.word_embeddings.weight": (96, 48), "emb_ln.weight": (48,)},
        **{"embeddings.token_type_embeddings.weight": (1, 48), "emb_ln.bias": (48,)},
    }
    for layer in range(2):
        at = f"encoder.layers.{layer}"
        shapes |= {f"{at}.attn.Wqkv.weight": (144, 48), f"{at}.attn.Wqkv.bias": (144,)}
        shapes |= {f"{at}.attn.out_proj.weight": (48, 48), f"{at}.attn.out_proj.bias": (48,)}
        for name in ("norm1", "norm2"):
            shapes |= {f"{at}.{name}.weight": (48,), f"{at}.{name}.bias": (48,)}
    dense, sparse = "encoder.layers.0.mlp", "encoder.layers.1.mlp"
    shapes |= {f"{dense}.fc1.weight": (80, 48), f"{dense}.fc1.bias": (80,)}
    shapes |= {f"{dense}.fc2.weight": (48, 80), f"{dense}.fc2.bias": (48,)}
    shapes |= {f"{sparse}.router.layer.weight": (4, 48), f"{sparse}.experts.bias": (48,)}
    shapes |= {f"{sparse}.experts.mlp.{name}": (320, 48) for name in ("w1", "w2")}
    made = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=made) * 0.3 for name, shape in shapes.items()}


def hidden_states(tensors: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """[tokens, width] of one text."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (48,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-5)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def rotated(x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(len(ids)), 500.0 ** (-torch.arange(4) / 4))[:, None]
        one, other = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)

    x = tensors["embeddings.word_embeddings.weight"][ids]
    x = norm(x + tensors["embeddings.token_type_embeddings.weight"][0], "emb_ln")
    for layer in range(2):
        at = f"encoder.layers.{layer}"
        q, k, v = linear(x, f"{at}.attn.Wqkv").view(len(ids), 3, 6, 8).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", rotated(q), rotated(k)) / 8**0.5
        y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = norm(linear(y, f"{at}.attn.out_proj") + x, f"{at}.norm1")
        mlp = (
            experts(tensors, x)
            if layer
            else linear(F.gelu(linear(x, f"{at}.mlp.fc1")), f"{at}.mlp.fc2")
        )
        x = norm(mlp + x, f"{at}.norm2")
    return x


def experts(tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Token by token."""
    at = "encoder.layers.1.mlp"
    up_XIE, down_XIE = (
        tensors[f"{at}.experts.mlp.{name}"].view(4, 80, 48) for name in ("w1", "w2")
    )
    rows = []
    for token in x:
        weights = (tensors[f"{at}.router.layer.weight"] @ token).softmax(-1)
        chosen = weights.topk(2)
        row = tensors[f"{at}.experts.bias"].clone()
        for weight, expert in zip(chosen.values, chosen.indices.tolist(), strict=True):
            row += weight * (F.gelu(up_XIE[expert] @ token) @ down_XIE[expert])
        rows.append(row)
    return torch.stack(rows)

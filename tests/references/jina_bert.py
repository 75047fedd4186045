"""Jina Embeddings v2 in plain PyTorch, by the paper (Günther et al. 2023, section 3: BERT with symmetric ALiBi and gated
MLPs) and the keys of jina-embeddings-v2-base-en's config.json; tensors by the names of its checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def slopes(heads: int) -> torch.Tensor:
    """Of a number of heads: 2^(-8 i / n) for a power of two n, else every other one of twice as many behind them."""

    def of_power(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    power = 1 << (heads.bit_length() - 1)
    if power == heads:
        return torch.tensor(of_power(heads))
    return torch.tensor(of_power(power) + of_power(2 * power)[0::2][: heads - power])


def hidden_states(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], ids: list[int]
) -> torch.Tensor:
    """[tokens, width] of one text."""
    eps, heads, inner = (
        config[key] for key in ("layer_norm_eps", "num_attention_heads", "intermediate_size")
    )

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(
            x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], eps
        )

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    x = tensors["embeddings.word_embeddings.weight"][ids]
    x = norm(x + tensors["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    place = torch.arange(len(ids))
    alibi = -slopes(heads)[:, None, None] * (place[:, None] - place[None]).abs()
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{one}").unflatten(1, (heads, -1)).transpose(0, 1)
            for one in ("query", "key", "value")
        )
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + alibi
        y = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = norm(linear(y, f"{at}.attention.output.dense") + x, f"{at}.attention.output.LayerNorm")
        both = linear(x, f"{at}.mlp.gated_layers")
        y = linear(F.gelu(both[:, :inner]) * both[:, inner:], f"{at}.mlp.wo")
        x = norm(y + x, f"{at}.mlp.layernorm")
    return x

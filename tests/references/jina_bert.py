"""Jina Embeddings v2 in plain PyTorch, by the paper (Günther et al. 2023, section 3: BERT with symmetric ALiBi and
gated MLPs) and the keys of jina-embeddings-v2-base-en's config.json; tensors by the names of its checkpoint. Those of
-base-code have norms of queries and keys and a norm more in each layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CONFIG: dict[str, Any] = {
    **{"architectures": ["JinaBertForMaskedLM"], "model_type": "bert", "vocab_size": 96},
    **{"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6},
    **{"intermediate_size": 80, "layer_norm_eps": 1e-12, "hidden_act": "gelu"},
    **{"position_embedding_type": "alibi", "feed_forward_type": "geglu", "emb_pooler": "mean"},
    **{"max_position_embeddings": 40, "type_vocab_size": 2, "pad_token_id": 0},
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
}


CODE = CONFIG | {
    "auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}
}


def tiny(*, code: bool = False) -> dict[str, torch.Tensor]:
    """Random tensors of CONFIG, or of CODE."""
    shapes = {"embeddings.word_embeddings.weight": (96, 48), "embeddings.LayerNorm.weight": (48,)}
    shapes |= {
        "embeddings.token_type_embeddings.weight": (2, 48),
        "embeddings.LayerNorm.bias": (48,),
    }
    for layer in range(2):
        at = f"encoder.layer.{layer}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            module = f"{at}.attention.{name}"
            shapes |= {f"{module}.weight": (48, 48), f"{module}.bias": (48,)}
        norms = ("attention.output.LayerNorm", "mlp.layernorm")
        wide, back = ("up_gated_layer", "down_layer") if code else ("gated_layers", "wo")
        if code:
            of_scores = (f"attention.self.layer_norm_{one}" for one in "qk")
            norms = (norms[0], *of_scores, "layer_norm_1", "layer_norm_2")
        for name in norms:
            shapes |= {f"{at}.{name}.weight": (48,), f"{at}.{name}.bias": (48,)}
        shapes |= {f"{at}.mlp.{wide}.weight": (160, 48), f"{at}.mlp.{back}.weight": (48, 80)}
        shapes[f"{at}.mlp.{back}.bias"] = (48,)
    made = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=made) * 0.3 for name, shape in shapes.items()}


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
        code = f"{at}.layer_norm_1.weight" in tensors
        q, k, v = (linear(x, f"{at}.attention.self.{one}") for one in ("query", "key", "value"))
        if code:
            q, k = (
                norm(q, f"{at}.attention.self.layer_norm_q"),
                norm(k, f"{at}.attention.self.layer_norm_k"),
            )
        q, k, v = (one.unflatten(1, (heads, -1)).transpose(0, 1) for one in (q, k, v))
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + alibi
        y = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        before = x
        x = norm(linear(y, f"{at}.attention.output.dense") + x, f"{at}.attention.output.LayerNorm")
        if code:
            x = norm(x + before, f"{at}.layer_norm_1")
            up, gate = linear(x, f"{at}.mlp.up_gated_layer").chunk(2, dim=-1)
            x = norm(linear(up * F.gelu(gate), f"{at}.mlp.down_layer") + x, f"{at}.layer_norm_2")
            continue
        both = linear(x, f"{at}.mlp.gated_layers")
        y = linear(F.gelu(both[:, :inner]) * both[:, inner:], f"{at}.mlp.wo")
        x = norm(y + x, f"{at}.mlp.layernorm")
    return x

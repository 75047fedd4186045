"""RWKV 6, written from the paper's equations (Peng et al. 2024, "Eagle and Finch: RWKV with Matrix-Valued States and
Dynamic Recurrence", section 4) and the published configuration (RWKV/v6-Finch-1B6-HF: model_type rwkv6, head_size,
head_size_divisor, layer_norm_epsilon, intermediate_size), without the model file of the package.

One row at a time, token by token; T tokens, E hidden size, H heads of D.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.references.rwkv7 import before

CONFIG: dict[str, Any] = {
    **{"architectures": ["Rwkv6ForCausalLM"], "model_type": "rwkv6", "vocab_size": 97},
    **{"hidden_size": 48, "attention_hidden_size": 48, "num_hidden_layers": 3, "head_size": 12},
    **{"head_size_divisor": 8, "intermediate_size": None, "layer_norm_epsilon": 1e-5},
    **{"rescale_every": 6, "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32"},
    **{"tie_word_embeddings": False, "num_attention_heads": 12},
}
MIX, DECAY = 32, 64
"""Ranks of the projections that decide on shares and decay, below a width of 4096."""
LETTERS = "wkvrg"


def tensors(config: dict[str, Any] = CONFIG, *, seed: int = 11) -> dict[str, torch.Tensor]:
    """A random checkpoint under its published names."""
    generator = torch.Generator().manual_seed(seed)
    width, head_dim = config["hidden_size"], config["head_size"]
    inner = int(width * 3.5) // 32 * 32
    made: dict[str, torch.Tensor] = {}

    def noise(*shape: int, size: float = 1.0) -> torch.Tensor:
        return size * torch.randn(shape, generator=generator)

    def matrix(name: str, rows: int, columns: int) -> None:
        made[f"{name}.weight"] = noise(rows, columns, size=1.2 / columns**0.5)

    def norm(name: str) -> None:
        made[f"{name}.weight"], made[f"{name}.bias"] = (
            1 + noise(width, size=0.2),
            noise(width, size=0.2),
        )

    matrix("rwkv.embeddings", config["vocab_size"], width)
    matrix("head", config["vocab_size"], width)
    norm("rwkv.ln_out")
    for layer in range(config["num_hidden_layers"]):
        at = f"rwkv.blocks.{layer}"
        for name in ("pre_ln", "ln1", "ln2", "attention.ln_x")[layer > 0 :]:
            norm(f"{at}.{name}")
        for name in ("receptance", "key", "value", "gate", "output"):
            matrix(f"{at}.attention.{name}", width, width)
        for letter in "x" + LETTERS:
            made[f"{at}.attention.time_maa_{letter}"] = torch.rand(1, 1, width, generator=generator)
        made[f"{at}.attention.time_maa_w1"] = noise(width, 5 * MIX, size=width**-0.5)
        made[f"{at}.attention.time_maa_w2"] = noise(5, MIX, width, size=0.5 * MIX**-0.5)
        made[f"{at}.attention.time_decay"] = noise(1, 1, width) - 1
        made[f"{at}.attention.time_decay_w1"] = noise(width, DECAY, size=width**-0.5)
        made[f"{at}.attention.time_decay_w2"] = noise(DECAY, width, size=DECAY**-0.5)
        made[f"{at}.attention.time_faaaa"] = noise(width // head_dim, head_dim)
        for letter in "kr":
            shares = torch.rand(1, 1, width, generator=generator)
            made[f"{at}.feed_forward.time_maa_{letter}"] = shares
        matrix(f"{at}.feed_forward.key", inner, width)
        matrix(f"{at}.feed_forward.receptance", width, width)
        matrix(f"{at}.feed_forward.value", width, inner)
    return made


def logits(
    config: dict[str, Any], weights: dict[str, torch.Tensor], row: list[int]
) -> torch.Tensor:
    """[T, V] of one row."""
    eps = config["layer_norm_epsilon"]
    x_TE = weights["rwkv.embeddings.weight"][torch.tensor(row)]
    x_TE = norm(weights, "rwkv.blocks.0.pre_ln", x_TE, eps)
    for layer in range(config["num_hidden_layers"]):
        at = f"rwkv.blocks.{layer}."
        own = {name.removeprefix(at): one for name, one in weights.items() if name.startswith(at)}
        x_TE = x_TE + _time(config, own, norm(own, "ln1", x_TE, eps))
        x_TE = x_TE + _channels(own, norm(own, "ln2", x_TE, eps))
    return norm(weights, "rwkv.ln_out", x_TE, eps) @ weights["head.weight"].T


def norm(own: dict[str, torch.Tensor], name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], own[f"{name}.weight"], own[f"{name}.bias"], eps)


def _channels(own: dict[str, torch.Tensor], x_TE: torch.Tensor) -> torch.Tensor:
    change = before(x_TE) - x_TE
    k, r = (x_TE + change * own[f"feed_forward.time_maa_{one}"][0, 0] for one in "kr")
    inner = (k @ own["feed_forward.key.weight"].T).relu().square()
    opened = (r @ own["feed_forward.receptance.weight"].T).sigmoid()
    return opened * (inner @ own["feed_forward.value.weight"].T)


def shifted(
    own: dict[str, torch.Tensor], x_TE: torch.Tensor, at: str = "attention"
) -> dict[str, torch.Tensor]:
    """Equations 14 to 16, by letter."""
    change = before(x_TE) - x_TE
    both = x_TE + change * own[f"{at}.time_maa_x"].flatten()
    inner = torch.tanh(both @ own[f"{at}.time_maa_w1"]).chunk(5, dim=1)
    return {
        letter: x_TE
        + change
        * (own[f"{at}.time_maa_{letter}"].flatten() + inner[i] @ own[f"{at}.time_maa_w2"][i])
        for i, letter in enumerate(LETTERS)
    }


def decays(own: dict[str, torch.Tensor], w_TE: torch.Tensor, at: str = "attention") -> torch.Tensor:
    """Equation 17."""
    inner = torch.tanh(w_TE @ own[f"{at}.time_decay_w1"]) @ own[f"{at}.time_decay_w2"]
    return torch.exp(-torch.exp(own[f"{at}.time_decay"].flatten() + inner))


def _time(config: dict[str, Any], own: dict[str, torch.Tensor], x_TE: torch.Tensor) -> torch.Tensor:
    """Equations 17 to 20."""
    head_dim, moved = config["head_size"], shifted(own, x_TE)

    def projected(name: str, letter: str) -> torch.Tensor:
        return moved[letter] @ own[f"attention.{name}.weight"].T

    r, k, v, decay = (
        one.unflatten(1, (-1, head_dim))
        for one in (
            projected("receptance", "r"), projected("key", "k"), projected("value", "v"),
            decays(own, moved["w"]),
        )
    )  # fmt: skip
    state_HKV = torch.zeros(r.shape[1], head_dim, head_dim)
    out_THV = torch.empty_like(v)
    for t in range(len(x_TE)):
        now_HKV = k[t][:, :, None] * v[t][:, None]
        read = state_HKV + own["attention.time_faaaa"][:, :, None] * now_HKV
        out_THV[t] = (r[t][:, None] @ read)[:, 0]
        state_HKV = decay[t][:, :, None] * state_HKV + now_HKV
    normed = F.group_norm(
        out_THV.flatten(1), r.shape[1], own["attention.ln_x.weight"], own["attention.ln_x.bias"],
        1e-5 * config["head_size_divisor"] ** 2,
    )  # fmt: skip
    return (normed * F.silu(projected("gate", "g"))) @ own["attention.output.weight"].T

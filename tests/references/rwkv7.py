"""RWKV 7, written from the paper's equations (Peng et al. 2025, "RWKV-7 Goose with Expressive Dynamic State Evolution",
section 4) and the published configuration of its checkpoints for flash-linear-attention (fla-hub/rwkv7-1.5B-world:
model_type rwkv7, head_dim, decay_low_rank_dim, a_low_rank_dim, v_low_rank_dim, gate_low_rank_dim, norm_first,
norm_bias, norm_eps, hidden_ratio), without the model file of the package.

One row at a time, token by token; T tokens, E hidden size, H heads of D.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

CONFIG: dict[str, Any] = {
    **{"architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "vocab_size": 97},
    **{"hidden_size": 48, "num_hidden_layers": 3, "head_dim": 12, "intermediate_size": 80},
    **{"decay_low_rank_dim": 10, "a_low_rank_dim": 7, "v_low_rank_dim": 6, "gate_low_rank_dim": 14},
    **{
        "norm_first": True,
        "norm_bias": True,
        "norm_eps": 1e-5,
        "hidden_act": "sqrelu",
        "attn": None,
    },
    **{
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    },
    **{"tie_word_embeddings": False, "value_dim": [48, 48, 48]},
}
LOW_RANK = {"w": "decay", "a": "a", "v": "v", "g": "gate"}


def tensors(config: dict[str, Any] = CONFIG, *, seed: int = 11) -> dict[str, torch.Tensor]:
    """A random checkpoint under its published names."""
    generator = torch.Generator().manual_seed(seed)
    width, inner, vocabulary = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    made: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        noise = torch.randn(rows, columns, generator=generator)
        made[f"{name}.weight"] = noise * 1.2 / columns**0.5

    def norm(name: str) -> None:
        made[f"{name}.weight"] = 1 + 0.2 * torch.randn(width, generator=generator)
        made[f"{name}.bias"] = 0.2 * torch.randn(width, generator=generator)

    matrix("model.embeddings", vocabulary, width)
    matrix("lm_head", vocabulary, width)
    norm("model.norm")
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name in ("pre_norm", "attn_norm", "ffn_norm", "attn.g_norm")[layer > 0 :]:
            norm(f"{at}.{name}")
        for letter in "rkvo":
            matrix(f"{at}.attn.{letter}_proj", width, width)
        for letter, rank in LOW_RANK.items():
            if letter == "v" and layer == 0:
                continue
            size = config[f"{rank}_low_rank_dim"]
            matrix(f"{at}.attn.{letter}_lora.lora.0", size, width)
            matrix(f"{at}.attn.{letter}_lora.lora.2", width, size)
            if letter != "g":
                bias = torch.randn(width, generator=generator)
                made[f"{at}.attn.{letter}_lora.lora.2.bias"] = bias
        for letter in "rwkvag":
            made[f"{at}.attn.x_{letter}"] = torch.rand(1, 1, width, generator=generator)
        for name in ("k_k", "k_a"):
            made[f"{at}.attn.{name}"] = 0.5 + torch.rand(width, generator=generator)
        heads = (width // config["head_dim"], config["head_dim"])
        made[f"{at}.attn.r_k"] = 0.5 * torch.randn(heads, generator=generator)
        made[f"{at}.ffn.x_k"] = torch.rand(width, generator=generator)
        matrix(f"{at}.ffn.key", inner, width)
        matrix(f"{at}.ffn.value", width, inner)
    return made


def logits(
    config: dict[str, Any], weights: dict[str, torch.Tensor], row: list[int]
) -> torch.Tensor:
    """[T, V] of one row."""
    eps = config["norm_eps"]
    x_TE = _norm(
        weights,
        "model.layers.0.pre_norm",
        weights["model.embeddings.weight"][torch.tensor(row)],
        eps,
    )
    first_TE: torch.Tensor | None = None
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        own = {name.removeprefix(at): one for name, one in weights.items() if name.startswith(at)}
        mixed, first_TE = time_mix(config, own, _norm(own, "attn_norm", x_TE, eps), first_TE)
        x_TE = x_TE + mixed
        x_TE = x_TE + channel_mix(own, _norm(own, "ffn_norm", x_TE, eps))
    return _norm(weights, "model.norm", x_TE, eps) @ weights["lm_head.weight"].T


def _norm(own: dict[str, torch.Tensor], name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], own[f"{name}.weight"], own[f"{name}.bias"], eps)


def before(x_TE: torch.Tensor) -> torch.Tensor:
    """Each token's predecessor, zeros in front of the first."""
    return torch.cat((torch.zeros_like(x_TE[:1]), x_TE[:-1]))


def channel_mix(own: dict[str, torch.Tensor], x_TE: torch.Tensor) -> torch.Tensor:
    """Equations 23 and 24."""
    shifted = torch.lerp(x_TE, before(x_TE), own["ffn.x_k"])
    return (shifted @ own["ffn.key.weight"].T).relu().square() @ own["ffn.value.weight"].T


def time_mix(
    config: dict[str, Any],
    own: dict[str, torch.Tensor],
    x_TE: torch.Tensor,
    first_TE: torch.Tensor | None,
    *,
    place: str = "attn",
    gated: bool = True,
    eps: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equations 3 to 22. The state is written as in the paper, values by keys."""
    head_dim = config["head_dim"]

    def shifted(letter: str) -> torch.Tensor:
        return torch.lerp(x_TE, before(x_TE), own[f"{place}.x_{letter}"].flatten())

    def projected(letter: str) -> torch.Tensor:
        return shifted(letter) @ own[f"{place}.{letter}_proj.weight"].T

    def low_rank(letter: str, activation: Any = lambda x: x) -> torch.Tensor:
        at = f"{place}.{letter}_lora.lora"
        inner = activation(shifted(letter) @ own[f"{at}.0.weight"].T)
        return inner @ own[f"{at}.2.weight"].T + own.get(f"{at}.2.bias", torch.zeros(()))

    r, k, v = projected("r"), projected("k"), projected("v")
    decay = torch.exp(-math.exp(-0.5) * low_rank("w", torch.tanh).sigmoid())
    rate = low_rank("a").sigmoid()
    if first_TE is None:
        first_TE = v
    else:
        v = torch.lerp(v, first_TE, low_rank("v").sigmoid())
    removal = F.normalize((k * own[f"{place}.k_k"]).unflatten(1, (-1, head_dim)), dim=-1)
    k = k * torch.lerp(torch.ones_like(rate), rate, own[f"{place}.k_a"])
    r, k, v, decay, rate = (one.unflatten(1, (-1, head_dim)) for one in (r, k, v, decay, rate))
    state_HVK = torch.zeros(r.shape[1], head_dim, head_dim)
    out_THV = torch.empty_like(v)
    for t in range(len(x_TE)):
        erased = removal[t][:, :, None] * (rate[t] * removal[t])[:, None]
        transition = torch.diag_embed(decay[t]) - erased
        state_HVK = state_HVK @ transition + v[t][:, :, None] * k[t][:, None]
        out_THV[t] = (state_HVK @ r[t][:, :, None])[..., 0]
    normed = F.group_norm(
        out_THV.flatten(1), r.shape[1], own[f"{place}.g_norm.weight"], own[f"{place}.g_norm.bias"],
        head_dim * config["norm_eps"] if eps is None else eps,
    )  # fmt: skip
    bonus = (r * own[f"{place}.r_k"] * k).sum(-1, keepdim=True) * v
    mixed = normed + bonus.flatten(1)
    if gated:
        mixed = mixed * low_rank("g", torch.sigmoid)
    return mixed @ own[f"{place}.o_proj.weight"].T, first_TE

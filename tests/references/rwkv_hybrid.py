"""Qwen 2 with RWKV's layers in place of attention, as GGUF files of the architectures rwkv6qwen2 (QRWKV 6, by
recursal/QRWKV6-32B-Instruct-Preview's config: num_key_value_heads, lora_rank_tokenshift, lora_rank_decay, rms_norm_eps,
attention_bias) and arwkv7 (by RWKV-Red-Team/ARWKV-7B-Preview-0.1's: head_size, wkv_has_gate, wkv_version) have it: of
version 6 keys count by what the state loses, and there is no norm of heads.

One row at a time, token by token; T tokens, E hidden size, H heads of D.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.references import rwkv6, rwkv7

_SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"rms_norm_eps": 1e-6, "head_size": 16},
}
SIX: dict[str, Any] = {**_SIZES, "wkv_version": 6, "num_key_value_heads": 2, "attention_bias": True}
SEVEN: dict[str, Any] = {
    **{**_SIZES, "wkv_version": 7, "head_dim": 16, "wkv_has_gate": True},
    **{"decay_low_rank_dim": 10, "a_low_rank_dim": 7, "v_low_rank_dim": 6, "gate_low_rank_dim": 14},
}
UNGATED = {**SEVEN, "wkv_has_gate": False}
HEAD_EPS = 64e-5


def tensors(config: dict[str, Any], *, seed: int = 11) -> dict[str, torch.Tensor]:
    """Random tensors: Qwen's names, and below self_attn those of the time mixing."""
    if config["wkv_version"] == 6:
        like = {**rwkv6.CONFIG, **config, "attention_hidden_size": config["hidden_size"]}
        found, place = rwkv6.tensors(like, seed=seed), "attention"
        layers = "rwkv.blocks"
    else:
        found = rwkv7.tensors({**rwkv7.CONFIG, **config}, seed=seed)
        place, layers = "attn", "model.layers"
    generator = torch.Generator().manual_seed(seed + 1)
    width, inner = config["hidden_size"], config["intermediate_size"]
    made = {}
    for name, tensor in found.items():
        if name.startswith(f"{layers}.") and f".{place}." in name:
            made[
                name.replace(f"{layers}.", "model.layers.").replace(f".{place}.", ".self_attn.")
            ] = tensor

    def matrix(name: str, rows: int, columns: int) -> None:
        noise = torch.randn(rows, columns, generator=generator)
        made[f"{name}.weight"] = noise * 1.2 / columns**0.5

    def norm(name: str) -> None:
        made[f"{name}.weight"] = 1 + 0.2 * torch.randn(width, generator=generator)

    matrix("model.embed_tokens", config["vocab_size"], width)
    matrix("lm_head", config["vocab_size"], width)
    norm("model.norm")
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        norm(f"{at}.input_layernorm")
        norm(f"{at}.post_attention_layernorm")
        for name, rows, columns in (
            ("gate_proj", inner, width), ("up_proj", inner, width), ("down_proj", width, inner),
        ):  # fmt: skip
            matrix(f"{at}.mlp.{name}", rows, columns)
        if config["wkv_version"] == 6:
            for name in ("time_faaaa", "ln_x.weight", "ln_x.bias"):
                del made[f"{at}.self_attn.{name}"]
            keys = config["num_key_value_heads"] * config["head_size"]
            for name, rows in (("receptance", width), ("key", keys), ("value", keys)):
                matrix(f"{at}.self_attn.{name}", rows, width)
                made[f"{at}.self_attn.{name}.bias"] = torch.randn(rows, generator=generator)
        elif not config["wkv_has_gate"]:
            made = {
                name: one
                for name, one in made.items()
                if ".g_lora." not in name and not name.endswith(".x_g")
            }
    return made


def logits(
    config: dict[str, Any], weights: dict[str, torch.Tensor], row: list[int]
) -> torch.Tensor:
    """[T, V] of one row."""
    x_TE = weights["model.embed_tokens.weight"][torch.tensor(row)]
    first_TE: torch.Tensor | None = None
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        own = {name.removeprefix(at): one for name, one in weights.items() if name.startswith(at)}
        h_TE = _norm(config, x_TE, own["input_layernorm.weight"])
        if config["wkv_version"] == 6:
            x_TE = x_TE + _six(config, own, h_TE)
        else:
            mixed, first_TE = rwkv7.time_mix(
                config, own, h_TE, first_TE, place="self_attn", gated=config["wkv_has_gate"],
                eps=HEAD_EPS,
            )  # fmt: skip
            x_TE = x_TE + mixed
        h_TE = _norm(config, x_TE, own["post_attention_layernorm.weight"])
        inner = F.silu(h_TE @ own["mlp.gate_proj.weight"].T) * (h_TE @ own["mlp.up_proj.weight"].T)
        x_TE = x_TE + inner @ own["mlp.down_proj.weight"].T
    return _norm(config, x_TE, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def _norm(config: dict[str, Any], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weight


def _six(config: dict[str, Any], own: dict[str, torch.Tensor], x_TE: torch.Tensor) -> torch.Tensor:
    head_dim, moved = config["head_size"], rwkv6.shifted(own, x_TE, "self_attn")
    heads = config["hidden_size"] // head_dim

    def projected(name: str, letter: str) -> torch.Tensor:
        y = moved[letter] @ own[f"self_attn.{name}.weight"].T + own[f"self_attn.{name}.bias"]
        y = y.unflatten(1, (-1, head_dim))
        return y.repeat_interleave(heads // y.shape[1], 1)

    r, k, v = projected("receptance", "r"), projected("key", "k"), projected("value", "v")
    decay = rwkv6.decays(own, moved["w"], "self_attn").unflatten(1, (-1, head_dim))
    state_HKV = torch.zeros(heads, head_dim, head_dim)
    out_THV = torch.empty_like(v)
    for t in range(len(x_TE)):
        lost = (1 - decay[t]) * k[t]
        state_HKV = decay[t][:, :, None] * state_HKV + lost[:, :, None] * v[t][:, None]
        out_THV[t] = (r[t][:, None] @ state_HKV)[:, 0] / head_dim**0.5
    gate = (moved["g"] @ own["self_attn.gate.weight"].T).sigmoid()
    return (out_THV.flatten(1) * gate) @ own["self_attn.output.weight"].T

"""PLaMo 2, written from its published configuration (pfnet/plamo-2-1b: model_type plamo2, hidden_size_per_head,
mamba_d_state, mamba_d_conv, mamba_num_heads, mamba_step, attention_window_size, full_attention_idx) and its tensor
names, without the model file of the package: Mamba 2's recurrence with Mamba 1's selection.

One row at a time, token by token; T tokens, E hidden size, H heads of P.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CONFIG: dict[str, Any] = {
    **{"architectures": ["Plamo2ForCausalLM"], "model_type": "plamo2", "vocab_size": 97},
    **{"hidden_size": 48, "num_hidden_layers": 5, "intermediate_size": 80, "rms_norm_eps": 1e-5},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size_per_head": 12},
    **{"mamba_d_state": 10, "mamba_d_conv": 4, "mamba_num_heads": 4, "mamba_step": 2},
    **{"mamba_enabled": True, "attention_window_size": 11, "full_attention_idx": [3]},
    **{"max_position_embeddings": 256, "torch_dtype": "float32", "tie_word_embeddings": True},
    **{"eos_token_id": 2, "bos_token_id": 1},
}
"""Layers 1 and 3 attend, the first of them within a window."""
STEPS = 64
"""The least rank of time steps."""
OFFSETS = {
    "pre_mixer_norm": 1.0,
    "post_mixer_norm": 0.2,
    "pre_mlp_norm": 1.0,
    "post_mlp_norm": 5**-1.5,
}


def attends(config: dict[str, Any], layer: int) -> bool:
    return layer % config["mamba_step"] == config["mamba_step"] // 2


def tensors(config: dict[str, Any] = CONFIG, *, seed: int = 11) -> dict[str, torch.Tensor]:
    """A random checkpoint under its published names."""
    generator = torch.Generator().manual_seed(seed)
    width, head_dim = config["hidden_size"], config["hidden_size_per_head"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    own, states = config["mamba_num_heads"], config["mamba_d_state"]
    inner = own * head_dim
    made: dict[str, torch.Tensor] = {}

    def noise(*shape: int, size: float = 0.2) -> torch.Tensor:
        return size * torch.randn(shape, generator=generator)

    def matrix(name: str, rows: int, columns: int) -> None:
        made[f"{name}.weight"] = noise(rows, columns, size=1.2 / columns**0.5)

    matrix("model.embed_tokens", config["vocab_size"], width)
    made["model.norm.weight"] = noise(width)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.layers.{layer}"
        for name in OFFSETS:
            made[f"{at}.{name}.weight"] = noise(width)
        matrix(f"{at}.mlp.gate_up_proj", 2 * config["intermediate_size"], width)
        matrix(f"{at}.mlp.down_proj", width, config["intermediate_size"])
        at = f"{at}.mixer"
        if attends(config, layer):
            matrix(f"{at}.qkv_proj", (heads + 2 * kv_heads) * head_dim, width)
            matrix(f"{at}.o_proj", width, heads * head_dim)
            made[f"{at}.q_weight"] = 1 + noise(heads, head_dim)
            made[f"{at}.k_weight"] = 1 + noise(kv_heads, head_dim)
            continue
        matrix(f"{at}.in_proj", 2 * inner, width)
        made[f"{at}.conv1d.weight"] = noise(inner, 1, config["mamba_d_conv"], size=0.5)
        matrix(f"{at}.bcdt_proj", STEPS + 2 * states, inner)
        matrix(f"{at}.dt_proj", own, STEPS)
        matrix(f"{at}.out_proj", width, inner)
        made[f"{at}.dt_bias"] = noise(own, size=1.0)
        made[f"{at}.A_log"] = torch.log(torch.arange(1.0, own + 1))
        made[f"{at}.D"] = 1 + noise(own)
        for name, size in (("dt", STEPS), ("B", states), ("C", states)):
            made[f"{at}.{name}_norm_weight"] = 1 + noise(size)
    return made


def logits(
    config: dict[str, Any], weights: dict[str, torch.Tensor], row: list[int]
) -> torch.Tensor:
    """[T, V] of one row."""
    eps, table = config["rms_norm_eps"], weights["model.embed_tokens.weight"]
    x_TE = table[torch.tensor(row)]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.layers.{layer}."
        own = {name.removeprefix(at): one for name, one in weights.items() if name.startswith(at)}
        norms = {name: own[f"{name}.weight"] + more for name, more in OFFSETS.items()}
        h_TE = _norm(x_TE, norms["pre_mixer_norm"], eps)
        h_TE = (
            _attention(config, own, h_TE, layer)
            if attends(config, layer)
            else _mamba(config, own, h_TE)
        )
        x_TE = x_TE + _norm(h_TE, norms["post_mixer_norm"], eps)
        gate, up = (
            _norm(x_TE, norms["pre_mlp_norm"], eps) @ own["mlp.gate_up_proj.weight"].T
        ).chunk(2, 1)
        h_TE = (F.silu(gate) * up) @ own["mlp.down_proj.weight"].T
        x_TE = x_TE + _norm(h_TE, norms["post_mlp_norm"], eps)
    return _norm(x_TE, weights["model.norm.weight"] + 1, eps) @ table.T


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _attention(
    config: dict[str, Any], own: dict[str, torch.Tensor], x_TE: torch.Tensor, layer: int
) -> torch.Tensor:
    head_dim, heads = config["hidden_size_per_head"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    qkv = (x_TE @ own["mixer.qkv_proj.weight"].T).unflatten(1, (-1, head_dim))
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    q = _rotated(_norm(q, own["mixer.q_weight"], 1e-6))
    k = _rotated(_norm(k, own["mixer.k_weight"], 1e-6))
    k, v = (one.repeat_interleave(heads // kv_heads, 1) for one in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / head_dim**0.5
    place = torch.arange(len(x_TE))
    apart = place[:, None] - place
    hidden = apart < 0
    if layer not in config["full_attention_idx"]:
        hidden |= apart > config["attention_window_size"]
    share = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", share, v).flatten(1) @ own["mixer.o_proj.weight"].T


def _rotated(x_THD: torch.Tensor) -> torch.Tensor:
    half = x_THD.shape[-1] // 2
    angle = torch.arange(len(x_THD))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x_THD.split(half, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _mamba(
    config: dict[str, Any], own: dict[str, torch.Tensor], x_TE: torch.Tensor
) -> torch.Tensor:
    heads, head_dim = config["mamba_num_heads"], config["hidden_size_per_head"]
    states, eps, taps = config["mamba_d_state"], config["rms_norm_eps"], config["mamba_d_conv"]
    both = (x_TE @ own["mixer.in_proj.weight"].T).unflatten(1, (heads, 2 * head_dim))
    z, x = both[..., :head_dim].flatten(1), both[..., head_dim:].flatten(1)
    padded = F.pad(x.T[None], (taps - 1, 0))
    x = F.silu(F.conv1d(padded, own["mixer.conv1d.weight"], groups=x.shape[1]))[0].T
    b, c, dt = (x @ own["mixer.bcdt_proj.weight"].T).split((states, states, STEPS), 1)
    b, c, dt = (
        _norm(one, own[f"mixer.{name}_norm_weight"], eps)
        for one, name in ((b, "B"), (c, "C"), (dt, "dt"))
    )
    step_TH = F.softplus(dt @ own["mixer.dt_proj.weight"].T + own["mixer.dt_bias"])
    rate_H, x_THP = own["mixer.A_log"].exp(), x.unflatten(1, (heads, head_dim))
    state_HPN, y_THP = torch.zeros(heads, head_dim, states), torch.empty_like(x_THP)
    for t in range(len(x_TE)):
        added = (step_TH[t][:, None] * x_THP[t])[:, :, None] * b[t]
        state_HPN = torch.exp(-step_TH[t] * rate_H)[:, None, None] * state_HPN + added
        y_THP[t] = state_HPN @ c[t] + own["mixer.D"][:, None] * x_THP[t]
    return (y_THP.flatten(1) * F.silu(z)) @ own["mixer.out_proj.weight"].T

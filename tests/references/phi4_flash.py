"""Phi-4-mini-flash (SambaY) in plain PyTorch, written from the paper (Ren et al. 2025, "Decoder-hybrid-decoder
architecture"), the published configuration and the tensor names of its checkpoint.

One row at a time, whole; T tokens, E hidden size, H heads, D head_dim, I inner channels, N state size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from tests.references.plain import Tensors, attended, norm, of_layer, random_tensors, window

E, H, K, D, N, RANK, LAYERS = 48, 8, 4, 6, 4, 3, 8
CONFIG: dict[str, Any] = {
    **{"architectures": ["Phi4FlashForCausalLM"], "model_type": "phi4flash", "vocab_size": 97},
    **{"hidden_size": E, "intermediate_size": 80, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": H, "num_key_value_heads": K, "layer_norm_eps": 1e-5},
    **{"mb_per_layer": 2, "mamba_d_state": N, "mamba_d_conv": 4, "mamba_expand": 2},
    **{"mamba_dt_rank": "auto", "hidden_act": "silu", "max_position_embeddings": 128},
    **{"sliding_window": 12, "tie_word_embeddings": True},
}
MIDDLE = LAYERS // 2
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (97, E)}
    for layer in range(LAYERS):
        own = _attention(layer) if layer % 2 else _scan(layer)
        own |= {f"{one}.{part}": (E,) for one in _NORMS for part in ("weight", "bias")}
        own |= {"mlp.fc1.weight": (160, E), "mlp.fc2.weight": (E, 80)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes |= {f"model.final_layernorm.{part}": (E,) for part in ("weight", "bias")}
    return random_tensors(shapes)


_NORMS = ("input_layernorm", "post_attention_layernorm")


def _attention(layer: int) -> dict[str, tuple[int, ...]]:
    rows = H * D if layer > MIDDLE + 1 else (H + 2 * K) * D
    at: dict[str, tuple[int, ...]] = {"Wqkv.weight": (rows, E), "Wqkv.bias": (rows,)}
    at |= {"out_proj.weight": (E, H * D), "out_proj.bias": (E,)}
    at |= {f"inner_cross_attn.{name}": (D,) for name in LAMBDAS}
    at["inner_cross_attn.subln.weight"] = (2 * D,)
    return {f"attn.{name}": shape for name, shape in at.items()}


def _scan(layer: int) -> dict[str, tuple[int, ...]]:
    inner = 2 * E
    at: dict[str, tuple[int, ...]] = {"out_proj.weight": (E, inner)}
    if layer > MIDDLE:
        at["in_proj.weight"] = (inner, E)
    else:
        at |= {"in_proj.weight": (2 * inner, E), "conv1d.weight": (inner, 1, 4)}
        at |= {"conv1d.bias": (inner,), "x_proj.weight": (RANK + 2 * N, inner)}
        at |= {"dt_proj.weight": (inner, RANK), "dt_proj.bias": (inner,)}
        at |= {"A_log": (inner, N), "D": (inner,)}
    return {f"attn.{name}": shape for name, shape in at.items()}


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    table = weights["model.embed_tokens.weight"]
    x_TE = table[row]
    memory = shared = None
    for layer in range(LAYERS):
        own = of_layer(weights, f"model.layers.{layer}.")
        at, h_TE = of_layer(own, "attn."), _layer_norm(own, "input_layernorm", x_TE)
        if layer % 2 == 0 and layer > MIDDLE:
            y_TI = memory * F.silu(h_TE @ at["in_proj.weight"].T)
            y_TE = y_TI @ at["out_proj.weight"].T
        elif layer % 2 == 0:
            memory, gate_TI = _scanned(at, h_TE)
            y_TE = (memory * F.silu(gate_TI)) @ at["out_proj.weight"].T
        else:
            qkv = h_TE @ at["Wqkv.weight"].T + at["Wqkv.bias"]
            q = qkv[:, : H * D].unflatten(1, (H, D))
            if layer <= MIDDLE + 1:
                shared = qkv[:, H * D :].unflatten(1, (2, K, D)).unbind(1)
            near = window(len(row), config["sliding_window"]) if layer < MIDDLE else None
            y_TX = _differential(at, layer, q, *shared, near)
            y_TE = y_TX @ at["out_proj.weight"].T + at["out_proj.bias"]
        x_TE = x_TE + y_TE
        h_TE = _layer_norm(own, "post_attention_layernorm", x_TE)
        gate, up = (h_TE @ own["mlp.fc1.weight"].T).chunk(2, -1)
        x_TE = x_TE + (up * F.silu(gate)) @ own["mlp.fc2.weight"].T
    return _layer_norm(of_layer(weights, "model."), "final_layernorm", x_TE) @ table.T


def _layer_norm(own: Tensors, name: str, x_TE: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x_TE, (E,), own[f"{name}.weight"], own[f"{name}.bias"], 1e-5)


def _scanned(at: Tensors, h_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the scan gives, a token at a time, and its gate."""
    x_TI, gate_TI = (h_TE @ at["in_proj.weight"].T).chunk(2, -1)
    channels = F.pad(x_TI.T, (3, 0))[None]
    x_TI = F.silu(F.conv1d(channels, at["conv1d.weight"], at["conv1d.bias"], groups=2 * E))[0].T
    step, b, c = (x_TI @ at["x_proj.weight"].T).split((RANK, N, N), -1)
    step_TI = F.softplus(step @ at["dt_proj.weight"].T + at["dt_proj.bias"])
    state, rows = torch.zeros_like(at["A_log"]), []
    for t in range(len(x_TI)):
        keep = torch.exp(-step_TI[t, :, None] * at["A_log"].exp())
        state = state * keep + (step_TI[t] * x_TI[t])[:, None] * b[t]
        rows.append(state @ c[t] + at["D"] * x_TI[t])
    return torch.stack(rows), gate_TI


def _differential(
    at: Tensors,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    near: torch.Tensor | None,
) -> torch.Tensor:
    """Of each two neighbouring heads the second one is taken off the first; both read both values."""
    inner = of_layer(at, "inner_cross_attn.")
    first = 0.8 - 0.6 * math.exp(-0.3 * layer)
    q1, k1, q2, k2 = (inner[name] for name in LAMBDAS)
    factor = (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + first
    given = []
    for one in range(2):
        halves = [
            attended(q[:, one::2], k[:, one::2], v[:, other::2], sees_HTT=near).unflatten(
                1, (-1, D)
            )
            for other in range(2)
        ]
        given.append(torch.cat(halves, -1))
    y = norm(given[0] - factor * given[1], inner["subln.weight"], 1e-5)
    return (y * (1 - first)).flatten(1)

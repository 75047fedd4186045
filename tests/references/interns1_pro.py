"""The text of Intern-S1-Pro, written from the config of its published checkpoint (94 layers, 512 experts in 8 groups,
`fope_sep_head`, `fope_init_factor`) and Hua et al. 2024 (arXiv:2412.17739): Qwen 3's attention whose rotations are
learned sums of frequencies for each KV head, and as many experts from each group.

One row at a time; T tokens, E hidden size, H heads, K KV heads, D head_dim, F frequencies, X experts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from tests.references.mixture_parts import SIZES, attention_shapes, experts, mlp_shapes, run
from tests.references.plain import Tensors, attended, norm, random_tensors

TURNING = 3
"""Of the 4 pairs of a head: the last turns less than once in 128 positions."""
TEXT: dict[str, Any] = {
    **{**SIZES, "model_type": "interns1_pro_text", "attention_bias": False},
    **{"num_experts": 12, "num_experts_per_tok": 6, "moe_intermediate_size": 24},
    **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"router_n_groups": 3, "vocab_size": 120, "max_position_embeddings": 512},
    "rope_scaling": {
        **{"rope_type": "default", "fope_init_factor": 0.5, "fope_sep_head": True},
        "num_inv_freq": None,
    },
    "rope_theta": 5000.0,
}


def tensors(text: dict[str, Any]) -> Tensors:
    """A random checkpoint; without what stands before the names of its text."""
    shapes: dict[str, tuple[int, ...]] = {
        **{"model.embed_tokens.weight": (120, 48), "model.norm.weight": (48,)},
        "lm_head.weight": (120, 48),
    }
    for i in range(text["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {
            **{"input_layernorm.weight": (48,), "post_attention_layernorm.weight": (48,)},
            **attention_shapes(),
            **{f"self_attn.{one}_norm.weight": (8,) for one in "qk"},
            "mlp.gate.weight": (text["num_experts"], 48),
        }
        for expert in range(text["num_experts"]):
            own |= mlp_shapes(f"mlp.experts.{expert}", text["moe_intermediate_size"])
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    apart = text["rope_scaling"]["fope_sep_head"]
    count = (2, TURNING, TURNING) if apart else (TURNING, TURNING)
    noise = random_tensors({f"model.rotary_emb.{one}_coef": count for one in ("cos", "sin")})
    turns = {name: 0.3 * tensor + torch.eye(TURNING) for name, tensor in noise.items()}
    return random_tensors(shapes) | turns


def logits(text: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    return decoded(text, weights, weights["model.embed_tokens.weight"][row])


def decoded(text: dict[str, Any], weights: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    """[T, V] of one row of embeddings."""
    eps = text["rms_norm_eps"]
    waves = _waves(text, weights, len(x_TE))

    def layer(index: int, own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
        h_TE = norm(x_TE, own["input_layernorm.weight"], eps)
        x_TE = x_TE + _attention(text, own, h_TE, *waves)
        h_TE = norm(x_TE, own["post_attention_layernorm.weight"], eps)
        return x_TE + experts(own, _chosen(text, own, h_TE), h_TE, "mlp.experts.{}")

    rows = list(range(len(x_TE)))
    return run(text, {**weights, "model.embed_tokens.weight": x_TE}, rows, layer)


def _waves(text: dict[str, Any], weights: Tensors, tokens: int) -> tuple[torch.Tensor, ...]:
    """Cosines and sines [T, K, D/2] of each KV head."""
    half, longest = 4, text["max_position_embeddings"]
    speeds = [text["rope_theta"] ** (-i / half) for i in range(half)]
    assert sum(speed > 2 * math.pi / longest for speed in speeds) == TURNING
    angles = torch.arange(tokens)[:, None] * torch.tensor(speeds[:TURNING])
    found = []
    for name, wave in (("cos", angles.cos()), ("sin", angles.sin())):
        matrix = weights[f"model.rotary_emb.{name}_coef"]
        matrix = matrix.expand(2, TURNING, TURNING) if matrix.dim() == 2 else matrix
        summed = torch.stack([wave.to(head.dtype) @ head for head in matrix], 1)
        found.append(F.pad(summed, (0, half - TURNING), value=1.0))
    return tuple(found)


def _attention(
    text: dict[str, Any], own: Tensors, h_TE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    q, k, v = (
        (h_TE @ own[f"self_attn.{one}_proj.weight"].T).unflatten(1, (-1, 8)) for one in "qkv"
    )
    eps = text["rms_norm_eps"]
    q, k = (norm(x, own[f"self_attn.{n}_norm.weight"], eps) for x, n in ((q, "q"), (k, "k")))
    q, k = _turned(q, cos, sin), _turned(k, cos, sin)
    return attended(q, k, v) @ own["self_attn.o_proj.weight"].T


def _turned(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    group = x_THD.shape[1] // cos.shape[1]
    cos, sin = (part.repeat_interleave(group, 1) for part in (cos, sin))
    first, second = x_THD.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _chosen(text: dict[str, Any], own: Tensors, h_TE: torch.Tensor) -> torch.Tensor:
    """The weights of the best of each group, 0 for the others."""
    groups = text["router_n_groups"]
    score_TgX = (h_TE @ own["mlp.gate.weight"].T).softmax(-1).unflatten(1, (groups, -1))
    best = score_TgX.topk(text["num_experts_per_tok"] // groups, -1).indices
    kept = torch.zeros_like(score_TgX).scatter(2, best, score_TgX.gather(2, best)).flatten(1)
    return kept / kept.sum(-1, keepdim=True)

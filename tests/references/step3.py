"""Step-3 (text), written from its report (StepFun 2025, arXiv:2507.19427: multi-matrix factorization attention) and its
published configuration and tensor names (stepfun-ai/step3, text_config: share_q_dim, moe_layers_enum, share_expert_dim,
norm_expert_weight)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.references.mixture_parts import SIZES, checkpoint, chosen, mlp_shapes, run
from tests.references.plain import Tensors, attended, mlp, norm, rotated, weighed

CONFIG: dict[str, Any] = {
    **{**SIZES, "architectures": ["Step3TextForCausalLM"], "model_type": "step3_text"},
    **{"num_attention_groups": 1, "share_q_dim": 20, "share_expert_dim": 28, "moe_top_k": 2},
    **{"moe_num_experts": 5, "moe_intermediate_size": 24, "norm_expert_weight": False},
    "moe_layers_enum": "1,2",
}
del CONFIG["num_key_value_heads"]


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    rank, count = config["share_q_dim"], config["moe_num_experts"]
    inner = config["moe_intermediate_size"]
    rows = {"q_proj": (rank, 48), "k_proj": (8, 48), "v_proj": (8, 48), "o_proj": (48, 48)}
    rows |= {"wq": (48, rank), "inter_norm": (rank,)}

    def layer(index: int) -> dict[str, tuple[int, ...]]:
        shapes = {f"self_attn.{name}.weight": shape for name, shape in rows.items()}
        if index == 0:
            return shapes | mlp_shapes("mlp", config["intermediate_size"])
        shapes |= {"moe.gate.weight": (count, 48), "moe.down_proj.weight": (count, 48, inner)}
        shapes |= {f"moe.{name}_proj.weight": (count, inner, 48) for name in ("gate", "up")}
        return shapes | mlp_shapes("share_expert", config["share_expert_dim"])

    return checkpoint(layer)


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """[T, V] of one row."""
    eps = config["rms_norm_eps"]

    def attention(own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
        q_TR, k_TD, v_TD = (x_TE @ own[f"self_attn.{one}_proj.weight"].T for one in "qkv")
        q_TX = norm(q_TR, own["self_attn.inter_norm.weight"], eps) @ own["self_attn.wq.weight"].T
        q_THD = rotated(q_TX.unflatten(1, (-1, 8)), config["rope_theta"])
        k_T1D = rotated(k_TD[:, None], config["rope_theta"])
        return attended(q_THD, k_T1D, v_TD[:, None]) @ own["self_attn.o_proj.weight"].T

    def layer(index: int, own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
        x_TE = x_TE + attention(own, norm(x_TE, own["input_layernorm.weight"], eps))
        h_TE = norm(x_TE, own["post_attention_layernorm.weight"], eps)
        if index == 0:
            return x_TE + mlp(own, "mlp", h_TE)
        score_TX = (h_TE @ own["moe.gate.weight"].T).softmax(-1)
        weight_TX = chosen(score_TX, config["moe_top_k"], renormalize=config["norm_expert_weight"])

        def expert(i: int) -> torch.Tensor:
            gate, up, down = (own[f"moe.{one}_proj.weight"][i] for one in ("gate", "up", "down"))
            return (F.silu(h_TE @ gate.T) * (h_TE @ up.T)) @ down.T

        return x_TE + weighed(weight_TX, expert) + mlp(own, "share_expert", h_TE)

    return run(config, weights, row, layer)

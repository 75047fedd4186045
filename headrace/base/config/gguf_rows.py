"""More rows of the table of GGUF architectures: dense ones, and mixtures in the way of DeepSeek-V3.

What the metadata leave unsaid is what the architecture fixes in llama.cpp, src/llama-model.cpp;
how the tensors lie is in back/models/load/gguf_dialects.py.
"""

from __future__ import annotations

from typing import Final

from headrace.base.config import gguf_mixtures as mixtures
from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_row import Config, GGUFArchitecture

_SILU: Final = {"hidden_act": "silu"}
_GELU: Final = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_ROUTED: Final = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_DRAFTS: Final = {"num_nextn_predict_layers": "nextn_predict_layers"}
_LATENT: Final = {
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}
_SOFTMAX, _SIGMOID = 1, 2
"""Values of expert_gating_func."""


def _qk_norm(file: GGUFFile, name: str, config: Config) -> None:
    """Command R+ norms queries and keys."""
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors


def _cohere2(file: GGUFFile, name: str, config: Config) -> None:
    """Every fourth layer sees all, without rotation."""
    config["layer_types"] = [
        "full_attention" if layer % 4 == 3 else "sliding_attention"
        for layer in range(config["num_hidden_layers"])
    ]


def _exaone4(file: GGUFFile, name: str, config: Config) -> None:
    """Where there is a window, every fourth layer sees all, without rotation."""
    layers = config["num_hidden_layers"]
    windowed = config.setdefault("sliding_window", None) is not None
    config["layer_types"] = [
        "sliding_attention" if windowed and layer % 4 != 3 else "full_attention"
        for layer in range(layers)
    ]


def _stablelm(file: GGUFFile, name: str, config: Config) -> None:
    config["use_qkv_bias"] = config["attention_bias"]
    config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in file.tensors


def _seed_oss(file: GGUFFile, name: str, config: Config) -> None:
    config["attention_out_bias"] = "blk.0.attn_output.bias" in file.tensors


def _ernie_moe(file: GGUFFile, name: str, config: Config) -> None:
    """Dense layers first, then experts in every so manieth."""
    config["moe_layer_interval"] = file.whole(f"{name}.interleave_moe_layer_step") or 1


def _lfm2(file: GGUFFile, name: str, config: Config) -> None:
    """Layers without KV heads are convolutions."""
    config["layer_types"] = [
        "full_attention" if f"blk.{layer}.attn_q.weight" in file.tensors else "conv"
        for layer in range(config["num_hidden_layers"])
    ]


def _behind_drafts(file: GGUFFile, name: str, config: Config) -> None:
    """Layers at the end only draft tokens."""
    config["num_hidden_layers"] -= config.get("num_nextn_predict_layers", 0)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors


def _deepseek2(file: GGUFFile, name: str, config: Config) -> None:
    """DeepSeek V2, V3 and R1, Kimi-K2, GLM-4.7-Flash. Files name the lengths of a head's keys and
    values apart since the attention computes with latents."""
    lengths = [
        file.whole(f"{name}.attention.{one}_length_mla")
        or file.whole(f"{name}.attention.{one}_length")
        for one in ("key", "value")
    ]
    rotary = config["qk_rope_head_dim"]
    if None in lengths or lengths[0] <= rotary:
        raise file.wrong(f"{name}.attention.key_length_mla", f"a number above {rotary}")
    config["head_dim"] = rotary
    config["qk_nope_head_dim"], config["v_head_dim"] = lengths[0] - rotary, lengths[1]
    config["num_key_value_heads"] = config["num_attention_heads"]
    config.setdefault("q_lora_rank", None)
    config["rope_interleave"] = True
    config.pop("partial_rotary_factor", None)
    gating = file.whole(f"{name}.expert_gating_func") or _SOFTMAX
    if gating == _SOFTMAX:
        config["model_type"] = "deepseek_v2"
        config["architectures"] = ["DeepseekV2ForCausalLM"]
        grouped = config.get("n_group", 1) > 1
        config["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    elif gating != _SIGMOID:
        raise file.wrong(f"{name}.expert_gating_func", "1 (softmax) or 2 (sigmoid)")
    scaling = config.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] == "yarn":
        stated = file.number(f"{name}.rope.scaling.yarn_log_multiplier", 0.0) or 0.0
        config["rope_scaling"] = scaling | {"mscale": stated * 10, "mscale_all_dim": stated * 10}


_GRANITE: Final = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
_MAMBA2: Final = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_ssm": "ssm.inner_size",
}


def _granite_hybrid(file: GGUFFile, name: str, config: Config) -> None:
    """Layers with queries have attention, the others are Mamba 2; without experts the MLP is what
    others call the shared one."""
    config["layer_types"] = [
        "attention" if f"blk.{layer}.attn_q.weight" in file.tensors else "mamba"
        for layer in range(config["num_hidden_layers"])
    ]
    rotated = file.flag(f"{name}.rope.scaling.finetuned", False)
    config["position_embedding_type"] = "rope" if rotated else "nope"
    config.setdefault("num_local_experts", 0)
    if not config["num_local_experts"]:
        config["shared_intermediate_size"] = config["intermediate_size"]


ROWS: Final[dict[str, GGUFArchitecture]] = {
    "gemma": GGUFArchitecture(model_type="gemma", architecture="GemmaForCausalLM", fixed=_GELU),
    "glm4": GGUFArchitecture(model_type="glm4", architecture="Glm4ForCausalLM", fixed=_SILU),
    "seed_oss": GGUFArchitecture(
        model_type="seed_oss",
        architecture="SeedOssForCausalLM",
        fixed={**_SILU, "mlp_bias": False},
        adjust=_seed_oss,
    ),
    "exaone": GGUFArchitecture(
        model_type="llama", architecture="LlamaForCausalLM", fixed={**_SILU, "mlp_bias": False}
    ),
    "exaone4": GGUFArchitecture(
        model_type="exaone4",
        architecture="Exaone4ForCausalLM",
        fixed=_SILU,
        keys={"sliding_window": "attention.sliding_window"},
        adjust=_exaone4,
    ),
    "internlm2": GGUFArchitecture(
        model_type="llama", architecture="LlamaForCausalLM", fixed={**_SILU, "mlp_bias": False}
    ),
    "starcoder2": GGUFArchitecture(
        model_type="starcoder2",
        architecture="Starcoder2ForCausalLM",
        fixed={**_GELU, "use_bias": True, "sliding_window": None},
    ),
    "stablelm": GGUFArchitecture(
        model_type="stablelm",
        architecture="StableLmForCausalLM",
        fixed=_SILU,
        keys={"use_parallel_residual": "use_parallel_residual"},
        adjust=_stablelm,
    ),
    "command-r": GGUFArchitecture(
        model_type="cohere",
        architecture="CohereForCausalLM",
        fixed=_SILU,
        keys={"logit_scale": "logit_scale"},
        adjust=_qk_norm,
    ),
    "cohere2": GGUFArchitecture(
        model_type="cohere2",
        architecture="Cohere2ForCausalLM",
        fixed=_SILU,
        keys={"logit_scale": "logit_scale", "sliding_window": "attention.sliding_window"},
        adjust=_cohere2,
    ),
    "nemotron": GGUFArchitecture(
        model_type="nemotron", architecture="NemotronForCausalLM", fixed={"hidden_act": "relu2"}
    ),
    "arcee": GGUFArchitecture(
        model_type="arcee", architecture="ArceeForCausalLM", fixed={"hidden_act": "relu2"}
    ),
    "olmo": GGUFArchitecture(
        model_type="olmo",
        architecture="OlmoForCausalLM",
        fixed=_SILU,
        keys={"clip_qkv": "attention.clamp_kqv"},
    ),
    "phi2": GGUFArchitecture(
        model_type="phi", architecture="PhiForCausalLM", fixed={"hidden_act": "gelu_new"}
    ),
    "ernie4_5": GGUFArchitecture(
        model_type="ernie4_5", architecture="Ernie4_5ForCausalLM", fixed=_SILU
    ),
    "ernie4_5-moe": GGUFArchitecture(
        model_type="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        fixed=_SILU,
        keys={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
        },
        adjust=_ernie_moe,
    ),
    "hunyuan-dense": GGUFArchitecture(
        model_type="hunyuan_v1_dense", architecture="HunYuanDenseV1ForCausalLM", fixed=_SILU
    ),
    "hunyuan-moe": GGUFArchitecture(
        model_type="hunyuan_v1_moe",
        architecture="HunYuanMoEV1ForCausalLM",
        fixed=_SILU,
        keys={
            "num_experts": "expert_count",
            "moe_topk": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
    ),
    "lfm2": GGUFArchitecture(
        model_type="lfm2",
        architecture="Lfm2ForCausalLM",
        fixed={"block_auto_adjust_ff_dim": False},
        keys={"conv_L_cache": "shortconv.l_cache"},
        adjust=_lfm2,
    ),
    "lfm2moe": GGUFArchitecture(
        model_type="lfm2_moe",
        architecture="Lfm2MoeForCausalLM",
        fixed={"block_auto_adjust_ff_dim": False, "norm_topk_prob": True, "use_expert_bias": True},
        keys={
            **mixtures.CHOSEN,
            **mixtures.INNER,
            "conv_L_cache": "shortconv.l_cache",
            "num_dense_layers": "leading_dense_block_count",
        },
        adjust=_lfm2,
    ),
    "glm4moe": GGUFArchitecture(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        fixed={**_SILU, "n_group": 1, "topk_group": 1},
        keys=_ROUTED | _DRAFTS,
        adjust=_behind_drafts,
    ),
    "dots1": GGUFArchitecture(
        model_type="dots1",
        architecture="Dots1ForCausalLM",
        fixed={**_SILU, "n_group": 1, "topk_group": 1},
        keys=_ROUTED,
    ),
    "minimax-m2": GGUFArchitecture(
        model_type="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        fixed=_SILU,
        keys={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
            "rotary_dim": "rope.dimension_count",
        },
    ),
    "deepseek2": GGUFArchitecture(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        fixed=_SILU,
        keys=_ROUTED | _LATENT,
        adjust=_deepseek2,
        latent=True,
    ),
    "granitemoe": GGUFArchitecture(
        model_type="granitemoe",
        architecture="GraniteMoeForCausalLM",
        fixed=_SILU,
        keys=_GRANITE,
    ),
    "granitehybrid": GGUFArchitecture(
        model_type="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        fixed=_SILU,
        keys=_GRANITE | _MAMBA2,
        adjust=_granite_hybrid,
    ),
}

"""Rows of the table of GGUF architectures: mixtures of experts."""

from __future__ import annotations

from typing import Final

from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_row import LATENT, SILU, Config, GGUFArchitecture, count

CHOSEN: Final = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
INNER: Final = {"moe_intermediate_size": "expert_feed_forward_length"}
SHARED: Final = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
GPT_OSS: Final = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window",
}
ROUTED: Final = {
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
DRAFTS: Final = {"num_nextn_predict_layers": "nextn_predict_layers"}
_MAVERICK_EXPERTS: Final = 128
_SOFTMAX, SIGMOID = 1, 2
"""Values of expert_gating_func."""
GRANITE: Final = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}


def llama(file: GGUFFile, name: str, config: Config) -> None:
    """With experts a file of this architecture is a Mixtral; theirs lie in one tensor per layer."""
    experts = file.whole(f"{name}.expert_count") or 0
    if experts == 0:
        return
    config["model_type"], config["architectures"] = "mixtral", ["MixtralForCausalLM"]
    config["num_local_experts"] = experts
    config["num_experts_per_tok"] = file.whole(f"{name}.expert_used_count")
    config["sliding_window"] = None


def renormalized(file: GGUFFile, name: str, config: Config) -> None:
    """Whether the weights of the chosen add up to 1: newer files say so."""
    stated = file.metadata.get(f"{name}.expert_weights_norm")
    if isinstance(stated, bool):
        config["norm_topk_prob"] = stated


def gpt_oss(file: GGUFFile, name: str, config: Config) -> None:
    """YaRN as OpenAI's checkpoints have it; windows in every other layer, the first one's on."""
    layers = config["num_hidden_layers"]
    kinds = ("sliding_attention", "full_attention")
    config["layer_types"] = [kinds[layer % 2] for layer in range(layers)]
    scaling = config.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] == "yarn":
        config["rope_scaling"] = scaling | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


def _ernie_moe(file: GGUFFile, name: str, config: Config) -> None:
    """Dense layers first, then experts in every so manieth."""
    config["moe_layer_interval"] = file.whole(f"{name}.interleave_moe_layer_step") or 1


def _behind_drafts(file: GGUFFile, name: str, config: Config) -> None:
    """Layers at the end only draft tokens."""
    config["num_hidden_layers"] -= config.get("num_nextn_predict_layers", 0)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors


def deepseek2(file: GGUFFile, name: str, config: Config) -> None:
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
    elif gating != SIGMOID:
        raise file.wrong(f"{name}.expert_gating_func", "1 (softmax) or 2 (sigmoid)")
    scaling = config.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] == "yarn":
        stated = file.number(f"{name}.rope.scaling.yarn_log_multiplier", 0.0) or 0.0
        config["rope_scaling"] = scaling | {"mscale": stated * 10, "mscale_all_dim": stated * 10}


def _mistral4(file: GGUFFile, name: str, config: Config) -> None:
    """DeepSeek's lengths, with queries that grow with their position."""
    deepseek2(file, name, config)
    config["model_type"], config["architectures"] = "mistral4", ["Mistral4ForCausalLM"]
    beta = file.number(f"{name}.attention.temperature_scale")
    scaling = config.get("rope_scaling")
    if beta is not None and scaling is not None:
        config["rope_scaling"] = scaling | {"llama_4_scaling_beta": beta}


def _exaone(file: GGUFFile, name: str, config: Config) -> None:
    """Local layers by a list; layers at the end only draft tokens."""
    config["num_hidden_layers"] -= config.get("num_nextn_predict_layers", 0)
    layers = config["num_hidden_layers"]
    local = list(file.numbers(f"{name}.attention.sliding_window_pattern") or ())[:layers]
    if config.get("sliding_window") is not None and len(local) == layers:
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[bool(one)] for one in local]
    config.setdefault("sliding_window", None)


def _ling(file: GGUFFile, name: str, config: Config) -> None:
    config["num_hidden_layers"] -= config.get("num_nextn_predict_layers", 0)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    config["use_qkv_bias"] = "blk.0.attn_qkv.bias" in file.tensors
    sigmoid = file.whole(f"{name}.expert_gating_func", SIGMOID) == SIGMOID
    config["score_function"] = "sigmoid" if sigmoid else "softmax"


def _phimoe(file: GGUFFile, name: str, config: Config) -> None:
    """Rotations as Phi 3's."""
    config["lm_head_bias"] = "output.bias" in file.tensors
    config.setdefault("sliding_window", None)


def _llama4(file: GGUFFile, name: str, config: Config) -> None:
    """Three of four layers turn queries and keys and see chunks; the largest model norms neither.
    Where layers alternate, those with experts stand last in each group."""
    config["intermediate_size_mlp"] = config["intermediate_size"]
    config["intermediate_size"] = count(file, f"{name}.expert_feed_forward_length", 8192)
    layers = config["num_hidden_layers"]
    config["moe_layers"] = [
        layer for layer in range(layers) if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors
    ]
    turned = [(layer + 1) % 4 != 0 for layer in range(layers)]
    config["no_rope_layers"] = [int(one) for one in turned]
    if file.flag(f"{name}.expert_swa", True) is False:
        config["layer_types"] = ["full_attention"] * layers
    config["use_qk_norm"] = config["num_local_experts"] != _MAVERICK_EXPERTS


ROWS: Final[dict[str, GGUFArchitecture]] = {
    "qwen2moe": GGUFArchitecture(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        fixed={**SILU, "use_sliding_window": False, "norm_topk_prob": False},
        keys=CHOSEN | INNER | SHARED,
        adjust=renormalized,
    ),
    "qwen3moe": GGUFArchitecture(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        fixed={**SILU, "use_sliding_window": False, "norm_topk_prob": True},
        keys=CHOSEN | INNER,
        adjust=renormalized,
    ),
    "qwen3vlmoe": GGUFArchitecture(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        fixed={**SILU, "use_sliding_window": False, "norm_topk_prob": True},
        keys=CHOSEN | INNER,
        adjust=renormalized,
    ),
    "olmoe": GGUFArchitecture(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        fixed={**SILU, "norm_topk_prob": False},
        keys=CHOSEN | {"clip_qkv": "attention.clamp_kqv"},
        adjust=renormalized,
    ),
    "gpt-oss": GGUFArchitecture(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        fixed={**SILU, "separate_experts": True},
        keys=GPT_OSS,
        adjust=gpt_oss,
    ),
    "ernie4_5-moe": GGUFArchitecture(
        model_type="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        fixed=SILU,
        keys={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
        },
        adjust=_ernie_moe,
    ),
    "hunyuan-moe": GGUFArchitecture(
        model_type="hunyuan_v1_moe",
        architecture="HunYuanMoEV1ForCausalLM",
        fixed=SILU,
        keys={
            "num_experts": "expert_count",
            "moe_topk": "expert_used_count",
            "intermediate_size": "expert_feed_forward_length",
        },
    ),
    "glm4moe": GGUFArchitecture(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        fixed={**SILU, "n_group": 1, "topk_group": 1},
        keys=ROUTED | DRAFTS,
        adjust=_behind_drafts,
    ),
    "dots1": GGUFArchitecture(
        model_type="dots1",
        architecture="Dots1ForCausalLM",
        fixed={**SILU, "n_group": 1, "topk_group": 1},
        keys=ROUTED,
    ),
    "minimax-m2": GGUFArchitecture(
        model_type="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        fixed=SILU,
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
        fixed=SILU,
        keys=ROUTED | LATENT,
        adjust=deepseek2,
        latent=True,
    ),
    "mistral4": GGUFArchitecture(
        model_type="mistral4",
        architecture="Mistral4ForCausalLM",
        fixed=SILU,
        keys=ROUTED | LATENT,
        adjust=_mistral4,
        latent=True,
    ),
    "granitemoe": GGUFArchitecture(
        model_type="granitemoe",
        architecture="GraniteMoeForCausalLM",
        fixed={**SILU, "separate_experts": True},
        keys=GRANITE,
    ),
    "llama4": GGUFArchitecture(
        model_type="llama4_text",
        architecture="Llama4ForCausalLM",
        fixed={**SILU, "separate_experts": True},
        keys={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        adjust=_llama4,
    ),
    "afmoe": GGUFArchitecture(
        model_type="afmoe",
        architecture="AfmoeForCausalLM",
        fixed={**SILU, "mup_enabled": True, "global_attn_every_n_layers": 4},
        keys={
            **CHOSEN,
            **INNER,
            "num_shared_experts": "expert_shared_count",
            "num_dense_layers": "leading_dense_block_count",
            "route_scale": "expert_weights_scale",
            "sliding_window": "attention.sliding_window",
        },
    ),
    "exaone-moe": GGUFArchitecture(
        model_type="exaone_moe",
        architecture="ExaoneMoeForCausalLM",
        fixed=SILU,
        keys=ROUTED | DRAFTS | {"sliding_window": "attention.sliding_window"},
        adjust=_exaone,
    ),
    "bailingmoe2": GGUFArchitecture(
        model_type="bailing_moe_v2",
        architecture="BailingMoeV2ForCausalLM",
        fixed=SILU,
        keys=ROUTED | DRAFTS,
        adjust=_ling,
    ),
    "phimoe": GGUFArchitecture(
        model_type="phimoe",
        architecture="PhimoeForCausalLM",
        fixed=SILU,
        keys={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "sliding_window": "attention.sliding_window",
        },
        adjust=_phimoe,
    ),
}

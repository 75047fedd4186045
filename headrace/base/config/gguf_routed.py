"""Rows of the table of GGUF architectures: mixtures whose routers score by sigmoid or by the root
of softplus alone."""

from __future__ import annotations

from array import array
from typing import Final

from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_experts import INDEXER, WINDOW, by_kind, sparse
from headrace.base.config.gguf_mixtures import CHOSEN, DRAFTS, INNER, ROUTED, SIGMOID
from headrace.base.config.gguf_row import SILU, Config, GGUFArchitecture, count, each_of

_SQRT_SOFTPLUS: Final = 4
"""A value of expert_gating_func."""


def _sigmoid(file: GGUFFile, name: str) -> None:
    """CheckpointError for a router of another kind, or whose weights do not add up to 1."""
    if file.whole(f"{name}.expert_gating_func", SIGMOID) != SIGMOID:
        raise file.wrong(f"{name}.expert_gating_func", f"{SIGMOID} (sigmoid)")
    if file.flag(f"{name}.expert_weights_norm", True) is not True:
        raise file.wrong(f"{name}.expert_weights_norm", "true")


def _hy_v3(file: GGUFFile, name: str, config: Config) -> None:
    """Layers at the end only draft tokens; the shared experts are stated as one."""
    config["num_hidden_layers"] -= config.pop("num_nextn_predict_layers", 0)
    _sigmoid(file, name)
    sparse(file, config)
    inner, key = config["moe_intermediate_size"], f"{name}.expert_shared_feed_forward_length"
    shared = count(file, key, inner)
    if shared % inner:
        raise file.wrong(key, f"a multiple of {name}.expert_feed_forward_length ({inner})")
    config["num_shared_experts"] = shared // inner


def _step35(file: GGUFFile, name: str, config: Config) -> None:
    """Layers with windows have heads of their own number, and rotate whole heads; the others half
    of what is stated."""
    layers = config["num_hidden_layers"]
    heads = each_of(file, f"{name}.attention.head_count", layers)
    kv_heads = each_of(file, f"{name}.attention.head_count_kv", layers)
    if len(set(kv_heads)) > 1:
        raise file.wrong(f"{name}.attention.head_count_kv", "the same number for all layers")
    config["num_hidden_layers"] = layers - config.get("num_nextn_predict_layers", 0)
    _sigmoid(file, name)
    by_kind(file, name, config)
    sparse(file, config)
    for key, stated in (("swiglu_limits", "exp"), ("swiglu_limits_shared", "shexp")):
        limits = file.numbers(f"{name}.swiglu_clamp_{stated}")
        config[key] = None if limits is None else [float(one) for one in limits]
    of_kind = dict(zip(config["layer_types"], heads, strict=False))
    config["num_attention_heads"] = of_kind.get("full_attention", heads[0])
    config["num_sliding_attention_heads"] = of_kind.get("sliding_attention", heads[0])
    full = config["rope_parameters"]["full_attention"]
    full["partial_rotary_factor"] /= 2
    turned = int(config["head_dim"] * full["partial_rotary_factor"]) // 2
    for key in ("short_factor", "long_factor"):
        if key in full:
            full[key] = full[key][:turned]


def _deepseek4(file: GGUFFile, name: str, config: Config) -> None:
    """Layers at the end may only draft tokens; one bound of activations for all."""
    layers, drafts = config["num_hidden_layers"], config.pop("num_nextn_predict_layers", 0)
    if f"blk.{layers - drafts}.nextn.eh_proj.weight" in file.tensors:
        config["num_hidden_layers"] = layers - drafts
    if file.whole(f"{name}.expert_gating_func") != _SQRT_SOFTPLUS:
        raise file.wrong(f"{name}.expert_gating_func", f"{_SQRT_SOFTPLUS} (sqrt of softplus)")
    if file.flag(f"{name}.expert_weights_norm", True) is not True:
        raise file.wrong(f"{name}.expert_weights_norm", "true")
    config["compress_ratios"] = [
        int(one) for one in file.numbers(f"{name}.attention.compress_ratios") or ()
    ]
    limits = set()
    for part in ("exp", "shexp"):
        key = f"{name}.swiglu_clamp_{part}"
        stated = file.numbers(key) if isinstance(file.metadata.get(key), array) else None
        limits |= {file.number(key)} if stated is None else set(stated)
    limits -= {None}
    if len(limits) > 1:
        raise file.wrong(f"{name}.swiglu_clamp_exp", "one number for all layers and experts")
    config["swiglu_limit"] = limits.pop() if limits else 0.0
    scaling = config.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] == "yarn":
        for ours in ("beta_fast", "beta_slow"):
            value = file.number(f"{name}.rope.scaling.yarn_{ours}")
            scaling |= {} if value is None else {ours: value}


ROWS: Final[dict[str, GGUFArchitecture]] = {
    "hy_v3": GGUFArchitecture(
        model_type="hy_v3",
        architecture="HYV3ForCausalLM",
        fixed=SILU,
        keys=CHOSEN | INNER | DRAFTS | {"router_scaling_factor": "expert_weights_scale"},
        adjust=_hy_v3,
    ),
    "step35": GGUFArchitecture(
        model_type="step3p5",
        architecture="Step3p5ForCausalLM",
        fixed=SILU,
        keys={
            **{"n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
            **{**INNER, **WINDOW, **DRAFTS, "moe_router_scaling_factor": "expert_weights_scale"},
            "share_expert_dim": "expert_shared_feed_forward_length",
        },
        adjust=_step35,
        varied=True,
    ),
    "deepseek4": GGUFArchitecture(
        model_type="deepseek_v4",
        architecture="DeepseekV4ForCausalLM",
        fixed=SILU,
        keys={
            **{**ROUTED, **DRAFTS, **WINDOW, **INDEXER, "q_lora_rank": "attention.q_lora_rank"},
            "o_groups": "attention.output_group_count",
            "o_lora_rank": "attention.output_lora_rank",
            "compress_rope_theta": "attention.compress_rope_freq_base",
            "hc_mult": "hyper_connection.count",
            "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
            "hc_eps": "hyper_connection.epsilon",
            "num_hash_layers": "hash_layer_count",
        },
        adjust=_deepseek4,
    ),
}

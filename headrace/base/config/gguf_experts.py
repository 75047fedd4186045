"""Rows of the table of GGUF architectures: mixtures whose layers differ in windows or caches, and
those of few."""

from __future__ import annotations

from array import array
from typing import Final

from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_mixtures import (
    CHOSEN,
    DRAFTS,
    INNER,
    ROUTED,
    SHARED,
    SIGMOID,
    deepseek2,
)
from headrace.base.config.gguf_row import (
    LATENT,
    SILU,
    Config,
    GGUFArchitecture,
    count,
    each_of,
    need_int,
)

WINDOW: Final = {"sliding_window": "attention.sliding_window"}
_KINDS: Final = ("full_attention", "sliding_attention")
INDEXER: Final = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}
SMALLTHINKER_PERIOD: Final = 4
"""In each so many layers all but the first slide and rotate, where any do."""
LAGUNA_PERIOD: Final = 4


def by_kind(file: GGUFFile, name: str, config: Config, *, period: int | None = None) -> None:
    """Which layers have windows, by a list or a period, whose first layer has none; and the
    rotations of both kinds: those with windows have a base of their own, and no scaling."""
    layers, key = config["num_hidden_layers"], f"{name}.attention.sliding_window_pattern"
    slides = [False] * layers
    if config.get("sliding_window"):
        if isinstance(file.metadata.get(key), array):
            slides = [bool(one) for one in file.numbers(key) or ()][:layers]
        else:
            every = count(file, key, period or 1)
            slides = [layer % every != 0 for layer in range(layers)]
        if len(slides) != layers:
            raise file.wrong(key, f"a list of {layers} numbers")
    config["layer_types"] = [_KINDS[one] for one in slides]
    head_dim = config["head_dim"]
    turned = count(file, f"{name}.rope.dimension_count_swa", head_dim)
    base = config.pop("rope_theta")
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    config["rope_parameters"] = {
        "full_attention": {
            **scaling,
            "rope_theta": base,
            "partial_rotary_factor": config.pop("partial_rotary_factor", 1.0),
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": file.number(f"{name}.rope.freq_base_swa", base),
            "partial_rotary_factor": turned / head_dim,
        },
    }


def sparse(file: GGUFFile, config: Config) -> None:
    """Which layers have experts, by their routers."""
    config["mlp_layer_types"] = [
        "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors else "dense"
        for layer in range(config["num_hidden_layers"])
    ]


def _mellum(file: GGUFFile, name: str, config: Config) -> None:
    by_kind(file, name, config)
    sparse(file, config)
    _renormalizes(file, name, config)


def _renormalizes(file: GGUFFile, name: str, config: Config) -> None:
    config["norm_topk_prob"] = file.flag(f"{name}.expert_weights_norm", True)


def _laguna(file: GGUFFile, name: str, config: Config) -> None:
    """Each layer's own number of query heads; the gate's rows say what it is of."""
    by_kind(file, name, config, period=LAGUNA_PERIOD)
    sparse(file, config)
    layers = config["num_hidden_layers"]
    heads = each_of(file, f"{name}.attention.head_count", layers)
    config["num_attention_heads_per_layer"] = list(heads)
    gate = file.tensors.get("blk.0.attn_gate.weight")
    rows = 0 if gate is None else gate.shape[0]
    config["gating"] = "per-head" if rows == heads[0] else "per-element"


def _cohere2moe(file: GGUFFile, name: str, config: Config) -> None:
    """Dense layers first; those without a window do not rotate, but for these where none of them
    has one. Shared experts are averaged with the others."""
    config["num_hidden_layers"] -= config.get("num_nextn_predict_layers", 0)
    theta = config["rope_theta"]
    by_kind(file, name, config)
    sparse(file, config)
    del config["rope_parameters"]
    config["rope_theta"] = theta
    dense = config["mlp_layer_types"].count("dense")
    first = config["layer_types"][:dense]
    config["prefix_dense_sliding_window_pattern"] = 1 if set(first) <= {"full_attention"} else 2
    config["prefix_dense_intermediate_size"] = config["intermediate_size"]
    config["intermediate_size"] = need_int(file, f"{name}.expert_feed_forward_length")
    sigmoid = file.whole(f"{name}.expert_gating_func") == SIGMOID
    config["expert_selection_fn"] = "sigmoid" if sigmoid else "softmax"
    config["norm_topk_prob"] = file.flag(f"{name}.expert_weights_norm", False)
    config["attention_bias"] = False
    if f"{name}.attention.layer_norm_epsilon" in file.metadata:
        config["layer_norm_eps"] = config.pop("rms_norm_eps")


def _mimo2(file: GGUFFile, name: str, config: Config) -> None:
    """Layers at the end only draft tokens; windows are stated without a token's own position."""
    layers = config["num_hidden_layers"]
    kv_heads = each_of(file, f"{name}.attention.head_count_kv", layers)
    config["num_hidden_layers"] = layers - config.pop("num_nextn_predict_layers", 0)
    turned = count(file, f"{name}.rope.dimension_count", config["head_dim"])
    by_kind(file, name, config)
    sparse(file, config)
    ropes = config["rope_parameters"]
    ropes["sliding_attention"]["partial_rotary_factor"] = turned / config["head_dim"]
    config["sliding_window"] += 1
    of_kind = dict(zip(config["layer_types"], kv_heads, strict=False))
    config["num_key_value_heads"] = of_kind.get("full_attention", kv_heads[0])
    config["swa_num_key_value_heads"] = of_kind.get("sliding_attention", kv_heads[0])
    config["norm_topk_prob"] = file.flag(f"{name}.expert_weights_norm", True)


def _indexed(file: GGUFFile, name: str, config: Config) -> None:
    """DeepSeek's layers with an indexer in each, or in those that are listed."""
    config["num_hidden_layers"] -= config.get("num_nextn_predict_layers", 0)
    model_type, architecture = config["model_type"], config["architectures"]
    deepseek2(file, name, config)
    if config["architectures"] == ["DeepseekV2ForCausalLM"]:
        raise file.wrong(f"{name}.expert_gating_func", f"{SIGMOID} (sigmoid)")
    config["model_type"], config["architectures"] = model_type, architecture
    own = [
        f"blk.{layer}.indexer.proj.weight" in file.tensors
        for layer in range(config["num_hidden_layers"])
    ]
    config["indexer_types"] = ["full" if one else "shared" for one in own]


def _kimi_linear(file: GGUFFile, name: str, config: Config) -> None:
    """Layers without KV heads keep a state."""
    heads = config["num_attention_heads"]
    kv_heads = each_of(file, f"{name}.attention.head_count_kv", config["num_hidden_layers"])
    deepseek2(file, name, config)
    config["model_type"], config["architectures"] = "kimi_linear", ["KimiLinearForCausalLM"]
    config["layer_types"] = ["full_attention" if one else "linear_attention" for one in kv_heads]
    config["linear_num_heads"] = heads
    config["linear_head_dim"] = need_int(file, f"{name}.kda.head_dim")
    config["norm_topk_prob"] = file.flag(f"{name}.expert_weights_norm", True)
    for key in ("n_group", "topk_group"):
        config.setdefault(key, 1)


def _smallthinker(file: GGUFFile, name: str, config: Config) -> None:
    layers = config["num_hidden_layers"]
    slides = [1] * layers
    if config.get("sliding_window_size"):
        slides = [int(layer % SMALLTHINKER_PERIOD != 0) for layer in range(layers)]
        config["sliding_window_layout"] = slides
        config["sliding_window"] = config["sliding_window_size"]
        config["layer_types"] = [_KINDS[one] for one in slides]
    config["rope_layout"] = slides
    softmax = file.whole(f"{name}.expert_gating_func") != SIGMOID
    config["moe_primary_router_apply_softmax"] = softmax


def _dbrx(file: GGUFFile, name: str, config: Config) -> None:
    config["attn_config"] = {
        "clip_qkv": file.number(f"{name}.attention.clamp_kqv"),
        "kv_n_heads": config["num_key_value_heads"],
        "rope_theta": config["rope_theta"],
    }
    config["ffn_config"] = {
        "ffn_hidden_size": config["intermediate_size"],
        "moe_num_experts": need_int(file, f"{name}.expert_count"),
        "moe_top_k": need_int(file, f"{name}.expert_used_count"),
        "moe_normalize_expert_weights": 1.0,
    }


def _sparse_latent(model_type: str, architecture: str) -> GGUFArchitecture:
    """DeepSeek sparse attention: an indexer over latents."""
    return GGUFArchitecture(
        model_type=model_type,
        architecture=architecture,
        fixed=SILU,
        keys=ROUTED | LATENT | DRAFTS | INDEXER,
        adjust=_indexed,
        latent=True,
    )


ROWS: Final[dict[str, GGUFArchitecture]] = {
    "bailingmoe": GGUFArchitecture(
        model_type="deepseek", architecture="DeepseekForCausalLM", fixed=SILU, keys=ROUTED
    ),
    "dbrx": GGUFArchitecture(
        model_type="dbrx",
        architecture="DbrxForCausalLM",
        fixed={"separate_experts": True},
        adjust=_dbrx,
    ),
    "grovemoe": GGUFArchitecture(
        model_type="grove_moe",
        architecture="GroveMoeForCausalLM",
        fixed=SILU,
        keys={
            **CHOSEN,
            **INNER,
            "num_experts_per_group": "experts_per_group",
            "parallel_expert_intermediate_size": "expert_chunk_feed_forward_length",
            "expert_group_scale": "expert_group_scale",
        },
    ),
    "smallthinker": GGUFArchitecture(
        model_type="smallthinker",
        architecture="SmallThinkerForCausalLM",
        keys={
            "moe_num_primary_experts": "expert_count",
            "moe_num_active_primary_experts": "expert_used_count",
            "moe_ffn_hidden_size": "expert_feed_forward_length",
            "sliding_window_size": "attention.sliding_window",
        },
        adjust=_smallthinker,
    ),
    "mellum": GGUFArchitecture(
        model_type="mellum",
        architecture="MellumForCausalLM",
        fixed=SILU,
        keys=CHOSEN | INNER | WINDOW,
        adjust=_mellum,
    ),
    "laguna": GGUFArchitecture(
        model_type="laguna",
        architecture="LagunaForCausalLM",
        fixed=SILU,
        keys=CHOSEN
        | INNER
        | SHARED
        | WINDOW
        | {"moe_routed_scaling_factor": "expert_weights_scale"},
        adjust=_laguna,
        varied=True,
    ),
    "cohere2moe": GGUFArchitecture(
        model_type="cohere2_moe",
        architecture="Cohere2MoeForCausalLM",
        fixed=SILU,
        keys=CHOSEN
        | WINDOW
        | DRAFTS
        | {"num_shared_experts": "expert_shared_count", "logit_scale": "logit_scale"},
        adjust=_cohere2moe,
    ),
    "mimo2": GGUFArchitecture(
        model_type="mimo_v2_flash",
        architecture="MiMoV2FlashForCausalLM",
        fixed={**SILU, "n_group": 1, "topk_group": 1},
        keys={
            **{key: name for key, name in ROUTED.items() if key != "n_shared_experts"},
            **WINDOW,
            **DRAFTS,
            "v_head_dim": "attention.value_length",
            "attention_value_scale": "attention.value_scale",
        },
        adjust=_mimo2,
        varied=True,
        short_values=True,
    ),
    "glm-dsa": _sparse_latent("glm_moe_dsa", "GlmMoeDsaForCausalLM"),
    "deepseek32": _sparse_latent("deepseek_v32", "DeepseekV32ForCausalLM"),
    "kimi-linear": GGUFArchitecture(
        model_type="kimi_linear",
        architecture="KimiLinearForCausalLM",
        keys={**ROUTED, **LATENT, "linear_conv_kernel_dim": "ssm.conv_kernel"},
        adjust=_kimi_linear,
        latent=True,
        varied=True,
    ),
}

"""Keys of published config.json files (published_keys.py) of decoders with MLPs of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.back.models.key_names import Keys, called
from headrace.base.config.hf import ConfigReader
from headrace.base.config.layer_count import num_layers


def _inkling_2(config: ConfigReader) -> Keys:
    """Published experts are MXFP8, which config.json does not say."""
    if "quantization_config" in config or "transformers_version" in config:
        return {}
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}}


def _grok(config: ConfigReader) -> Keys:
    """Rotations are scaled by keys of their own: as they are, or as YaRN does it but for sizes."""
    if not config.bool("rope_rotate_half_dims", False):
        share: Keys = {}
    else:
        share = {"partial_rotary_factor": 0.5}
    known = ("original", "yarn", "yarn_linear")
    if config.raw.get("rope_type") is None or config.choice("rope_type", known) == "original":
        return share
    scaling = {
        "rope_type": "yarn",
        "factor": config.float("scaling_factor", ge=1.0),
        "attention_factor": 1.0,
        **called(config, {key: key for key in YARN}),
    }
    if config.float("extrapolation_factor", 1.0) != 1.0:
        raise config.wrong("extrapolation_factor", "1")
    return {**share, "rope_scaling": scaling}


YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow")


def _first_grok(config: ConfigReader) -> Keys:
    """Its router's logits have no bound, and its head is its embeddings."""
    cap = config.float("max_attn_value", 30.0, ge=0.0)
    tied = config.bool("tie_word_embeddings", True)
    keys = {"attn_logit_softcapping": cap, "router_logit_softcapping": 0.0}
    return {**keys, "tie_word_embeddings": tied}


def _mimo_v2(config: ConfigReader) -> Keys:
    """Layers by lists of 0 and 1: 1 of those with windows, and of those with experts; windows are
    stated without a token's own position."""
    layers = num_layers(config)
    pattern = config.list("hybrid_layer_pattern", None, of=int, length=layers)
    if pattern is None:
        return {}
    if config.bool("add_full_attention_sink_bias", False):
        raise config.wrong("add_full_attention_sink_bias", "false")
    sparse = config.list("moe_layer_freq", of=int, length=layers)
    share = config.float("partial_rotary_factor", 1.0, ge=0.0, le=1.0)
    thetas = {
        "full_attention": config.float("rope_theta", 5e6, ge=1.0),
        "sliding_attention": config.float("swa_rope_theta", 1e4, ge=1.0),
    }
    names = {key: key.removeprefix("swa_") for key in OF_WINDOWS}
    for key, whole in names.items():
        if config.int(key, config.int(whole, ge=1), ge=1) != config.int(whole, ge=1):
            raise config.wrong(key, f"as {whole}")
    return {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in pattern],
        "mlp_layer_types": ["sparse" if one else "dense" for one in sparse],
        "sliding_window": config.int("sliding_window_size", ge=1) + 1,
        "rope_parameters": {
            kind: {"rope_theta": theta, "partial_rotary_factor": share}
            for kind, theta in thetas.items()
        },
        **called(config, {"layernorm_epsilon": "rms_norm_eps"}),
        **_mimo_sections(config),
    }


def _mimo_sections(config: ConfigReader) -> Keys:
    """One tensor for queries, keys and values lies as so many ranks of tensor parallelism have it
    as there are KV heads in layers without windows, and is FP8 in blocks that begin anew for each.
    Of others it is not said how they lie."""
    layouts = ("split", "fused_qkv")
    if config.choice("attention_projection_layout", layouts, "split") == "split":
        return {}
    stored = config.section("quantization_config")
    blocks = stored is not None and stored.list("weight_block_size", (), of=int)
    if stored is None or stored.raw.get("quant_method") != "fp8" or not blocks:
        raise config.wrong(
            "attention_projection_layout", "split, where quantization_config has no FP8 in blocks"
        )
    sections = {"qkv_proj": config.int("num_key_value_heads", ge=1)}
    return {"quantization_config": {**stored.raw, "output_sections": sections}}


OF_WINDOWS = ("swa_num_attention_heads", "swa_head_dim", "swa_v_head_dim")
"""What MiMo states of layers with windows apart."""


def _param2(config: ConfigReader) -> Keys:
    """Ling 2's layers under other defaults."""
    shared = config.int("num_shared_experts", 1, ge=0)
    inner = config.int("moe_intermediate_size", ge=1)
    stated = config.int("moe_shared_expert_intermediate_size", shared * inner, ge=0)
    if stated % inner:
        raise config.wrong("moe_shared_expert_intermediate_size", f"a multiple of {inner}")
    return {
        "score_function": config.str("score_function", "sigmoid"),
        "first_k_dense_replace": config.int("first_k_dense_replace", 1, ge=0),
        "num_shared_experts": stated // inner,
    }


def _smallthinker(config: ConfigReader) -> Keys:
    """Layers with windows by their kinds."""
    slides = config.list("sliding_window_layout", (), of=int)
    kinds = ("full_attention", "sliding_attention")
    keys: Keys = {"tie_word_embeddings": config.bool("tie_word_embeddings", True)}
    if any(slides):
        keys["layer_types"] = [kinds[bool(one)] for one in slides]
        keys["sliding_window"] = config.int("sliding_window_size", 4096, ge=1)
    return keys


def _pangu_ultra(config: ConfigReader) -> Keys:
    """The first models' names of DeepSeek's keys."""
    return called(
        config,
        {
            "attention_q_lora_dim": "q_lora_rank",
            "attention_kv_lora_dim": "kv_lora_rank",
            "attention_qk_dim": "qk_nope_head_dim",
            "attention_qk_rope_dim": "qk_rope_head_dim",
            "attention_v_dim": "v_head_dim",
            "num_dense_layers": "first_k_dense_replace",
            "num_routed_experts": "n_routed_experts",
            "num_mtp_layers": "num_nextn_predict_layers",
        },
    )


def _pangu_pro(config: ConfigReader) -> Keys:
    """A head's size is that of its two parts, of which the first is rotated."""
    turned, others = config.int("qk_rope_dim", ge=2), config.int("qk_nope_dim", ge=0)
    share = {"partial_rotary_factor": turned / (turned + others)}
    return {"head_dim": turned + others, **share}


def _step3(config: ConfigReader) -> Keys:
    """One key and value for all heads, unless it says otherwise."""
    names = {"max_seq_len": "max_position_embeddings"}
    names["max_position_embedding"] = "max_position_embeddings"
    groups = config.int("num_attention_groups", 1, ge=1)
    return {"num_key_value_heads": groups, **called(config, names)}


def _step3_vl(config: ConfigReader) -> Keys:
    """The text part's keys need not say of which type they are."""
    text = config.required_section("text_config")
    return {"text_config": {"model_type": "step3_text", **text.raw, **_step3(text)}}


def _deepseek_v41(config: ConfigReader) -> Keys:
    """The text part's, whose tensors lie beside those of the tower."""
    text = config.section("text_config")
    keys: Keys = {} if text is None else {**text.raw, "model_type": "deepseek_v41"}
    return keys | _deepseek_v4(ConfigReader({**config.raw, **keys}, config.where))


def _deepseek_v4(config: ConfigReader) -> Keys:
    """Published experts are e2m1, which is said apart from how the other weights are stored."""
    stored = config.section("quantization_config")
    if stored is None or "expert_dtype" not in config:
        return {}
    kind = {"expert_dtype": config.raw["expert_dtype"]}
    return {"quantization_config": {**kind, **stored.raw}}


def _deepseek_vl2(config: ConfigReader) -> Keys:
    """Three sizes, three text parts: without latents, as DeepSeek V2 and routed as V3 is. Keys that
    have the defaults of V2's class are not there."""
    text = config.required_section("language_config")
    if not text.bool("use_mla", True):
        kind = "deepseek"
    elif text.str("topk_method", "greedy") == "noaux_tc":
        kind = "deepseek_v3"
    else:
        kind = "deepseek_v2"
    absent = {"norm_topk_prob": False, "routed_scaling_factor": 1.0}
    return {"text_config": {**absent, **text.raw, "model_type": kind}}


def _longcat_ngram(config: ConfigReader) -> Keys:
    """Where two numbers of layers are stated, one counts attentions."""
    return called(config, {"num_layers": "num_hidden_layers"})


def _llada_2(config: ConfigReader) -> Keys:
    """Ling 2's layers, whose routers and norms its config.json need not name."""
    defaults: Keys = {
        **{"use_qk_norm": True, "score_function": "sigmoid", "partial_rotary_factor": 0.5},
        **{"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    }
    return {key: value for key, value in defaults.items() if config.raw.get(key) is None}


EXPERT_KEYS: Mapping[str, Callable[[ConfigReader], Keys]] = {
    "Inkling2ForConditionalGeneration": _inkling_2,
    **dict.fromkeys(("Grok1ForCausalLM", "GrokForCausalLM"), _grok),
    "Grok1ModelForCausalLM": _first_grok,
    "Param2MoEForCausalLM": _param2,
    "SmallThinkerForCausalLM": _smallthinker,
    "PanguUltraMoEForCausalLM": _pangu_ultra,
    "PanguProMoEV2ForCausalLM": _pangu_pro,
    "Step3TextForCausalLM": _step3,
    "LongcatFlashNgramForCausalLM": _longcat_ngram,
    "LLaDA2MoeModelLM": _llada_2,
    "Step3VLForConditionalGeneration": _step3_vl,
    "DeepseekV4ForCausalLM": _deepseek_v4,
    "DeepseekV41ForCausalLM": _deepseek_v41,
    "DeepseekVLV2ForCausalLM": _deepseek_vl2,
    **dict.fromkeys(
        ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM"), _mimo_v2
    ),
}
"""By the name of the architecture."""

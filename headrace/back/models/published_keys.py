"""Keys of config.json files that were published with code of their own, under the names that others
use.

A row is a function of an architecture's config, which gives the keys to add. The config's own keys
stay, for the family to read what only it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from headrace.back.models.families import COLBERT
from headrace.back.models.recurrent_keys import RECURRENT_KEYS
from headrace.base.config.hf import ConfigReader
from headrace.base.config.layer_count import num_layers

Keys = dict[str, Any]
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
QK_POST_NORM = "qk-post-norm"
"""In the name of Jina's code for BERT that norms queries and keys."""


def in_common_keys(config: Mapping[str, Any], where: str = "config.json") -> Keys:
    """The config with the common keys besides, where its architecture has a row."""
    names = config.get("architectures")
    named = names[0] if isinstance(names, list) and names else None
    row = ROWS.get(named) if isinstance(named, str) else None
    return dict(config) if row is None else {**config, **row(ConfigReader(config, where))}


def _called(config: ConfigReader, names: Mapping[str, str]) -> Keys:
    """The values under the keys of `names`, under the keys that these stand for."""
    return {ours: config.raw[theirs] for theirs, ours in names.items() if theirs in config}


def _chatglm(config: ConfigReader) -> Keys:
    heads = config.int("num_attention_heads", ge=1)
    shared = config.bool("multi_query_attention", False)
    return {
        **_called(
            config,
            {
                "num_layers": "num_hidden_layers",
                "ffn_hidden_size": "intermediate_size",
                "layernorm_epsilon": "rms_norm_eps",
                "kv_channels": "head_dim",
                "padded_vocab_size": "vocab_size",
                "seq_length": "max_position_embeddings",
                "add_qkv_bias": "attention_bias",
            },
        ),
        "num_key_value_heads": config.int("multi_query_group_num", 1, ge=1) if shared else heads,
        "rope_theta": 10_000.0 * config.float("rope_ratio", 1.0, ge=1e-3),
    }


def _qwen(config: ConfigReader) -> Keys:
    """`intermediate_size` counts gates and ups. Beyond `seq_length` positions and scores change
    with the length of a text: such texts are not read."""
    inner = config.int("intermediate_size", ge=2)
    if inner % 2:
        raise config.wrong("intermediate_size", "even: it counts gates and ups")
    called = {
        "seq_length": "max_position_embeddings",
        "kv_channels": "head_dim",
        "rotary_emb_base": "rope_theta",
        "rotary_pct": "partial_rotary_factor",
    }
    return {**_called(config, called), "intermediate_size": inner // 2}


def _deci(config: ConfigReader) -> Keys:
    """A number of KV heads for each layer: as listed, or by the heads that share one in its
    block."""
    blocks = config.raw.get("block_configs")
    if not isinstance(blocks, list):
        listed = config.list("num_key_value_heads_per_layer", of=int)
    else:
        heads = config.int("num_attention_heads", ge=1)
        listed = tuple(
            _kv_heads(block, f"{config.where}: block_configs: {i}", heads)
            for i, block in enumerate(blocks)
        )
    most = max(listed, default=0)
    return {"num_key_value_heads_per_layer": list(listed), "num_key_value_heads": max(1, most)}


def _kv_heads(block: object, where: str, heads: int) -> int:
    """0: the block has no attention."""
    reader = ConfigReader(block if isinstance(block, Mapping) else {}, where)
    attention = reader.section("attention")
    if attention is None:
        raise reader.wrong("attention", "an object: how the block attends")
    plain = not attention.bool("no_op", False) and not attention.bool("replace_with_linear", False)
    if not plain:
        return 0
    shared = attention.int("n_heads_in_group", ge=1)
    if heads % shared:
        raise attention.wrong("n_heads_in_group", f"a divisor of num_attention_heads ({heads})")
    return heads // shared


def _openelm(config: ConfigReader) -> Keys:
    layers = config.int("num_transformer_layers", ge=1)
    kv_heads = config.list("num_kv_heads", of=int, length=layers)
    called = {
        "num_transformer_layers": "num_hidden_layers",
        "model_dim": "hidden_size",
        "max_context_length": "max_position_embeddings",
        "rope_freq_constant": "rope_theta",
        "share_input_output_layers": "tie_word_embeddings",
        "activation_fn_name": "hidden_act",
    }
    return {
        **_called(config, called),
        "num_attention_heads": max(config.list("num_query_heads", of=int, length=layers)),
        "num_key_value_heads": max(kv_heads),
        "num_key_value_heads_per_layer": list(kv_heads),
    }


def _reward(config: ConfigReader) -> Keys:
    """One label, whose number the configs do not state."""
    return {"num_labels": 1, "id2label": None}


def _bidirectional(config: ConfigReader) -> Keys:
    """NVIDIA's rerankers say by a word of their own what is pooled."""
    known = {"avg": "mean", "cls": "cls", "last": "last"}
    return {"classifier_pooling": known[config.choice("pooling", known, "avg")]}


def _nomic(config: ConfigReader) -> Keys:
    """The first checkpoints have GPT-2's keys. Where rotations are scaled, they are so for texts
    beyond those of the training alone, and such texts are not read."""
    if "n_embd" not in config:
        return {}
    called = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    }
    gates = {"swiglu": "silu", "geglu": "gelu", "gelu": "gelu"}
    keys = {
        "intermediate_size": 4 * config.int("n_embd", ge=1),
        **_called(config, called),
        "hidden_act": gates[config.choice("activation_function", gates, "gelu")],
    }
    if config.float("rotary_scaling_factor", None) is not None:
        longest = config.int("n_positions", 2048, ge=1)
        keys["max_position_embeddings"] = config.int("max_trained_positions", longest, le=longest)
    return keys


def _flash_roberta(config: ConfigReader) -> Keys:
    """Jina's XLM-RoBERTa, with rotations or with learned positions, has names of its own for
    tensors but not for itself."""
    named = config.list("architectures", of=str)[0]
    own = "use_flash_attn" in config or config.raw.get("position_embedding_type") == "rotary"
    if not own:
        return {}
    base = named.replace("XLMRobertaModel", "XLMRobertaForMaskedLM")  # all lies below a prefix
    return {
        "architectures": [base.replace("XLMRoberta", "JinaEmbeddingsV3")],
        **_rotary(config),
    }


def _rotary(config: ConfigReader) -> Keys:
    """Jina's name of the base; all that Jina ColBERT 2, its XLM-RoBERTa, has of its own."""
    return _called(config, {"rotary_emb_base": "rope_theta"})


def _jina_bert(config: ConfigReader) -> Keys:
    """Only the place of its code tells whether queries and keys are normed."""
    places = config.raw.get("auto_map")
    stated = " ".join(map(str, places.values())) if isinstance(places, Mapping) else ""
    return {"qk_post_norm": QK_POST_NORM in stated}


def _neobert(config: ConfigReader) -> Keys:
    """Inner sizes are two thirds of what is stated, in whole multiples of 8."""
    names = {"NeoBERT": "NeoBERTModel", "NeoBERTLMHead": "NeoBERTForMaskedLM"}
    named = config.list("architectures", of=str)[0]
    inner = 2 * config.int("intermediate_size", ge=2) // 3
    return {
        "architectures": [names.get(named, named)],
        "intermediate_size": -(-inner // 8) * 8,
        **_called(config, {"norm_eps": "layer_norm_eps", "max_length": "max_position_embeddings"}),
    }


def _cohere(config: ConfigReader) -> Keys:
    """Command R was trained for longer texts than its first key says."""
    return _called(config, {"model_max_length": "max_position_embeddings"})


def _qwen2(config: ConfigReader) -> Keys:
    """Beyond its chunk, dual chunk attention counts positions otherwise: such texts are not
    read."""
    chunks = config.section("dual_chunk_attention_config")
    if chunks is None:
        return {}
    chunk = chunks.int("chunk_size", 8192, ge=1) - chunks.int("local_size", 1024, ge=0)
    stated = config.int("max_position_embeddings", 32_768, ge=1)
    return {"max_position_embeddings": min(stated, max(1, chunk))}


def _inkling_2(config: ConfigReader) -> Keys:
    """Published experts are MXFP8, which config.json does not say."""
    if "quantization_config" in config or "transformers_version" in config:
        return {}
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}}


def _phi3_small(config: ConfigReader) -> Keys:
    """Without a scaling of its own, positions are divided by one number."""
    config.choice("hidden_act", ("gegelu",), "gegelu")
    called = {"rope_embedding_base": "rope_theta", "ff_intermediate_size": "intermediate_size"}
    keys = {**_called(config, called), "hidden_act": "silu"}
    if "rope_embedding_base" not in config:
        keys["rope_theta"] = 1e6
    factor = config.float("rope_position_scale", 1.0, ge=1e-3)
    if config.section("rope_scaling") is None and factor != 1.0:
        keys["rope_scaling"] = {"type": "linear", "factor": factor}
    return keys


def _telechat(config: ConfigReader) -> Keys:
    """The base of rotations follows from the length that the model was trained for, as long as
    texts are no longer: such are not read."""
    called = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    called["ffn_hidden_size"] = "intermediate_size"
    keys = {**_called(config, called), "hidden_act": "silu"}
    base = config.int("base_seqlen", 8192, ge=1)
    trained = config.int("training_seqlen", base, ge=1)
    keys["max_position_embeddings"] = trained
    alpha = 2 ** math.ceil(math.log2(trained / base) + 1) - 1
    if alpha > 1:
        keys["rope_scaling"] = {"type": "dynamic", "alpha": float(alpha)}
    return keys


def _ouro(config: ConfigReader) -> Keys:
    """Each time that the layers run has caches of its own."""
    times, layers = config.int("total_ut_steps", 4, ge=1, le=64), num_layers(config)
    heads = config.int("num_attention_heads", ge=1)
    kv_heads = config.int("num_key_value_heads", heads, ge=1)
    return {"num_key_value_heads_per_layer": [times * kv_heads] * layers}


def _refined_web(config: ConfigReader) -> Keys:
    """Of Falcon's first configs only the model's type tells the 40B's layers from the 7B's."""
    return {"new_decoder_architecture": config.str("model_type", "") == "RefinedWeb"}


def _stablelm_epoch(config: ConfigReader) -> Keys:
    return _called(config, {"rope_pct": "partial_rotary_factor", "norm_eps": "layer_norm_eps"})


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
        **_called(config, {key: key for key in YARN}),
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
    layout = config.str("attention_projection_layout", "split")
    if layout != "split":
        raise config.wrong("attention_projection_layout", "split: a tensor for each projection")
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
        **_called(config, {"layernorm_epsilon": "rms_norm_eps"}),
    }


OF_WINDOWS = ("swa_num_attention_heads", "swa_head_dim", "swa_v_head_dim")
"""What MiMo states of layers with windows apart."""


def _plamo3(config: ConfigReader) -> Keys:
    """A window for each layer, null where it sees all."""
    key = "interleaved_sliding_window" if "interleaved_sliding_window" in config else WINDOW
    listed = config.raw.get(key)
    if not isinstance(listed, list):
        return {}
    sizes = {one for one in listed if one is not None}
    alike = len(sizes) == 1 and all(type(one) is int and one >= 1 for one in sizes)
    if len(listed) != num_layers(config) or (sizes and not alike):
        raise config.wrong(key, "one window of at least 1, or null, for each layer")
    kinds = ["full_attention" if one is None else "sliding_attention" for one in listed]
    return {WINDOW: max(sizes, default=None), "layer_types": kinds}


WINDOW = "sliding_window"


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


ROWS: Mapping[str, Callable[[ConfigReader], Keys]] = {
    **dict.fromkeys(("ChatGLMModel", "ChatGLMForConditionalGeneration"), _chatglm),
    "QWenLMHeadModel": _qwen,
    "DeciLMForCausalLM": _deci,
    "OpenELMForCausalLM": _openelm,
    "Inkling2ForConditionalGeneration": _inkling_2,
    "Phi3SmallForCausalLM": _phi3_small,
    **dict.fromkeys(
        ("TeleChat2ForCausalLM", "TeleChatForCausalLM", "TelechatForCausalLM"), _telechat
    ),
    "OuroForCausalLM": _ouro,
    "RWForCausalLM": _refined_web,
    **dict.fromkeys(("Grok1ForCausalLM", "GrokForCausalLM"), _grok),
    "Grok1ModelForCausalLM": _first_grok,
    "Param2MoEForCausalLM": _param2,
    **dict.fromkeys(("Plamo3ForCausalLM", "PLaMo3ForCausalLM"), _plamo3),
    **dict.fromkeys(("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"), _mimo_v2),
    **dict.fromkeys(("CohereForCausalLM", "Cohere2ForCausalLM"), _cohere),
    **dict.fromkeys(("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"), _qwen2),
    "StableLMEpochForCausalLM": _stablelm_epoch,
    **dict.fromkeys(("InternLM2ForRewardModel", "Qwen2ForRewardModel"), _reward),
    "LlamaBidirectionalForSequenceClassification": _bidirectional,
    **{f"NomicBert{head}": _nomic for head in HEADS},
    **{f"XLMRoberta{head}": _flash_roberta for head in HEADS},
    **{f"JinaBert{head}": _jina_bert for head in HEADS},
    COLBERT: _rotary,
    **RECURRENT_KEYS,
    **dict.fromkeys(("NeoBERT", "NeoBERTLMHead", "NeoBERTForSequenceClassification"), _neobert),
}
"""By the name of the architecture."""

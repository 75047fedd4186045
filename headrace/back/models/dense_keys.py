"""Keys of published config.json files (published_keys.py) of decoders with dense MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from headrace.back.models.key_names import Keys, called
from headrace.base.config.hf import ConfigReader
from headrace.base.config.layer_count import num_layers


def _chatglm(config: ConfigReader) -> Keys:
    heads = config.int("num_attention_heads", ge=1)
    shared = config.bool("multi_query_attention", False)
    return {
        **called(
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
    names = {
        "seq_length": "max_position_embeddings",
        "kv_channels": "head_dim",
        "rotary_emb_base": "rope_theta",
        "rotary_pct": "partial_rotary_factor",
    }
    return {**called(config, names), "intermediate_size": inner // 2}


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
    names = {
        "num_transformer_layers": "num_hidden_layers",
        "model_dim": "hidden_size",
        "max_context_length": "max_position_embeddings",
        "rope_freq_constant": "rope_theta",
        "share_input_output_layers": "tie_word_embeddings",
        "activation_fn_name": "hidden_act",
    }
    return {
        **called(config, names),
        "num_attention_heads": max(config.list("num_query_heads", of=int, length=layers)),
        "num_key_value_heads": max(kv_heads),
        "num_key_value_heads_per_layer": list(kv_heads),
    }


def _reward(config: ConfigReader) -> Keys:
    """One label, whose number the configs do not state."""
    return {"num_labels": 1, "id2label": None}


def _cohere(config: ConfigReader) -> Keys:
    """Command R was trained for longer texts than its first key says."""
    return called(config, {"model_max_length": "max_position_embeddings"})


def _qwen2(config: ConfigReader) -> Keys:
    """Beyond its chunk, dual chunk attention counts positions otherwise: such texts are not
    read."""
    chunks = config.section("dual_chunk_attention_config")
    if chunks is None:
        return {}
    chunk = chunks.int("chunk_size", 8192, ge=1) - chunks.int("local_size", 1024, ge=0)
    stated = config.int("max_position_embeddings", 32_768, ge=1)
    return {"max_position_embeddings": min(stated, max(1, chunk))}


def _phi3_small(config: ConfigReader) -> Keys:
    """Without a scaling of its own, positions are divided by one number."""
    config.choice("hidden_act", ("gegelu",), "gegelu")
    names = {"rope_embedding_base": "rope_theta", "ff_intermediate_size": "intermediate_size"}
    keys = {**called(config, names), "hidden_act": "silu"}
    if "rope_embedding_base" not in config:
        keys["rope_theta"] = 1e6
    factor = config.float("rope_position_scale", 1.0, ge=1e-3)
    if config.section("rope_scaling") is None and factor != 1.0:
        keys["rope_scaling"] = {"type": "linear", "factor": factor}
    return keys


def _telechat(config: ConfigReader) -> Keys:
    """The base of rotations follows from the length that the model was trained for, as long as
    texts are no longer: such are not read."""
    names = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    names["ffn_hidden_size"] = "intermediate_size"
    keys = {**called(config, names), "hidden_act": "silu"}
    base = config.int("base_seqlen", 8192, ge=1)
    trained = config.int("training_seqlen", base, ge=1)
    keys["max_position_embeddings"] = trained
    alpha = 2 ** math.ceil(math.log2(trained / base) + 1) - 1
    if alpha > 1:
        keys["rope_scaling"] = {"type": "dynamic", "alpha": float(alpha)}
    return keys


def _ouro(config: ConfigReader) -> Keys:
    return _several_times(config, config.int("total_ut_steps", 4, ge=1, le=64))


def _looped(config: ConfigReader) -> Keys:
    """Windows of later times are counted whole."""
    return _several_times(config, config.int("loop_num", 2, ge=1, le=64))


def _several_times(config: ConfigReader, times: int) -> Keys:
    """Each time that the layers run has caches of its own."""
    heads = config.int("num_attention_heads", ge=1)
    kv_heads = config.int("num_key_value_heads", heads, ge=1)
    return {"num_key_value_heads_per_layer": [times * kv_heads] * num_layers(config)}


def _refined_web(config: ConfigReader) -> Keys:
    """Of Falcon's first configs only the model's type tells the 40B's layers from the 7B's."""
    return {"new_decoder_architecture": config.str("model_type", "") == "RefinedWeb"}


def _stablelm_epoch(config: ConfigReader) -> Keys:
    return called(config, {"rope_pct": "partial_rotary_factor", "norm_eps": "layer_norm_eps"})


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


def _maincoder(config: ConfigReader) -> Keys:
    return called(config, {"intermediate_size_mlp": "intermediate_size"})


def _plamo(config: ConfigReader) -> Keys:
    """So many query heads share a KV head."""
    heads = config.int("num_attention_heads", ge=1)
    shared = config.int("n_shared_head", 8, ge=1)
    if heads % shared:
        raise config.wrong("n_shared_head", f"a divisor of num_attention_heads ({heads})")
    return {"num_key_value_heads": heads // shared}


def _step1(config: ConfigReader) -> Keys:
    names = {
        "num_attention_groups": "num_key_value_heads",
        "max_seq_len": "max_position_embeddings",
    }
    return called(config, names)


def _codeshell(config: ConfigReader) -> Keys:
    return called(config, {"num_query_groups": "num_key_value_heads"})


def _refact(config: ConfigReader) -> Keys:
    """Inner sizes are two thirds of what is stated, in whole multiples of 256."""
    width = config.int("n_embd", aliases=("hidden_size",), ge=1)
    inner = 2 * config.int("n_inner", 4 * width, ge=2) // 3
    return {"num_key_value_heads": 1, "intermediate_size": -(-inner // 256) * 256}


def _bitnet(config: ConfigReader) -> Keys:
    """The defaults of Llama's class, from which the first BitNet was made. Weights that are stored
    as they were trained are rounded by its code, which states their bits."""
    if config.int("weight_bits", 16, ge=1) < 16:
        raise config.wrong("weight_bits", "absent: weights as trained are not rounded at load")
    return {
        "hidden_act": config.str("hidden_act", "silu"),
        "rms_norm_eps": config.float("rms_norm_eps", 1e-6, ge=0.0),
        "rope_theta": config.float("rope_theta", 1e4, ge=1.0),
    }


def _olmo(config: ConfigReader) -> Keys:
    """Inner sizes count gates and ups; the embedding may have rows behind the vocabulary, which the
    head has too."""
    width = config.int("d_model", ge=1)
    heads = config.int("n_heads", ge=1)
    shared = config.bool("multi_query_attention", False)
    inner = config.int("mlp_hidden_size", None, ge=2)
    if inner is None:
        inner = config.int("mlp_ratio", 4, ge=1) * width
    names = {"n_layers": "num_hidden_layers", "max_sequence_length": "max_position_embeddings"}
    names["weight_tying"] = "tie_word_embeddings"
    rows = config.int("vocab_size", ge=1)
    return {
        **called(config, names),
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": config.int("n_kv_heads", 1 if shared else heads, ge=1),
        "intermediate_size": inner // 2,
        "vocab_size": config.int("embedding_size", rows, ge=1),
        "tie_word_embeddings": config.bool("weight_tying", True),
    }


def _llada(config: ConfigReader) -> Keys:
    """OLMo's keys; what is not as in Llama's layers is refused."""
    off = ("alibi", "include_bias", "include_qkv_bias", "scale_logits", "input_emb_norm")
    for key in (*off, "attention_layer_norm", "multi_query_attention"):
        if config.raw.get(key):
            raise config.wrong(key, "false")
    if config.raw.get("clip_qkv") is not None:
        raise config.wrong("clip_qkv", "null")
    config.choice("block_type", ("llama",), "llama")
    config.choice("layer_norm_type", ("rms",), "rms")
    config.choice("activation_type", ("silu",), "silu")
    heads = config.int("n_heads", ge=1)
    names = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "mlp_hidden_size": "intermediate_size",
        "max_sequence_length": "max_position_embeddings",
        "weight_tying": "tie_word_embeddings",
    }
    rows = config.int("vocab_size", ge=1)
    return {
        **called(config, names),
        "num_attention_heads": heads,
        "num_key_value_heads": config.int("n_kv_heads", heads, ge=1),
        "vocab_size": config.int("embedding_size", rows, ge=1),
        "hidden_act": "silu",
    }


def _llada_moe(config: ConfigReader) -> Keys:
    """Only experts have a size."""
    return {"intermediate_size": config.int("expert_intermediate_size", ge=1)}


def _blt(config: ConfigReader) -> Keys:
    """Sizes are those of the global layers; all layers of the four parts keep caches."""
    parts = [
        part
        for name in ("patcher_config", "encoder_config", "global_config", "decoder_config")
        if (part := config.section(name)) is not None
    ]
    whole = config.section("global_config")
    if whole is None or len(parts) < 4:
        raise config.wrong("architectures", "one whose four parts have a section of sizes each")
    heads, width = whole.int("num_attention_heads", ge=1), whole.int("hidden_size", ge=1)
    return {
        "num_hidden_layers": sum(part.int("num_hidden_layers", ge=1) for part in parts),
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": whole.int("num_key_value_heads", heads, ge=1),
        "intermediate_size": whole.int("intermediate_size", 8 * width // 3, ge=1),
    }


def _talkie(config: ConfigReader) -> Keys:
    """Keys of the first checkpoint, and of those converted from it."""
    names = {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "rope_base": "rope_theta",
        "max_seq_len": "max_position_embeddings",
    }
    keys = called(config, names)
    width = config.int("hidden_size", aliases=("n_embd",), ge=1)
    inner = -(-(8 * width // 3) // 128) * 128
    return {**keys, "intermediate_size": config.int("intermediate_size", inner, ge=1)}


DENSE_KEYS: Mapping[str, Callable[[ConfigReader], Keys]] = {
    **dict.fromkeys(("ChatGLMModel", "ChatGLMForConditionalGeneration"), _chatglm),
    "QWenLMHeadModel": _qwen,
    "DeciLMForCausalLM": _deci,
    "OpenELMForCausalLM": _openelm,
    "Phi3SmallForCausalLM": _phi3_small,
    **dict.fromkeys(
        ("TeleChat2ForCausalLM", "TeleChatForCausalLM", "TelechatForCausalLM"), _telechat
    ),
    "OuroForCausalLM": _ouro,
    "IQuestLoopCoderForCausalLM": _looped,
    "MaincoderForCausalLM": _maincoder,
    "PlamoForCausalLM": _plamo,
    "Step1ForCausalLM": _step1,
    "CodeShellForCausalLM": _codeshell,
    "GPTRefactForCausalLM": _refact,
    "BitnetForCausalLM": _bitnet,
    "OLMoForCausalLM": _olmo,
    "TalkieForCausalLM": _talkie,
    "BltForCausalLM": _blt,
    "LLaDAModelLM": _llada,
    "LLaDAMoEModelLM": _llada_moe,
    "RWForCausalLM": _refined_web,
    **dict.fromkeys(("Plamo3ForCausalLM", "PLaMo3ForCausalLM"), _plamo3),
    **dict.fromkeys(("CohereForCausalLM", "Cohere2ForCausalLM"), _cohere),
    **dict.fromkeys(("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"), _qwen2),
    "StableLMEpochForCausalLM": _stablelm_epoch,
    **dict.fromkeys(("InternLM2ForRewardModel", "Qwen2ForRewardModel"), _reward),
}
"""By the name of the architecture."""

"""From GGUF metadata to the config.json the same model has: one row per GGUF architecture, plain
data throughout.

The result goes through the same reader, family and checks as any config.json, so a GGUF file is one
more spelling of a checkpoint and no second kind of model. Metadata keys: github.com/ggml-org/ggml,
docs/gguf.md; what they leave unsaid (an activation, a layer pattern) is what that architecture
fixes in llama.cpp, src/llama-model.cpp.
"""

from __future__ import annotations

from array import array
from typing import Final

from headrace.base.config import gguf_mixtures as mixtures
from headrace.base.config import gguf_recurrent as recurrent
from headrace.base.config import gguf_rows
from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_row import Config, GGUFArchitecture
from headrace.base.errors import CheckpointError


def gguf_config(file: GGUFFile) -> Config:
    """The config.json-like dict of a GGUF model; an unknown architecture is refused with the list
    of known ones."""
    name = file.text("general.architecture") or "(none)"
    row = ARCHITECTURES.get(name)
    if row is None:
        raise CheckpointError(
            f"{file.paths[0]}: general.architecture is {name!r}; supported in GGUF: {', '.join(sorted(ARCHITECTURES))}",
            field="general.architecture",
        )
    config: Config = {
        "model_type": row.model_type,
        "architectures": [row.architecture],
        **row.fixed,
        **_common(file, name, latent=row.latent),
        **_present(file, {key: f"{name}.{ours}" for key, ours in row.keys.items()}),
        **_token_ids(file),
    }
    if row.adjust is not None:
        row.adjust(file, name, config)
    return config


def gguf_generation(file: GGUFFile) -> Config:
    """The sampling defaults of a GGUF model under generation_config.json's keys; most files have
    none."""
    return _present(file, {key: f"general.sampling.{ours}" for key, ours in _SAMPLING.items()})


def _common(file: GGUFFile, name: str, *, latent: bool = False) -> Config:
    """`latent`: keys and values of an attention over latents are read elsewhere."""
    heads = _need_int(file, f"{name}.attention.head_count")
    hidden = _need_int(file, f"{name}.embedding_length")
    head_dim = _count(file, f"{name}.attention.key_length", hidden // heads)
    if head_dim < 2 or head_dim % 2:
        raise file.wrong(f"{name}.attention.key_length", "an even number")
    if not latent and head_dim != _count(file, f"{name}.attention.value_length", head_dim):
        raise file.wrong(f"{name}.attention.value_length", f"the key length {head_dim}")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": _layers(file, f"{name}.block_count"),
        "intermediate_size": _inner_size(file, name),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(file, name, heads),
        "head_dim": head_dim,
        "max_position_embeddings": _need_int(file, f"{name}.context_length"),
        "rms_norm_eps": _epsilon(file, name),
        "rope_theta": file.number(f"{name}.rope.freq_base", 10000.0),
        "vocab_size": _vocab(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": _dtype(file),
        **_rotated_share(file, name, head_dim),
        **_rope_scaling(file, name, head_dim),
    }


def _epsilon(file: GGUFFile, name: str) -> float | None:
    """Of root mean square norms, or of layer norms."""
    plain = file.number(f"{name}.attention.layer_norm_epsilon")
    return file.number(f"{name}.attention.layer_norm_rms_epsilon", 1e-6 if plain is None else plain)


def _kv_heads(file: GGUFFile, name: str, heads: int) -> int:
    """One number, or one for each layer, which is 0 where there is no attention."""
    key = f"{name}.attention.head_count_kv"
    if not isinstance(file.metadata.get(key), array):
        return _count(file, key, heads)
    each = {int(count) for count in file.numbers(key) or ()} - {0}
    if len(each) != 1 or min(each) < 1:
        raise file.wrong(key, "the same number of at least 1 for all layers with attention")
    return each.pop()


def _rotated_share(file: GGUFFile, name: str, head_dim: int) -> Config:
    """The part of a head that is rotated, where that is not all."""
    rotated = _count(file, f"{name}.rope.dimension_count", head_dim)
    return {} if rotated >= head_dim else {"partial_rotary_factor": rotated / head_dim}


def _inner_size(file: GGUFFile, name: str) -> int:
    """Of dense layers; files of mixtures without any may have that of experts alone."""
    keys = [f"{name}.{part}feed_forward_length" for part in ("", "expert_")]
    return _need_int(file, next((key for key in keys if key in file.metadata), keys[0]))


def _rope_scaling(file: GGUFFile, name: str, head_dim: int) -> Config:
    """Rotary scaling; per-frequency divisors (rope_freqs) become a longrope with two equal lists:
    the same numbers."""
    context = _need_int(file, f"{name}.context_length")
    original = _count(file, f"{name}.rope.scaling.original_context_length", context)
    if "rope_freqs.weight" in file.tensors:
        factors = _factors(file, "rope_freqs.weight", head_dim // 2)
        scaling: Config = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        scaling |= {"original_max_position_embeddings": context, "attention_factor": 1.0}
        return {"rope_scaling": {**scaling, "factor": 1.0}}
    kind = file.text(f"{name}.rope.scaling.type", "none")
    factor = file.number(f"{name}.rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        return {"rope_scaling": {**scaling, "original_max_position_embeddings": original}}
    if kind not in ("none", "longrope"):
        raise file.wrong(f"{name}.rope.scaling.type", "one of linear, longrope, none, yarn")
    return {}


def _phi3(file: GGUFFile, name: str, config: Config) -> None:
    half = _count(file, f"{name}.rope.dimension_count", config["head_dim"]) // 2
    config["partial_rotary_factor"] = 2 * half / config["head_dim"]
    context = config["max_position_embeddings"]
    original = _count(file, f"{name}.rope.scaling.original_context_length", context)
    config["original_max_position_embeddings"] = original
    if "rope_factors_long.weight" in file.tensors:
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": _factors(file, "rope_factors_long.weight", half),
            "short_factor": _factors(file, "rope_factors_short.weight", half),
            "original_max_position_embeddings": original,
        }
        attention_factor = file.number(f"{name}.rope.scaling.attn_factor")
        if attention_factor is not None:
            config["rope_scaling"]["attention_factor"] = attention_factor


def _gemma2(file: GGUFFile, name: str, config: Config) -> None:
    """The 27B model scales queries by hidden_size / heads, the others by the head size; the file
    does not say."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    big = layers == _GEMMA2_27B_LAYERS
    config["query_pre_attn_scalar"] = config["hidden_size"] // heads if big else config["head_dim"]
    kinds = ("sliding_attention", "full_attention")
    config["layer_types"] = [kinds[layer % 2] for layer in range(layers)]


def _gemma3(file: GGUFFile, name: str, config: Config) -> None:
    """Every sixth layer is full; the local layers' rotary base is 10,000 unless the file says
    otherwise."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    big = layers == _GEMMA3_27B_LAYERS
    config["query_pre_attn_scalar"] = config["hidden_size"] // heads if big else config["head_dim"]
    config["rope_local_base_freq"] = file.number(f"{name}.rope.freq_base_swa", 10000.0)
    config["layer_types"] = [
        "full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)
    ]


def _smollm3(file: GGUFFile, name: str, config: Config) -> None:
    """Every fourth layer has no rotary embedding (1 marks a layer that has it)."""
    layers = config["num_hidden_layers"]
    config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(layers)]


_SAMPLING: Final = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_GEMMA2_27B_LAYERS: Final = 46
_GEMMA3_27B_LAYERS: Final = 62
_GEMMA_KEYS: Final = {"sliding_window": "attention.sliding_window"}
_GELU: Final = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_SILU: Final = {"hidden_act": "silu"}

ARCHITECTURES: Final[dict[str, GGUFArchitecture]] = {
    "llama": GGUFArchitecture(
        model_type="llama",
        architecture="LlamaForCausalLM",
        fixed={**_SILU, "mlp_bias": False},
        adjust=mixtures.llama,
    ),
    "qwen2moe": GGUFArchitecture(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        fixed={**_SILU, "use_sliding_window": False, "norm_topk_prob": False},
        keys=mixtures.CHOSEN | mixtures.INNER | mixtures.SHARED,
        adjust=mixtures.renormalized,
    ),
    "qwen3moe": GGUFArchitecture(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        fixed={**_SILU, "use_sliding_window": False, "norm_topk_prob": True},
        keys=mixtures.CHOSEN | mixtures.INNER,
        adjust=mixtures.renormalized,
    ),
    "olmoe": GGUFArchitecture(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        fixed={**_SILU, "norm_topk_prob": False},
        keys=mixtures.CHOSEN | {"clip_qkv": "attention.clamp_kqv"},
        adjust=mixtures.renormalized,
    ),
    "gpt-oss": GGUFArchitecture(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        fixed={**_SILU, "separate_experts": True},
        keys=mixtures.GPT_OSS,
        adjust=mixtures.gpt_oss,
    ),
    "qwen2": GGUFArchitecture(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        fixed={**_SILU, "use_sliding_window": False},
    ),
    "qwen2vl": GGUFArchitecture(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        fixed={**_SILU, "use_sliding_window": False},
    ),
    "qwen3": GGUFArchitecture(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        fixed={**_SILU, "use_sliding_window": False},
    ),
    "qwen3vl": GGUFArchitecture(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        fixed={**_SILU, "use_sliding_window": False},
    ),
    "qwen3vlmoe": GGUFArchitecture(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        fixed={**_SILU, "use_sliding_window": False, "norm_topk_prob": True},
        keys=mixtures.CHOSEN | mixtures.INNER,
        adjust=mixtures.renormalized,
    ),
    "qwen3next": GGUFArchitecture(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        fixed={**_SILU, "norm_topk_prob": True},
        keys=mixtures.CHOSEN | mixtures.INNER | mixtures.SHARED | recurrent.DELTA,
        adjust=recurrent.qwen_delta,
    ),
    "qwen35": GGUFArchitecture(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        fixed=_SILU,
        keys=recurrent.DELTA,
        adjust=recurrent.qwen_delta,
    ),
    "qwen35moe": GGUFArchitecture(
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        fixed={**_SILU, "norm_topk_prob": True},
        keys=mixtures.CHOSEN | mixtures.INNER | mixtures.SHARED | recurrent.DELTA,
        adjust=recurrent.qwen_delta,
    ),
    "gemma2": GGUFArchitecture(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        fixed=_GELU,
        keys={
            **_GEMMA_KEYS,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        adjust=_gemma2,
    ),
    "gemma3": GGUFArchitecture(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        fixed=_GELU,
        keys={**_GEMMA_KEYS, "final_logit_softcapping": "final_logit_softcapping"},
        adjust=_gemma3,
    ),
    "phi3": GGUFArchitecture(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        fixed=_SILU,
        keys={"sliding_window": "attention.sliding_window"},
        adjust=_phi3,
    ),
    "olmo2": GGUFArchitecture(model_type="olmo2", architecture="Olmo2ForCausalLM", fixed=_SILU),
    "granite": GGUFArchitecture(
        model_type="granite",
        architecture="GraniteForCausalLM",
        fixed={**_SILU, "mlp_bias": False},
        keys={
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention.scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "smollm3": GGUFArchitecture(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        fixed={**_SILU, "use_sliding_window": False, "mlp_bias": False},
        adjust=_smollm3,
    ),
    **gguf_rows.ROWS,
}


def _token_ids(file: GGUFFile) -> Config:
    ids = {
        key: file.whole(f"tokenizer.ggml.{name}_token_id")
        for key, name in (("bos_token_id", "bos"), ("pad_token_id", "padding"))
    }
    ends = [file.whole(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(one for one in ends if one is not None))
    return {**{key: value for key, value in ids.items() if value is not None}, "eos_token_id": eos}


def _vocab(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.paths[0]}: tensor token_embd.weight is missing or no matrix")
    return embedding.shape[0]


def _dtype(file: GGUFFile) -> str:
    """The dtype the weights are best widened to: the file's own if it is unquantized, else
    bfloat16."""
    kinds = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) == 2}
    if kinds == {"F16"}:
        return "float16"
    return "float32" if kinds == {"F32"} else "bfloat16"


def _factors(file: GGUFFile, tensor: str, count: int) -> list[float]:
    stored = file.tensors.get(tensor)
    if stored is None or stored.shape != (count,):
        shape = None if stored is None else stored.shape
        raise CheckpointError(
            f"{file.paths[0]}: tensor {tensor} has the shape {shape}, not ({count},)"
        )
    return file.floats(tensor)


def _present(file: GGUFFile, names: dict[str, str]) -> Config:
    values = {key: file.metadata.get(name) for key, name in names.items()}
    return {key: value for key, value in values.items() if value is not None}


def _layers(file: GGUFFile, key: str) -> int:
    """The number of layers; bounded by the number of tensors, so that a wrong one builds nothing
    huge."""
    value = _need_int(file, key)
    if value > len(file.tensors):
        raise file.wrong(key, f"at most the number of tensors, {len(file.tensors)}")
    return value


def _need_int(file: GGUFFile, key: str) -> int:
    value = file.whole(key)
    if value is None or value < 1:
        raise file.wrong(key, "a whole number of at least 1")
    return value


def _count(file: GGUFFile, key: str, default: int) -> int:
    if key not in file.metadata:
        return default
    return _need_int(file, key)

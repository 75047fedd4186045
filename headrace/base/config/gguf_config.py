"""From GGUF metadata to the config.json the same model has: one row per GGUF architecture, plain
data throughout, in gguf_rows.py, gguf_gemma.py, gguf_mixtures.py, gguf_experts.py,
gguf_routed.py, gguf_recurrent.py, gguf_rwkv.py, gguf_encoders.py and gguf_published.py.

The result goes through the same reader, family and checks as any config.json, so a GGUF file is one
more spelling of a checkpoint and no second kind of model. Metadata keys: github.com/ggml-org/ggml,
docs/gguf.md; what they leave unsaid (an activation, a layer pattern) is what that architecture
fixes in llama.cpp, src/llama-model.cpp.
"""

from __future__ import annotations

from array import array
from typing import Final

from headrace.base.config import (
    gguf_encoders,
    gguf_experts,
    gguf_gemma,
    gguf_mixtures,
    gguf_published,
    gguf_recurrent,
    gguf_routed,
    gguf_rows,
    gguf_rwkv,
)
from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_row import (
    Config,
    GGUFArchitecture,
    count,
    factors,
    need_int,
    present,
    rows_of,
)
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
        **(_recurrent(file, name) if row.recurrent else _common(file, name, row)),
        **present(file, {key: f"{name}.{ours}" for key, ours in row.keys.items()}),
        **_token_ids(file),
    }
    if row.adjust is not None:
        row.adjust(file, name, config)
    return config


def gguf_generation(file: GGUFFile) -> Config:
    """The sampling defaults of a GGUF model under generation_config.json's keys; most files have
    none."""
    return present(file, {key: f"general.sampling.{ours}" for key, ours in _SAMPLING.items()})


def _common(file: GGUFFile, name: str, row: GGUFArchitecture) -> Config:
    heads = _of_layers(file, f"{name}.attention.head_count", varied=row.varied)
    hidden = need_int(file, f"{name}.embedding_length")
    head_dim = count(file, f"{name}.attention.key_length", hidden // heads)
    if head_dim < 2 or head_dim % 2:
        raise file.wrong(f"{name}.attention.key_length", "an even number")
    alike = not row.latent and not row.short_values
    if alike and head_dim != count(file, f"{name}.attention.value_length", head_dim):
        raise file.wrong(f"{name}.attention.value_length", f"the key length {head_dim}")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": _layers(file, f"{name}.block_count"),
        "intermediate_size": _inner_size(file, name),
        "num_attention_heads": heads,
        "num_key_value_heads": _of_layers(
            file, f"{name}.attention.head_count_kv", varied=row.varied, default=heads
        ),
        "head_dim": head_dim,
        "max_position_embeddings": need_int(file, f"{name}.context_length"),
        "rms_norm_eps": _epsilon(file, name),
        "rope_theta": file.number(f"{name}.rope.freq_base", 10000.0),
        "vocab_size": rows_of(file, "token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": _dtype(file),
        **_rotated_share(file, name, head_dim),
        **_rope_scaling(file, name, head_dim),
    }


def _of_layers(file: GGUFFile, key: str, *, varied: bool, default: int | None = None) -> int:
    """A number, or a list of one for each layer, 0 where there is no such branch. `varied`: layers
    may have more or fewer; then the first one's. `default`: where the file states none."""
    if not isinstance(file.metadata.get(key), array):
        return need_int(file, key) if default is None else count(file, key, default)
    each = [int(number) for number in file.numbers(key) or () if number]
    if not each or min(each) < 1 or (len(set(each)) > 1 and not varied):
        form = "a number" if varied else "the same number"
        raise file.wrong(key, f"{form} of at least 1 for all layers with such a branch")
    return each[0]


def _epsilon(file: GGUFFile, name: str) -> float | None:
    """Of root mean square norms, or of layer norms."""
    plain = file.number(f"{name}.attention.layer_norm_epsilon")
    return file.number(f"{name}.attention.layer_norm_rms_epsilon", 1e-6 if plain is None else plain)


def _recurrent(file: GGUFFile, name: str) -> Config:
    """Of a model without attention, whose texts may be of any length."""
    return {
        "hidden_size": need_int(file, f"{name}.embedding_length"),
        "num_hidden_layers": _layers(file, f"{name}.block_count"),
        "rms_norm_eps": _epsilon(file, name),
        "vocab_size": rows_of(file, "token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _dtype(file),
    }


def _rotated_share(file: GGUFFile, name: str, head_dim: int) -> Config:
    """The part of a head that is rotated, where that is not all; DeepSeek-OCR states 0 for all."""
    if file.metadata.get(f"{name}.rope.dimension_count") == 0:
        return {}
    rotated = count(file, f"{name}.rope.dimension_count", head_dim)
    return {} if rotated >= head_dim else {"partial_rotary_factor": rotated / head_dim}


def _inner_size(file: GGUFFile, name: str) -> int:
    """Of dense layers; files of mixtures without any may have that of experts alone. Where each
    layer has its own, 0 where it has none, the first that there is."""
    keys = [f"{name}.{part}feed_forward_length" for part in ("", "expert_")]
    key = next((key for key in keys if key in file.metadata), keys[0])
    return _of_layers(file, key, varied=True)


def _rope_scaling(file: GGUFFile, name: str, head_dim: int) -> Config:
    """Rotary scaling; per-frequency divisors (rope_freqs) become a longrope with two equal lists:
    the same numbers."""
    context = need_int(file, f"{name}.context_length")
    original = count(file, f"{name}.rope.scaling.original_context_length", context)
    if "rope_freqs.weight" in file.tensors:
        per_pair = factors(file, "rope_freqs.weight", head_dim // 2)
        scaling: Config = {
            "rope_type": "longrope",
            "short_factor": per_pair,
            "long_factor": per_pair,
        }
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


_SAMPLING: Final = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
ARCHITECTURES: Final[dict[str, GGUFArchitecture]] = {
    **gguf_rows.ROWS,
    **gguf_gemma.ROWS,
    **gguf_mixtures.ROWS,
    **gguf_experts.ROWS,
    **gguf_routed.ROWS,
    **gguf_recurrent.ROWS,
    **gguf_encoders.ROWS,
    **gguf_published.ROWS,
    **gguf_rwkv.ROWS,
}


def _token_ids(file: GGUFFile) -> Config:
    ids = {
        key: file.whole(f"tokenizer.ggml.{name}_token_id")
        for key, name in (("bos_token_id", "bos"), ("pad_token_id", "padding"))
    }
    ends = [file.whole(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(one for one in ends if one is not None))
    return {**{key: value for key, value in ids.items() if value is not None}, "eos_token_id": eos}


def _dtype(file: GGUFFile) -> str:
    """The dtype the weights are best widened to: the file's own if it is unquantized, else
    bfloat16."""
    matrices = (tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) == 2)
    kinds = set(matrices) - {"I32"}
    if kinds == {"F16"}:
        return "float16"
    return "float32" if kinds == {"F32"} else "bfloat16"


def _layers(file: GGUFFile, key: str) -> int:
    """The number of layers; bounded by the number of tensors, so that a wrong one builds nothing
    huge."""
    value = need_int(file, key)
    if value > len(file.tensors):
        raise file.wrong(key, f"at most the number of tensors, {len(file.tensors)}")
    return value

"""Rows of the table of GGUF architectures: Gemma 1 to 4."""

from __future__ import annotations

import math
from array import array
from typing import Final

from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_row import (
    GELU,
    Config,
    GGUFArchitecture,
    count,
    factors,
    need_int,
    rows_of,
)
from headrace.base.errors import CheckpointError

_GEMMA2_27B_LAYERS: Final = 46
_GEMMA3_27B_LAYERS: Final = 62
_STILL: Final = 1e20
"""From this divisor on a rotation counts as none."""
_GEMMA_KEYS: Final = {"sliding_window": "attention.sliding_window"}


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


def embedding_gemma(file: GGUFFile, name: str, config: Config) -> None:
    """As Gemma 3's; of projections behind the pooling, which few files hold, none is read."""
    _gemma3(file, name, config)
    for tensor in ("dense_2.weight", "dense_3.weight"):
        if tensor in file.tensors:
            raise CheckpointError(
                f"{file.paths[0]}: tensor {tensor}: projections behind the pooling are not read "
                "from GGUF files; use the safetensors checkpoint"
            )


def _layer_types(file: GGUFFile, name: str, config: Config) -> None:
    """By the list that says of each layer whether it has a window."""
    key = f"{name}.attention.sliding_window_pattern"
    local = file.numbers(key)
    if local is None or len(local) != config["num_hidden_layers"]:
        raise file.wrong(key, f"a list of {config['num_hidden_layers']} truth values")
    kinds = ("full_attention", "sliding_attention")
    config["layer_types"] = [kinds[bool(one)] for one in local]


def _gemma3n(file: GGUFFile, name: str, config: Config) -> None:
    """Shares of activations that are set to zero stand there as what their normal distribution is
    cut at."""
    _layer_types(file, name, config)
    cuts = file.numbers(f"{name}.activation_sparsity_scale")
    if cuts is None or len(cuts) != config["num_hidden_layers"]:
        wanted = f"a list of {config['num_hidden_layers']} numbers"
        raise file.wrong(f"{name}.activation_sparsity_scale", wanted)
    config["activation_sparsity_pattern"] = [
        0.0 if math.isinf(cut) else round(0.5 + 0.5 * math.erf(cut / math.sqrt(2)), 6)
        for cut in cuts
    ]
    config["rope_local_base_freq"] = file.number(f"{name}.rope.freq_base_swa", 10000.0)
    config["laurel_rank"] = rows_of(file, "blk.0.laurel_l.weight")
    config["vocab_size_per_layer_input"] = rows_of(file, "per_layer_token_embd.weight")


def _gemma4(file: GGUFFile, name: str, config: Config) -> None:
    """Local and global layers have heads of their own sizes; the divisors of rotations are those
    of global layers alone."""
    _layer_types(file, name, config)
    layers, kinds = config["num_hidden_layers"], config["layer_types"]
    whole = config["head_dim"]
    config["global_head_dim"] = whole
    config["head_dim"] = count(file, f"{name}.attention.key_length_swa", whole)
    _gemma4_heads(file, name, config)
    width = file.whole(f"{name}.embedding_length_per_layer_input") or 0
    config["hidden_size_per_layer_input"] = width
    if width:
        config["vocab_size_per_layer_input"] = rows_of(file, "per_layer_token_embd.weight")
    inner = file.metadata.get(f"{name}.feed_forward_length")
    if isinstance(inner, array):
        config["use_double_wide_mlp"] = max(inner) == 2 * min(inner)
    experts = file.whole(f"{name}.expert_count") or 0
    if experts:
        config |= {"enable_moe_block": True, "num_experts": experts, "separate_experts": True}
        config["top_k_experts"] = need_int(file, f"{name}.expert_used_count")
        config["moe_intermediate_size"] = need_int(file, f"{name}.expert_feed_forward_length")
    local: Config = {"rope_type": "default", "rope_theta": 10000.0}
    local["rope_theta"] = file.number(f"{name}.rope.freq_base_swa", 10000.0)
    ropes = {"sliding_attention": local}
    if "full_attention" in kinds:
        ropes["full_attention"] = _proportional(file, config, whole)
    for key in ("rope_scaling", "rope_theta", "partial_rotary_factor"):
        config.pop(key, None)
    config["rope_parameters"] = ropes
    config["attention_k_eq_v"] = any(
        kinds[i] == "full_attention" and f"blk.{i}.attn_v.weight" not in file.tensors
        for i in range(layers - config.get("num_kv_shared_layers", 0))
    )


def _gemma4_heads(file: GGUFFile, name: str, config: Config) -> None:
    """KV heads, which stand for each layer where global ones have others."""
    key = f"{name}.attention.head_count_kv"
    if not isinstance(file.metadata.get(key), array):
        return
    numbers = list(file.numbers(key) or ())
    for kind, target in (
        ("sliding_attention", "num_key_value_heads"),
        ("full_attention", "num_global_key_value_heads"),
    ):
        layers = zip(numbers, config["layer_types"], strict=False)
        own = {int(heads) for heads, one in layers if one == kind}
        if len(own) > 1 or len(numbers) != config["num_hidden_layers"]:
            raise file.wrong(key, "a number for each layer, the same for all layers of a kind")
        if own:
            config[target] = own.pop()


def _proportional(file: GGUFFile, config: Config, head_dim: int) -> Config:
    """Rotations of global layers: what does not turn is divided by far too much."""
    divisors = factors(file, "rope_freqs.weight", head_dim // 2)
    turned = sum(divisor == 1.0 for divisor in divisors)
    share = turned / len(divisors)
    if not turned or any(divisor < _STILL for divisor in divisors[turned:]):
        raise file.wrong("rope_freqs.weight", f"1 first, then at least {_STILL:g}")
    theta = config["rope_theta"]
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}


ROWS: Final[dict[str, GGUFArchitecture]] = {
    "gemma": GGUFArchitecture(model_type="gemma", architecture="GemmaForCausalLM", fixed=GELU),
    "gemma2": GGUFArchitecture(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        fixed=GELU,
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
        fixed=GELU,
        keys={**_GEMMA_KEYS, "final_logit_softcapping": "final_logit_softcapping"},
        adjust=_gemma3,
    ),
    "gemma3n": GGUFArchitecture(
        model_type="gemma3n_text",
        architecture="Gemma3nForCausalLM",
        fixed=GELU,
        keys={
            **_GEMMA_KEYS,
            "final_logit_softcapping": "final_logit_softcapping",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "altup_num_inputs": "altup.num_inputs",
            "altup_active_idx": "altup.active_idx",
        },
        adjust=_gemma3n,
    ),
    "gemma4": GGUFArchitecture(
        model_type="gemma4_text",
        architecture="Gemma4ForCausalLM",
        fixed=GELU,
        keys={
            **_GEMMA_KEYS,
            "final_logit_softcapping": "final_logit_softcapping",
            "num_kv_shared_layers": "attention.shared_kv_layers",
        },
        adjust=_gemma4,
        varied=True,
    ),
}

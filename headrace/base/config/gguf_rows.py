"""Rows of the table of GGUF architectures: dense ones.

What the metadata leave unsaid is what the architecture fixes in llama.cpp, src/llama-model.cpp;
how the tensors lie is in back/models/load/gguf_dialects.py.
"""

from __future__ import annotations

import math
from array import array
from typing import Final

from headrace.base.config import gguf_mixtures as mixtures
from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_row import (
    GELU,
    SILU,
    Config,
    GGUFArchitecture,
    count,
    factors,
    need_int,
    rows_of,
)

_GEMMA2_27B_LAYERS: Final = 46
_GEMMA3_27B_LAYERS: Final = 62
_STILL: Final = 1e20
"""From this divisor on a rotation counts as none."""
_GEMMA_KEYS: Final = {"sliding_window": "attention.sliding_window"}


def _phi3(file: GGUFFile, name: str, config: Config) -> None:
    half = count(file, f"{name}.rope.dimension_count", config["head_dim"]) // 2
    config["partial_rotary_factor"] = 2 * half / config["head_dim"]
    context = config["max_position_embeddings"]
    original = count(file, f"{name}.rope.scaling.original_context_length", context)
    config["original_max_position_embeddings"] = original
    if "rope_factors_long.weight" in file.tensors:
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": factors(file, "rope_factors_long.weight", half),
            "short_factor": factors(file, "rope_factors_short.weight", half),
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


def _mistral3(file: GGUFFile, name: str, config: Config) -> None:
    """Mistral Small 3.1 and later; Ministral 3 where queries grow with their position."""
    beta = file.number(f"{name}.attention.temperature_scale")
    if beta is None:
        config["model_type"], config["architectures"] = "mistral", ["MistralForCausalLM"]
        config["sliding_window"] = None
        return
    scaling = config.get("rope_scaling")
    if scaling is None or scaling["rope_type"] != "yarn":
        raise file.wrong(f"{name}.rope.scaling.type", "yarn, where queries grow")
    whole = file.number(f"{name}.rope.scaling.yarn_log_multiplier", 1.0)
    stated = {"mscale": 1.0, "mscale_all_dim": whole, "llama_4_scaling_beta": beta}
    config["rope_scaling"] = scaling | stated


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
    "llama": GGUFArchitecture(
        model_type="llama",
        architecture="LlamaForCausalLM",
        fixed={**SILU, "mlp_bias": False},
        adjust=mixtures.llama,
    ),
    "qwen2": GGUFArchitecture(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        fixed={**SILU, "use_sliding_window": False},
    ),
    "qwen2vl": GGUFArchitecture(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        fixed={**SILU, "use_sliding_window": False},
    ),
    "qwen3": GGUFArchitecture(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        fixed={**SILU, "use_sliding_window": False},
    ),
    "qwen3vl": GGUFArchitecture(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        fixed={**SILU, "use_sliding_window": False},
    ),
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
    "phi3": GGUFArchitecture(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        fixed=SILU,
        keys={"sliding_window": "attention.sliding_window"},
        adjust=_phi3,
    ),
    "olmo2": GGUFArchitecture(model_type="olmo2", architecture="Olmo2ForCausalLM", fixed=SILU),
    "granite": GGUFArchitecture(
        model_type="granite",
        architecture="GraniteForCausalLM",
        fixed={**SILU, "mlp_bias": False},
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
        fixed={**SILU, "use_sliding_window": False, "mlp_bias": False},
        adjust=_smollm3,
    ),
    "gemma": GGUFArchitecture(model_type="gemma", architecture="GemmaForCausalLM", fixed=GELU),
    "glm4": GGUFArchitecture(model_type="glm4", architecture="Glm4ForCausalLM", fixed=SILU),
    "seed_oss": GGUFArchitecture(
        model_type="seed_oss",
        architecture="SeedOssForCausalLM",
        fixed={**SILU, "mlp_bias": False},
        adjust=_seed_oss,
    ),
    "exaone": GGUFArchitecture(
        model_type="llama", architecture="LlamaForCausalLM", fixed={**SILU, "mlp_bias": False}
    ),
    "exaone4": GGUFArchitecture(
        model_type="exaone4",
        architecture="Exaone4ForCausalLM",
        fixed=SILU,
        keys={"sliding_window": "attention.sliding_window"},
        adjust=_exaone4,
    ),
    "internlm2": GGUFArchitecture(
        model_type="llama", architecture="LlamaForCausalLM", fixed={**SILU, "mlp_bias": False}
    ),
    "starcoder2": GGUFArchitecture(
        model_type="starcoder2",
        architecture="Starcoder2ForCausalLM",
        fixed={**GELU, "use_bias": True, "sliding_window": None},
    ),
    "stablelm": GGUFArchitecture(
        model_type="stablelm",
        architecture="StableLmForCausalLM",
        fixed=SILU,
        keys={"use_parallel_residual": "use_parallel_residual"},
        adjust=_stablelm,
    ),
    "command-r": GGUFArchitecture(
        model_type="cohere",
        architecture="CohereForCausalLM",
        fixed=SILU,
        keys={"logit_scale": "logit_scale"},
        adjust=_qk_norm,
    ),
    "cohere2": GGUFArchitecture(
        model_type="cohere2",
        architecture="Cohere2ForCausalLM",
        fixed=SILU,
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
        fixed=SILU,
        keys={"clip_qkv": "attention.clamp_kqv"},
    ),
    "phi2": GGUFArchitecture(
        model_type="phi", architecture="PhiForCausalLM", fixed={"hidden_act": "gelu_new"}
    ),
    "ernie4_5": GGUFArchitecture(
        model_type="ernie4_5", architecture="Ernie4_5ForCausalLM", fixed=SILU
    ),
    "hunyuan-dense": GGUFArchitecture(
        model_type="hunyuan_v1_dense", architecture="HunYuanDenseV1ForCausalLM", fixed=SILU
    ),
    "mistral3": GGUFArchitecture(
        model_type="ministral3",
        architecture="Ministral3ForCausalLM",
        fixed=SILU,
        adjust=_mistral3,
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

"""Rows of the table of GGUF architectures: dense ones.

What the metadata leave unsaid is what the architecture fixes in llama.cpp, src/llama-model.cpp;
how the tensors lie is in back/models/load/gguf_dialects.py.
"""

from __future__ import annotations

from typing import Final

from headrace.base.config import gguf_mixtures as mixtures
from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_row import (
    GELU,
    LATENT,
    SILU,
    Config,
    GGUFArchitecture,
    count,
    factors,
    latent_sizes,
)


def _phi3(file: GGUFFile, name: str, config: Config) -> None:
    half = count(file, f"{name}.rope.dimension_count", config["head_dim"]) // 2
    config["partial_rotary_factor"] = 2 * half / config["head_dim"]
    context = config["max_position_embeddings"]
    original = count(file, f"{name}.rope.scaling.original_context_length", context)
    config["original_max_position_embeddings"] = original
    _longrope(file, name, config, half=half, original=original)


def _longrope(file: GGUFFile, name: str, config: Config, *, half: int, original: int) -> None:
    """Factors for short and for long texts, where the file has them."""
    if "rope_factors_long.weight" not in file.tensors:
        return
    config["rope_scaling"] = {
        "rope_type": "longrope",
        "long_factor": factors(file, "rope_factors_long.weight", half),
        "short_factor": factors(file, "rope_factors_short.weight", half),
        "original_max_position_embeddings": original,
    }
    attention_factor = file.number(f"{name}.rope.scaling.attn_factor")
    if attention_factor is not None:
        config["rope_scaling"]["attention_factor"] = attention_factor


def _minicpm3(file: GGUFFile, name: str, config: Config) -> None:
    """The lengths of long rotations are stated beside the factors."""
    latent_sizes(file, name, config)
    context = config["max_position_embeddings"]
    original = count(file, f"{name}.rope.scaling.original_context_length", context)
    half = config["qk_rope_head_dim"] // 2
    _longrope(file, name, config, half=half, original=original)


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


def _olmo2(file: GGUFFile, name: str, config: Config) -> None:
    """OLMo 3 where there is a window: every fourth layer sees all, and its rotations alone are
    scaled."""
    if config.get("sliding_window") is None:
        return
    config["model_type"], config["architectures"] = "olmo3", ["Olmo3ForCausalLM"]
    config["layer_types"] = [
        "full_attention" if layer % 4 == 3 else "sliding_attention"
        for layer in range(config["num_hidden_layers"])
    ]


def _multiplied(file: GGUFFile, name: str, config: Config) -> None:
    """MiniCPM: branches by a depth, logits by a width."""
    scale = file.number(f"{name}.residual_scale", 1.0) or 1.0
    config["scale_depth"] = scale * config["num_hidden_layers"] ** 0.5
    config["dim_model_base"] = config["hidden_size"] / (
        file.number(f"{name}.logit_scale", 1.0) or 1.0
    )


def _falcon(file: GGUFFile, name: str, config: Config) -> None:
    """Several KV heads came with a norm for each branch, of which Falcon 2 has one again."""
    groups, heads = config["num_key_value_heads"], config["num_attention_heads"]
    config["new_decoder_architecture"] = groups > 1
    config["num_kv_heads"], config["multi_query"] = groups, groups == 1 and heads > 1
    two = "blk.0.attn_norm_2.weight" in file.tensors
    config["num_ln_in_parallel_attn"] = 2 if two else 1
    config["bias"] = "blk.0.attn_qkv.bias" in file.tensors


def _neox(file: GGUFFile, name: str, config: Config) -> None:
    config["attention_bias"] = "blk.0.attn_qkv.bias" in file.tensors
    config["rotary_pct"] = config.pop("partial_rotary_factor", 1.0)
    config["rotary_emb_base"] = config.pop("rope_theta")


def _starcoder(file: GGUFFile, name: str, config: Config) -> None:
    config["multi_query"] = config["num_key_value_heads"] == 1
    if not config["multi_query"]:
        raise file.wrong(f"{name}.attention.head_count_kv", "1")


def _mpt(file: GGUFFile, name: str, config: Config) -> None:
    largest = file.number(f"{name}.attention.max_alibi_bias", 8.0)
    clip = file.number(f"{name}.attention.clamp_kqv")
    config["attn_config"] = {"alibi": True, "alibi_bias_max": largest, "clip_qkv": clip or None}
    inner, width = config["intermediate_size"], config["hidden_size"]
    if inner % width:
        raise file.wrong(f"{name}.feed_forward_length", f"a multiple of {width}")
    config["expansion_ratio"] = inner // width


ROWS: Final[dict[str, GGUFArchitecture]] = {
    "glm4": GGUFArchitecture(model_type="glm4", architecture="Glm4ForCausalLM", fixed=SILU),
    "seed_oss": GGUFArchitecture(
        model_type="seed_oss",
        architecture="SeedOssForCausalLM",
        fixed={**SILU, "mlp_bias": False},
        adjust=_seed_oss,
    ),
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
    "phi3": GGUFArchitecture(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        fixed=SILU,
        keys={"sliding_window": "attention.sliding_window"},
        adjust=_phi3,
    ),
    "olmo2": GGUFArchitecture(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        fixed=SILU,
        keys={"sliding_window": "attention.sliding_window"},
        adjust=_olmo2,
    ),
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
    "minicpm": GGUFArchitecture(
        model_type="minicpm",
        architecture="MiniCPMForCausalLM",
        fixed=SILU,
        keys={"scale_emb": "embedding_scale"},
        adjust=_multiplied,
    ),
    "orion": GGUFArchitecture(model_type="orion", architecture="OrionForCausalLM", fixed=SILU),
    "jais2": GGUFArchitecture(
        model_type="jais2", architecture="Jais2ForCausalLM", fixed={"hidden_act": "relu2"}
    ),
    "falcon": GGUFArchitecture(
        model_type="falcon", architecture="FalconForCausalLM", adjust=_falcon
    ),
    "gptneox": GGUFArchitecture(
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        fixed={"hidden_act": "gelu"},
        keys={"use_parallel_residual": "use_parallel_residual"},
        adjust=_neox,
    ),
    "bloom": GGUFArchitecture(model_type="bloom", architecture="BloomForCausalLM"),
    "gpt2": GGUFArchitecture(
        model_type="gpt2", architecture="GPT2LMHeadModel", fixed={"outputs_first": True}
    ),
    "starcoder": GGUFArchitecture(
        model_type="gpt_bigcode", architecture="GPTBigCodeForCausalLM", adjust=_starcoder
    ),
    "mpt": GGUFArchitecture(model_type="mpt", architecture="MptForCausalLM", adjust=_mpt),
    "apertus": GGUFArchitecture(
        model_type="apertus", architecture="ApertusForCausalLM", fixed={"hidden_act": "xielu"}
    ),
    "gptj": GGUFArchitecture(
        model_type="gptj",
        architecture="GPTJForCausalLM",
        fixed={"activation_function": "gelu_new"},
        keys={"rotary_dim": "rope.dimension_count"},
    ),
    "minicpm3": GGUFArchitecture(
        model_type="minicpm3",
        architecture="MiniCPM3ForCausalLM",
        fixed={**SILU, "scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
        keys=LATENT,
        adjust=_minicpm3,
        latent=True,
    ),
}

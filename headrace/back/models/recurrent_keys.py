"""Keys of published config.json files (published_keys.py) of families with recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.back.models.key_names import Keys
from headrace.base.config.hf import ConfigReader
from headrace.base.config.layer_count import num_layers


def _plamo2(config: ConfigReader) -> Keys:
    """Of each period of layers the middle one attends, of few layers the last; all but the listed
    ones of these have a window, which does not count the token itself."""
    layers, step = num_layers(config), config.int("mamba_step", 2, ge=2)
    full = config.list("full_attention_idx", (), of=int) or ()
    mixes = config.bool("mamba_enabled", True)
    middle = step // 2

    def attends(layer: int) -> bool:
        if layers <= middle:
            return layer == layers - 1
        return layer % step == middle

    window = config.int("attention_window_size", 2048, ge=1) + 1
    kinds = ["full_attention" if i in full else "sliding_attention" for i in range(layers)]
    return {
        "head_dim": config.int("hidden_size_per_head", 128, ge=2),
        "num_key_value_heads": config.int("num_key_value_heads", 4, ge=1),
        "layer_types": [
            kind if attends(i) or not mixes else "mamba" for i, kind in enumerate(kinds)
        ],
        "sliding_window": window,
        "attention_window_size": None,
    }


def _unbounded(config: ConfigReader) -> Keys:
    """A state has no longest text; what the config states is that of the training."""
    return {"max_position_embeddings": None}


def _bailing_v3(config: ConfigReader) -> Keys:
    """Layers that fill no group attend; without a word on gates there are none."""
    layers, every = num_layers(config), config.int("layer_group_size", ge=1)
    whole = layers // every * every
    shared = config.int("num_shared_experts", 1, ge=0)
    inner = config.int("moe_intermediate_size", ge=1)
    each = config.int("moe_shared_expert_intermediate_size", inner, ge=1)
    if each * shared % inner:
        raise config.wrong("moe_shared_expert_intermediate_size", f"a multiple of {inner}")
    gates = config.raw.get("gated_attention_proj_granularity_type")
    return {
        "layer_types": [
            "linear_attention" if (i + 1) % every and i < whole else "full_attention"
            for i in range(layers)
        ],
        "num_shared_experts": each * shared // inner,
        "gated_attention_proj_granularity_type": gates or "none",
    }


def _puzzle(config: ConfigReader) -> Keys:
    """What each layer is, from what it has of its own."""
    blocks = config.raw.get("block_configs")
    alike = isinstance(blocks, list) and all(isinstance(one, Mapping) for one in blocks)
    if not alike or not blocks:
        raise config.wrong("block_configs", "a list of objects, one for each layer")
    kinds = [
        ConfigReader(block, f"{config.where}: block_configs: {i}").str("block_type")
        for i, block in enumerate(blocks)
    ]
    for i, block in enumerate(blocks):
        own = {key for key, value in block.items() if value not in (None, config.raw.get(key))}
        if kinds[i] != "moe" and own - {"block_type"}:
            key = min(own - {"block_type"})
            raise config.wrong(f"block_configs: {i}: {key}", "as all layers have it, or absent")
    return {"num_hidden_layers": len(kinds), "layers_block_type": kinds}


def _phi4_flash(config: ConfigReader) -> Keys:
    """Every second layer attends: below the middle in windows, above it over one cache. Windows may
    be listed, null where there is none."""
    layers = num_layers(config)
    middle = layers // 2
    listed = config.raw.get("sliding_window")
    window = next((one for one in listed if one), None) if isinstance(listed, list) else listed
    sources = [i if i % 2 else -1 for i in range(min(middle + 2, layers))]
    slides = [i % 2 == 1 and i < middle for i in range(layers)]
    return {
        "sliding_window": window,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "kv_source_layers": [*sources, *[middle + 1] * (layers - len(sources))],
    }


def _rwkv6_qwen2(config: ConfigReader) -> Keys:
    """Ranks that are not stated follow from the width; queries, keys and values have biases."""
    if config.bool("use_rope", False):
        raise config.wrong("use_rope", "false")
    width, heads = config.int("hidden_size", ge=1), config.int("num_attention_heads", ge=1)
    twice = 2 if width >= 4096 else 1
    return {
        "wkv_version": 6,
        "head_size": width // heads,
        "time_mix_extra_dim": config.int("lora_rank_tokenshift", 32 * twice, ge=1),
        "time_decay_extra_dim": config.int("lora_rank_decay", 64 * twice, ge=1),
        "attention_bias": config.bool("attention_bias", True),
        **_unbounded(config),
    }


def _every_fourth(config: ConfigReader) -> Keys:
    """Every so manieth layer attends where the config does not list them."""
    if "layer_types" in config:
        return {}
    every = config.int("full_attention_interval", 4, ge=1)
    kinds = ("full_attention", "linear_attention")
    return {"layer_types": [kinds[(i + 1) % every != 0] for i in range(num_layers(config))]}


def _jet_nemotron(config: ConfigReader) -> Keys:
    """The names of its kinds of layers, and windows in a section of their own."""
    names = {"jet": "linear_attention", "swa": "sliding_attention", "attn": "full_attention"}
    kinds = config.list("layer_types", of=str, length=num_layers(config))
    if not set(kinds) <= set(names):
        raise config.wrong("layer_types", f"a list of {', '.join(names)}")
    others = config.section("efficient_attention_config")
    windows = None if others is None else others.section("swa")
    if "swa" in kinds and windows is None:
        raise config.wrong(
            "efficient_attention_config", "with a section swa, as layer_types has it"
        )
    return {
        "layer_types": [names[kind] for kind in kinds],
        "sliding_window": None if windows is None else windows.int("window_size", ge=1),
    }


RECURRENT_KEYS: Mapping[str, Callable[[ConfigReader], Keys]] = {
    **dict.fromkeys(("Plamo2ForCausalLM", "PLaMo2ForCausalLM"), _plamo2),
    "BailingMoeV3ForCausalLM": _bailing_v3,
    "NemotronHPuzzleForCausalLM": _puzzle,
    "Phi4FlashForCausalLM": _phi4_flash,
    "JetNemotronForCausalLM": _jet_nemotron,
    **dict.fromkeys(("AliceAIForCausalLM", "BerryLMForCausalLM"), _every_fourth),
    "RWKV6Qwen2ForCausalLM": _rwkv6_qwen2,
    **dict.fromkeys(("RWKV7ForCausalLM", "Rwkv7ForCausalLM"), _unbounded),
}
"""By the name of the architecture."""

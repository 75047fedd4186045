"""What a family's layers keep per token, read off a config: how many KV heads, which layers keep
nothing, and how many the keys of an indexer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.back.models.encoder_families import ENCODERS
from headrace.back.models.families import FALLBACK
from headrace.back.models.recurrent_families import RECURRENT
from headrace.base.config.hf import ConfigReader
from headrace.base.config.index_choices import shared_layers

KV_HEADS_LISTED = "num_key_value_heads_per_layer"
"""The KV heads of each layer, where they differ; 0: it does not attend."""
OWN_HEADS = ("num_global_key_value_heads", "per_layer_config")
"""Keys of configs whose layers with whole caches may have KV heads of their own."""
RECURRENT_KINDS = frozenset({"mamba", "linear_attention", "conv", "recurrent"})
"""Kinds of layers, as config.json lists them, that keep a state and no cache per token."""
CHOICES_SHARED = {
    **{"glm_moe_dsa": 1, "glm5_next": 1, "glm5_vision": 1, "hy_v4": 4, "mistral_large4": 1},
    "mistral_large4_vision": 1,
}
"""Families whose layers may read what the indexer of one before them chose, and every how manieth
has one of its own unless the config says."""
CHOOSING = "minimax_m3_sparse"
"""What MiniMax calls layers with an indexer, where others have none."""
TWO_ATTENTIONS = frozenset({"longcat_flash"})
"""Families of which each layer has two attentions."""
SHARING = {"gemma3n", "gemma3n_audio", "gemma4", "gemma4_vision"}
SHARING |= {"gemma4_unified", "gemma4_unified_vision"}
"""Families whose upper layers may read the caches of lower ones."""


def kv_heads_of(family: str, config: ConfigReader, heads: int) -> int:
    """The KV heads beside `heads` query heads. Some families have keys of their own."""
    if family == "gpt_bigcode":
        return 1 if config.bool("multi_query", True) else heads
    if family == "dbrx":
        section = config.section("attn_config")
        return 1 if section is None else section.int("kv_n_heads", 1, ge=1)
    if family != "falcon":
        return config.int("num_key_value_heads", heads, ge=1)
    if config.bool("new_decoder_architecture", False):
        return config.int("num_kv_heads", heads, aliases=("n_head_kv",), ge=1)
    return 1 if config.bool("multi_query", True) else heads


def whole_cache_heads(family: str, config: ConfigReader, heads: int) -> tuple[int, ...]:
    """The KV heads of layers that keep whole sequences, each number once, beside `heads` query
    heads; 1 of latents, which all heads share. Empty where the config alone does not say."""
    if family in ENCODERS | RECURRENT | {FALLBACK} or any(key in config for key in OWN_HEADS):
        return ()
    if config.int("kv_lora_rank", None, ge=1) is not None:
        return (1,)
    listed = config.list(KV_HEADS_LISTED, None, of=int)
    if listed is not None:
        return tuple(sorted({count for count in listed if count > 0}))
    return (kv_heads_of(family, config, heads),)


def layers_without_cache(family: str, config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """The layers that keep no cache per token, as far as the config lists them: recurrent ones, and
    those that read the caches of others."""
    kinds = config.get("layers_block_type") or config.get("layer_types")
    attending, shared = config.get("attn_layer_indices"), config.get("num_kv_shared_layers")
    sources, repeated = config.get("kv_source_layers"), config.get("block_types")
    if isinstance(listed := config.get(KV_HEADS_LISTED), list):
        return frozenset(i for i, count in enumerate(listed) if count == 0)
    if family in RECURRENT:
        return frozenset(range(layers))
    if family in SHARING and isinstance(shared, int):
        return frozenset(range(layers - shared, layers))
    if isinstance(sources, list) and len(sources) == layers:
        return frozenset(i for i, source in enumerate(sources) if source != i)
    if isinstance(kinds, list):
        return frozenset(i for i, kind in enumerate(kinds) if kind in RECURRENT_KINDS)
    if isinstance(repeated, list) and repeated:
        return frozenset(i for i in range(layers) if repeated[i % len(repeated)] in RECURRENT_KINDS)
    if isinstance(crossing := config.get("cross_attention_layers"), list):
        return frozenset(i for i in crossing if isinstance(i, int))
    if isinstance(config.get("attn_type_list"), list):
        return frozenset(i for i, kind in enumerate(config["attn_type_list"]) if kind == 0)
    if isinstance(attending, list):
        return frozenset(i for i in range(layers) if i not in attending)
    if isinstance(every := config.get("layer_group_size"), int) and every > 0:
        return frozenset(i for i in range(layers // every * every) if (i + 1) % every)
    return frozenset()


def indexed_layers(family: str, config: ConfigReader, layers: int) -> int:
    """How many layers keep keys of an indexer, of a config that states one."""
    if family in CHOICES_SHARED:
        shared = shared_layers(config, layers, every=CHOICES_SHARED[family])
        return layers - sum(shared)
    types = config.list("layer_types", None, of=str)
    return layers if types is None or CHOOSING not in types else types.count(CHOOSING)

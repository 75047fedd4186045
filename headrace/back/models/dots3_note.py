"""dots 3 note (text): latent attention, in most layers over windows with sizes of their own, in the
others over what an indexer chooses, the shared key normed and a gate for each head; dense layers
first, then experts routed as DeepSeek-V3 routes them."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.latent_attention import LatentAttentionSpec
from headrace.back.layers.moe.mixture import MixtureSpec, SharedSpec
from headrace.back.layers.output_gate import OutputGate
from headrace.back.layers.scope import Scope
from headrace.back.layers.window_choice import WindowChoiceSpec
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.latent import read_indexer, read_latent_attention
from headrace.back.models.moe import divided, feed_forwards, sigmoid_mixture, sparse_by_type
from headrace.base.config.hf import ConfigReader

WINDOW, CHOSEN, FULL = "sliding_attention", "indexed_attention", "full_attention"
OWN = {
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""What layers with windows have of their own, below the prefix `swa_` in the first configs."""
IGNORED = (r"(model\.)?(vision_encoder|audio_encoder|audio_adapter)\..*",)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Dots3NoteForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    sparse = sparse_by_type(config, sizes.layers, dense=1)
    branches = feed_forwards(_mixture(config), sparse)
    layers = tuple(
        LayerSpec(
            mixer=_attention(scope, _of_layer(config, i, kind), sizes, kind),
            feed_forward=branches[i],
        )
        for i, kind in enumerate(_kinds(config, sizes.layers))
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, ignored=IGNORED))


def _of_layer(config: ConfigReader, layer: int, kind: str) -> ConfigReader:
    """The config as this layer reads it."""
    of_layers = config.section("per_layer_config")
    own = of_layers.section(str(layer)) if of_layers is not None else None
    if own is not None:
        return ConfigReader({**config.raw, **own.raw}, config.where)
    if kind != WINDOW:
        return config
    stated = {key: config.int(f"swa_{key}", default, ge=1) for key, default in OWN.items()}
    return ConfigReader({**config.raw, **stated}, config.where)


def _attention(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, kind: str
) -> LatentAttentionSpec:
    heads = config.int("num_attention_heads", sizes.heads, ge=1)
    attention = read_latent_attention(
        scope, config, replace(sizes, heads=heads), layout="pairs", layer_type=kind
    )
    if attention.q_rank is None:
        raise config.wrong("q_lora_rank", "a number")
    window = config.int("sliding_window", 512, aliases=("sliding_window_size",), ge=1)
    attention = replace(
        attention,
        scale=attention.scale * (sizes.width / attention.q_rank) ** 0.5,
        latent_scale=(sizes.width / attention.rank) ** 0.5,
        eps=sizes.eps,
        key_norm="k_rope_only_layernorm",
        gate=OutputGate(name="g_proj", per_head=True),
    )
    if kind == FULL:
        return attention
    if kind == CHOSEN:
        return replace(attention, indexer=read_indexer(config, attention, layout="pairs"))
    return replace(attention, window=window, indexer=WindowChoiceSpec(window=window))


def _mixture(config: ConfigReader) -> MixtureSpec:
    mixture = sigmoid_mixture(config)
    count = config.int("n_shared_experts", 1, ge=1)
    key = "shared_experts_intermediate_size"
    shared = count * config.int(key, 1536, aliases=("moe_shared_expert_intermediate_size",), ge=1)
    inner = divided(config, key, shared, mixture.inner)
    return replace(mixture, shared=SharedSpec(inner=inner))


def _kinds(config: ConfigReader, layers: int) -> list[str]:
    types = config.list("layer_types", None, of=str)
    chosen = FULL if not config.bool("use_dsa", True) else CHOSEN
    if types is None:
        slides = config.bool("use_sliding_window", True)
        return [WINDOW if slides and i > 1 and i % 4 != 1 else chosen for i in range(layers)]
    if len(types) != layers or not set(types) <= {WINDOW, CHOSEN, FULL}:
        raise config.wrong("layer_types", f"{layers} of {WINDOW}, {CHOSEN}, {FULL}")
    if "per_layer_config" in config:
        return list(types)
    return [WINDOW if kind == WINDOW else chosen for kind in types]

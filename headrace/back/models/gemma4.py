"""Gemma 4, text: local and global layers whose heads have sizes of their own, norms over queries,
keys and values, upper layers that read the caches of lower ones, inputs of each layer's own, a
learned scale behind each layer, and, in some sizes, experts beside the dense MLP."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.layer_tail import LayerInputsSpec, LayerTailSpec
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.mlp import FeedForwardSpec, GatedMLPSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.normed import NormedMixtureSpec
from headrace.back.layers.moe.weights import MergedExperts, SeparateExperts
from headrace.back.layers.norm import SANDWICH
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.shared_attention import SharedAttentionSpec
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, LayerSpec, read_windows
from headrace.back.models.encoder import EncoderSizes
from headrace.back.models.gemma2 import embedding_scale, gemma_sizes
from headrace.base.config.hf import ConfigReader

OTHER_PARTS = r"model\.(vision_tower|vision_embedder|audio_tower|embed_vision|embed_audio)\..*"
LOCAL, GLOBAL = "sliding_attention", "full_attention"
LAYOUT = MergedExperts(up="experts.gate_up_proj", down="experts.down_proj")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Gemma4ForCausalLM."""
    sizes = gemma_sizes(config)
    if config.choice("use_bidirectional_attention", ("all", "vision"), None) == "all":
        raise config.wrong("use_bidirectional_attention", "null or vision for generation")
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", 512, ge=1),
        sliding=lambda layer: (layer + 1) % 6 != 0,
    )
    windows = (*windows[:-1], None)  # the last layer sees all, whatever the list says
    shared = config.int("num_kv_shared_layers", 0, ge=0, le=sizes.layers - 1)
    first_shared = sizes.layers - shared
    width = config.int("hidden_size_per_layer_input", 256, ge=0)
    mixers = shared_caches(config, _attentions(scope, config, sizes, windows), first_shared)
    layers = tuple(
        LayerSpec(
            mixer=mixer,
            placement=SANDWICH,
            feed_forward=_feed_forward(config, sizes, shares=layer >= first_shared),
            tail=LayerTailSpec(width=width),
        )
        for layer, mixer in enumerate(mixers)
    )
    inputs = (
        None
        if not width
        else LayerInputsSpec(
            vocabulary=layer_vocabulary(config, sizes.vocabulary),
            width=width,
            scale=embedding_scale(width, scope.dtype),
            media_id=config.int("pad_token_id", 0, ge=0, le=sizes.vocabulary - 1),
        )
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            embedding_scale=embedding_scale(sizes.width, scope.dtype),
            logits_softcap=config.float("final_logit_softcapping", None, ge=1e-6),
            layer_inputs=inputs,
            ignored=(OTHER_PARTS, *unread_projections(first_shared, sizes.layers)),
        ),
    )


def layer_vocabulary(config: ConfigReader, vocabulary: int) -> int:
    """Rows of the table of the layers' inputs, which every token must have."""
    rows = config.int("vocab_size_per_layer_input", 262_144, ge=1)
    if rows < vocabulary:
        raise config.wrong("vocab_size_per_layer_input", f"at least vocab_size ({vocabulary})")
    return rows


def shared_caches(
    config: ConfigReader, attentions: tuple[AttentionSpec, ...], first_shared: int
) -> tuple[MixerSpec, ...]:
    """From `first_shared` on, each layer reads the cache of the last one below that has its
    window."""
    writers = {spec.window: layer for layer, spec in enumerate(attentions[:first_shared])}
    if any(spec.window not in writers for spec in attentions):
        raise config.wrong(
            "num_kv_shared_layers", "such that each kind of layer is among those that share nothing"
        )
    above = (
        SharedAttentionSpec(attention=spec, cache=writers[spec.window])
        for spec in attentions[first_shared:]
    )
    return (*attentions[:first_shared], *above)


def unread_projections(first_shared: int, layers: int) -> tuple[str, ...]:
    """What checkpoints hold of layers that have no keys and values of their own."""
    if first_shared == layers:
        return ()
    numbers = "|".join(str(layer) for layer in range(first_shared, layers))
    return (rf".*layers\.({numbers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.\w+",)


def _attentions(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, windows: tuple[int | None, ...]
) -> tuple[AttentionSpec, ...]:
    """Keys of global layers are their values where `attention_k_eq_v` says so."""
    bias, same = config.bool("attention_bias", False), config.bool("attention_k_eq_v", False)
    ropes: dict[tuple[str, int], RopeSpec] = {}
    specs = []
    for layer, window in enumerate(windows):
        kind = LOCAL if window else GLOBAL
        head_dim, kv_heads = layer_heads(config, sizes, layer, whole=window is None)
        key = kind, head_dim
        if key not in ropes:
            ropes[key] = _rope(config, kind, head_dim, scope.max_positions)
        specs.append(
            AttentionSpec(
                width=sizes.width,
                heads=sizes.heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                scale=1.0,
                rope=ropes[key],
                window=window,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=QKNorm(eps=sizes.eps),
                value_eps=sizes.eps,
                keys_are_values=same and window is None,
            )
        )
    return tuple(specs)


def _rope(config: ConfigReader, kind: str, head_dim: int, max_positions: int) -> RopeSpec:
    """As the config states it for this kind of layer, else as the class does."""
    if config.section("rope_parameters") is None:
        stated = {"rope_type": "default", "rope_theta": 10_000.0}
        if kind == GLOBAL:
            stated = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
        raw = {**config.raw, "rope_parameters": {kind: stated}}
        config = ConfigReader(raw, config.where)
    return read_rope(config, head_dim=head_dim, max_positions=max_positions, layer_type=kind)


def layer_heads(
    config: ConfigReader, sizes: DecoderSizes | EncoderSizes, layer: int, *, whole: bool
) -> tuple[int, int]:
    """head_dim and KV heads of a layer: those of `per_layer_config`, or the keys of global layers
    (`whole`)."""
    head_dim, kv_heads, reader = sizes.head_dim, sizes.kv_heads, config
    listed = config.section("per_layer_config")
    if listed is not None:
        reader = listed.section(str(layer)) or ConfigReader({}, listed.where)
        head_dim = reader.int("head_dim", head_dim, ge=1)
        kv_heads = reader.int("num_key_value_heads", kv_heads, ge=1)
    elif whole:
        head_dim = config.int("global_head_dim", 512, ge=1)
        if config.bool("attention_k_eq_v", False):
            kv_heads = config.int("num_global_key_value_heads", kv_heads, ge=1)
    if sizes.heads % kv_heads:
        key = "num_key_value_heads" if listed is not None else "num_global_key_value_heads"
        raise reader.wrong(key, f"a divisor of num_attention_heads ({sizes.heads})")
    return head_dim, kv_heads


def _feed_forward(config: ConfigReader, sizes: DecoderSizes, *, shares: bool) -> FeedForwardSpec:
    """Layers without a cache of their own may be twice as wide."""
    dense = GatedMLPSpec()
    if shares and config.bool("use_double_wide_mlp", False):
        dense = replace(dense, inner=2 * sizes.inner)
    if not config.bool("enable_moe_block", False):
        return dense
    experts = config.int("num_experts", ge=1)
    router = RouterSpec(
        experts=experts,
        top_k=config.int("top_k_experts", ge=1, le=experts),
        renormalize=True,
        name="router.proj",
        expert_scale="router.per_expert_scale",
    )
    mixture = MixtureSpec(
        router=router,
        inner=config.int("moe_intermediate_size", ge=1),
        layout=SeparateExperts() if config.bool("separate_experts", False) else LAYOUT,
    )
    return NormedMixtureSpec(mixture=mixture, dense=dense, eps=sizes.eps)

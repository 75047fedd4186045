"""Step-3.5-Flash, alone and as the text part of Step-3.7: layers with windows have heads of their
own number, rotation and base; a gate for each head; dense layers first, then experts by sigmoid
with a bias that only chooses, their activations bounded layer by layer."""

from __future__ import annotations

from headrace.back.kernels.experts.op import SWIGLU_STEP
from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.mlp import GATED_MLP, FeedForwardSpec
from headrace.back.layers.moe.beside import BesideSpec, LoneExpert
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.weights import StackedExperts
from headrace.back.layers.norm import RMS_UNIT_OFFSET
from headrace.back.layers.output_gate import OutputGate
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
    read_windows,
)
from headrace.back.models.moe import draft_layers, scored_by, sparse_by_type
from headrace.base.config.hf import ConfigReader

PARTS = (r"vision_model\..*", r"vit_large_projector\..*")
"""Of Step-3.7, which are not read."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Step3p5ForCausalLM, and the text part of Step3p7ForConditionalGeneration."""
    groups = config.int("num_attention_groups", None, ge=1)
    sizes = read_sizes(config, eps=1e-5, kv_heads=groups)
    windows = read_windows(
        _trunk(config, sizes.layers),
        sizes.layers,
        window=config.int("sliding_window", None, ge=1),
        sliding=lambda layer: False,
    )
    layers = tuple(
        LayerSpec(
            mixer=_attention(scope, _of_layer(config, i, windows[i]), sizes, windows[i]),
            feed_forward=_feed_forward(config, i, sparse=sparse),
        )
        for i, sparse in enumerate(_sparse(config, sizes.layers))
    )
    ignored = (*PARTS, *draft_layers(config, sizes.layers))
    spec = DecoderSpec(
        sizes=sizes,
        layers=layers,
        norm=RMS_UNIT_OFFSET,
        ignored=ignored,
        draft_layer=_draft_layer(scope, config, sizes),
    )
    return Decoder(scope, spec)


def _draft_layer(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> LayerSpec | None:
    """The layer of the first head for multi-token prediction, which is dense: the lists of layers
    go on with those of the heads."""
    types = config.raw.get("layer_types")
    if not isinstance(types, list) or len(types) <= sizes.layers:
        return None
    window = None
    if types[sizes.layers] == "sliding_attention":
        window = config.int("sliding_window", None, ge=1)
    of_layer = _of_layer(config, sizes.layers, window)
    return LayerSpec(mixer=_attention(scope, of_layer, sizes, window))


def _trunk(config: ConfigReader, layers: int) -> ConfigReader:
    """The config without the kinds of layers that only draft tokens, with which the list may go
    on."""
    types = config.raw.get("layer_types")
    drafts = config.int("num_nextn_predict_layers", 0, ge=0)
    if not isinstance(types, list) or len(types) != layers + drafts:
        return config
    return ConfigReader({**config.raw, "layer_types": types[:layers]}, config.where)


def _sparse(config: ConfigReader, layers: int) -> list[bool]:
    """Which layers have experts: `moe_layers_enum` lists them in one text."""
    listed = config.str("moe_layers_enum", None)
    if listed is None:
        return sparse_by_type(config, layers, dense=3)
    names = {name.strip() for name in listed.split(",")}
    return [str(layer) in names for layer in range(layers)]


def _of_layer(config: ConfigReader, layer: int, window: int | None) -> ConfigReader:
    """The config as this layer reads it, where base and share of the rotation are lists and the
    scaling is that of `yarn_only_types`."""
    bases = config.raw.get("rope_theta")
    if not isinstance(bases, list):
        return config
    if len(bases) <= layer:
        raise config.wrong("rope_theta", "a number for each layer")
    shares = config.list("partial_rotary_factors", [1.0] * len(bases), of=float)
    kind = "sliding_attention" if window else "full_attention"
    scaled = config.list("yarn_only_types", (kind,), of=str)
    own = {"rope_theta": bases[layer], "partial_rotary_factor": shares[layer]}
    own["rope_scaling"] = config.raw.get("rope_scaling") if kind in scaled else None
    return ConfigReader({**config.raw, **own}, config.where)


def _attention(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, window: int | None
) -> AttentionSpec:
    kind = "sliding_attention" if window else "full_attention"
    other = config.section("attention_other_setting")
    stated = sizes.heads if other is None else other.int("num_attention_heads", sizes.heads, ge=1)
    heads = config.int("num_sliding_attention_heads", stated, ge=1) if window else sizes.heads
    if heads % sizes.kv_heads:
        allowed = f"a multiple of num_key_value_heads ({sizes.kv_heads})"
        raise config.wrong("num_sliding_attention_heads", allowed)
    scalar = config.float("query_pre_attn_scalar", sizes.head_dim, ge=1e-6)
    bias = config.bool("attention_bias", False)
    return AttentionSpec(
        **{**plain_attention(sizes), "heads": heads, "scale": scalar**-0.5},
        rope=read_rope(
            config,
            head_dim=sizes.head_dim,
            max_positions=scope.max_positions,
            layer_type=kind,
        ),
        window=window,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm(norm=RMS_UNIT_OFFSET, eps=sizes.eps),
        gate=OutputGate(name="g_proj", per_head=True),
    )


def _feed_forward(config: ConfigReader, layer: int, *, sparse: bool) -> FeedForwardSpec:
    shared_limit = _limit(config, "swiglu_limits_shared", layer)
    if not sparse:
        if shared_limit:
            raise config.wrong("swiglu_limits_shared", f"0 for layer {layer}, which is dense")
        return GATED_MLP
    experts = config.int("n_routed_experts", ge=1, aliases=("moe_num_experts",))
    limit = _limit(config, "swiglu_limits", layer)
    mixture = MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", ge=1, le=experts, aliases=("moe_top_k",)),
            score=scored_by(config, "sigmoid"),
            renormalize=True,
            scale=config.float("moe_router_scaling_factor", 1.0),
            bias_name="router_bias",
        ),
        inner=config.int("moe_intermediate_size", ge=1),
        layout=StackedExperts(),
        name="moe",
        activation=SWIGLU_STEP if limit else "silu",
        clamp=limit,
    )
    shared = LoneExpert(
        inner=config.int("share_expert_dim", ge=1, aliases=("share_expert_dims",)),
        name="share_expert",
        activation=SWIGLU_STEP if shared_limit else "silu",
        clamp=shared_limit,
    )
    return BesideSpec(mixture=mixture, shared=shared)


def _limit(config: ConfigReader, key: str, layer: int) -> float:
    """The layer's bound; 0: none. Lists may go on with layers that only draft tokens."""
    limits = config.list(key, None, of=float)
    if limits is None:
        return 0.0
    if len(limits) <= layer:
        raise config.wrong(key, "a number for each layer")
    return limits[layer]

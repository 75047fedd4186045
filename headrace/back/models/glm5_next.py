"""GLM-5.3: Kimi delta attention, and in every fourth layer latent attention without position
embedding over groups of positions that an indexer chooses, in a residual of several streams; dense
layers first, then experts routed as DeepSeek-V3 routes them, all with a bound."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.group_indexer import GatedGroupSpec
from headrace.back.layers.hyper_connections import HyperSpec
from headrace.back.layers.indexer import Selection
from headrace.back.layers.latent_attention import LatentAttentionSpec
from headrace.back.layers.moe.lone import LoneExpert
from headrace.back.layers.rope import RopeSpec
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_delta import GatedDeltaSpec
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, read_sizes
from headrace.back.models.hybrid import MAX_TAPS
from headrace.back.models.hyper_layer import HyperLayerSpec
from headrace.back.models.kimi_linear import NAMES, delta_norm
from headrace.back.models.moe import sigmoid_mixture, sparse_by_type
from headrace.base.config.hf import ConfigReader
from headrace.base.config.index_choices import shared_layers

LINEAR, ATTENDS = "linear_attention", ("indexed_attention", "full_attention")
RENAMED = (
    (r"\.hc_attn_(fn|base|scale)", r".attn_hc.\1"),
    (r"\.hc_ffn_(fn|base|scale)", r".ffn_hc.\1"),
)
VISUAL = r"model\.visual\..*"
IGNORED = (r".*layers\.\d+\.shared_head\..*", VISUAL)
STILL = RopeSpec(kind="default", head_dim=0, frequencies=())
"""No dimension turns."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """The text part of Glm5NextForConditionalGeneration."""
    sizes = read_sizes(config, eps=1e-5)
    streams = HyperSpec(
        streams=config.int("hc_mult", 4, ge=1, le=16),
        eps=config.float("hc_eps", 1e-6, ge=0.0),
        norm_eps=sizes.eps,
        iterations=config.int("hc_sinkhorn_iters", 20, ge=1),
        mean_end=True,
    )
    clamp = config.float("swiglu_limit", 10.0, ge=0.0)
    experts = replace(sigmoid_mixture(config), clamp=clamp)
    dense = LoneExpert(inner=sizes.inner, name="mlp", clamp=clamp)
    delta, attention = _delta(config, sizes), _attention(config, sizes)
    sparse, shared = (
        sparse_by_type(config, sizes.layers, dense=3),
        shared_layers(config, sizes.layers),
    )
    layers = tuple(
        HyperLayerSpec(
            mixer=delta if kind == LINEAR else attention[shared[i]],
            feed_forward=experts if sparse[i] else dense,
            streams=streams,
        )
        for i, kind in enumerate(_kinds(config, sizes.layers))
    )
    drafts = rf".*layers\.{sizes.layers}\..*"
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            streams=streams,
            renamed=RENAMED,
            ignored=(*IGNORED, drafts),
        ),
    )


def _attention(config: ConfigReader, sizes: DecoderSizes) -> list[LatentAttentionSpec]:
    """With an indexer of its own, and with the choice of one before."""
    if config.int("qk_rope_head_dim", 0, ge=0):
        raise config.wrong("qk_rope_head_dim", "0")
    group = config.int("index_kpool", 16, ge=1)
    top_k = config.int("index_topk", 2048, ge=1)
    if top_k % group:
        raise config.wrong("index_topk", f"a multiple of index_kpool ({group})")
    indexer = GatedGroupSpec(
        heads=config.int("index_n_heads", 32, ge=1),
        dim=config.int("index_head_dim", 128, ge=1),
        group=group,
        top_groups=top_k // group,
        eps=1e-6,
        tail=config.bool("index_kpool_always_select_tail", True),
        selection=Selection(),
    )
    nope = config.int("qk_nope_head_dim", 256, ge=1)
    attention = LatentAttentionSpec(
        width=sizes.width,
        heads=sizes.heads,
        q_rank=config.int("q_lora_rank", 1536, ge=1),
        rank=config.int("kv_lora_rank", 512, ge=1),
        nope=nope,
        values=config.int("v_head_dim", 256, ge=1),
        scale=nope**-0.5,
        rope=STILL,
        eps=sizes.eps,
        down_bias=config.bool("attention_bias", False),
        out_bias=config.bool("attention_bias", False),
    )
    return [replace(attention, indexer=replace(indexer, shared=one)) for one in (False, True)]


def _delta(config: ConfigReader, sizes: DecoderSizes) -> GatedDeltaSpec:
    """By keys of their own, or of the section that the first configs have."""
    section = config.section("linear_attn_config") or config
    heads = section.int("linear_num_heads", 64, aliases=("num_heads",), ge=1)
    head_dim = section.int("linear_head_dim", 128, aliases=("head_dim",), ge=1)
    taps = ("short_conv_kernel_size",)
    return GatedDeltaSpec(
        width=sizes.width,
        key_heads=heads,
        heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        taps=section.int("linear_conv_kernel_dim", 4, aliases=taps, ge=2, le=MAX_TAPS),
        norm=delta_norm(heads, sizes.eps),
        names=NAMES,
        per_channel=True,
        bound=_bound(config, section),
        low_rank=head_dim,
    )


def _bound(config: ConfigReader, section: ConfigReader) -> float:
    """Below 0; 0: there is none."""
    if section is not config:
        safe = section.bool("safe_gate", True)
        return section.float("gate_lower_bound", -5.0 if safe else 0.0, le=0.0)
    stated = config.raw.get("linear_lower_bound", -5.0)
    return 0.0 if stated is None else config.float("linear_lower_bound", -5.0, le=0.0)


def _kinds(config: ConfigReader, layers: int) -> list[str]:
    types = config.list("layer_types", None, of=str)
    if types is None:
        return [ATTENDS[0] if i % 4 == 3 else LINEAR for i in range(layers)]
    if len(types) != layers or not set(types) <= {LINEAR, *ATTENDS}:
        raise config.wrong("layer_types", f"{layers} of {LINEAR}, {', '.join(ATTENDS)}")
    return list(types)

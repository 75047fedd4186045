"""Ring and Ling linear (Ling team 2025, "Every attention matters"): lightning attention with
rotated queries and keys, and in each group's last layer softmax attention, of latents since version
2.5; experts as those of Ling 2. Names and keys of the published checkpoints."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.alibi import alibi_slopes
from headrace.back.layers.attention import QKNorm
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.moe.mixture import SharedSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_norm import GatedNormSpec
from headrace.back.layers.ssm.lightning import LightningNames, LightningSpec
from headrace.back.models.bailing_hybrid import LATENT
from headrace.back.models.bailing_moe import NAMES, QK_NAMES, bailing_attention, bailing_mixture
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.latent import read_latent_attention
from headrace.back.models.moe import dense_first, draft_layers, feed_forwards
from headrace.base.config.hf import ConfigReader

LIGHTNING = LightningNames(
    module="attention", merged="query_key_value", by_head=False, gate="g_proj", out="dense"
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """BailingMoeLinearForCausalLM, BailingMoeLinearV2ForCausalLM, BailingMoeV2_5ForCausalLM."""
    sizes = read_sizes(config)
    linear, whole = _lightning(scope, config, sizes), _softmax(scope, config, sizes)
    every = config.int("layer_group_size", 1, ge=1)
    grouped = sizes.layers // every * every
    mixture = bailing_mixture(config)
    shared = config.int("moe_shared_expert_intermediate_size", None, ge=1)
    if mixture.shared is not None and shared is not None:
        count = config.int("num_shared_experts", ge=1)
        mixture = replace(mixture, shared=SharedSpec(inner=shared * count))
    layers = tuple(
        LayerSpec(
            mixer=whole
            if (layer + 1) % every == 0 or layer >= grouped
            else replace(linear, slopes=_slopes(sizes, layer)),
            feed_forward=feed_forward,
        )
        for layer, feed_forward in enumerate(
            feed_forwards(mixture, dense_first(config, sizes.layers))
        )
    )
    ignored = (*draft_layers(config, sizes.layers), r".*\.attention\.slope")
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, names=NAMES, ignored=ignored))


def _softmax(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> MixerSpec:
    if config.int("kv_lora_rank", None, ge=1) is None:
        return bailing_attention(scope, config, sizes)
    return replace(read_latent_attention(scope, config, sizes, layout="pairs"), names=LATENT)


def _lightning(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> LightningSpec:
    groups = config.int("group_norm_size", 1, ge=1)
    if sizes.heads * sizes.head_dim % groups:
        raise config.wrong("group_norm_size", f"a divisor of {sizes.heads * sizes.head_dim}")
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    silu = config.bool("use_linear_silu", False) or config.bool("linear_silu", False)
    return LightningSpec(
        width=sizes.width,
        heads=sizes.heads,
        head_dim=sizes.head_dim,
        slopes=(),
        norm=GatedNormSpec(
            eps=sizes.eps, groups=groups, norm_first=True, gate="sigmoid", name="g_norm"
        ),
        activation="silu" if silu else None,
        scale=sizes.head_dim**-0.5,
        qk_norm=QKNorm(eps=sizes.eps, names=QK_NAMES)
        if config.bool("use_qk_norm", False)
        else None,
        rope=rope if config.bool("linear_rope", True) else None,
        qkv_bias=config.bool("use_qkv_bias", False),
        out_bias=config.bool("use_bias", False),
        names=LIGHTNING,
    )


def _slopes(sizes: DecoderSizes, layer: int) -> tuple[float, ...]:
    """ALiBi's, less in later layers; the first layer's are above them, as in the models' training
    code."""
    less = 1 - (layer - 1) / max(sizes.layers - 1, 1) + 1e-5
    return tuple(slope * less for slope in alibi_slopes(sizes.heads))

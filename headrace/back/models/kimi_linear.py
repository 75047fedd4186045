"""Kimi Linear: three layers of Kimi delta attention to one of latent attention without position
embedding; a dense layer, then experts routed by sigmoid (Kimi Team 2025). Kimi K3 (2026) besides:
attention over a residual by blocks, gated latent attention, experts over latents, and gates and ups
that are bounded."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.kernels.experts.op import SITU, SITU_BOUNDS
from headrace.back.layers.block_residual import BlockMixtureSpec, BlockResidualSpec, MixtureNames
from headrace.back.layers.latent_attention import LatentAttentionSpec
from headrace.back.layers.mixer import MixerSpec
from headrace.back.layers.mlp import GATED_MLP, FeedForwardSpec, SummedSpec
from headrace.back.layers.moe.latent import LatentMixtureSpec
from headrace.back.layers.moe.lone import LoneExpert
from headrace.back.layers.output_gate import OutputGate
from headrace.back.layers.rope import RopeSpec
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_delta import DeltaNames, GatedDeltaSpec
from headrace.back.layers.ssm.gated_norm import GatedNormSpec
from headrace.back.models.block_layer import BlockLayerSpec
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, LayerSpec, read_sizes
from headrace.back.models.decoder_layer import DecoderLayerSpec
from headrace.back.models.hybrid import MAX_TAPS, linear_layers
from headrace.back.models.latent import read_latent_attention
from headrace.back.models.mixtral import LAYOUT
from headrace.back.models.moe import sigmoid_mixture, sparse_by_type
from headrace.base.config.hf import ConfigReader

MIXTURES = tuple(
    MixtureNames(query=f"{name}_proj.weight", norm=f"{name}_norm.weight")
    for name in ("self_attention_res", "mlp_res")
)
END = MixtureNames(query="output_attn_res_proj.weight", norm="output_attn_res_norm.weight")
LATENTS = ("routed_expert_down_proj", "routed_expert_up_proj")
UNUSED = (r"model\.layers\.0\.self_attention_res_(norm|proj)\.weight",)
"""The first layer has nothing to mix."""
RENAMED = ((r"\.block_sparse_moe\.", ".mlp."),)
"""Experts, and in some checkpoints dense layers too, stand below a name of their own."""
NAMES = DeltaNames(
    module="self_attn",
    parts=("q_proj", "k_proj", "v_proj", "g_a_proj", "b_proj", "f_a_proj"),
    gate_up="g_b_proj",
    decay_up="f_b_proj",
)
FULL_RANK = replace(NAMES, parts=(*NAMES.parts[:3], "g_proj", *NAMES.parts[4:]), gate_up=None)
"""Where the gate is one matrix."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """KimiLinearForCausalLM; KimiK3ForConditionalGeneration, its text part."""
    sizes = read_sizes(config, eps=1e-5, activation=("hidden_activation",))
    delta, latent = _delta(config, sizes), _latent(scope, config, sizes)
    mixers = _mixers(config, sizes.layers, delta, latent)
    branches = _feed_forwards(config, sizes)
    size = config.int("attn_res_block_size", None, ge=1)
    if size is None:
        layers: tuple[DecoderLayerSpec, ...] = tuple(
            LayerSpec(mixer=mixer, feed_forward=branch)
            for mixer, branch in zip(mixers, branches, strict=True)
        )
        return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, renamed=RENAMED))
    residual = BlockResidualSpec(
        layers=sizes.layers,
        size=size,
        mixture=BlockMixtureSpec(eps=sizes.eps),
        end=END,
        shape=(1,),
    )
    layers = tuple(
        BlockLayerSpec(index=i, mixer=mixer, feed_forward=branch, residual=residual, names=MIXTURES)
        for i, (mixer, branch) in enumerate(zip(mixers, branches, strict=True))
    )
    spec = DecoderSpec(
        sizes=sizes, layers=layers, streams=residual, ignored=UNUSED, renamed=RENAMED
    )
    return Decoder(scope, spec)


def _feed_forwards(config: ConfigReader, sizes: DecoderSizes) -> tuple[FeedForwardSpec, ...]:
    """Dense layers, then experts, which may compute over latents of tokens."""
    activation = config.choice("hidden_act", ("silu", SITU), "silu")
    dense: FeedForwardSpec = GATED_MLP
    mixture = replace(sigmoid_mixture(config), layout=LAYOUT)
    if activation == SITU:
        bounds = ("activation_situ_beta", "activation_situ_linear_beta")
        for key, bound in zip(bounds, SITU_BOUNDS, strict=True):
            if config.float(key, 1.0) != bound:
                raise config.wrong(key, str(bound))
        dense = LoneExpert(inner=sizes.inner, name="mlp", activation=SITU)
        mixture = replace(mixture, activation=SITU)
    sparse: FeedForwardSpec = mixture
    latent = config.int("routed_expert_hidden_size", None, ge=1)
    if latent is not None:
        normed = config.bool("latent_moe_use_norm", False)
        sparse = LatentMixtureSpec(
            mixture=replace(mixture, shared=None),
            latent=latent,
            names=LATENTS,
            norm=("routed_expert_norm", sizes.eps) if normed else None,
        )
        if mixture.shared is not None:
            beside = LoneExpert(
                inner=mixture.shared.inner, name="mlp.shared_experts", activation=activation
            )
            sparse = SummedSpec(experts=sparse, beside=beside)
    kinds = sparse_by_type(config, sizes.layers, dense=1)
    return tuple(sparse if is_sparse else dense for is_sparse in kinds)


def _latent(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> LatentAttentionSpec:
    """Its positions are those of the other layers: what would be rotated turns by 0."""
    spec = read_latent_attention(scope, config, sizes)
    still = RopeSpec(
        kind="default",
        head_dim=spec.rope.head_dim,
        frequencies=(0.0,) * len(spec.rope.frequencies),
    )
    gate = OutputGate(name="g_proj") if config.bool("mla_use_output_gate", False) else None
    return replace(spec, rope=still, gate=gate)


def _delta(config: ConfigReader, sizes: DecoderSizes) -> GatedDeltaSpec:
    """By keys of their own, or of the section that the first checkpoints have."""
    section = config.section("linear_attn_config") or config
    heads = section.int("linear_num_heads", 32, aliases=("num_heads",), ge=1)
    head_dim = section.int("linear_head_dim", 128, aliases=("head_dim",), ge=1)
    taps = section.int(
        "linear_conv_kernel_dim", 4, aliases=("short_conv_kernel_size",), ge=2, le=MAX_TAPS
    )
    full = section.bool("use_full_rank_gate", False)
    padded = "attn_res_block_size" in config
    return GatedDeltaSpec(
        width=sizes.width,
        key_heads=heads,
        heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        taps=taps,
        norm=delta_norm(heads, sizes.eps),
        names=FULL_RANK if full else NAMES,
        per_channel=True,
        bound=section.float("gate_lower_bound", 0.0, le=0.0),
        low_rank=head_dim,
        decay_shape=(1, 1, -1, 1),
        decay_rows=max(heads, head_dim) if padded else None,
    )


def delta_norm(heads: int, eps: float) -> GatedNormSpec:
    """The gated norm of Kimi delta attention."""
    return GatedNormSpec(
        eps=eps, groups=heads, norm_first=True, gate="sigmoid", shared=True, name="o_norm"
    )


def _mixers(
    config: ConfigReader, layers: int, delta: MixerSpec, latent: MixerSpec
) -> list[MixerSpec]:
    """By `layer_types`, or by the section's lists, which count layers from 1."""
    section = config.section("linear_attn_config")
    if "layer_types" not in config and section is not None:
        kinds = section.list("kda_layers", of=int)
        return [delta if i + 1 in kinds else latent for i in range(layers)]
    is_linear = linear_layers(config, layers, default=lambda i: i == 0 or i % 4 != 0)
    return [delta if linear else latent for linear in is_linear]

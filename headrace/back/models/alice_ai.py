"""Alice AI (2026): three layers of Kimi delta attention to one of Qwen3-Next's gated attention,
experts in all, over a residual by blocks (keys and names of the published checkpoint)."""

from __future__ import annotations

from headrace.back.layers.block_residual import BlockMixtureSpec, BlockResidualSpec, MixtureNames
from headrace.back.layers.norm import RMS_UNIT_OFFSET
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_delta import DeltaNames, GatedDeltaSpec
from headrace.back.models.block_layer import BlockLayerSpec
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, read_sizes
from headrace.back.models.hybrid import MAX_TAPS, gated_attention, linear_layers
from headrace.back.models.kimi_linear import delta_norm
from headrace.back.models.qwen2_moe import qwen_mixture
from headrace.base.config.hf import ConfigReader

DELTA = DeltaNames(
    parts=("q_proj", "k_proj", "v_proj", "g_a_proj", "b_proj", "f_a_proj"),
    gate_up="g_b_proj",
    decay_up="f_b_proj",
)
MIXTURES = tuple(
    MixtureNames(query=f"{name}_res_proj.weight", norm=f"{name}_res_norm_weight")
    for name in ("attn", "mlp")
)
END = MixtureNames(query="attnres_final.res_proj.weight", norm="attnres_final.res_norm_weight")
RENAMED = ((r"\.a_log_bias$", ".A_log"),)
DRAFTS = r"(model\.)?mtp\..*"
"""Tensors that only draft tokens."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """AliceAIForCausalLM."""
    sizes = read_sizes(config)
    every = config.int("full_attention_interval", 4, ge=1)
    kinds = linear_layers(config, sizes.layers, default=lambda i: (i + 1) % every != 0)
    delta, attention = _delta(config, sizes), gated_attention(scope, config, sizes)
    residual = BlockResidualSpec(
        layers=sizes.layers,
        size=config.int("block_attn_res_block_size", ge=1),
        mixture=BlockMixtureSpec(eps=sizes.eps),
        end=END,
        shape=(1,),
    )
    mixture = qwen_mixture(config, renormalize=True)
    layers = tuple(
        BlockLayerSpec(
            index=index,
            mixer=delta if is_linear else attention,
            feed_forward=mixture,
            residual=residual,
            names=MIXTURES,
        )
        for index, is_linear in enumerate(kinds)
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            norm=RMS_UNIT_OFFSET,
            streams=residual,
            ignored=(DRAFTS,),
            renamed=RENAMED,
        ),
    )


def _delta(config: ConfigReader, sizes: DecoderSizes) -> GatedDeltaSpec:
    heads = config.int("linear_num_key_heads", ge=1)
    dim = config.int("linear_key_head_dim", ge=1)
    for key, wanted in (("linear_num_value_heads", heads), ("linear_value_head_dim", dim)):
        if config.int(key, wanted, ge=1) != wanted:
            raise config.wrong(key, f"that of keys ({wanted})")
    return GatedDeltaSpec(
        width=sizes.width,
        key_heads=heads,
        heads=heads,
        key_dim=dim,
        value_dim=dim,
        taps=config.int("linear_conv_kernel_dim", 4, ge=2, le=MAX_TAPS),
        norm=delta_norm(heads, sizes.eps),
        names=DELTA,
        per_channel=True,
        low_rank=dim,
    )

"""Mamba 2: layers of one branch each, a norm and the recurrence of state space duality."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.gated_norm import GatedNormSpec
from headrace.back.layers.ssm.mamba2 import Mamba2Spec
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec
from headrace.back.models.ssm import ANY_STEP, BACKBONE, ONE_BRANCH, divides, read_recurrent_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Mamba2ForCausalLM."""
    sizes = read_recurrent_sizes(config, tied=False)
    config.choice("hidden_act", ("silu", "swish"), "silu")
    heads = config.int("num_heads", 128, ge=1)
    head_dim = config.int("head_dim", 64, ge=1)
    groups = divides(config, "n_groups", config.int("n_groups", 8, ge=1), heads)
    layer = LayerSpec(
        mixer=Mamba2Spec(
            width=sizes.width,
            heads=heads,
            head_dim=head_dim,
            state_dim=config.int("state_size", 128, ge=1),
            groups=groups,
            taps=config.int("conv_kernel", 4, ge=2, le=8),
            limits=config.range("time_step_limit", ANY_STEP),
            bias=config.bool("use_bias", False),
            conv_bias=config.bool("use_conv_bias", True),
            norm=GatedNormSpec(eps=sizes.eps, groups=groups),
        ),
        placement=ONE_BRANCH,
        feed_forward=None,
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers, names=BACKBONE))

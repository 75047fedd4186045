"""LASR's encoder, a conformer whose places turn (Google 2025, MedASR; transformers 5.23,
modeling_lasr.py)."""

from __future__ import annotations

from headrace.back.kernels.gated_act.op import ACTIVATIONS
from headrace.back.layers.audio.conformer_branches import BranchSpec
from headrace.back.layers.audio.turning_conformer import TurningConformerSpec
from headrace.base.config.hf import ConfigReader


def lasr_spec(encoder: ConfigReader) -> TurningConformerSpec:
    """By an `encoder_config`."""
    width, heads = (
        encoder.int("hidden_size", 512, ge=2),
        encoder.int("num_attention_heads", 8, ge=1),
    )
    if width % (2 * heads):
        raise encoder.wrong("num_attention_heads", f"a divisor of half of hidden_size ({width})")
    ropes = encoder.section("rope_parameters") or encoder
    branches = BranchSpec(
        width=width,
        inner=encoder.int("intermediate_size", 2048, ge=1),
        taps=encoder.int("conv_kernel_size", 32, ge=1),
        bias=encoder.bool("attention_bias", False),
        convolution_bias=encoder.bool("convolution_bias", False),
        activation=ACTIVATIONS[encoder.choice("hidden_act", ACTIVATIONS, "silu")],
    )
    return TurningConformerSpec(
        bands=encoder.int("num_mel_bins", 128, ge=1),
        channels=encoder.int("subsampling_conv_channels", 256, ge=1),
        seen=encoder.int("subsampling_conv_kernel_size", 5, ge=1, le=64),
        step=encoder.int("subsampling_conv_stride", 2, ge=1, le=64),
        layers=encoder.int("num_hidden_layers", 17, ge=1),
        heads=heads,
        eps=encoder.float("layer_norm_eps", 1e-6, ge=0.0),
        theta=ropes.float("rope_theta", 10_000.0, ge=1.0),
        mlp_shares=_pair(encoder, "feed_forward_residual_weights", (1.5, 0.5)),
        convolution_shares=_pair(encoder, "conv_residual_weights", (2.0, 1.0)),
        branches=branches,
    )


def _pair(encoder: ConfigReader, key: str, default: tuple[float, float]) -> tuple[float, float]:
    one, other = encoder.list(key, default, of=float, length=2)
    return one, other

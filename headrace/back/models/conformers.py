"""Conformers of several families, by their configs: those of wav2vec 2.0's successors, and Granite
Speech 5's."""

from __future__ import annotations

from headrace.back.kernels.gated_act.op import ACTIVATIONS
from headrace.back.layers.audio.conformer_branches import BranchSpec
from headrace.back.layers.audio.halving_conformer import HalvingConformerSpec
from headrace.back.layers.audio.wave_conformer import WaveConformerSpec
from headrace.base.config.hf import ConfigReader

NAMED = {**ACTIVATIONS, "swish": ACTIVATIONS["silu"]}
PLACES = {"relative": "relative", "relative_key": "relative_key", "rotary": "rotary"}


def wave_layers(
    config: ConfigReader, *, default: str, activation: str = "gelu", backward: bool = False
) -> WaveConformerSpec:
    """`default`: of places; `backward`: see the spec."""
    width, heads = (
        config.int("hidden_size", 1024, ge=2),
        config.int("num_attention_heads", 16, ge=1),
    )
    if width % (2 * heads):
        raise config.wrong("num_attention_heads", f"a divisor of half of hidden_size ({width})")
    named = "none"
    if config.raw.get("position_embeddings_type", default) is not None:
        named = PLACES[config.choice("position_embeddings_type", PLACES, default)]
    taps = config.int("conv_depthwise_kernel_size", 31, ge=1)
    if taps % 2 == 0:
        raise config.wrong("conv_depthwise_kernel_size", "an odd number")
    before, behind = (
        config.int(f"{side}_max_position_embeddings", most, ge=0, le=4096)
        for side, most in (("left", 64), ("right", 8))
    )
    return WaveConformerSpec(
        width=width,
        inner=config.int("intermediate_size", 4096, ge=1),
        heads=heads,
        layers=config.int("num_hidden_layers", 24, ge=1),
        taps=taps,
        eps=config.float("layer_norm_eps", 1e-5, ge=0.0),
        activation=NAMED[config.choice("hidden_act", NAMED, activation)],
        places=named,
        reach=(before, behind),
        theta=config.float("rotary_embedding_base", 10_000.0, ge=1.0),
        backward=backward,
    )


def halving_spec(encoder: ConfigReader) -> HalvingConformerSpec:
    """Of Granite Speech 5 (transformers 5.23, configuration_granite_speech5.py)."""
    width, heads = (
        encoder.int("hidden_size", 1024, ge=1),
        encoder.int("num_attention_heads", 8, ge=1),
    )
    if width != heads * encoder.int("head_dim", width // heads, ge=1):
        raise encoder.wrong("head_dim", f"hidden_size / num_attention_heads ({width / heads:g})")
    taps = encoder.int("conv_kernel_size", 7, ge=1)
    if taps % 2 == 0:
        raise encoder.wrong("conv_kernel_size", "an odd number")
    halving = encoder.list("subsample_layers", (0, 1), of=int) or ()
    farthest = encoder.int("max_position_embeddings", 512, ge=1)
    return HalvingConformerSpec(
        bands=4 * encoder.int("num_mel_bins", 80, ge=1, le=1024),
        layers=encoder.int("num_hidden_layers", 16, ge=1),
        halving=tuple(halving),
        heads=heads,
        block=encoder.int("context_size", 128, ge=1, le=farthest),
        farthest=farthest,
        expansion=encoder.int("conv_expansion_factor", 2, ge=1),
        labels=encoder.int("vocab_size", 16_384, ge=1),
        branches=BranchSpec(
            width=width,
            inner=encoder.int("intermediate_size", 4096, ge=1),
            taps=taps,
            bias=encoder.bool("attention_bias", True),
            convolution_bias=False,
            activation=ACTIVATIONS[encoder.choice("hidden_act", ACTIVATIONS, "silu")],
        ),
    )

"""Parakeet's encoder, a FastConformer (Rekesh et al. 2023; transformers 5.23,
modeling_parakeet.py)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.kernels.gated_act.op import ACTIVATIONS
from headrace.back.layers.audio.fast_conformer import FastConformerSpec
from headrace.back.layers.audio.transducer import DIGIT, AskedSpec, TransducerSpec
from headrace.base.config.ctc import most_symbols
from headrace.base.config.hf import ConfigReader


def streaming_spec(encoder: ConfigReader) -> FastConformerSpec:
    """Nemotron's, which looks ahead no further than its own chunk (transformers 5.23,
    modeling_nemotron_asr_streaming.py)."""
    chunk = encoder.int("default_num_lookahead_tokens", 13, ge=0, le=4096) + 1
    before = (encoder.int("sliding_window", 71, ge=1) - 1) // chunk
    return replace(conformer_spec(encoder), chunk=chunk, before=before)


def conformer_spec(encoder: ConfigReader, *, plain: bool = False) -> FastConformerSpec:
    """`plain`: by default it has no biases, and its input is not scaled."""
    width, heads = (
        encoder.int("hidden_size", 1024, ge=2),
        encoder.int("num_attention_heads", 8, ge=1),
    )
    if width % heads:
        raise encoder.wrong("num_attention_heads", f"a divisor of hidden_size ({width})")
    factor = encoder.int("subsampling_factor", 8, ge=2, le=64)
    if factor & (factor - 1):
        raise encoder.wrong("subsampling_factor", "a power of two")
    for key, value in (("subsampling_conv_kernel_size", 3), ("subsampling_conv_stride", 2)):
        if encoder.int(key, value, ge=1) != value:
            raise encoder.wrong(key, str(value))
    taps = encoder.int("conv_kernel_size", 9, ge=1)
    if taps % 2 == 0:
        raise encoder.wrong("conv_kernel_size", "an odd number")
    scaled = encoder.bool("scale_input", not plain)
    return FastConformerSpec(
        bands=encoder.int("num_mel_bins", 80, ge=factor, le=1024),
        channels=encoder.int("subsampling_conv_channels", 256, ge=1),
        halvings=factor.bit_length() - 1,
        width=width,
        inner=encoder.int("intermediate_size", 4096, ge=1),
        layers=encoder.int("num_hidden_layers", 24, ge=1),
        heads=heads,
        taps=taps,
        scale=float(width) ** 0.5 if scaled else 1.0,
        bias=encoder.bool("attention_bias", not plain),
        convolution_bias=encoder.bool("convolution_bias", True),
        activation=ACTIVATIONS[encoder.choice("hidden_act", ACTIVATIONS, "silu")],
    )


def transducer_spec(config: ConfigReader, inputs: int) -> TransducerSpec:
    """Of ParakeetForRNNT, ParakeetForTDT, NemotronAsrStreamingForRNNT and Nemotron3_5AsrForRNNT.
    `inputs`: width of the encoder."""
    vocabulary = config.int("vocab_size", 8193, ge=2, le=DIGIT**2 - 2)
    blank = config.int("blank_token_id", vocabulary - 1, ge=0, le=vocabulary - 1)
    durations = 0
    if config.raw["architectures"][0] == "ParakeetForTDT":
        listed = config.list("durations", (0, 1, 2, 3, 4), of=int) or ()
        durations = len(listed)
        if list(listed) != list(range(durations)) or durations < 2:
            raise config.wrong("durations", "0, 1, 2 and so on")
    asked = None
    if "num_prompts" in config:
        choices = config.int("num_prompts", 128, ge=1, le=1 << 16)
        asked = AskedSpec(
            width=inputs,
            choices=choices,
            inner=config.int("prompt_intermediate_size", 2048, ge=1),
            choice=config.int("default_prompt_id", 101, ge=0, le=choices - 1),
        )
    return TransducerSpec(
        asked=asked,
        inputs=inputs,
        width=config.int("decoder_hidden_size", 640, ge=1),
        layers=config.int("num_decoder_layers", 2, ge=1),
        vocabulary=vocabulary,
        blank=blank,
        start=config.int("decoder_start_token_id", blank, ge=0, le=vocabulary - 1),
        most=most_symbols(config.raw),
        durations=durations,
        activation=ACTIVATIONS[config.choice("hidden_act", ACTIVATIONS, "relu")],
    )

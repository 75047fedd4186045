"""The audio tower of Gemma 4 from its config (transformers 5.23, modeling_gemma4.py)."""

from __future__ import annotations

import math

from headrace.back.layers.audio.usm import UsmLayerSpec
from headrace.back.layers.audio.usm_tower import UsmTower, UsmTowerSpec
from headrace.back.layers.scope import Scope
from headrace.base.config.hf import ConfigReader

BANDS = 128
"""Of the extractor; the config states none."""


def gemma4_audio_tower(scope: Scope, audio: ConfigReader, text: ConfigReader) -> UsmTower:
    """`scope` is that of tower and projection."""
    audio.choice("hidden_act", ("silu",), "silu")
    channels = audio.list("subsampling_conv_channels", (128, 32), of=int, length=2)
    if channels[0] != BANDS:
        raise audio.wrong("subsampling_conv_channels", f"{BANDS} and another number")
    spec = UsmTowerSpec(
        bands=BANDS,
        channels=(channels[0], channels[1]),
        layer=_layer(audio),
        layers=audio.int("num_hidden_layers", 12, ge=1),
        middle=audio.int("output_proj_dims", 1536, ge=1),
        outputs=text.int("hidden_size", ge=1),
    )
    return UsmTower(scope / "audio_tower", scope / "embed_audio", spec)


def _layer(audio: ConfigReader) -> UsmLayerSpec:
    width, heads = (
        audio.int("hidden_size", 1024, ge=2),
        audio.int("num_attention_heads", 8, ge=1),
    )
    if width % heads:
        raise audio.wrong("num_attention_heads", f"a divisor of hidden_size ({width})")
    # The reference's mask leaves out the furthest position on either side, of whose place the
    # first row of its table is.
    left = audio.int("attention_context_left", 13, ge=2)
    right = audio.int("attention_context_right", 0, ge=0)
    chunk = audio.int("attention_chunk_size", 12, ge=1)
    return UsmLayerSpec(
        width=width,
        heads=heads,
        left=left - 1,
        right=max(right - 1, 0),
        places=((chunk + left - 1 + right) // 2 - 1, 0),
        cap=audio.float("attention_logit_cap", 50.0, ge=0.0),
        key_scale=math.log(1 + math.e) / math.log(2),
        taps=audio.int("conv_kernel_size", 5, ge=1),
        share=audio.float("residual_weight", 0.5),
        clip=audio.float("gradient_clipping", 1e10, ge=0.0),
        eps=audio.float("rms_norm_eps", 1e-6, ge=0.0),
        clipped=audio.bool("use_clipped_linears", True),
    )

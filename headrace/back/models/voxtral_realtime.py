"""Voxtral Realtime: Mistral's decoder, which says a token for every 80 ms of sound: what a tower
that hears in time gives is added to the token before, in the prompt and behind it; how far the text
is behind the sound, each layer's second norm is told (Mistral AI 2026; transformers 5.23,
modeling_voxtral_realtime.py)."""

from __future__ import annotations

from headrace.back.kernels.gated_act.op import ACTIVATIONS as FUNCTIONS
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.audio.causal_tower import CausalTower, CausalTowerSpec
from headrace.back.layers.conditioned_norm import ConditionedNormSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.back.models.hearing import parts_that_hear
from headrace.back.models.vision import ACTIVATIONS, with_media
from headrace.base.config.hf import ConfigReader

SECOND = "post_attention_layernorm"
RENAMED = ((r"(.*layers\.\d+)\.ada_rms_norm\.(linear[12]\.weight)", rf"\1.{SECOND}.ada.\2"),)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """VoxtralRealtimeForConditionalGeneration."""
    text, audio = parts_that_hear(config)
    delay = config.int("default_num_delay_tokens", 6, ge=0, le=1024)
    tower = CausalTower(scope, scope / "audio_tower", _tower(config, audio, text))
    decoder = _decoder(scope / "language_model", text, delay=delay)
    return with_media(scope, decoder, tower, renamed=RENAMED)


def _decoder(scope: Scope, text: ConfigReader, *, delay: int) -> Decoder:
    sizes = read_sizes(text, tied=True)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(text, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            window=text.int("sliding_window", None, ge=1),
        ),
        norms={SECOND: ConditionedNormSpec(number=float(delay))},
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))


def _tower(config: ConfigReader, audio: ConfigReader, text: ConfigReader) -> CausalTowerSpec:
    beside = config.int("downsample_factor", 4, ge=1, le=64)
    if config.int("audio_length_per_tok", 2 * beside, ge=1) != 2 * beside:
        raise config.wrong("audio_length_per_tok", f"twice downsample_factor ({2 * beside})")
    width = audio.int("hidden_size", 1280, ge=2)
    heads = audio.int("num_attention_heads", 32, ge=1)
    ropes = audio.section("rope_parameters") or audio
    activation = config.choice("projector_hidden_act", ACTIVATIONS, "gelu")
    return CausalTowerSpec(
        bands=audio.int("num_mel_bins", 128, ge=1),
        width=width,
        inner=audio.int("intermediate_size", 5120, ge=1),
        heads=heads,
        head_dim=audio.int("head_dim", width // heads, ge=2),
        layers=audio.int("num_hidden_layers", 32, ge=1),
        eps=audio.float("rms_norm_eps", 1e-5, ge=0.0),
        window=audio.int("sliding_window", 750, ge=1),
        theta=ropes.float("rope_theta", 10_000.0, ge=1.0),
        beside=beside,
        activation=FUNCTIONS[audio.choice("hidden_act", FUNCTIONS, "silu")],
        projector=TwoLayers(
            width=beside * width,
            outputs=text.int("hidden_size", ge=1),
            bias=False,
            activation=ACTIVATIONS[activation],
        ),
    )

"""SeamlessM4T 1 and 2 as they write down speech or translate it: a conformer over filter banks,
layers that put positions together, and the decoder of M2M-100 (Barrault et al. 2023; transformers
5.23, modeling_seamless_m4t.py, modeling_seamless_m4t_v2.py).

S positions of one input, E width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.layers.audio.wave_conformer import (
    FrameConformer,
    FrameConformerSpec,
    NamedMLP,
    PlacedAttention,
)
from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.positions import SinusoidalPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import PLAIN_ACTIVATIONS, DecoderSizes
from headrace.back.models.conformers import wave_layers
from headrace.back.models.crossing_layer import plain_cross_layer
from headrace.back.models.encoder_decoder import EncoderDecoder, EncoderDecoderSpec, StackSpec
from headrace.back.models.frame_source import FrameSource
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import Strides, length_after

EPS = 1e-5
MOST_ROWS = 1500
"""Of half a minute."""
NORMS = ("self_attn_layer_norm", "cross_attention_layer_norm", "ffn_layer_norm")
MLP = PlainMLPSpec(name="ffn", up="fc1", down="fc2", bias=True)
CROSS = ("cross_attention", "q_proj", "k_proj", "v_proj", "out_proj")
UNREAD = (
    r"(?:text_encoder|t2u_model|vocoder)\..*",
    r"text_decoder\.embed_tokens\.weight",
    r"lm_head\.weight",
    r".*\.(?:num_batches_tracked|inv_freq|pos_conv_embed\..*|masked_spec_embed)",
)


@dataclass(frozen=True, kw_only=True)
class SpeechEncoderSpec:
    """conformer: of the frames; adapters: how many, seen and step: positions that one of them sees,
    and its stride."""

    conformer: FrameConformerSpec
    adapters: int
    seen: int
    step: int

    @property
    def bands(self) -> int:
        """Of a row of frames."""
        return self.conformer.bands

    @property
    def width(self) -> int:
        """Of a position."""
        return self.conformer.width

    @property
    def strides(self) -> Strides:
        """Along time."""
        return ((self.seen, self.step, self.step // 2),) * self.adapters

    def build(self, scope: Scope) -> SpeechEncoder:
        """See ConformerSpec."""
        return SpeechEncoder(scope, self)


class SpeechEncoder:
    """frames_NM -> x_SE of one input."""

    def __init__(self, scope: Scope, spec: SpeechEncoderSpec) -> None:
        self.width, layers = spec.width, spec.conformer.layers
        self._conformer = FrameConformer(scope, spec.conformer)
        self._behind = LAYER.build(scope / "encoder.layer_norm", spec.width, eps=layers.eps)
        self._mlp = NamedMLP(scope / "intermediate_ffn", layers, activation=F.relu)
        self._adapters = [
            AdapterLayer(scope / "adapter.layers" / str(i), spec) for i in range(spec.adapters)
        ]
        self._norm = LAYER.build(scope / "inner_layer_norm", spec.width, eps=EPS)

    def forward(self, frames_NM: torch.Tensor, *, ghosts: int = 0) -> torch.Tensor:
        """See Conformer; there are no ghosts."""
        x_SE = self._behind.norm(self._conformer.forward(frames_NM, ghosts=ghosts))
        x_SE = x_SE + 0.5 * self._mlp.forward(x_SE)
        for adapter in self._adapters:
            x_SE = adapter.forward(x_SE)
        return self._norm.norm(x_SE)


class AdapterLayer:
    """x_SE -> x_SE, of fewer positions: strided convolutions with gates before the residual and
    before attention, then an MLP."""

    def __init__(self, scope: Scope, spec: SpeechEncoderSpec) -> None:
        self._spec, width, layers = spec, spec.width, spec.conformer.layers
        names = ("residual", "self_attn")
        shape = (2 * width, width, spec.seen)
        self._params = [
            (
                scope.param(f"{name}_conv.weight", shape),
                scope.param(f"{name}_conv.bias", (2 * width,)),
            )
            for name in names
        ]
        self._norms = [
            LAYER.build(scope / f"{name}_layer_norm", width, eps=EPS) for name in (*names, "ffn")
        ]
        self._attention = PlacedAttention(scope / "self_attn", layers, "none")
        self._mlp = NamedMLP(scope / "ffn", layers, activation=F.relu)
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = [(weight.take(), bias.take()) for weight, bias in self._params]

    def forward(self, x_SE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        step, (residual, attention, mlp) = self._spec.step, self._norms
        parts = []
        for norm, (weight, bias) in zip((residual, attention), self._weights, strict=True):
            x_AES = norm.norm(x_SE).T[None]
            y_AES = F.conv1d(x_AES, weight, bias, stride=step, padding=step // 2)
            parts.append(F.glu(y_AES, dim=1)[0].T.contiguous())
        x_SE = parts[0] + self._attention.forward(parts[1], None, None)
        return x_SE + self._mlp.forward(mlp.norm(x_SE))


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """SeamlessM4TForSpeechToText, SeamlessM4Tv2ForSpeechToText."""
    source = _speech_encoder(config)
    scope = replace(scope, encoder_tokens=length_after(MOST_ROWS, source.strides))
    sizes = _sizes(config)
    positions = SinusoidalPositions(first=config.int("pad_token_id", 0, ge=0) + 1, spread=1)
    layer = plain_cross_layer(scope, sizes, bias=True, cross=CROSS, feed_forward=MLP, norms=NORMS)
    spec = EncoderDecoderSpec(
        sizes=sizes,
        encoder_layers=0,
        encoder_layer=no_layer,
        layers=(layer,) * sizes.layers,
        norm=LAYER,
        encoder=StackSpec(stack="speech_encoder"),
        decoder=StackSpec(stack="text_decoder", norm="layer_norm", positions=positions),
        hears=lambda at, width: FrameSource(at, source, width, None),
        embedding_scale=sizes.width**0.5 if config.bool("scale_embedding", True) else 1.0,
        prefix="",
        ignored=UNREAD,
    )
    return EncoderDecoder(scope, spec)


def no_layer(scope: Scope, index: int) -> None:
    """Of an encoder that is all in its source."""
    raise AssertionError("this encoder has no layers besides")


def _speech_encoder(config: ConfigReader) -> SpeechEncoderSpec:
    second = config.raw["architectures"][0] == "SeamlessM4Tv2ForSpeechToText"
    if not config.bool("add_adapter", True):
        raise config.wrong("add_adapter", "true")
    seen, step = (config.int(f"adaptor_{key}", 8, ge=1, le=64) for key in ("kernel_size", "stride"))
    layers = wave_layers(
        _named(config), default="relative_key" if second else "relative", backward=second
    )
    size = config.int("speech_encoder_chunk_size", 20_000, ge=1) if second else MOST_ROWS
    if size < MOST_ROWS:
        left = config.int("speech_encoder_left_chunk_num", 128, ge=-1)
        layers = replace(layers, blocks=(size, left))
    return SpeechEncoderSpec(
        conformer=FrameConformerSpec(
            bands=config.int("feature_projection_input_dim", 160, ge=1, le=4096), layers=layers
        ),
        adapters=config.int("num_adapter_layers", 1, ge=0, le=8),
        seen=seen,
        step=step,
    )


def _named(config: ConfigReader) -> ConfigReader:
    """The speech encoder's keys by the names that conformers have."""
    own = {
        "num_hidden_layers": config.int("speech_encoder_layers", 24, ge=1),
        "num_attention_heads": config.int("speech_encoder_attention_heads", 16, ge=1),
        "intermediate_size": config.int("speech_encoder_intermediate_size", 4096, ge=1),
        "hidden_act": config.raw.get("speech_encoder_hidden_act", "swish"),
    }
    return ConfigReader({**config.raw, **own}, config.where)


def _sizes(config: ConfigReader) -> DecoderSizes:
    width = config.int("hidden_size", 1024, ge=1)
    heads = config.int("decoder_attention_heads", 16, ge=1)
    if width % heads:
        raise config.wrong("decoder_attention_heads", f"a divisor of hidden_size ({width})")
    named = config.choice("activation_function", PLAIN_ACTIVATIONS, "relu")
    return DecoderSizes(
        vocabulary=config.int("vocab_size", 256_102, ge=1),
        width=width,
        inner=config.int("decoder_ffn_dim", 8192, ge=1),
        layers=config.int("decoder_layers", 24, ge=1),
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        eps=EPS,
        activation=PLAIN_ACTIVATIONS[named],
        tied=True,
    )

"""Moonshine Streaming: Moonshine's decoder behind an encoder over frames of 5 ms, each of mean 0
and deviation 1, through two convolutions that look back; a position sees some before it and few
behind it, and has no place (transformers 5.23, modeling_moonshine_streaming.py).

A whole sound is read at a time. N samples, S positions, D width of the encoder, E of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.attention.plan import Batch
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation, PlainMLP
from headrace.back.layers.norm import LAYER_NO_BIAS, NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import PLAIN_ACTIVATIONS, DecoderSizes
from headrace.back.models.encoder import EncoderLayer, EncoderSizes
from headrace.back.models.encoder_decoder import EncoderDecoder, EncoderDecoderSpec, StackSpec
from headrace.back.models.moonshine import EPS, MLP, NORMS, cross_layer
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.config.speech import MOONSHINE_STREAMING
from headrace.base.wire.media import encoder_outputs

FRAME, TAPS = MOONSHINE_STREAMING[3], MOONSHINE_STREAMING[5]
FRAME_EPS = 1e-6
NORM = NormSpec(layer=True, offset=1.0)
RENAMED = ((r"(.*encoder\..*norm)\.gamma", r"\1.weight"),)
QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, kw_only=True)
class ListenerSpec:
    """The encoder: its sizes, and of each layer how many positions before the query, with it, and
    how many behind it are seen."""

    sizes: EncoderSizes
    windows: tuple[tuple[int, int], ...]
    bias: bool


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """MoonshineStreamingForConditionalGeneration."""
    inside = config.required_section("encoder_config")
    longest = encoder_outputs(MOONSHINE_STREAMING, MOONSHINE_STREAMING[1])
    scope = replace(scope, encoder_tokens=longest)
    sizes, listener = _sizes(config), _listener(inside, longest)
    positions = config.int("max_position_embeddings", 4096, ge=longest)
    bias = config.bool("attention_bias", False)
    spec = EncoderDecoderSpec(
        sizes=sizes,
        encoder_layers=listener.sizes.layers,
        encoder_layer=lambda at, i: _encoder_layer(at, listener, listener.windows[i]),
        layers=(cross_layer(scope, config, sizes, bias=bias, share=0.8),) * sizes.layers,
        norm=LAYER_NO_BIAS,
        encoder=StackSpec(stack="encoder"),
        decoder=StackSpec(stack="decoder", norm="norm"),
        hears=lambda at, width: ShortFrames(at, listener.sizes.width),
        between=lambda at: Bridge(at, listener.sizes.width, sizes.width, positions),
        shared="decoder.embed_tokens",
        head=None if sizes.tied else "proj_out",
        ignored=(r"proj_out\.weight",) if sizes.tied else (),
    )
    model = EncoderDecoder(scope, spec)
    model.weights = replace(model.weights, renamed=RENAMED)
    return model


class ShortFrames:
    """See SoundSource; `scope` is the encoder's."""

    def __init__(self, scope: Scope, width: int) -> None:
        self._dtype, at = scope.dtype, scope / "embedder"
        shapes: dict[str, tuple[int, ...]] = {
            "comp.log_k": (),
            "linear.weight": (width, FRAME),
            "conv1.weight": (2 * width, width, TAPS),
            "conv1.bias": (2 * width,),
            "conv2.weight": (width, 2 * width, TAPS),
            "conv2.bias": (width,),
        }
        self._params = {name: at.param(name, shape) for name, shape in shapes.items()}
        self._weights: dict[str, torch.Tensor] = {}
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = {name: param.take() for name, param in self._params.items()}

    def read(self, sounds: Sequence[torch.Tensor]) -> torch.Tensor:
        """See SoundSource."""
        return torch.cat([self._read(one) for one in sounds])

    def _read(self, samples_N: torch.Tensor) -> torch.Tensor:
        at, count = self._weights, samples_N.shape[0] // FRAME
        x_NF = samples_N[: count * FRAME].to(self._dtype).view(count, FRAME)
        x_NF = x_NF - x_NF.mean(1, keepdim=True)
        x_NF = x_NF / (x_NF.square().mean(1, keepdim=True) + FRAME_EPS).sqrt()
        x_NF = torch.asinh(at["comp.log_k"].exp() * x_NF)
        x_ADN = F.silu(F.linear(x_NF, at["linear.weight"])).T[None]
        for name in ("conv1", "conv2"):
            x_ADN = F.pad(x_ADN, (TAPS - 1, 0))
            x_ADN = F.conv1d(x_ADN, at[f"{name}.weight"], at[f"{name}.bias"], stride=2)
            x_ADN = F.silu(x_ADN) if name == "conv1" else x_ADN
        return x_ADN[0].T.contiguous()


class Bridge:
    """What cross-attentions read: the encoder's outputs behind its norm, with their places, in the
    decoder's width. `scope` is that of both halves."""

    def __init__(self, scope: Scope, inner: int, width: int, positions: int) -> None:
        scope = replace(scope, mesh=Mesh())
        self._norm = NORM.build(scope / "encoder.final_norm", inner, eps=EPS)
        self._places = (scope / "decoder.pos_emb").param("weight", (positions, inner))
        self._project = None
        if inner != width:
            self._project = WholeLinear(scope / "decoder.proj", inner, width)
        self._place_PD = torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._place_PD = self._places.take()

    def cross(self, x_SD: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:
        """See EncoderBridge."""
        x_SD = self._norm.norm(x_SD) + self._place_PD.index_select(0, positions_S)
        return x_SD if self._project is None else self._project.project(x_SD)


class NearAttention:
    """x_SD -> y_SD, in which a position sees few others of its own sound; every rank computes it
    whole."""

    def __init__(
        self, scope: Scope, sizes: EncoderSizes, window: tuple[int, int], bias: bool
    ) -> None:
        inner = sizes.heads * sizes.head_dim
        self._heads, self._window = sizes.heads, window
        self._query, self._key, self._value = (
            WholeLinear(scope / name, sizes.width, inner, bias=bias) for name in QKV
        )
        self._out = WholeLinear(scope / "o_proj", inner, sizes.width, bias=bias)

    def forward(self, x_SD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See TokenLayer."""
        assert batch.query_start is not None
        lengths = (batch.query_start[1:] - batch.query_start[:-1]).tolist()
        q, k, v = (
            one.project(x_SD).unflatten(1, (self._heads, -1)).split(lengths)
            for one in (self._query, self._key, self._value)
        )
        before, behind = self._window
        parts = []
        for part in zip(q, k, v, strict=True):
            place_S = torch.arange(part[0].shape[0], device=x_SD.device)
            apart_SS = place_S[:, None] - place_S
            seen_SS = ((apart_SS >= 0) & (apart_SS < before)) | (
                (apart_SS < 0) & (-apart_SS < behind)
            )
            heads = (one.transpose(0, 1)[None] for one in part)
            y_HSD = F.scaled_dot_product_attention(*heads, attn_mask=seen_SS)[0]
            parts.append(y_HSD.transpose(0, 1).flatten(1))
        return self._out.project(torch.cat(parts))


def _encoder_layer(scope: Scope, listener: ListenerSpec, window: tuple[int, int]) -> EncoderLayer:
    scope, sizes = replace(scope, mesh=Mesh()), listener.sizes
    before, middle = (NORM.build(scope / name, sizes.width, eps=EPS) for name in NORMS[:2])
    activation = ElementwiseActivation(scope, sizes.activation)
    return EncoderLayer(
        attention=NearAttention(scope / "self_attn", sizes, window, listener.bias),
        mlp=PlainMLP(scope / "mlp", MLP, sizes.feed_forward, activation),
        before_attention=before,
        before_mlp=middle,
    )


def _listener(encoder: ConfigReader, longest: int) -> ListenerSpec:
    rate, span = encoder.int("sample_rate", 16_000, ge=1), encoder.float("frame_ms", 5.0, ge=0.1)
    if round(rate * span / 1000.0) != FRAME or rate != 16_000:
        raise encoder.wrong("frame_ms", "5, of a sample_rate of 16000")
    width, heads = (
        encoder.int("hidden_size", 320, ge=1),
        encoder.int("num_attention_heads", 8, ge=1),
    )
    if encoder.int("num_key_value_heads", heads, ge=1) != heads:
        raise encoder.wrong("num_key_value_heads", f"num_attention_heads ({heads})")
    layers = encoder.int("num_hidden_layers", 6, ge=1)
    stated = encoder.raw.get("sliding_windows") or ((16, 4), (16, 4), (16, 0)) * layers
    windows = tuple((int(before), int(behind)) for before, behind in stated)
    if len(windows) < layers or min(before for before, _ in windows) < 1:
        raise encoder.wrong("sliding_windows", f"two numbers for each of {layers} layers")
    return ListenerSpec(
        sizes=EncoderSizes(
            vocabulary=1,
            width=width,
            inner=encoder.int("intermediate_size", 1280, ge=1),
            layers=layers,
            heads=heads,
            kv_heads=heads,
            head_dim=encoder.int("head_dim", width // heads, ge=1),
            eps=EPS,
            activation=PLAIN_ACTIVATIONS[encoder.choice("hidden_act", PLAIN_ACTIVATIONS, "gelu")],
        ),
        windows=windows,
        bias=encoder.bool("attention_bias", False),
    )


def _sizes(config: ConfigReader) -> DecoderSizes:
    width, heads = config.int("hidden_size", ge=1), config.int("num_attention_heads", 8, ge=1)
    if config.int("num_key_value_heads", heads, ge=1) != heads:
        raise config.wrong("num_key_value_heads", f"num_attention_heads ({heads})")
    return DecoderSizes(
        vocabulary=config.int("vocab_size", ge=1),
        width=width,
        inner=config.int("intermediate_size", ge=1),
        layers=config.int("num_hidden_layers", 6, ge=1),
        heads=heads,
        kv_heads=heads,
        head_dim=config.int("head_dim", width // heads, ge=1),
        eps=EPS,
        activation=PLAIN_ACTIVATIONS[config.choice("hidden_act", PLAIN_ACTIVATIONS, "silu")],
        tied=config.bool("tie_word_embeddings", False),
    )

"""IQuest-Coder's loop (2026): Llama's layers, all of which run several times over each token; later
times attend to the first time's cache and to a window of their own (layers/looped_attention.py;
names and keys of the published checkpoint)."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.looped_attention import LoopedAttention, LoopedAttentionSpec
from headrace.back.layers.norm import RMS, NormSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.decoder_layer import DecoderLayer, Stream
from headrace.base.config.hf import ConfigReader
from headrace.base.errors import ConfigError

NAMES = DecoderNames()


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """IQuestLoopCoderForCausalLM."""
    if scope.kv_quantized and scope.kv_plain:
        why = "--kv-dtype-skip-layers: this model's layers run several times, with caches all alike"
        raise ConfigError(why, field="kv_dtype_skip_layers")
    sizes = read_sizes(config, eps=1e-5)
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(
            config,
            head_dim=sizes.head_dim,
            max_positions=scope.max_positions,
            default_theta=500_000.0,
        ),
    )
    inside = scope if scope.head.bare else scope / NAMES.prefix
    layers = []
    for index in range(sizes.layers):
        mixer = LoopedAttentionSpec(
            attention=attention,
            layers=sizes.layers,
            window=config.int("loop_window_size", 64, ge=1),
            gates=inside / "gate_projections" / str(index),
        )
        at = inside / NAMES.layers / str(index)
        layers.append(LayerSpec(mixer=mixer).build(at, index, sizes, RMS))
    times = config.int("loop_num", 2, ge=1, le=64)
    runs = tuple(LoopTimeSpec(layers=tuple(layers), time=time) for time in range(times))
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=runs, names=NAMES))


@dataclass(frozen=True, kw_only=True)
class LoopTimeSpec:
    """One time that all layers run, as one layer of their decoder."""

    layers: tuple[DecoderLayer, ...]
    time: int

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> LoopTime:
        """See DecoderLayerSpec."""
        return LoopTime(self.layers, self.time)


class LoopTime:
    """See LoopTimeSpec."""

    mixer: DecoderLayer | None = None
    tail: Tail | None = None
    takes_adapters = False

    def __init__(self, layers: tuple[DecoderLayer, ...], time: int) -> None:
        self._layers = [_again(layer, time) for layer in layers]
        self.kv_forms: tuple[CacheForm, ...] = tuple(
            form for layer in self._layers for form in layer.kv_forms
        )

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        for layer in self._layers:
            stream = layer.forward(stream, batch, last=last and layer is self._layers[-1])
        return stream


def _again(layer: DecoderLayer, time: int) -> DecoderLayer:
    """The layer as it runs that time: with the same weights."""
    assert isinstance(layer.mixer, LoopedAttention), layer.mixer
    again = copy(layer)
    again.mixer = layer.mixer.again(time)
    return again

"""Ouro (Zhu et al. 2025, "Scaling Latent Reasoning via Looped Language Models"): Llama's layers
between norms, all of which run several times over each token. Each time has a cache of its own, and
ends with the norm that stands behind the layers elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.linear import add_norm
from headrace.back.layers.norm import RMS, NormPlacement, NormSpec
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
    read_windows,
)
from headrace.back.models.decoder_layer import DecoderLayer, Stream
from headrace.back.models.hrm_text import from_cache
from headrace.base.config.hf import ConfigReader
from headrace.base.errors import ConfigError

NAMES = DecoderNames(norm=None)
PLACEMENT = NormPlacement(
    before_attention="input_layernorm",
    after_attention="input_layernorm_2",
    before_mlp="post_attention_layernorm",
    after_mlp="post_attention_layernorm_2",
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """OuroForCausalLM. Tokens run all times: the gate that ends them early is not read."""
    if scope.kv_quantized and scope.kv_plain:
        why = "--kv-dtype-skip-layers: this model's layers run several times, with caches all alike"
        raise ConfigError(why, field="kv_dtype_skip_layers")
    if config.float("early_exit_threshold", 1.0) < 1.0:
        raise config.wrong("early_exit_threshold", "1: no token ends early")
    sizes = read_sizes(config)
    windows = read_windows(
        config,
        sizes.layers,
        window=config.int("sliding_window", None, ge=1),
        sliding=lambda _: config.bool("use_sliding_window", False),
    )
    shared = {
        **plain_attention(sizes),
        "rope": read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
    }
    inside = scope if scope.head.bare else scope / NAMES.prefix
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**shared, window=window), placement=PLACEMENT)
        for window in windows
    )
    loop = Loop(inside, layers, sizes)
    times = config.int("total_ut_steps", 4, ge=1, le=64)
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(LoopRunSpec(loop=loop),) * times,
            names=NAMES,
            ignored=(r"model\.early_exit_gate\.(weight|bias)",),
        ),
    )


class Loop:
    """All layers and the norm behind them, built once."""

    def __init__(self, inside: Scope, specs: tuple[LayerSpec, ...], sizes: DecoderSizes) -> None:
        self.layers = [
            spec.build(inside / "layers" / str(index), index, sizes, RMS)
            for index, spec in enumerate(specs)
        ]
        self.norm = RMS.build(inside / "norm", sizes.width, eps=sizes.eps)


@dataclass(frozen=True, kw_only=True)
class LoopRunSpec:
    """One time that the layers run."""

    loop: Loop

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> LoopRun:
        """See DecoderLayerSpec."""
        return LoopRun(self.loop, cache)


class LoopRun:
    """See LoopRunSpec. Its layers know the caches of the first time alone, which `cache` is the
    first of."""

    mixer: DecoderLayer | None = None
    tail: Tail | None = None
    takes_adapters = False

    def __init__(self, loop: Loop, cache: int) -> None:
        self._loop, self._cache = loop, cache
        self.kv_forms: tuple[CacheForm, ...] = tuple(
            replace(form, cache=form.cache + cache)
            for layer in loop.layers
            for form in layer.kv_forms
        )

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        batch, layers = from_cache(batch, self._cache), self._loop.layers
        for layer in layers:
            stream = layer.forward(stream, batch, last=last and layer is layers[-1])
        return None, add_norm(self._loop.norm, *stream)

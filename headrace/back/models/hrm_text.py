"""HRM-Text (hierarchical reasoning, Wang et al. 2025): two stacks of layers that run several times
over each token, the lower one some times for each time of the higher one. Each time has a cache of
its own.

T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.attention import AttentionNames, AttentionSpec
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.linear import MergedTensor, add_norm
from headrace.back.layers.mlp import GatedMLPSpec
from headrace.back.layers.norm import RMS_NO_WEIGHT, NormSpec
from headrace.back.layers.output_gate import OutputGate
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
from headrace.base.config.resolved import Decision
from headrace.base.errors import ConfigError

NAMES = DecoderNames(norm=None)
LOW, HIGH = "L_module", "H_module"
ATTENTION = AttentionNames(
    module="attn", grouped=MergedTensor(name="gqkv_proj", parts=(3, 0, 1, 2))
)
"""The gate comes before queries, keys and values."""
CAUSAL = Decision(
    "model.prefix", "prefix_lm", "causal", "prompts are read token by token, as answers are"
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """HrmTextForCausalLM."""
    if scope.kv_quantized and scope.kv_plain:
        why = "--kv-dtype-skip-layers: this model's layers run several times, with caches all alike"
        raise ConfigError(why, field="kv_dtype_skip_layers")
    sizes = read_sizes(config, kv_heads=config.int("num_attention_heads", ge=1))
    inside = scope if scope.head.bare else scope / NAMES.prefix
    layers = config.int("num_layers_per_stack", sizes.layers, ge=1)
    layer = _layer(scope, config, sizes)
    low, high = (Stack(inside / name, layer, layers, sizes) for name in (LOW, HIGH))
    cycle = (low,) * config.int("L_cycles", 3, ge=1) + (high,)
    runs = tuple(
        StackRunSpec(stack=stack, is_high=stack is high)
        for stack in cycle * config.int("H_cycles", 2, ge=1)
    )
    if config.bool("prefix_lm", True):
        scope.ledger.note(CAUSAL)
    spread = config.float("initializer_range", 0.02, ge=1e-6)
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=runs,
            norm=RMS_NO_WEIGHT,
            embedding_scale=config.float("embedding_scale", 1 / spread),
            streams=TwoStatesSpec(),
            names=NAMES,
        ),
    )


def _layer(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> LayerSpec:
    bias = config.bool("attention_bias", False)
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        gate=OutputGate(name="gate_proj"),
        names=ATTENTION,
    )
    mlp = GatedMLPSpec(merged="gate_up_proj", bias=config.bool("mlp_bias", False))
    return LayerSpec(mixer=attention, feed_forward=mlp)


class Stack:
    """The layers of one stack, built once. `scope` is its own."""

    def __init__(self, scope: Scope, spec: LayerSpec, layers: int, sizes: DecoderSizes) -> None:
        self.layers = [
            spec.build(scope / "layers" / str(index), index, sizes, RMS_NO_WEIGHT)
            for index in range(layers)
        ]
        self.norm = RMS_NO_WEIGHT.build(scope / "final_norm", sizes.width, eps=sizes.eps)


@dataclass(frozen=True, kw_only=True)
class StackRunSpec:
    """One time that a stack runs. `is_high`: what it gives is the higher state."""

    stack: Stack
    is_high: bool

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> StackRun:
        """See DecoderLayerSpec."""
        return StackRun(self, cache)


class StackRun:
    """See StackRunSpec. The residual of its stream is [2, T, E]: the higher state, the lower one;
    a stack reads their sum. Its layers know the caches of the stack's first time alone, which
    `cache` is the first of."""

    mixer: DecoderLayer | None = None
    tail: Tail | None = None
    takes_adapters = False

    def __init__(self, spec: StackRunSpec, cache: int) -> None:
        self._stack, self._place, self._cache = spec.stack, 0 if spec.is_high else 1, cache
        self.kv_forms: tuple[CacheForm, ...] = tuple(
            replace(form, cache=form.cache + cache)
            for layer in spec.stack.layers
            for form in layer.kv_forms
        )

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        states_2TE = stream[1]
        inner: Stream = None, states_2TE[0] + states_2TE[1]
        batch, layers = from_cache(batch, self._cache), self._stack.layers
        for layer in layers:
            inner = layer.forward(inner, batch, last=last and layer is layers[-1])
        y_TE = add_norm(self._stack.norm, *inner)
        if last:
            return None, torch.stack((y_TE, y_TE))
        states_2TE[self._place] = y_TE
        return None, states_2TE


def from_cache(batch: Batch, first: int) -> Batch:
    """The batch as layers see it whose first cache is this one."""
    after = batch.last_token_batch
    return replace(
        batch,
        kv=batch.kv[first:],
        group_of_layer=batch.group_of_layer[first:],
        last_token_batch=None if after is None else from_cache(after, first),
    )


class TwoStatesSpec:
    """The states of a token: its embedding, and one that is learned."""

    def build(self, scope: Scope, width: int) -> TwoStates:
        """See ResidualStreamsSpec."""
        return TwoStates(scope, width)


class TwoStates:
    """See TwoStatesSpec."""

    def __init__(self, scope: Scope, width: int) -> None:
        self._first = scope.param("z_L_init", (width,), init="zeros")
        self._first_E = torch.empty(0)
        scope.on_finish(self._finish)

    def begin(self, x_TE: torch.Tensor) -> torch.Tensor:
        """states_2TE, the higher one before the lower one."""
        return torch.stack((x_TE, self._first_E.expand_as(x_TE)))

    def end(self, states_STE: torch.Tensor) -> torch.Tensor:
        """The higher one."""
        return states_STE[0]

    def _finish(self) -> None:
        self._first_E = self._first.take()

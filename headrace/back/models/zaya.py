"""ZAYA (Zyphra 2025): attention with convolved queries and keys, experts of which a router with a
memory over layers chooses one or none, and branches and residual with scales and biases.

T tokens, E hidden size, R the router's size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.convolved_attention import ConvolvedAttentionSpec
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.mixer import Mixer
from headrace.back.layers.mlp import FeedForwardPlace
from headrace.back.layers.moe.carried import CarriedMixtureSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.weights import MergedExperts
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.decoder_layer import Stream
from headrace.base.config.hf import ConfigReader

WHOLE, SLIDING = "hybrid", "hybrid_sliding"
THETA = {WHOLE: 5_000_000.0, SLIDING: 10_000.0}


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """ZayaForCausalLM."""
    inner = config.int("moe_intermediate_size", 2048, ge=1)
    sizes = replace(read_sizes(config, eps=1e-5, tied=True, inner=inner), inner=inner)
    if config.bool("attention_bias", False):
        raise config.wrong("attention_bias", "false")
    if sizes.kv_heads * sizes.head_dim % 2:
        raise config.wrong("num_key_value_heads", "such that all values together have halves")
    mixture, states = _mixture(config, sizes), config.int("router_hidden_size", 256, ge=1)
    layers = tuple(
        ZayaLayerSpec(
            attention=_attention(scope, config, sizes, kind),
            mixture=CarriedMixtureSpec(mixture=mixture, size=states, eps=sizes.eps),
            first=layer == 0,
        )
        for layer, kind in enumerate(_kinds(config, sizes.layers))
    )
    return Decoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=layers,
            streams=RouterStatesSpec(size=states),
            logits_bias=config.bool("lm_head_bias", False),
        ),
    )


def _kinds(config: ConfigReader, layers: int) -> list[str]:
    kinds = config.list("layer_types", [WHOLE] * layers, of=str)
    if len(kinds) != layers or not set(kinds) <= set(THETA):
        raise config.wrong("layer_types", f"{layers} of {', '.join(THETA)}")
    return kinds


def _attention(
    scope: Scope, config: ConfigReader, sizes: DecoderSizes, kind: str
) -> ConvolvedAttentionSpec:
    rope = read_rope(
        config,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        layer_type=kind,
        default_theta=THETA[kind],
        default_share=0.5,
    )
    window = config.int("sliding_window", ge=1) if kind == SLIDING else None
    first, second = (config.int(f"cca_time{i}", 2, ge=1, le=8) for i in (0, 1))
    if first + second < 3:
        raise config.wrong("cca_time1", "such that both convolutions together see two tokens")
    return ConvolvedAttentionSpec(
        attention=AttentionSpec(**plain_attention(sizes), rope=rope, window=window),
        taps=(first, second),
    )


def _mixture(config: ConfigReader, sizes: DecoderSizes) -> MixtureSpec:
    """One expert behind the others gives nothing."""
    experts = config.int("num_experts", 16, ge=1)
    config.int("num_experts_per_tok", 1, ge=1, le=1)
    return MixtureSpec(
        router=RouterSpec(
            experts=experts + 1,
            top_k=1,
            name="gate.router_mlp.out_proj",
            bias_name="gate.balancing_biases",
            idle=1,
            idle_drops=True,
        ),
        inner=sizes.inner,
        layout=MergedExperts(up="experts.gate_up_proj", down="experts.down_proj"),
    )


@dataclass(frozen=True, kw_only=True)
class ZayaLayerSpec:
    """One layer; `first`: none is before it."""

    attention: ConvolvedAttentionSpec
    mixture: CarriedMixtureSpec
    first: bool

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> ZayaLayer:
        """See DecoderLayerSpec."""
        return ZayaLayer(scope, cache, self, sizes, norms)


class ZayaLayer:
    """See ZayaLayerSpec. The residual of its stream is [T, E + R] in float32: the residual, and
    behind it what the last router had in mind."""

    tail: Tail | None = None
    takes_adapters = False

    def __init__(
        self, scope: Scope, cache: int, spec: ZayaLayerSpec, sizes: DecoderSizes, norms: NormSpec
    ) -> None:
        self._width, self._dtype = sizes.width, scope.dtype
        self._before_attention, self._before_mixture = (
            norms.build(scope / name, sizes.width, eps=sizes.eps)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        self.mixer: Mixer[Any] = spec.attention.build(scope, cache)
        self.kv_forms: tuple[CacheForm, ...] = self.mixer.kv_forms
        place = FeedForwardPlace(width=sizes.width, inner=sizes.inner, activation=sizes.activation)
        self._mixture = spec.mixture.build(scope, place, first=spec.first)
        self._behind_attention, self._behind_mixture = (
            ScaledSum(scope / f"post_{branch}_residual_scale", sizes.width)
            for branch in ("attention", "mlp")
        )

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        residual_TX = stream[1]
        x_TE = residual_TX[:, : self._width].to(self._dtype).contiguous()
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        handed = self.mixer.queries(self._before_attention.norm(x_TE), batch, at_N)
        if after is not None and at_N is not None:
            residual_TX, batch = residual_TX.index_select(0, at_N), after
        residual_TE, state_TR = residual_TX[:, : self._width], residual_TX[:, self._width :]
        branch_TE = self.mixer.attend_into(handed, residual_TE, batch)
        assert isinstance(branch_TE, torch.Tensor), "a branch that does not add gives its sum"
        residual_TE = self._behind_attention.of(branch_TE, residual_TE)
        x_TE = self._before_mixture.norm(residual_TE.to(self._dtype))
        branch_TE, state_TR = self._mixture.forward(x_TE, state_TR)
        residual_TE = self._behind_mixture.of(branch_TE, residual_TE)
        return None, torch.cat((residual_TE, state_TR.float()), dim=1)


class ScaledSum:
    """(branch_TE, residual_TE) -> both with scales and biases of their own, added; float32."""

    def __init__(self, scope: Scope, width: int) -> None:
        self._params = [
            scope.param(name, (width,), init=init, dtype=torch.float32)
            for name, init in (
                ("hidden_states_scale", "ones"),
                ("hidden_states_bias", "zeros"),
                ("residual_scale", "ones"),
                ("residual_bias", "zeros"),
            )
        ]
        self._scales: tuple[torch.Tensor, ...] = ()
        scope.on_finish(self._finish)

    def of(self, branch_TE: torch.Tensor, residual_TE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        scale_E, kept_E, bias_E = self._scales
        return branch_TE.float() * scale_E + residual_TE * kept_E + bias_E

    def _finish(self) -> None:
        scale_E, bias_E, kept_E, kept_bias_E = (param.take() for param in self._params)
        self._scales = scale_E, kept_E, bias_E * scale_E + kept_bias_E * kept_E


@dataclass(frozen=True, kw_only=True)
class RouterStatesSpec:
    """`size`: R. The embeddings have a scale and a bias."""

    size: int

    def build(self, scope: Scope, width: int) -> RouterStates:
        """See ResidualStreamsSpec."""
        return RouterStates(scope, width, self.size)


class RouterStates:
    """See RouterStatesSpec."""

    def __init__(self, scope: Scope, width: int, size: int) -> None:
        self._params = [
            scope.param(f"input_hidden_states_{name}", (width,), init=init, dtype=torch.float32)
            for name, init in (("scale", "ones"), ("bias", "zeros"))
        ]
        self._width, self._size, self._dtype = width, size, scope.dtype
        self._scale_E = self._bias_E = torch.empty(0)
        scope.on_finish(self._finish)

    def begin(self, x_TE: torch.Tensor) -> torch.Tensor:
        """residual_TX with no states yet."""
        residual_TE = (x_TE.float() + self._bias_E) * self._scale_E
        return torch.nn.functional.pad(residual_TE, (0, self._size))

    def end(self, residual_TX: torch.Tensor) -> torch.Tensor:
        """x_TE."""
        return residual_TX[:, : self._width].to(self._dtype).contiguous()

    def _finish(self) -> None:
        self._scale_E, self._bias_E = (param.take() for param in self._params)

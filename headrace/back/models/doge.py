"""Doge (Shi et al. 2025): attention with biases that follow from values, and a residual with a
scale of each element for each branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.mixer import Mixer
from headrace.back.layers.mlp import FeedForwardPlace, GatedMLP
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.value_biased_attention import ValueBiasedSpec
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.decoder_layer import Stream
from headrace.base.config.hf import ConfigReader
from headrace.base.errors import ConfigError


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DogeForCausalLM."""
    sizes = read_sizes(config)
    if config.bool("is_moe", False):
        raise config.wrong("is_moe", "false: its router mixes the tokens of a batch")
    if config.int("sliding_window", None, ge=1) is not None:
        raise config.wrong("sliding_window", "null")
    kept = config.int("keep_window_size", 2048, ge=1)
    if scope.max_positions > kept:
        raise ConfigError(
            f"--max-model-len {scope.max_positions}: this model sees all positions only up to its "
            f"keep_window_size, {kept}; use --max-model-len {kept}",
            field="max_model_len",
        )
    bias = config.bool("attention_bias", False)
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm(eps=sizes.eps),
    )
    layer = DogeLayerSpec(
        attention=ValueBiasedSpec(attention=attention), mlp_bias=config.bool("mlp_bias", False)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))


@dataclass(frozen=True, kw_only=True)
class DogeLayerSpec:
    """One layer."""

    attention: ValueBiasedSpec
    mlp_bias: bool

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> DogeLayer:
        """See DecoderLayerSpec."""
        return DogeLayer(scope, cache, self, sizes, norms)


class DogeLayer:
    """See DogeLayerSpec and Layer."""

    tail: Tail | None = None
    takes_adapters = False

    def __init__(
        self, scope: Scope, cache: int, spec: DogeLayerSpec, sizes: DecoderSizes, norms: NormSpec
    ) -> None:
        self._norms = [
            norms.build(scope / name, sizes.width, eps=sizes.eps)
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        self.mixer: Mixer[Any] = spec.attention.build(scope, cache)
        self.kv_forms: tuple[CacheForm, ...] = self.mixer.kv_forms
        place = FeedForwardPlace(width=sizes.width, inner=sizes.inner, activation=sizes.activation)
        self._mlp = GatedMLP(scope / "mlp", place, bias=spec.mlp_bias)
        self._params = [
            scope.param(name, (sizes.width,), init="ones")
            for name in ("input_residual", "post_attention_residual")
        ]
        self._kept: list[torch.Tensor] = []
        scope.on_finish(self._finish)

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        x_TE, (before, between), (kept_E, later_E) = stream[1], self._norms, self._kept
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        handed = self.mixer.queries(before.norm(x_TE), batch, at_N)
        if after is not None and at_N is not None:
            x_TE, batch = x_TE.index_select(0, at_N), after
        branch_TE = self.mixer.attend_into(handed, x_TE, batch)
        assert isinstance(branch_TE, torch.Tensor), "a branch that does not add gives its sum"
        x_TE = torch.addcmul(branch_TE, x_TE, kept_E)
        return None, torch.addcmul(self._mlp.forward(between.norm(x_TE)), x_TE, later_E)

    def _finish(self) -> None:
        self._kept = [param.take() for param in self._params]

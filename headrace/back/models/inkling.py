"""Inkling (Thinking Machines 2026; text): biases by distance that follow from each token's state
instead of a rope, short convolutions of keys, values and both branches, and experts beside which
the shared ones weigh in.

The names are those of the published checkpoint. T tokens, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.attention_names import AttentionNames
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.linear import MergedTensor, add_norm, total
from headrace.back.layers.logits import TopOf
from headrace.back.layers.mixer import Mixer
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec, GatedMLPSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec, SharedSpec
from headrace.back.layers.moe.stacked import PairedExperts
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.query_scale import LateLogScale
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.recurrence import ShortConv, scan_rows
from headrace.back.layers.state_biased_attention import StateBiasedSpec
from headrace.back.models.blocks import (
    Decoder,
    DecoderNames,
    DecoderSizes,
    DecoderSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.decoder_layer import Stream
from headrace.back.models.hybrid import MAX_TAPS
from headrace.back.parallel.shard import Part
from headrace.base.config.hf import ConfigReader

WHOLE, SLIDING = "hybrid", "hybrid_sliding"
DENSE, SPARSE = "dense", "sparse"
NAMES = DecoderNames(embedding="embed", embedding_norm="embed_norm", head="model.llm.unembed")
ATTENTION = AttentionNames(module="attn", query="wq_du", key="wk_dv", value="wv_dv", out="wo_ud")
EXPERTS = PairedExperts(up="experts.w13_weight", down="experts.w2_weight")
SHARED = PairedExperts(up="shared_w13_weight", down="shared_w2_weight")
DRAFTS = (r"model\.mtp\..*",)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """InklingForConditionalGeneration, its text part."""
    stated = config.int("dense_intermediate_size", None, ge=1)
    inner = stated or config.int("intermediate_size", 24576, ge=1)
    sizes = replace(read_sizes(config, inner=inner), inner=inner, tied=False)
    for key in ("shared_expert_sink", "use_embed_norm"):
        if not config.bool(key, True):
            raise config.wrong(key, "true")
    experts = config.int("moe_intermediate_size", 3072, ge=1)
    if stated is not None:
        experts = config.int("intermediate_size", ge=1)
    taps = config.int("conv_kernel_size", 4, aliases=("sconv_kernel_size",), ge=2, le=MAX_TAPS)
    mixture = _mixture(config, experts)
    mlp = GatedMLPSpec(merged=MergedTensor(name="w13_dn", parts=(0, 1), groups=inner), down="w2_md")
    layers = tuple(
        InklingLayerSpec(
            attention=_attention(config, sizes, kind == SLIDING, taps),
            feed_forward=mlp if branch == DENSE else mixture,
            scale="mlp.global_scale" if branch == DENSE else "mlp.gate.global_scale",
            taps=taps,
        )
        for kind, branch in zip(
            read_kinds(config, sizes.layers), _branches(config, sizes.layers), strict=True
        )
    )
    spec = DecoderSpec(
        sizes=sizes,
        layers=layers,
        logits_scale=1 / config.float("logits_mup_width_multiplier", 24.0, ge=1e-6),
        names=NAMES,
        ignored=DRAFTS,
    )
    known = config.int("unpadded_vocab_size", sizes.vocabulary, ge=1, le=sizes.vocabulary)
    return Decoder(scope, spec) if known == sizes.vocabulary else PaddedDecoder(scope, spec, known)


class PaddedDecoder(Decoder):
    """A decoder whose head has rows behind those of the `known` tokens, which nobody may choose."""

    def __init__(self, scope: Scope, spec: DecoderSpec, known: int) -> None:
        super().__init__(scope, spec)
        self._known = known

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """See CausalModel."""
        logits_NV = super().logits(hidden_NE)
        logits_NV[:, self._known :] = float("-inf")
        return logits_NV

    @property
    def argmax(self) -> TopOf | None:
        """None: see CausalModel."""
        return None

    @property
    def top_candidates(self) -> TopOf | None:
        """None: see CausalModel."""
        return None


def read_kinds(config: ConfigReader, layers: int) -> list[str]:
    """Of its layers: WHOLE or SLIDING."""
    local = config.list("local_layer_ids", None, of=int)
    if local is None:
        local = [layer for layer in range(layers) if (layer + 1) % 6]
    kinds = config.list(
        "layer_types", [SLIDING if i in local else WHOLE for i in range(layers)], of=str
    )
    if len(kinds) != layers or not set(kinds) <= {WHOLE, SLIDING}:
        raise config.wrong("layer_types", f"{layers} of {WHOLE}, {SLIDING}")
    return list(kinds)


def _branches(config: ConfigReader, layers: int) -> list[str]:
    dense = config.int("dense_mlp_idx", 0, ge=0)
    kinds = config.list(
        "mlp_layer_types", [DENSE if i < dense else SPARSE for i in range(layers)], of=str
    )
    if len(kinds) != layers or not set(kinds) <= {DENSE, SPARSE}:
        raise config.wrong("mlp_layer_types", f"{layers} of {DENSE}, {SPARSE}")
    return list(kinds)


def _attention(
    config: ConfigReader, sizes: DecoderSizes, sliding: bool, taps: int
) -> StateBiasedSpec:
    """Sliding layers have heads of their own, and biases as far as they see."""
    window, extent = None, config.int("rel_extent", 1024, ge=1)
    growth, first = None, config.int("log_scaling_n_floor", None, ge=1)
    if sliding:
        heads = config.int("swa_num_attention_heads", 64, ge=1)
        kv_heads = config.int("swa_num_key_value_heads", 16, ge=1)
        if heads % kv_heads:
            raise config.wrong("swa_num_key_value_heads", f"a divisor of {heads}")
        head_dim = config.int("swa_head_dim", 128, ge=1)
        sizes = replace(sizes, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        window = extent = config.int("sliding_window_size", 512, aliases=("sliding_window",), ge=1)
    elif first is not None:
        growth = LateLogScale(alpha=config.float("log_scaling_alpha", 0.1), first=first)
    return StateBiasedSpec(
        attention=AttentionSpec(
            **{**plain_attention(sizes), "scale": 1 / sizes.head_dim},
            rope=None,
            window=window,
            qk_norm=QKNorm(eps=sizes.eps),
            query_scale=growth,
            names=ATTENTION,
        ),
        rank=config.int("d_rel", 16, ge=1),
        extent=extent,
        taps=taps,
        states="wr_du",
    )


def _mixture(config: ConfigReader, inner: int) -> MixtureSpec:
    experts = config.int("n_routed_experts", 256, aliases=("num_local_experts",), ge=1)
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 6, ge=1, le=experts),
            score="sigmoid",
            scale=config.float("route_scale", 8.0),
            bias_name="gate.bias",
        ),
        inner=inner,
        layout=EXPERTS,
        shared=SharedSpec(
            inner=inner * config.int("n_shared_experts", 2, ge=1), joint=True, layout=SHARED
        ),
    )


@dataclass(frozen=True, kw_only=True)
class InklingLayerSpec:
    """One layer. `scale`: the name of what its feed-forward gives is multiplied with."""

    attention: StateBiasedSpec
    feed_forward: FeedForwardSpec
    scale: str
    taps: int

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> InklingLayer:
        """See DecoderLayerSpec."""
        return InklingLayer(scope, cache, self, sizes, norms)


class InklingLayer:
    """See InklingLayerSpec. Convolutions follow both branches, so that the last layer too goes on
    with all tokens until its end."""

    tail: Tail | None = None
    takes_adapters = True

    def __init__(
        self, scope: Scope, cache: int, spec: InklingLayerSpec, sizes: DecoderSizes, norms: NormSpec
    ) -> None:
        width = Part("hidden size", sizes.width, 1)
        self._adapters = scope.adapters
        self._before_attention, self._before_mlp = (
            norms.build(scope / name, sizes.width, eps=sizes.eps)
            for name in ("attn_norm", "mlp_norm")
        )
        self.mixer: Mixer[Any] = spec.attention.build(scope, cache)
        own = self.mixer.kv_forms
        self._mlp = spec.feed_forward.build(
            scope,
            FeedForwardPlace(
                width=sizes.width, inner=sizes.inner, activation=sizes.activation, adds=False
            ),
        )
        scale = scope.param(spec.scale, (1,), init="ones", dtype=torch.float32)
        self._first = cache + len(own)
        self._behind_attention, self._behind_mlp = (
            ShortConv(
                scope / name,
                self._first + place,
                (width,),
                taps=spec.taps,
                activation="",
                adds_input=True,
                scale=factor,
            )
            for place, (name, factor) in enumerate((("attn_sconv", None), ("mlp_sconv", scale)))
        )
        self.kv_forms: tuple[CacheForm, ...] = (
            *own,
            self._behind_attention.form,
            self._behind_mlp.form,
        )

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        branch_TE, residual_TE = stream
        x_TE = add_norm(self._before_attention, branch_TE, residual_TE)
        handed = self.mixer.queries(x_TE, batch)
        branch_TE = total(self.mixer.attend_into(handed, residual_TE, batch))
        assert branch_TE is not None, "a branch that does not add gives its sum"
        rows = scan_rows(batch, self._first)
        branch_TE = self._behind_attention.apply(branch_TE, batch, rows)
        x_TE = add_norm(self._before_mlp, branch_TE, residual_TE)
        branch_TE = total(self._mlp.forward_into(x_TE, residual_TE))
        assert branch_TE is not None, "a branch that does not add gives its sum"
        branch_TE = self._behind_mlp.apply(branch_TE, batch, rows)
        after = batch.last_token_batch if last else None
        if after is None:
            return branch_TE, residual_TE
        if self._adapters is not None:
            self._adapters.take(after)
        at_N = batch.logits_at_N
        return branch_TE.index_select(0, at_N), residual_TE.index_select(0, at_N)

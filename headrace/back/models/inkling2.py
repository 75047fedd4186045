"""Inkling 2 (Thinking Machines 2026; text): a residual by blocks (layers/block_residual.py), of
which whole attention reads three mixtures; attention of layers/clipped_attention.py; convolutions
behind both branches, and experts in all layers whose gates and ups are bounded.

The names are those of the published checkpoint. T tokens, E hidden size, S blocks and one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.experts.op import SITU, SITU_BOUNDS
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.block_residual import (
    BlockMixture,
    BlockMixtureSpec,
    BlockResidualSpec,
    MixtureNames,
)
from headrace.back.layers.clipped_attention import ClippedAttention, ClippedAttentionSpec
from headrace.back.layers.layer_tail import Tail
from headrace.back.layers.linear import total
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.query_scale import LateLogScale
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.recurrence import ShortConv, scan_rows
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.decoder_layer import Stream
from headrace.back.models.hybrid import MAX_TAPS
from headrace.back.models.inkling import (
    ATTENTION,
    DRAFTS,
    EXPERTS,
    NAMES,
    SLIDING,
    PaddedDecoder,
    read_kinds,
)
from headrace.back.parallel.shard import Part
from headrace.base.config.hf import ConfigReader

OF_ATTENTION, OF_MLP = "attention_mixture", "mlp_mixture"
END = MixtureNames(query="attn_res.output_query")
INPUTS = ("q_input_norm", "k_input_norm", "v_input_norm")
MIXTURE_EPS = 1e-6


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Inkling2ForConditionalGeneration, its text part."""
    inner = config.int("moe_intermediate_size", 2304, aliases=("intermediate_size",), ge=1)
    sizes = replace(read_sizes(config, inner=inner), inner=inner, tied=False)
    taps = config.int("conv_kernel_size", 4, aliases=("sconv_kernel_size",), ge=2, le=MAX_TAPS)
    residual = BlockResidualSpec(
        layers=sizes.layers,
        size=config.int("n_layers_per_attn_res_block", 6, ge=1),
        mixture=BlockMixtureSpec(eps=MIXTURE_EPS, scale=sizes.width**-0.5, normed=True),
        end=END,
    )
    mixture = _mixture(config, inner)
    layers = tuple(
        Inkling2LayerSpec(
            index=index,
            attention=_attention(config, sizes, kind == SLIDING, taps),
            feed_forward=mixture,
            residual=residual,
            taps=taps,
        )
        for index, kind in enumerate(read_kinds(config, sizes.layers))
    )
    spec = DecoderSpec(
        sizes=sizes,
        layers=layers,
        streams=residual,
        logits_softcap=config.float("final_logit_softcapping", 30.0, ge=1e-6),
        names=NAMES,
        ignored=DRAFTS,
        renamed=_renamed(sizes.layers),
    )
    known = config.int("unpadded_vocab_size", sizes.vocabulary, ge=1, le=sizes.vocabulary)
    return Decoder(scope, spec) if known == sizes.vocabulary else PaddedDecoder(scope, spec, known)


def _renamed(layers: int) -> tuple[tuple[str, str], ...]:
    """The queries lie in a module of their own, those of attention without the first layer's."""
    of_attention = (
        (rf"\.attn_res\.attn_queries\.{i - 1}$", f".layers.{i}.{OF_ATTENTION}")
        for i in range(1, layers)
    )
    of_mlp = (r"\.attn_res\.mlp_queries\.(\d+)$", rf".layers.\1.{OF_MLP}")
    return (*of_attention, of_mlp, (r"_sconv\.weight_proj$", "_sconv.weight_proj.weight"))


def _attention(
    config: ConfigReader, sizes: DecoderSizes, sliding: bool, taps: int
) -> ClippedAttentionSpec:
    """Sliding layers have heads of their own, and biases as far as they see."""
    window, extent = None, config.int("rel_extent", 1024, ge=1)
    growth = None
    if sliding:
        heads = config.int("swa_num_attention_heads", 48, ge=1)
        kv_heads = config.int("swa_num_key_value_heads", 8, ge=1)
        if heads % kv_heads:
            raise config.wrong("swa_num_key_value_heads", f"a divisor of {heads}")
        head_dim = config.int("swa_head_dim", 128, ge=1)
        sizes = replace(sizes, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        window = config.int("sliding_window_size", 1024, aliases=("sliding_window",), ge=1)
        extent = window
    else:
        growth = LateLogScale(
            alpha=config.float("log_scaling_alpha", 0.1),
            first=config.int("log_scaling_n_floor", 128000, ge=1),
        )
    return ClippedAttentionSpec(
        attention=AttentionSpec(
            **plain_attention(sizes),
            rope=None,
            window=window,
            value_eps=sizes.eps,
            query_scale=growth,
            names=ATTENTION,
        ),
        rank=config.int("d_rel", 16, ge=1),
        extent=extent,
        taps=taps,
        longest=(
            config.float("qk_l2_clip_threshold", 512**0.5, ge=1e-6),
            config.float("rel_l2_clip_threshold", 8.0, ge=1e-6),
        ),
        apart=not sliding,
    )


def _mixture(config: ConfigReader, inner: int) -> MixtureSpec:
    bounds = ("mlp_gate_softcap", "mlp_up_softcap")
    for key, bound in zip(bounds, SITU_BOUNDS, strict=True):
        if config.float(key, bound) != bound:
            raise config.wrong(key, str(bound))
    config.choice("scoring_func", ("sigmoid",), "sigmoid")
    experts = config.int("n_routed_experts", 384, aliases=("num_local_experts",), ge=1)
    scale = config.float("route_scale", 8.0, aliases=("routed_scaling_factor",))
    return MixtureSpec(
        router=RouterSpec(
            experts=experts,
            top_k=config.int("num_experts_per_tok", 8, ge=1, le=experts),
            score="sigmoid",
            renormalize=True,
            scale=scale,
            bias_name="gate.bias",
        ),
        inner=inner,
        layout=EXPERTS,
        activation=SITU,
    )


@dataclass(frozen=True, kw_only=True)
class Inkling2LayerSpec:
    """Layer `index` of its decoder."""

    index: int
    attention: ClippedAttentionSpec
    feed_forward: FeedForwardSpec
    residual: BlockResidualSpec
    taps: int

    def build(
        self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec
    ) -> Inkling2Layer:
        """See DecoderLayerSpec."""
        return Inkling2Layer(scope, cache, self, sizes, norms)


class Inkling2Layer:
    """See Inkling2LayerSpec; the residual of its stream is [S, T, E]. Convolutions follow both
    branches, so that the last layer too goes on with all tokens until its end."""

    tail: Tail | None = None
    takes_adapters = True

    def __init__(
        self,
        scope: Scope,
        cache: int,
        spec: Inkling2LayerSpec,
        sizes: DecoderSizes,
        norms: NormSpec,
    ) -> None:
        residual, apart, width = spec.residual, spec.attention.apart, sizes.width
        self._adapters = scope.adapters
        *before, self._before_mlp = (
            norms.build(scope / name, width, eps=sizes.eps)
            for name in (*(INPUTS if apart else ("attn_norm",)), "mlp_norm")
        )
        self._before_attention = before
        self._blocks, self._begins = residual.before(spec.index), residual.begins(spec.index)
        self._of_attention: BlockMixture | None = None
        mix = residual.mixture
        if self._blocks:
            shape = (len(INPUTS),) if apart else ()
            names = MixtureNames(query=OF_ATTENTION)
            self._of_attention = mix.build(scope, names, width, shape=shape)
        self._of_mlp = mix.build(scope, MixtureNames(query=OF_MLP), width)
        self.mixer: ClippedAttention = spec.attention.build(scope, cache)
        place = FeedForwardPlace(
            width=width, inner=sizes.inner, activation=sizes.activation, adds=False
        )
        self._mlp = spec.feed_forward.build(scope, place)
        own = self.mixer.kv_forms
        self._first = cache + len(own)
        self._behind_attention, self._behind_mlp = (
            ShortConv(
                scope / name,
                self._first + beside,
                (Part("hidden size", width, 1),),
                taps=spec.taps,
                activation="",
                adds_input=True,
                factor=(spec.taps + 1) ** -0.5,
            )
            for beside, name in enumerate(("attn_sconv", "mlp_sconv"))
        )
        self.kv_forms: tuple[CacheForm, ...] = (
            *own,
            self._behind_attention.form,
            self._behind_mlp.form,
        )

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer. The residual is changed in place."""
        x_STE, blocks = stream[1], self._blocks
        rows = scan_rows(batch, self._first)
        handed = self.mixer.queries(self._inputs(x_STE[: blocks + 1]), batch)
        branch_TE = total(self.mixer.attend_into(handed, x_STE[0], batch))
        assert branch_TE is not None, "a branch that does not add gives its sum"
        branch_TE = self._behind_attention.apply(branch_TE, batch, rows)
        if self._begins:
            blocks += 1
            x_STE[blocks] = x_STE[0]
            x_STE[0] = branch_TE
        else:
            x_STE[0] += branch_TE
        (x_TE,) = self._of_mlp.of(x_STE[: blocks + 1])
        branch_TE = total(self._mlp.forward_into(self._before_mlp.norm(x_TE), x_TE))
        assert branch_TE is not None, "a branch that does not add gives its sum"
        x_STE[0] += self._behind_mlp.apply(branch_TE, batch, rows)
        after = batch.last_token_batch if last else None
        if after is None:
            return None, x_STE
        if self._adapters is not None:
            self._adapters.take(after)
        return None, x_STE.index_select(1, batch.logits_at_N)

    def _inputs(self, x_STE: torch.Tensor) -> torch.Tensor:
        """What attention reads: [T, E], or [3, T, E]."""
        norms = self._before_attention
        mixed = [x_STE[0]] * len(norms)
        if self._of_attention is not None:
            mixed = self._of_attention.of(x_STE)
        normed = [norm.norm(x_TE) for norm, x_TE in zip(norms, mixed, strict=True)]
        return normed[0] if len(normed) == 1 else torch.stack(normed)

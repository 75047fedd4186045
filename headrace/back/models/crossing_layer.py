"""What an encoder-decoder asks of the layers of its decoder, which read its encoder's outputs, and
the usual one (Vaswani et al. 2017): attention, cross-attention, feed-forward. T tokens of a step, S
outputs of the encoder, E hidden size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.attention_names import AttentionNames
from headrace.back.layers.cross_attention import CrossAttentionSpec
from headrace.back.layers.linear import Branch, add_norm, total
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.decoder_layer import DecoderSizes, Stream


class CrossingLayerSpec(Protocol):
    """A decoder layer as data of its encoder-decoder; `build` makes it on this rank, with its
    caches `cache` and the one behind it."""

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norm: NormSpec) -> CrossingLayer:
        """`scope` is the layer's; `norm`: the kind of its norms."""
        ...


class CrossWriter(Protocol):
    """What keeps the encoder's outputs for a layer."""

    def write(
        self, source_SE: torch.Tensor, batch: Batch, slots_GS: tuple[torch.Tensor, ...], /
    ) -> None:
        """Keeps the keys and values of these outputs in the slots of their group."""
        ...


class CrossingLayer(Protocol):
    """What an encoder-decoder asks of a layer of its decoder."""

    @property
    def cross(self) -> CrossWriter: ...

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]: ...

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """The stream behind the layer. `last`: no later layer writes a cache."""
        ...


@dataclass(frozen=True, kw_only=True)
class CrossLayerSpec:
    """One decoder layer. `norms` name those of the three
    branches. `post`: each stands behind the sum of its branch and the residual, which then is what
    it gives; else before its branch, and those that `behind` names between its branch and the
    sum."""

    attention: AttentionSpec
    cross: CrossAttentionSpec
    feed_forward: FeedForwardSpec
    norms: tuple[str, str, str]
    post: bool
    behind: tuple[str, str, str] | None = None

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norm: NormSpec) -> CrossLayer:
        """See CrossingLayerSpec."""
        return CrossLayer(scope, cache, self, sizes, norm)


def plain_cross_layer(
    scope: Scope,
    sizes: DecoderSizes,
    *,
    bias: bool,
    cross: tuple[str, str, str, str, str],
    feed_forward: FeedForwardSpec,
    norms: tuple[str, str, str],
    post: bool = False,
    source: int | None = None,
) -> CrossLayerSpec:
    """A layer whose heads of both attentions are the same and are not rotated. `cross` names the
    cross-attention and its four linear layers; those of self_attn have these names too. `source`:
    the width of what it reads, where that is not its own."""
    heads = {
        "width": sizes.width,
        "heads": sizes.heads,
        "head_dim": sizes.head_dim,
        "scale": sizes.head_dim**-0.5,
    }
    return CrossLayerSpec(
        attention=AttentionSpec(
            **heads,
            kv_heads=sizes.heads,
            rope=None,
            qkv_bias=bias,
            out_bias=bias,
            names=AttentionNames(module="self_attn", out=cross[-1]),
        ),
        cross=CrossAttentionSpec(
            **heads,
            source=source or sizes.width,
            span=scope.encoder_tokens,
            bias=bias,
            names=cross,
        ),
        feed_forward=feed_forward,
        norms=norms,
        post=post,
    )


class CrossLayer:
    """A CrossLayerSpec on this rank; its caches are `cache` and the one behind it."""

    def __init__(
        self, scope: Scope, cache: int, spec: CrossLayerSpec, sizes: DecoderSizes, norm: NormSpec
    ) -> None:
        self._post = spec.post
        self._norms, self._behind = (
            [norm.build(scope / name, sizes.width, eps=sizes.eps) for name in names or ()]
            for names in (spec.norms, spec.behind)
        )
        adds = not spec.post and spec.behind is None
        self._attention = spec.attention.build(scope, cache, adds=adds)
        self.cross = spec.cross.build(scope, cache + 1)
        place = FeedForwardPlace(
            width=sizes.width, inner=sizes.inner, activation=sizes.activation, adds=adds
        )
        self._feed_forward = spec.feed_forward.build(scope, place)
        self.kv_forms: tuple[CacheForm, ...] = (*self._attention.kv_forms, self.cross.kv_form)

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """Adds the branch of the layer before to the residual, in place, and leaves its own, to be
        added by whoever comes next; with `post` norms all is added already."""
        branch_TE, residual_TE = stream
        x_TE = residual_TE
        if not self._post or branch_TE is not None:
            x_TE = add_norm(self._norms[0], branch_TE, residual_TE)
        if self._post:  # of embeddings and positions only the sum was wanted, in one native call
            x_TE = residual_TE
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        handed = self._attention.queries(x_TE, batch, at_N)
        if after is not None and at_N is not None:
            residual_TE, batch = residual_TE.index_select(0, at_N), after
        branch_TE = self._attention.attend_into(handed, residual_TE, batch)
        x_TE, residual_TE = self._next(0, branch_TE, residual_TE)
        branch_TE = self.cross.attend_into(x_TE, residual_TE, batch)
        x_TE, residual_TE = self._next(1, branch_TE, residual_TE)
        branch_TE = self._normed(2, self._feed_forward.forward_into(x_TE, residual_TE))
        if not self._post:
            return branch_TE, residual_TE
        return None, add_norm(self._norms[2], branch_TE, residual_TE)

    def _next(
        self, branch: int, branch_TE: Branch, residual_TE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the branch after `branch` reads, and the residual that it is added to."""
        norm = self._norms[branch if self._post else branch + 1]
        x_TE = add_norm(norm, self._normed(branch, branch_TE), residual_TE)
        return x_TE, x_TE if self._post else residual_TE

    def _normed(self, branch: int, branch_TE: Branch) -> Branch:
        """What a branch gives, behind the norm that is its own."""
        if not self._behind:
            return branch_TE
        branch_TE = total(branch_TE)
        assert branch_TE is not None, "a branch with a norm behind it does not add"
        return self._behind[branch].norm(branch_TE)

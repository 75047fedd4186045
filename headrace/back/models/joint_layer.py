"""A decoder layer of an encoder-decoder whose attention is joint (layers/joint_attention.py): two
branches, each between norms of its own. T tokens, E hidden size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.plan import Batch
from headrace.back.layers.joint_attention import JointAttention, JointAttentionSpec
from headrace.back.layers.linear import Branch, add_norm, total
from headrace.back.layers.mlp import FeedForwardPlace, FeedForwardSpec
from headrace.back.layers.norm import NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.decoder_layer import DecoderSizes, Stream


@dataclass(frozen=True, kw_only=True)
class JointLayerSpec:
    """`norms`: before the branches, `behind`: behind them."""

    attention: JointAttentionSpec
    feed_forward: FeedForwardSpec
    norms: tuple[str, str]
    behind: tuple[str, str]

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norm: NormSpec) -> JointLayer:
        """See crossing_layer.CrossingLayerSpec."""
        return JointLayer(scope, cache, self, sizes, norm)


class JointLayer:
    """A JointLayerSpec on this rank."""

    def __init__(
        self, scope: Scope, cache: int, spec: JointLayerSpec, sizes: DecoderSizes, norm: NormSpec
    ) -> None:
        self._norms, self._behind = (
            [norm.build(scope / name, sizes.width, eps=sizes.eps) for name in names]
            for names in (spec.norms, spec.behind)
        )
        self.cross: JointAttention = spec.attention.build(scope, cache)
        self.kv_forms = self.cross.kv_forms
        place = FeedForwardPlace(width=sizes.width, inner=sizes.inner, activation=sizes.activation)
        self._feed_forward = spec.feed_forward.build(scope, place)

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See encoder_decoder.CrossLayer."""
        branch_TE, residual_TE = stream
        after = batch.last_token_batch if last else None
        at_N = None if after is None else batch.logits_at_N
        x_TE = add_norm(self._norms[0], branch_TE, residual_TE)
        q_THD = self.cross.queries(x_TE, batch, at_N)
        if after is not None and at_N is not None:
            residual_TE, batch = residual_TE.index_select(0, at_N), after
        branch_TE = self._normed(0, self.cross.attend_into(q_THD, residual_TE, batch))
        x_TE = add_norm(self._norms[1], branch_TE, residual_TE)
        return self._normed(1, self._feed_forward.forward_into(x_TE, residual_TE)), residual_TE

    def _normed(self, branch: int, branch_TE: Branch) -> torch.Tensor:
        branch_TE = total(branch_TE)
        assert branch_TE is not None, "a branch with a norm behind it does not add"
        return self._behind[branch].norm(branch_TE)

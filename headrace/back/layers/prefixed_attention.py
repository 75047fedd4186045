"""Attention with learned keys, and values, in front of every text, which all its tokens see, in
windows too (openPangu). They lie in no cache: what a token sees of them is merged with what it sees
of the text by their log-sum-exps.

T tokens, H query heads, K KV heads, G queries of each, D head_dim, V of a value, S learned ones; H
and K are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.kernels.attention.op import AttentionFunction, Plan
from headrace.back.kernels.merge_attention.op import OP as MERGE
from headrace.back.kernels.merge_attention.op import MergeAttentionProblem, share_beside
from headrace.back.layers.attention import Attention, AttentionSpec
from headrace.back.layers.decode_context import DecodeContext, split_context
from headrace.back.layers.norm import RMS, RMSNorm
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.parallel.param import Param
from headrace.back.parallel.shard import Part, Shard


@dataclass(frozen=True, kw_only=True)
class PrefixedAttentionSpec(AttentionSpec):
    """`learned`: S; `learned_values`: they have values, else zeros. `key_eps`: of a norm of each
    key, `key_norm`, those of the text before they are rotated; queries have none."""

    learned: int
    learned_values: bool
    key_eps: float
    key_norm: str = "k_layernorm"
    learned_names: tuple[str, str] = ("param_sink_key", "param_sink_value")

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> PrefixedAttention:
        """See MixerSpec."""
        return PrefixedAttention(scope, cache, self, norm=norm, adds=adds)

    def shared_context(self, scope: Scope) -> DecodeContext | None:
        """Ranks do not share out its cache: each would add the learned ones."""
        return split_context(scope, self.kv_heads, whole=True)


class PrefixedAttention(Attention):
    """x_TE -> y_TE: see Attention and the file."""

    def __init__(
        self,
        scope: Scope,
        layer: int,
        spec: PrefixedAttentionSpec,
        *,
        norm: RMSNorm | None = None,
        adds: bool = False,
    ) -> None:
        assert spec.qk_norm is None and spec.softcap is None and not spec.sinks, spec
        super().__init__(scope, layer, spec, norm=norm, adds=adds)
        self._key_norm = RMS.build(self._scope / spec.key_norm, spec.head_dim, eps=spec.key_eps)
        key, value = spec.learned_names
        self._keys = self._learned(key, spec.learned, spec.head_dim)
        self._values: Param | None = None
        if spec.learned_values:
            value_dim = spec.value_dim or spec.head_dim
            self._values = self._learned(value, spec.learned, value_dim)
        self._scope.on_finish(self._finish_learned)

    def _learned(self, name: str, count: int, size: int) -> Param:
        heads = Part(name, self._spec.kv_heads, self._spec.kv_heads)
        shard = Shard(axis="tp", dim=1, parts=(heads,))
        return self._scope.param(name, (count, heads.size, size), shard=shard)

    def _normed(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return q_THD, self._key_norm.norm(k_TKD)

    def _bind_fused(self, shape: object) -> None:
        """No kernel norms keys alone."""

    def _finish_learned(self) -> None:
        """Behind the norm of keys, which those that are learned go through too."""
        keys_SKD = self._key_norm.norm(self._keys.take().contiguous())
        values_SKD = None
        if self._values is not None:
            values_SKV = self._values.take()
            values_SKD = F.pad(values_SKV, (0, self._spec.head_dim - values_SKV.shape[2]))
        self._attend = self._beside(self._attend, keys_SKD, values_SKD)

    def _beside(
        self,
        attend: AttentionFunction,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor | None,
    ) -> AttentionFunction:
        """`attend` with the learned keys and values beside those of the cache."""
        scope, scale = self._scope, self._spec.scale
        merge = not_loaded
        if values_SKD is not None:
            sizes = {"heads": self._heads, "head_dim": self._spec.head_dim}
            problem = MergeAttentionProblem(device=scope.kind, dtype=scope.dtype, **sizes)
            merge = scope.bind(MERGE, problem)

        def attend_both(
            q_THD: torch.Tensor,
            kv: torch.Tensor,
            plan: Plan,
            lse_TH: torch.Tensor | None = None,
            states_THR: torch.Tensor | None = None,
            /,
        ) -> torch.Tensor:
            assert lse_TH is None and states_THR is None, "no layer asks for them"
            own_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
            y_THD = attend(q_THD, kv, plan, own_TH)
            q_TKGD = q_THD.unflatten(1, (keys_SKD.shape[1], -1))
            scores_TKGS = torch.einsum("tkgd,skd->tkgs", q_TKGD, keys_SKD).float() * scale
            learned_TH = scores_TKGS.logsumexp(-1).flatten(1)
            if values_SKD is None:
                return (y_THD.float() * share_beside(learned_TH, own_TH)).to(y_THD.dtype)
            weights_TKGS = scores_TKGS.softmax(-1).to(q_THD.dtype)
            learned_TKGD = torch.einsum("tkgs,skd->tkgd", weights_TKGS, values_SKD)
            merge(y_THD, own_TH, learned_TKGD.flatten(1, 2).contiguous(), learned_TH)
            return y_THD

        return attend_both

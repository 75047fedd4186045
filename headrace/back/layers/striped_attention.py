"""Attention that is sparse in blocks (kernels/attention/stripes.py) as data of a layer. Texts that
are no longer than what everything sees of it run as any attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.kernels.attention.stripes import Stripes
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.scope import Scope
from headrace.back.parallel.shard import Part, Shard


@dataclass(frozen=True, kw_only=True)
class StripedAttentionSpec(AttentionSpec):
    """`stripes`: of all heads."""

    stripes: Stripes

    def problem(
        self, scope: Scope, *, heads: int, kv_heads: int, sinks: bool = False
    ) -> AttentionProblem:
        """See AttentionSpec."""
        plain = AttentionSpec.problem(self, scope, heads=heads, kv_heads=kv_heads, sinks=sinks)
        if scope.max_positions <= self.stripes.reach:
            return plain
        axis, phases = scope.mesh.tp, self.stripes.phases
        part = Part("heads", self.heads, self.heads)
        (span,) = Shard(axis=axis.name, dim=0, parts=(part,)).spans(axis)
        own = phases[span.start : span.start + span.size]
        return replace(plain, stripes=replace(self.stripes, phases=own))

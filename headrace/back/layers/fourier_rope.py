"""Rotations that are sums of several frequencies, learned for each KV head ("Fourier position
embedding", Hua et al. 2024, arXiv:2412.17739, as Intern-S1-Pro has it).

F frequencies, K KV heads of this rank, P positions, R = rotary_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.back.kernels.rope.op import Rope as Rotate
from headrace.back.layers.scope import Scope
from headrace.back.parallel.shard import Part, Shard


class FourierSeries:
    """Cosines and sines of pairs as sums of those of the `count` fastest frequencies: by learned
    matrices, one for each of `heads` KV heads, or one for all (0). Pairs beyond them turn by no
    position: their cosine and sine are both 1."""

    def __init__(self, scope: Scope, *, count: int, heads: int) -> None:
        self.by_heads = heads > 0
        shard = None
        if self.by_heads:
            shard = Shard(axis="tp", dim=0, parts=(Part("heads", heads, heads),))
        shape = (heads, count, count) if self.by_heads else (count, count)
        self._count = count
        self._cos, self._sin = (
            scope.param(f"{name}_coef", shape, shard=shard, dtype=torch.float32)
            for name in ("cos", "sin")
        )
        self._waves: tuple[torch.Tensor, torch.Tensor] | None = None
        scope.on_finish(self._finish)

    def table(self, angles_PF: torch.Tensor) -> torch.Tensor:
        """[K, P, R], or [P, R], of angles of all pairs."""
        assert self._waves is not None, "not loaded"
        cos_FF, sin_FF = self._waves
        lacking = angles_PF.shape[1] - self._count
        angles_PF = angles_PF[:, : self._count]
        parts = (angles_PF.cos() @ cos_FF, angles_PF.sin() @ sin_FF)
        return torch.cat([F.pad(part, (0, lacking), value=1.0) for part in parts], dim=-1)

    def _finish(self) -> None:
        self._waves = self._cos.take().cpu(), self._sin.take().cpu()


def rotating_by_heads(rotate: Rotate) -> Rotate:
    """Rotates each KV head, and the query heads that share it, by its own table, [K, P, R]."""

    def each(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, positions_T: torch.Tensor, table_KPR: torch.Tensor
    ) -> None:
        group = q_THD.shape[1] // k_TKD.shape[1]
        for head, table_PR in enumerate(table_KPR.unbind(0)):
            queries = q_THD[:, head * group : (head + 1) * group]
            rotate(queries, k_TKD[:, head : head + 1], positions_T, table_PR)

    return each

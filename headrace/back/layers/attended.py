"""The second half of attention layers whose queries come ready: attention over their own cache, and
the projection back. T query tokens, E hidden size, H query heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch

from headrace.back.attention.plan import Batch
from headrace.back.kernels.attention.op import AttentionFunction
from headrace.back.layers.linear import RowLinear
from headrace.back.parallel.collectives import Partial

Queries = tuple[torch.Tensor, torch.Tensor | None, Any]
"""With the gates of what they give, if there are any, and what the choice of positions hands on."""


def chosen(x_TX: torch.Tensor | None, at_N: torch.Tensor) -> torch.Tensor | None:
    """Rows `at_N` of what may be missing."""
    return None if x_TX is None else x_TX.index_select(0, at_N)


class Attended:
    """What its layers share. They bind `_attend`, keep `_out` and the id `_cache`, and say how wide
    a value is that leads back, `_value_dim`; what is cached behind it was added for keys."""

    _attend: AttentionFunction
    _out: RowLinear
    _cache: int
    _value_dim: int

    def attend_into(
        self, q_THD: torch.Tensor, residual_TE: torch.Tensor, batch: Batch
    ) -> torch.Tensor | Partial | None:
        """y_TE, to be added to the residual; None if that was done."""
        plan = batch.plans[batch.group_of_layer[self._cache]]
        y_THD = self._attend(q_THD, batch.kv[self._cache], plan)
        return self._out.project_into(y_THD[..., : self._value_dim].flatten(1), residual_TE)

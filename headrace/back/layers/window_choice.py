"""A choice of positions that is no indexer's: the last ones. So attention over chosen latents
serves latent attention with windows, for which there is no kernel of its own.

T tokens, W positions of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.back.attention.forms import CacheForm
from headrace.back.attention.plan import Batch
from headrace.back.layers.indexer import PositionChoice
from headrace.back.layers.scope import Scope


@dataclass(frozen=True, kw_only=True)
class WindowChoiceSpec:
    """`window`: W, a query's own position included. See ChoiceSpec."""

    window: int
    lists: int = 1

    @property
    def top_k(self) -> int:
        """W."""
        return self.window

    def build(self, scope: Scope, cache: int, *, width: int, q_rank: int) -> PositionChoice[Any]:
        """See ChoiceSpec."""
        return WindowChoice(self.window)


class WindowChoice:
    """See PositionChoice."""

    kv_forms: tuple[CacheForm, ...] = ()

    def __init__(self, window: int) -> None:
        self._window = window

    def queries(
        self, x_TE: torch.Tensor, q_TX: torch.Tensor, batch: Batch, at_N: torch.Tensor | None
    ) -> torch.Tensor:
        """Where the queries stand."""
        return batch.positions_T if at_N is None else batch.positions_T.index_select(0, at_N)

    def choose(self, position_T: torch.Tensor, batch: Batch) -> torch.Tensor:
        """chosen_TW."""
        first_T1 = (position_T[:, None] - (self._window - 1)).clamp_(min=0)
        at_TW = first_T1 + torch.arange(self._window, device=position_T.device)
        return at_TW.masked_fill_(at_TW > position_T[:, None], -1).int()

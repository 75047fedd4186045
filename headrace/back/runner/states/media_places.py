"""Where recorded steps find what placeholders stand for: tensors that stay where they are, and
that the host fills ahead of each such step.

T query tokens of a step, padded to its size; C, W: see EncoderCache; R rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from headrace.back.attention.plan import Batch, EncodedInPlace
from headrace.back.kernels.upload import to_device
from headrace.back.layers.vision.axes_rope import AxesRope
from headrace.back.runner.batch import StepShape

TokensOf = Callable[[StepShape], tuple[np.ndarray, np.ndarray | None]]
"""Of a step's tokens: the row of the arena of each, int64 [T], and their positions int64 [axes, T],
where these are not their places."""


class MediaPlaces:
    """RecordedMedia by the rows of an arena. arena_CW: its last row is zero and stands for tokens
    of text. `rope` None: positions are places. `tokens_of`: what a step's tokens are."""

    def __init__(
        self,
        arena_CW: torch.Tensor,
        rope: AxesRope | None,
        tokens_of: TokensOf,
        *,
        width: int,
        adds: bool,
        max_tokens: int,
    ) -> None:
        device = arena_CW.device
        new = {"dtype": torch.int64, "device": device}
        self._arena_CW, self._rope, self._tokens_of = arena_CW, rope, tokens_of
        self._width, self._adds = width, adds
        self._slot_T = torch.full((max_tokens,), arena_CW.shape[0] - 1, **new)
        self._order_T = torch.arange(max_tokens, **new)
        self._place_TA = torch.empty(0)
        self._table_TR = torch.empty(0)
        if rope is not None:
            self._place_TA = torch.zeros(max_tokens, rope.axes, **new)
            self._table_TR = rope.turns(self._place_TA.T).contiguous()

    def send(self, shape: StepShape, *, tokens: int) -> None:
        """See RecordedMedia."""
        slot_T, place_AT = self._tokens_of(shape)
        own, device = slot_T.size, self._slot_T.device
        padded = np.full(tokens, self._arena_CW.shape[0] - 1, np.int64)
        padded[:own] = slot_T
        self._slot_T[:tokens].copy_(to_device(padded, device), non_blocking=True)
        if place_AT is not None:
            place_TA = to_device(np.ascontiguousarray(place_AT.T, np.int64), device)
            self._place_TA[:own].copy_(place_TA, non_blocking=True)

    def on(self, batch: Batch) -> Batch:
        """See RecordedMedia."""
        size = batch.token_ids_T.shape[0]
        encoded = EncodedInPlace(
            arena_CW=self._arena_CW,
            slot_T=self._slot_T[:size],
            width=self._width,
            adds=self._adds,
        )
        if self._rope is None:
            return replace(batch, encoded=encoded)
        turned = {"rope_table_TR": self._table_TR[:size], "positions_T": self._order_T[:size]}
        after = batch.last_token_batch
        if after is not None:
            after = replace(after, **turned)
        return replace(batch, encoded=encoded, last_token_batch=after, **turned)

    def turn(self, batch: Batch) -> None:
        """Fills the table of a batch of `on`; recorded with its step."""
        if self._rope is None or not isinstance(batch.encoded, EncodedInPlace):
            return
        size = batch.token_ids_T.shape[0]
        self._table_TR[:size].copy_(self._rope.turns(self._place_TA[:size].T))

"""From logits to tokens (walking skeleton: greedy)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.back.sampling.greedy import argmax_rows
from headrace.base.errors import HeadraceError, NonFiniteLogits
from headrace.base.wire.step import RowLogprobs, RowStart


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What was sampled for N rows. token_N int64 on the device, always within the vocabulary (P26); `failed`: index
    into the N rows -> why that row has no token; `logprobs`: `RowLogprobs.index` is the index into the N rows."""

    token_N: torch.Tensor
    failed: dict[int, HeadraceError] = field(default_factory=dict)
    logprobs: list[RowLogprobs] = field(default_factory=list)


class Sampler:
    """Samples one token per row."""

    def __init__(self, *, max_rows: int, logits_width: int, device: torch.device) -> None:
        self.logits_width = logits_width

    def end(self, rows: np.ndarray) -> None:
        """The rows are given back."""

    def start(self, start: RowStart) -> None:
        """A request takes a row."""

    def sample(
        self,
        logits_NV: torch.Tensor,
        *,
        rows: np.ndarray,
        positions: np.ndarray,
        tokens: torch.Tensor,
    ) -> Sampled:
        """Samples the token at `positions[i]` of `rows[i]` from logits_NV[i] (float32, may be overwritten)."""
        token_N = argmax_rows(logits_NV)
        best_N = logits_NV.gather(1, token_N[:, None])[:, 0]
        bad = torch.nonzero(~torch.isfinite(best_N))[:, 0].tolist()
        return Sampled(
            token_N=token_N,
            failed={
                i: NonFiniteLogits("the model's output for this request is not finite") for i in bad
            },
        )

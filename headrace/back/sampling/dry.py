"""DRY ("don't repeat yourself"): the longer the repetition a token would continue, the less likely
it becomes.

The sampler of p-e-w (text-generation-webui pull request 5677, 2024), as in llama.cpp: for every
earlier place whose preceding tokens equal the row's last n tokens, the token that stands there is
penalised by multiplier * base^(n - allowed_length), with the greatest n of its places, if n >=
allowed_length. A sequence breaker ends a match, is never matched and never penalised. `dry_range`
is how many of the last tokens count, 0: all.

Matches are counted up to MAX_EXTRA tokens beyond the allowed length, where the penalty is far
beyond any logit, and to MAX_MATCH in all: the work of one row stays bounded whatever the request
says.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.back.kernels.upload import to_device
from headrace.back.sampling.features import FeatureRows
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import RowStart

MAX_EXTRA = 128
MAX_MATCH = 1024
LARGEST_PENALTY = 1e30
DENSE = 1 << 22
"""Comparisons at a time where matches are not followed one by one."""


class Dry:
    """Works row by row, on the row's tokens on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._repeats = repeats if device.type == "cpu" else repeats_dense
        self._rows: dict[int, tuple[RowSampling, torch.Tensor]] = {}

    def start(self, start: RowStart) -> None:
        """Keeps the row's numbers and breakers."""
        breakers = np.array(start.sampling.dry_breaker_ids, np.int32)
        self._rows[start.row] = (start.sampling, to_device(breakers, self._device))

    def end(self, row: int) -> None:
        """Forgets them."""
        self._rows.pop(row, None)

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Subtracts the penalties."""
        for k, (row, length) in enumerate(
            zip(feature_rows.rows, feature_rows.positions, strict=True)
        ):
            s, breakers = self._rows[int(row)]
            start = max(0, int(length) - s.dry_range) if s.dry_range else 0
            history = feature_rows.tokens[int(row), start : int(length)]
            most = min(s.dry_allowed_length + MAX_EXTRA, MAX_MATCH)
            ids, matched = self._repeats(history, breakers, most=most)
            self._penalise(logits_KV[k], ids, matched, s)

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Nothing to count."""

    @staticmethod
    def _penalise(
        logits_V: torch.Tensor, ids: torch.Tensor, matched: torch.Tensor, s: RowSampling
    ) -> None:
        longest_V = torch.zeros(logits_V.shape, dtype=torch.float64, device=logits_V.device)
        longest_V.scatter_reduce_(0, ids, matched.to(torch.float64), reduce="amax")
        power_V = torch.pow(s.dry_base, longest_V - s.dry_allowed_length)
        penalty_V = (s.dry_multiplier * power_V).clamp_(-LARGEST_PENALTY, LARGEST_PENALTY)
        hit_V = (longest_V >= max(1, s.dry_allowed_length)).to(torch.float64)
        logits_V.sub_((penalty_V * hit_V).to(logits_V.dtype))


def repeats(
    history: torch.Tensor, breakers: torch.Tensor, *, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(next ids int64 [C], match lengths int64 [C]): for each earlier place at least one token of
    whose past matches.

    history int32 [n]. Place j continues a match of length m if history[j-m : j] equals the last m
    tokens, breakers excluded; m is at most `most`.
    """
    n = history.shape[0]
    live = ~torch.isin(history, breakers)
    place = torch.arange(1, max(1, n), device=history.device)[live[1:]]
    matched = torch.zeros(max(0, n - 1), dtype=torch.int64, device=history.device)
    for m in range(1, min(most, n - 1) + 1):
        place = place[place >= m]
        same = (history[place - m] == history[n - m]) & live[n - m]
        place = place[same]
        if not place.numel():
            break
        matched[place - 1] = m
    candidates = torch.nonzero(matched)[:, 0]
    return history[candidates + 1].to(torch.int64), matched[candidates]


def repeats_dense(
    history: torch.Tensor, breakers: torch.Tensor, *, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `repeats` finds, without asking the device how much is left: (ids, lengths) of every
    place, 0 where nothing matches. [n] x [most] comparisons, some places at a time."""
    n = history.shape[0]
    live = ~(history[:, None] == breakers).any(1)
    most = min(most, n - 1)
    if most < 1:
        return history.to(torch.int64), torch.zeros_like(history, dtype=torch.int64)
    back_M = torch.arange(1, most + 1, device=history.device)
    suffix_M, live_M = history[n - back_M], live[n - back_M]
    parts = []
    for places in torch.arange(n, device=history.device).split(max(1, DENSE // most)):
        at_PM = places[:, None] - back_M
        same_PM = (history[at_PM.clamp(min=0)] == suffix_M) & live_M & (at_PM >= 0)
        parts.append(same_PM.to(torch.uint8).cummin(1).values.sum(1))
    return history.to(torch.int64), torch.cat(parts) * live

"""Counts what steps ask of a device: floating point operations, and bytes read and written, as the
model's shapes say (a multiply-add is two operations). Divided by the time and by the device's peak
this is the model FLOPs utilization (Chowdhery et al. 2022, "PaLM", appendix B) and its like for
bandwidth. Weights, KV cache and attention are counted; activations, recurrences and norms are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.base.wire.request import EngineRequest
from headrace.base.wire.step import StepPlan
from headrace.core.ports import AdmissionHook, AdmissionVerdict, StatsSink, none_computed

Int64 = npt.NDArray[np.int64]
YES = AdmissionVerdict("yes")


@dataclass(frozen=True, kw_only=True)
class AttendedCache:
    """One cache of a layer, on one device. `pair_flops`: of a query token and a position that it
    sees; `token_bytes`: of a position; `span`: positions that a token sees at most, None: all."""

    pair_flops: int
    token_bytes: int
    span: int | None


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What a device has to do. `token_flops`: for each token of a step, without attention and head;
    `sampled_flops`: of the head, for each token that is sampled from. `read_by(tokens)`: bytes of
    weights that a step of so many tokens reads."""

    token_flops: int
    sampled_flops: int
    read_by: Callable[[int], float]
    caches: tuple[AttendedCache, ...]


class ComputeMeter(AdmissionHook, StatsSink):
    """Follows the steps as a sink, and tells its sums as a hook does, which holds nobody back."""

    name = "compute"

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._flops = self._read = self._written = 0
        self._kinds: dict[int | None, tuple[int, int]] = {}
        for cache in cost.caches:
            flops, size = self._kinds.get(cache.span, (0, 0))
            sums = flops + cache.pair_flops, size + cache.token_bytes
            self._kinds[cache.span] = sums

    def step(
        self,
        *,
        running: int,
        waiting: int,
        tokens: int,
        free_blocks: int,
        host_s: float,
        plan: StepPlan,
    ) -> None:
        """See StatsSink."""
        cost, num_tokens = self._cost, int(plan.num_tokens.sum())
        before_R = plan.num_computed.astype(np.int64)
        tokens_R = plan.num_tokens.astype(np.int64)
        sampled = int(plan.sample.sum()) + int(plan.drafts.sum())
        self._flops += num_tokens * cost.token_flops + sampled * cost.sampled_flops
        self._read += int(cost.read_by(num_tokens))
        for span, (pair_flops, token_bytes) in self._kinds.items():
            self._flops += pair_flops * num_pairs(before_R, tokens_R, span)
            self._read += token_bytes * num_read(before_R, tokens_R, span)
            self._written += token_bytes * num_tokens

    def finished(self, *, reason: str, num_prompt: int, num_output: int, num_cached: int) -> None:
        """See StatsSink."""

    def figures(self) -> Mapping[str, int]:
        """See AdmissionHook."""
        return {
            "estimated_flops": self._flops,
            "estimated_read_bytes": self._read,
            "estimated_write_bytes": self._written,
        }

    def admit(self, request: EngineRequest) -> AdmissionVerdict:
        """See AdmissionHook."""
        return YES

    def ready(
        self, request_id: int, computed: Callable[[], int] = none_computed
    ) -> AdmissionVerdict:
        """See AdmissionHook."""
        return YES

    def payload(self, request_ids: list[int]) -> bytes | None:
        """See AdmissionHook."""
        return None

    def finish(self, request_id: int) -> None:
        """See AdmissionHook."""

    def renew(self) -> None:
        """See AdmissionHook: what was counted stays."""


def num_pairs(before_R: Int64, tokens_R: Int64, span: int | None) -> int:
    """Pairs of a token and a position that it sees, itself included: of `tokens` behind `before`
    others in each row."""
    return int((_seen_by_first(before_R + tokens_R, span) - _seen_by_first(before_R, span)).sum())


def num_read(before_R: Int64, tokens_R: Int64, span: int | None) -> int:
    """Positions of the cache that a step reads: what its tokens see, each once a row."""
    all_R = before_R + tokens_R
    return int((all_R if span is None else np.minimum(all_R, span - 1 + tokens_R)).sum())


def _seen_by_first(count_R: Int64, span: int | None) -> Int64:
    """What the first tokens of a row see together: 1 + 2 + ..., each at most the span."""
    if span is None:
        return count_R * (count_R + 1) // 2
    short_R = np.minimum(count_R, span)
    seen_R: Int64 = short_R * (short_R + 1) // 2 + (count_R - short_R) * span
    return seen_R

"""What each row asks of the sampler: one bit per feature and one column per number, written when
the row starts.

A step reads a row's bits once and runs only the features that some row of the step uses, on those
rows alone. Host arrays: the numbers come with the row and never change, so that they need no home
on the device.

What comes out for the rows of a step, and why a row has no token, is `Sampled`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntFlag, auto
from typing import Protocol, TypedDict

import numpy as np
import torch

from headrace.back.kernels.token_scores.op import MOST
from headrace.back.kernels.upload import to_device
from headrace.back.sampling.logprobs import SampledLogprobs
from headrace.base.errors import HeadraceError, InvalidRequest, NonFiniteLogits
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import RowStart


class Use(IntFlag):
    """The features of a row."""

    PENALTIES = auto()
    BIAS = auto()
    DRY = auto()
    ALLOWED = auto()
    MIN_TOKENS = auto()
    BAD_WORDS = auto()
    RANDOM = auto()
    TOP_K = auto()
    TYPICAL_P = auto()
    TOP_P = auto()
    MIN_P = auto()
    XTC = auto()
    LOGPROBS = auto()
    GRAMMAR = auto()
    PROCESSORS = auto()
    CHAIN = auto()


TRUNCATES = Use.TOP_K | Use.TYPICAL_P | Use.TOP_P | Use.MIN_P | Use.XTC | Use.CHAIN
SAMPLED_BY_OP = Use.RANDOM | Use.TOP_K | Use.TOP_P | Use.MIN_P
"""What op `sample` does on a device, in the step's own graph."""
MASKED_BY_OP = Use.BIAS | Use.ALLOWED | Use.MIN_TOKENS | Use.BAD_WORDS
"""What op `logit_masks` does in a recorded step, on every device, for rows whose lists it has room
for."""
IN_STEP = SAMPLED_BY_OP | MASKED_BY_OP | Use.PENALTIES | Use.LOGPROBS
"""What decodes can do there (in_step.py), of log-probabilities those that op `token_scores`
gives."""


def uses(s: RowSampling, width: int) -> Use:
    """The features that change anything for this row. Truncation is moot for greedy rows: it keeps
    the argmax."""
    wanted = {
        Use.PENALTIES: (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) != (1, 0, 0),
        Use.BIAS: bool(s.logit_bias),
        Use.DRY: s.dry_multiplier > 0.0,
        Use.ALLOWED: s.allowed_ids is not None,
        Use.MIN_TOKENS: s.min_tokens > 0 and bool(s.suppressed_ids),
        Use.BAD_WORDS: any(s.bad_words),
        Use.LOGPROBS: s.logprobs is not None or bool(s.logprob_ids),
        Use.PROCESSORS: bool(s.logits_processors),
    }
    if not s.greedy:
        wanted |= {
            Use.RANDOM: True,
            Use.TOP_K: 0 < s.top_k < width,
            Use.TYPICAL_P: s.typical_p < 1.0,
            Use.TOP_P: s.top_p < 1.0,
            Use.MIN_P: s.min_p > 0.0,
            Use.XTC: s.xtc_probability > 0.0,
            Use.CHAIN: s.has_chain,
        }
    return Use(sum(use for use, is_used in wanted.items() if is_used))


COLDEST, HOTTEST = 1e-6, 1e6
"""Temperatures are held within these: beyond them nothing changes but that single precision
overflows."""


BEYOND = MOST + 1
"""Alternatives of a row that asks for log-probabilities which are not made within steps."""


def alternatives(s: RowSampling) -> int:
    """How many a step has to make for such a row, if it asks for log-probabilities."""
    count = s.logprobs or 0
    plain = s.logprobs_mode == "raw" and not s.sampling_mask
    within = 0 <= count <= MOST and not s.logprob_ids and plain
    return count if within else BEYOND


class RowNumbers:
    """The numbers of all rows, one array each; a feature that is off holds the value that changes
    nothing. `alternatives` means something only for rows that use LOGPROBS; `changed`: rows whose
    numbers a device's table has not yet."""

    def __init__(self, max_rows: int) -> None:
        self.use = np.zeros(max_rows, np.int64)
        self.num_prompt = np.zeros(max_rows, np.int64)
        self.seed = np.zeros(max_rows, np.uint64)
        self.temperature = np.ones(max_rows)
        self.top_k = np.zeros(max_rows, np.int64)
        self.typical_p = np.ones(max_rows)
        self.top_p = np.ones(max_rows)
        self.min_p = np.zeros(max_rows)
        self.xtc_probability = np.zeros(max_rows)
        self.xtc_threshold = np.zeros(max_rows)
        self.alternatives = np.zeros(max_rows, np.int64)
        self.changed: set[int] = set()

    def start(self, start: RowStart, width: int) -> Use:
        """Takes a row's numbers over and returns what it uses. `width`: vocabulary size."""
        s, row = start.sampling, start.row
        use = uses(s, width)
        self.use[row] = use
        self.changed.add(row)
        self.num_prompt[row] = start.num_prompt
        self.seed[row] = s.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.temperature[row] = min(max(s.temperature, COLDEST), HOTTEST)
        self.top_k[row] = s.top_k if Use.TOP_K in use else width
        self.typical_p[row] = s.typical_p
        self.top_p[row] = s.top_p
        self.min_p[row] = max(s.min_p, 0.0)
        self.xtc_probability[row] = s.xtc_probability
        self.xtc_threshold[row] = s.xtc_threshold
        return use


@dataclass(frozen=True, kw_only=True)
class FeatureRows:
    """The K rows of a step that a feature works on, in the order of its logits.

    rows [K]; positions [K]: the position of the token to be sampled; num_output [K]: output tokens
    before it; tokens int32 [max_rows, columns] on the device: column p is the row's token at
    position p.
    """

    rows: np.ndarray
    positions: np.ndarray
    num_output: np.ndarray
    tokens: torch.Tensor

    def take(self, index: np.ndarray) -> FeatureRows:
        """The rows at these places."""
        return replace(
            self,
            rows=self.rows[index],
            positions=self.positions[index],
            num_output=self.num_output[index],
        )


class LogitFeature(Protocol):
    """A feature that rewrites the logits of the rows that use it."""

    def start(self, start: RowStart) -> None:
        """A row that uses the feature starts, or starts again after a preemption."""
        ...

    def end(self, row: int) -> None:
        """A row that used the feature was given back."""
        ...

    def apply(self, logits_KV: torch.Tensor, feature_rows: FeatureRows) -> None:
        """Rewrites the logits in place."""
        ...

    def sampled(self, token_K: torch.Tensor, feature_rows: FeatureRows) -> None:
        """The tokens that were sampled for these rows (int64, on the device)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What was sampled for N rows.

    token_N int64 on the device, always within the vocabulary, also for failed rows. A row failed if
    its value in max_logit_N (the model's greatest logit, on the device) or in chosen_logit_N (the
    chosen one after processing; None: nothing was processed) is not finite. `logprobs`: the
    log-probabilities asked for, on their way to the host. `errors`: index into the rows -> what
    else was wrong with one.
    """

    token_N: torch.Tensor
    max_logit_N: torch.Tensor
    chosen_logit_N: torch.Tensor | None = None
    logprobs: SampledLogprobs | None = None
    errors: Mapping[int, HeadraceError] = field(default_factory=dict)


class SampledRows(TypedDict):
    """The N rows to sample: rows [N], positions [N] of the tokens to be sampled, and tokens
    [max_rows, columns]: the rows' tokens so far, at their positions."""

    rows: np.ndarray
    positions: np.ndarray
    tokens: torch.Tensor


def failures(
    max_logit_N: np.ndarray, chosen_logit_N: np.ndarray | None
) -> dict[int, HeadraceError]:
    """Index into the N rows -> why that row has no token; from the host's copies of the fields of
    `Sampled`."""
    failed: dict[int, HeadraceError] = {}
    if chosen_logit_N is not None:
        message = "the request's penalties, biases and masks leave no token to sample"
        failed = {
            int(i): InvalidRequest(message) for i in np.flatnonzero(~np.isfinite(chosen_logit_N))
        }
    message = "the model's output for this request is not finite"
    return failed | {
        int(i): NonFiniteLogits(message) for i in np.flatnonzero(~np.isfinite(max_logit_N))
    }


def zero_failed(logits_NV: torch.Tensor, max_logit_N: torch.Tensor) -> None:
    """Sets rows that are not finite to 0: nothing after this has to bear them. On a CPU it looks
    first, as that costs nothing; elsewhere the device is not asked."""
    if logits_NV.device.type != "cpu":
        logits_NV.masked_fill_((max_logit_N - max_logit_N != 0.0)[:, None], 0.0)
        return
    failed = np.flatnonzero(~np.isfinite(max_logit_N.numpy()))
    if failed.size:
        logits_NV[failed] = 0.0


def rows_at(values: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    """A copy of some rows; of none it costs nothing."""
    if not index.size:
        return values[:0]
    return values.index_select(0, to_device(index, values.device))

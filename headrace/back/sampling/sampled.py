"""What the sampler gives for the rows of a step, and why a row has no token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch

from headrace.back.sampling.logprobs import SampledLogprobs
from headrace.base.errors import HeadraceError, InvalidRequest, NonFiniteLogits


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What was sampled for N rows.

    token_N int64 on the device, always within the vocabulary, also for failed rows. A row failed if
    its value in max_logit_N (the model's greatest logit, on the device) or in chosen_logit_N (the
    chosen one after processing; None: nothing was processed) is not finite. `logprobs`: the
    log-probabilities asked for, on their way to the host.
    """

    token_N: torch.Tensor
    max_logit_N: torch.Tensor
    chosen_logit_N: torch.Tensor | None = None
    logprobs: SampledLogprobs | None = None


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

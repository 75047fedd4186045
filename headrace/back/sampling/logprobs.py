"""Log-probabilities of tokens and their alternatives, from the model's own distribution: before any processing.

M positions, V vocabulary, A alternatives. Alternatives are the most likely tokens in falling order, of equals the
lowest id first, whatever the device's selection does: they are found on integer keys that hold value and id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.kernels.log_sum_exp.op import OP as LOG_SUM_EXP
from headrace.back.kernels.log_sum_exp.op import LogSumExpProblem
from headrace.back.kernels.upload import to_device, to_host
from headrace.base.wire.step import RowLogprobs

_ID_MASK = 0x7FFF_FFFF


@dataclass(frozen=True, kw_only=True)
class Scores:
    """ids int32 [M, 1+A+named], values float32 of the same shape, ranks int32 [M], on the host: to be read once the
    step's event has passed (kernels/upload.py: to_host)."""

    ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Told:
    """What M of a step's N sampled rows are told. index [M] into the N; kept [M]: columns that each row asked for;
    `named`: the scores of the ids that row m named."""

    index: np.ndarray
    kept: list[int]
    scores: Scores
    named: Mapping[int, Scores]

    def rows(self) -> Iterator[RowLogprobs]:
        """Row by row, once the step's event has passed."""
        ids, values = self.scores.ids.numpy(), self.scores.values.numpy()
        ranks = self.scores.ranks.numpy()
        for m, (index, count) in enumerate(zip(self.index.tolist(), self.kept, strict=True)):
            row_ids, row_values = ids[m, :count], values[m, :count]
            if m in self.named:
                more = self.named[m]
                row_ids = np.concatenate([row_ids, more.ids.numpy()[0, 1:]])
                row_values = np.concatenate([row_values, more.values.numpy()[0, 1:]])
            yield RowLogprobs(index, row_ids, row_values, int(ranks[m]))


def score(
    logits_MV: torch.Tensor,
    token_M: torch.Tensor,
    *,
    alternatives: int,
    named: Sequence[int] = (),
) -> Scores:
    """Scores the tokens of M positions.

    Column 0 is the token itself, then the alternatives (-1: the whole vocabulary; the token may be among them), then
    the named ids. The rank counts from 1: tokens with a greater logit, plus one.
    """
    count = logits_MV.shape[1]
    top_MA = top_ids(logits_MV, count if alternatives < 0 else min(alternatives, count))
    named_MN = to_device(np.array(named, np.int64), logits_MV.device)
    ids = torch.cat([token_M[:, None], top_MA, named_MN.expand(len(token_M), -1)], dim=1)
    log_sum_exp = LOG_SUM_EXP.choose(LogSumExpProblem(device=logits_MV.device.type)).bind()
    values = logits_MV.gather(1, ids) - log_sum_exp(logits_MV)
    ranks_M = (logits_MV > logits_MV.gather(1, token_M[:, None])).sum(1) + 1
    return Scores(
        ids=to_host(ids.to(torch.int32)),
        values=to_host(values.to(torch.float32)),
        ranks=to_host(ranks_M.to(torch.int32)),
    )


def top_ids(logits_MV: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of the `count` greatest logits in falling order, of equals the lowest id first; int64 [M, count].

    A float's bits, with the lower 31 inverted if it is negative, order like the float as a signed integer; adding 0.0
    makes -0.0 and 0.0 equal.
    """
    if count == 0:
        return torch.empty((len(logits_MV), 0), dtype=torch.int64, device=logits_MV.device)
    bits_MV = (logits_MV + 0.0).view(torch.int32)
    order_MV = (bits_MV ^ ((bits_MV >> 31) & _ID_MASK)).to(torch.int64)
    id_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
    keys_MV = (order_MV << 32) + (_ID_MASK - id_V)
    return _ID_MASK - (keys_MV.topk(count, dim=1).values & _ID_MASK)

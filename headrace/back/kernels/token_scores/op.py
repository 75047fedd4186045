"""What a token's log-probability comes with: its rank, the most likely tokens, and the log of the
sum of exp.

`bind(problem)` returns `f(logits_MV, token_M, scores)`, which fills `scores` (`ScoreTable.empty`
makes it).

    logits_MV   float32, V contiguous
    token_M     int64: the tokens to score
    scores      C columns: the token itself, then the C - 1 greatest logits in falling order, of
                equals the lowest id
                first; C - 1 at most V, of kernels at most MOST

A log-probability is the logit minus the row's log of the sum of exp, in float32. A rank counts from
1: tokens with a greater logit, plus one. A row's bits depend on that row alone: torch's own
reduction cuts rows in a way that depends on how many there are, and a token's log-probability must
not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator

MOST = 20
"""Alternatives that every kernel gives; a caller that wants more takes `top_ids`."""
_ID_MASK = 0x7FFF_FFFF


@dataclass(frozen=True)
class ScoreTable:
    """M positions, C columns. data int32 [M, 2 C + 2]: ids, the bits of the log-probabilities, the
    rank, the bits of the log of the sum of exp; one tensor, so that one copy brings all to the
    host."""

    data: torch.Tensor

    @classmethod
    def empty(cls, positions: int, columns: int, device: torch.device) -> ScoreTable:
        """Room for M positions and C columns."""
        shape = positions, cls.words(columns)
        return cls(torch.empty(shape, dtype=torch.int32, device=device))

    @staticmethod
    def words(columns: int) -> int:
        """Words of a position."""
        return 2 * columns + 2

    @property
    def columns(self) -> int:
        """C."""
        return self.data.shape[1] // 2 - 1

    @property
    def ids(self) -> torch.Tensor:
        """int32 [M, C]."""
        return self.data[:, : self.columns]

    @property
    def values(self) -> torch.Tensor:
        """Log-probabilities, float32 [M, C]."""
        return self.data[:, self.columns : 2 * self.columns].view(torch.float32)

    @property
    def ranks(self) -> torch.Tensor:
        """int32 [M]."""
        return self.data[:, -2]

    @property
    def log_sum_exp(self) -> torch.Tensor:
        """float32 [M, 1]."""
        return self.data[:, -1:].view(torch.float32)


TokenScores = Callable[[torch.Tensor, torch.Tensor, ScoreTable], None]


@dataclass(frozen=True, kw_only=True)
class TokenScoresProblem:
    """The same for every width, number of positions and of alternatives. `device` is a torch device
    type."""

    device: str


def bind_reference(problem: TokenScoresProblem) -> TokenScores:
    """torch's operations; the sums row by row."""

    def token_scores(logits_MV: torch.Tensor, token_M: torch.Tensor, scores: ScoreTable) -> None:
        token_M1, lse_M1 = token_M[:, None], scores.log_sum_exp
        ids_MC = torch.cat([token_M1, top_ids(logits_MV, scores.columns - 1)], dim=1)
        for row_V, lse_1 in zip(logits_MV, lse_M1, strict=True):
            lse_1.copy_(torch.logsumexp(row_V, 0, keepdim=True))
        scores.ids.copy_(ids_MC)
        scores.values.copy_(logits_MV.gather(1, ids_MC) - lse_M1)
        scores.ranks.copy_((logits_MV > logits_MV.gather(1, token_M1)).sum(1) + 1)

    return token_scores


def top_ids(logits_MV: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of the `count` greatest logits in falling order, of equals the lowest id first; int64
    [M, count].

    Found on integer keys that hold value and id, whatever the device's selection does with equals.
    A float's bits, with the lower 31 inverted if it is negative, order like the float as a signed
    integer; adding 0.0 makes -0.0 and 0.0 equal.
    """
    if count == 0:
        return torch.empty((len(logits_MV), 0), dtype=torch.int64, device=logits_MV.device)
    bits_MV = (logits_MV + 0.0).view(torch.int32)
    order_MV = (bits_MV ^ ((bits_MV >> 31) & _ID_MASK)).to(torch.int64)
    id_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
    keys_MV = (order_MV << 32) + (_ID_MASK - id_V)
    return _ID_MASK - (keys_MV.topk(count, dim=1).values & _ID_MASK)


def _sample(problem: TokenScoresProblem) -> Sample:
    generator = sample_generator()
    logits_MV = 4 * random_tensor(
        5, 5008, dtype=torch.float32, device=problem.device, generator=generator
    )
    logits_MV[1, 7:] = -torch.inf
    logits_MV[2] -= 300.0
    logits_MV[3] = logits_MV[3].round()
    token_M = torch.tensor([4097, 3, 5007, 0, 77], device=problem.device)
    scores = ScoreTable.empty(5, 6, logits_MV.device)
    return Sample(problem=problem, weights=(), arguments=(logits_MV, token_M, scores))


def _outputs(sample: Sample) -> list[torch.Tensor]:
    scores = sample.arguments[2]
    return [scores.ids, scores.values, scores.ranks, scores.log_sum_exp]


OP: Op[TokenScoresProblem] = Op(
    name="token_scores",
    reference=Kernel(
        name="torch", supports=lambda problem: None, bind=bind_reference, invariant=True
    ),
    kernels=(
        "headrace.back.kernels.token_scores.native:KERNEL",
        "headrace.back.kernels.token_scores.triton_token_scores:KERNEL",
    ),
    sample=_sample,
    tolerance=lambda problem: 2e-6,
    outputs=_outputs,
)

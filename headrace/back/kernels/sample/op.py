"""Sampling of every row of a step: temperature, top_k, top_p, min_p, noise, argmax; greedy rows
keep their argmax.

`bind(problem)` returns `f(logits_KV, argmax, rows, row_K, position_K) -> (token_K, z_K)`.

    logits_KV    float32, V contiguous
    argmax       what op `greedy` finds in them: token int64 [K], value float32 [K]
    rows         int64 [M, NUMBERS], the numbers of all rows (`numbers` makes them)
    row_K        int32 or int64: the row of each of the K; position_K, likewise: the position of the
                 token to be sampled
    token_K      int64; z_K float64: logit / temperature of the token, of a greedy row the argmax's
                 value

Order and meaning are those of sampling/random_rows.py: top_k, top_p over what top_k leaves, min_p,
then argmax of z - log E with the noise of kernels/gumbel/noise.py. Tokens whose logits equal the
last one kept stay. What top_p adds up may be single precision: it is off by at most 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.kernels.greedy.op import Argmax
from headrace.back.kernels.gumbel import noise
from headrace.back.kernels.op import Kernel, Op, Sample, random_tensor, sample_generator
from headrace.base import splitmix

NUMBERS = 5
HEAT, SEED, TOP_K, TOP_P, LOG_MIN_P = range(NUMBERS)
RandomRows = Callable[[torch.Tensor, Argmax, torch.Tensor, torch.Tensor, torch.Tensor], Argmax]


@dataclass(frozen=True, kw_only=True)
class SampleProblem:
    """The same for every width and number of rows."""

    device: str


def numbers(
    *,
    heat: np.ndarray,
    seed: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
) -> np.ndarray:
    """Columns [K] to int64 [K, NUMBERS]. heat float64: the temperature, 0 for a greedy row; seed
    uint64; top_k: 0 keeps all; top_p of 1 keeps all, min_p of 0 too."""
    table = np.empty((len(heat), NUMBERS), np.int64)
    table[:, HEAT] = heat.astype(np.float64).view(np.int64)
    table[:, SEED] = splitmix.mix_all(seed + np.uint64(splitmix.GAMMA)).view(np.int64)
    table[:, TOP_K] = top_k
    table[:, TOP_P] = top_p.astype(np.float64).view(np.int64)
    with np.errstate(divide="ignore"):
        table[:, LOG_MIN_P] = np.log(min_p.astype(np.float64)).view(np.int64)
    return table


def bind_reference(problem: SampleProblem) -> RandomRows:
    """The reference: sorts whole rows, in double precision."""

    def sample(
        logits_KV: torch.Tensor,
        argmax: Argmax,
        rows: torch.Tensor,
        row_K: torch.Tensor,
        position_K: torch.Tensor,
    ) -> Argmax:
        of_K5 = rows.index_select(0, row_K.long())
        heat_K1, _, _, top_p_K1, log_min_p_K1 = of_K5.view(torch.float64).split(1, dim=1)
        greedy_K1 = heat_K1 == 0.0
        z_KV = logits_KV.double() / heat_K1.masked_fill(greedy_K1, 1.0)
        z_KV = _truncated(z_KV, of_K5[:, TOP_K : TOP_K + 1], top_p_K1, log_min_p_K1)
        keys_K = noise.keys_on_device(of_K5[:, SEED], position_K.long())
        ids_V = torch.arange(logits_KV.shape[1], device=logits_KV.device)
        score_KV = z_KV - noise.exponential(keys_K, ids_V).log_()
        token_K1 = torch.where(greedy_K1, argmax[0][:, None], score_KV.argmax(1, keepdim=True))
        z_K1 = torch.where(greedy_K1, argmax[1][:, None].double(), z_KV.gather(1, token_K1))
        return token_K1[:, 0], z_K1[:, 0]

    return sample


def _truncated(
    z_KV: torch.Tensor, k_K1: torch.Tensor, p_K1: torch.Tensor, log_min_p_K1: torch.Tensor
) -> torch.Tensor:
    width = z_KV.shape[1]
    sorted_KV = z_KV.sort(dim=1, descending=True).values
    kth_K1 = sorted_KV.gather(1, torch.where((k_K1 <= 0) | (k_K1 > width), width, k_K1) - 1)
    z_KV = z_KV.masked_fill(z_KV < kth_K1, -torch.inf)
    probs_KV = sorted_KV.masked_fill_(sorted_KV < kth_K1, -torch.inf).softmax(1)
    short_K1 = (probs_KV.cumsum(1) < p_K1).sum(1, keepdim=True).clamp_(max=width - 1)
    last_K1 = sorted_KV.gather(1, short_K1).masked_fill_(p_K1 >= 1.0, -torch.inf)
    least_K1 = torch.maximum(last_K1, sorted_KV[:, :1] + log_min_p_K1)
    return z_KV.masked_fill(z_KV < least_K1, -torch.inf)


def _sample(problem: SampleProblem) -> Sample:
    generator = sample_generator()
    logits = random_tensor(7, 1008, dtype=torch.float32, device="cpu", generator=generator) * 3
    logits[3] = logits[3].round()
    logits[4, 5:] = -torch.inf
    rows = numbers(
        heat=np.array([0.7, 0.0, 1.0, 1.3, 0.5, 1e-3, 1.0]),
        seed=np.arange(7, dtype=np.uint64),
        top_k=np.array([0, 3, 0, 40, 0, 0, 7]),
        top_p=np.array([1.0, 0.5, 0.9, 0.8, 0.99, 1.0, 1.0]),
        min_p=np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1]),
    )
    logits = logits.to(problem.device)
    value, token = logits.max(dim=1)
    row = torch.tensor([6, 1, 2, 3, 4, 5, 0], dtype=torch.int32, device=problem.device)
    position = torch.arange(3, 10, dtype=torch.int32, device=problem.device)
    numbers_M5 = torch.from_numpy(rows).to(problem.device)
    arguments = (logits, (token, value), numbers_M5, row, position)
    return Sample(problem=problem, weights=(), arguments=arguments)


OP: Op[SampleProblem] = Op(
    name="sample",
    reference=Kernel(name="torch", supports=lambda problem: None, bind=bind_reference),
    kernels=("headrace.back.kernels.sample.triton_sample:KERNEL",),
    sample=_sample,
    tolerance=lambda problem: 1e-9,
)

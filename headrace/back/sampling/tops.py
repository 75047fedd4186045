"""Drawing from the best tokens of a row alone, where the step has left these and no logits (KRN-02, op linear_top).

A row whose top_k is less than TOPS is drawn among them: every token above the last one's value is there, so all
that top_k keeps, ties included, if the k-th value is greater than the last. Where it is not, or the best value is not
finite, the row is not `proven`, and its logits have to be computed after all.

N rows, K of them drawn, C = TOPS.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from headrace.back.kernels.linear_top.op import TOPS
from headrace.back.sampling.candidates import Candidates
from headrace.back.sampling.draw import Draw
from headrace.back.sampling.features import DRAWN, Picked, RowNumbers, Use
from headrace.back.sampling.step_draw import Drawing

Leaves = Literal["logits", "picks", "tops"] | Drawing
"""What a step leaves for the sampler: whole rows of logits, the greedy picks, each row's TOPS best tokens, or nothing:
what it does itself instead."""

Tops = tuple[torch.Tensor, torch.Tensor]
"""ids int64 [N, C] and logits float32 [N, C], best first: the order of op linear_top."""


def needs(numbers: RowNumbers, rows: np.ndarray) -> Leaves:
    """Tops, if each of these rows is greedy or has a top_k that tops may prove, and asks for nothing they do not tell;
    else logits."""
    use_N = numbers.use[rows]
    provable_N = (use_N & Use.TOP_K != 0) & (use_N & ~DRAWN == 0) & (numbers.top_k[rows] < TOPS)
    return "tops" if ((use_N == 0) | provable_N).all() else "logits"


def draw_tops(
    tops: Tops, numbers: RowNumbers, picked: Picked
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """token_N and best_N (see sampler.Sampled) of rows that need no more than tops, and the places of those that are
    not proven: they are still to be drawn."""
    id_NC, value_NC = tops
    token_N, best_N = id_NC[:, 0].clone(), value_NC[:, 0].clone()
    drawn = np.flatnonzero(numbers.use[picked.rows])
    value_KC = value_NC.numpy()[drawn]
    kth_K = value_KC[np.arange(drawn.size), numbers.top_k[picked.rows[drawn]] - 1]
    proven_K = (kth_K > value_KC[:, -1]) & np.isfinite(value_KC[:, 0])
    at = drawn[proven_K]
    if at.size:
        draw = Draw(numbers, picked.take(at), value_NC.device)
        token_N[at], _ = draw.among(_rising(id_NC[at], value_NC[at], draw.temperature))
    return token_N, best_N, drawn[~proven_K]


def _rising(
    id_KC: torch.Tensor, value_KC: torch.Tensor, temperature_K1: torch.Tensor
) -> Candidates:
    id_KC, order_KC = id_KC.sort(dim=1)
    z_KC = value_KC.gather(1, order_KC).to(torch.float64).div_(temperature_K1)
    return Candidates(ids_KC=id_KC, z_KC=z_KC, cut_K1=value_KC[:, -1:] / temperature_K1)

"""Kimi delta attention over packed rows, whole rows at once (Kimi Team 2025, "Kimi Linear", section 3).

A row is cut into chunks of CHUNK tokens; a document begins with a chunk. Inside a chunk, what each token writes follows
from a triangular system; between chunks the state S becomes M S + U, which a scan computes for all chunks together.
The state forgets by channel: S_i = diag(exp g_i) S_{i-1} + k_i beta_i (v_i - k_i^T diag(exp g_i) S_{i-1})^T.

B rows, H heads, N chunks, C tokens of a chunk, D size of keys and of values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK = 16
MOST_TOKENS = 1024
"""Of a document: the scan reaches so far."""
LOWEST = -8.0
"""Of a token's log decay, so that the products of a chunk stay within float32: exp(-8) is as good as forgotten."""


def delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, goes_on_BN: Tensor) -> Tensor:
    """q (scaled), k, v and g [B, H, T, D], beta [B, H, T], in float32 -> [B, H, T, D]. `goes_on_BN`: whether a chunk
    goes on with the document of the chunk before it."""
    shape = q.shape
    q, k, v, g = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, g.clamp(min=LOWEST)))
    beta = beta.unflatten(2, (-1, CHUNK))[..., None]
    sums = g.cumsum(dim=-2)
    middle = sums[..., CHUNK // 2 : CHUNK // 2 + 1, :]
    later, sooner = (sums - middle).exp(), (middle - sums).exp()
    k_sooner = k * sooner
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    reads = ((q * later) @ k_sooner.mT).masked_fill(~lower, 0.0)
    overlap = (beta * (k * later) @ k_sooner.mT).masked_fill(~lower.tril(-1), 0.0)
    solve = _inverse(overlap)
    since = sums.exp()
    written, erased = solve @ (beta * v), solve @ (beta * k * since)
    last = sums[..., -1:, :]
    k_end = k * (last - sums).exp()
    size = q.shape[-1]
    keep = torch.eye(size, device=q.device) * last.exp() - k_end.mT @ erased
    state = _states(keep, k_end.mT @ written, goes_on_BN)
    out = (q * since) @ state + reads @ (written - erased @ state)
    return out.reshape(shape)


def _inverse(strict: Tensor) -> Tensor:
    """Of I + X for strictly lower X [..., C, C]: its powers end at C."""
    power = -strict
    found = torch.eye(CHUNK, device=strict.device) + power
    for _ in range(int(math.log2(CHUNK)) - 1):
        power = power @ power
        found = found + found @ power
    return found


def _states(keep: Tensor, added: Tensor, goes_on_BN: Tensor) -> Tensor:
    """The state before each chunk, from what a chunk keeps and adds [B, H, N, D, D]."""
    goes_on = goes_on_BN[:, None, :, None, None]
    keep = torch.where(goes_on, keep, 0.0)
    step = 1
    for _ in range(int(math.log2(MOST_TOKENS // CHUNK))):
        if step >= keep.shape[2]:
            break
        before, rest = keep[:, :, :step], keep[:, :, step:]
        added = torch.cat(
            (added[:, :, :step], added[:, :, step:] + rest @ added[:, :, :-step]), dim=2
        )
        keep = torch.cat((torch.zeros_like(before), rest @ keep[:, :, :-step]), dim=2)
        step *= 2
    before = torch.cat((torch.zeros_like(added[:, :, :1]), added[:, :, :-1]), dim=2)
    return torch.where(goes_on, before, 0.0)

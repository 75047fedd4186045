"""typical_p: the tokens whose information is nearest to the entropy, up to probability p (Meister
et al. 2023, "Locally typical sampling", section 4). Tokens tied with the last one stay.

Usually few tokens hold probability p: on the CPU the whole row is sorted only where the nearest
ones do not."""

from __future__ import annotations

import torch

NEAREST = 1024
"""Tokens sorted at first: 1 ms at 152 thousand tokens, a whole sort 14."""


def keep_typical_p_(z_KC: torch.Tensor, p_K1: torch.Tensor, lse_K1: torch.Tensor) -> None:
    """Removes (-Inf) atypical tokens; p >= 1 keeps all. z float64 [K, C] with all that is left of
    the row."""
    log_KC = z_KC - lse_K1
    probs_KC = log_KC.exp()
    entropy_K1 = -(probs_KC * log_KC).nan_to_num_(nan=0.0).sum(1, keepdim=True)
    distance_KC = (-log_KC - entropy_K1).abs_()
    most_K1 = _farthest(distance_KC, probs_KC, p_K1)
    most_K1.masked_fill_(p_K1 >= 1.0, torch.inf)
    z_KC.masked_fill_(distance_KC > most_K1, -torch.inf)


def _farthest(
    distance_KC: torch.Tensor, probs_KC: torch.Tensor, p_K1: torch.Tensor
) -> torch.Tensor:
    """The distance of the token at which the nearest ones reach probability p."""
    width = distance_KC.shape[1]
    few = min(NEAREST, width) if distance_KC.device.type == "cpu" else width
    for count in (few, width):
        sorted_KC, order_KC = distance_KC.topk(count, dim=1, largest=False)
        mass_KC = probs_KC.gather(1, order_KC).cumsum(1)
        if count == width or ((mass_KC[:, -1:] >= p_K1) | (p_K1 >= 1.0)).all():
            break
    short_K1 = (mass_KC < p_K1).sum(1, keepdim=True)
    return sorted_KC.gather(1, short_K1.clamp(max=count - 1))

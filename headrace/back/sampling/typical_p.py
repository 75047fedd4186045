"""typical_p: the tokens whose information is nearest to the entropy, up to probability p (Meister et al. 2023, "Locally
typical sampling", section 4). Tokens tied with the last one stay."""

from __future__ import annotations

import torch


def keep_typical_p_(z_KC: torch.Tensor, p_K1: torch.Tensor, lse_K1: torch.Tensor) -> None:
    """Removes (-Inf) atypical tokens; p >= 1 keeps all. z float64 [K, C] with all that is left of the row."""
    log_KC = z_KC - lse_K1
    probs_KC = log_KC.exp()
    entropy_K1 = -(probs_KC * log_KC).nan_to_num_(nan=0.0).sum(1, keepdim=True)
    distance_KC = (-log_KC - entropy_K1).abs_()
    sorted_KC, order_KC = distance_KC.sort(dim=1, stable=True)
    short_K1 = (probs_KC.gather(1, order_KC).cumsum(1) < p_K1).sum(1, keepdim=True)
    most_K1 = sorted_KC.gather(1, short_K1.clamp(max=z_KC.shape[1] - 1))
    most_K1.masked_fill_(p_K1 >= 1.0, torch.inf)
    z_KC.masked_fill_(distance_KC > most_K1, -torch.inf)

"""XTC ("exclude top choices"): with some probability, removes all tokens that reach a threshold but
the least likely of them (the sampler of p-e-w, text-generation-webui pull request 6335, 2024).
Among ties the last in the order of candidates stays, which is the order of ids among equals."""

from __future__ import annotations

import torch


def exclude_top_(z_KC: torch.Tensor, threshold_K1: torch.Tensor, acts_K1: torch.Tensor) -> None:
    """Removes (-Inf) the top choices of the rows where `acts` holds. z float64 [K, C], ids rising
    among equals."""
    probs_KC = z_KC.softmax(1)
    reaches_KC = probs_KC >= threshold_K1
    least_K1 = torch.where(reaches_KC, probs_KC, torch.inf).amin(1, keepdim=True)
    place_C = torch.arange(z_KC.shape[1], device=z_KC.device)
    stays_K1 = torch.where(probs_KC == least_K1, place_C, -1).amax(1, keepdim=True)
    removed_KC = reaches_KC & (place_C != stays_K1) & acts_K1
    z_KC.masked_fill_(removed_KC, -torch.inf)

"""Truncation: which of a row's tokens may be sampled. Each function removes tokens, by -Inf.

K rows, C tokens of each: all, or candidates that hold whatever is kept; z float64 [K, C] = logit /
temperature. Tokens tied with the last one kept stay, so that no choice hangs on an id.

    top_k      the k most likely tokens
    typical_p  those whose information is nearest to the entropy, up to probability p (Meister et
               al. 2023, "Locally typical sampling", section 4)
    top_p      the smallest set of the most likely tokens whose probability reaches p, the nucleus
               (Holtzman et al. 2020, "The curious case of neural text degeneration", section 3.1)
    min_p      those at least min_p times as likely as the most likely one (Nguyen et al. 2024,
               "Turning up the heat", section 3). In logits: z >= max z + log(min_p)
    XTC        "exclude top choices": with some probability, removes all tokens that reach a
               threshold but the least likely of them (the sampler of p-e-w, text-generation-webui
               pull request 6335, 2024). Among ties the last in the order of candidates stays, which
               is the order of ids among equals
"""

from __future__ import annotations

import torch

from headrace.back.kernels.nucleus.op import Nucleus


def keep_top_k_(z_KC: torch.Tensor, k_K: torch.Tensor, *, most: int) -> torch.Tensor:
    """Removes (-Inf) what is below each row's k-th greatest value; z [K, C], k int64 [K], k >= C
    keeps all.

    `most` is the greatest k, known to the host. Returns the log of the sum of exp of what is left,
    [K, 1]: summed in falling order, so that its bits hang neither on what was removed nor on where
    the others stand."""
    most = min(most, z_KC.shape[1])
    max_logit = z_KC.topk(most, dim=1).values
    last_K1 = (k_K - 1).clamp(max=most - 1)[:, None]
    kth_K1, max_K1 = max_logit.gather(1, last_K1), max_logit[:, :1]
    sum_K1 = (max_logit - max_K1).exp_().cumsum(1).gather(1, last_K1)
    more_K1 = (z_KC >= kth_K1).sum(1, keepdim=True) - last_K1 - 1
    sum_K1 += more_K1 * (kth_K1 - max_K1).exp_()
    kth_K1.masked_fill_((k_K > most)[:, None], -torch.inf)
    z_KC.masked_fill_(z_KC < kth_K1, -torch.inf)
    return max_K1 + sum_K1.log_()


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


def keep_top_p_(
    z_KC: torch.Tensor, p_K1: torch.Tensor, lse_K1: torch.Tensor, *, nucleus: Nucleus
) -> None:
    """Removes (-Inf) what the nucleus does not need; p >= 1 keeps all.

    z float64 [K, C]; `lse_K1`: log of the sum of exp over all tokens of the row, also over those
    not among the C.
    """
    probs_KC = (z_KC - lse_K1).exp_()
    least_K1 = nucleus(probs_KC, p_K1)
    least_K1.masked_fill_(p_K1 >= 1.0, 0.0)
    z_KC.masked_fill_(probs_KC < least_K1, -torch.inf)


def keep_min_p_(z_KC: torch.Tensor, log_min_p_K1: torch.Tensor) -> None:
    """Removes (-Inf) less likely tokens; log(0) = -Inf keeps all."""
    least_K1 = z_KC.amax(1, keepdim=True) + log_min_p_K1
    z_KC.masked_fill_(z_KC < least_K1, -torch.inf)


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

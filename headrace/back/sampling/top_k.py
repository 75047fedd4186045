"""top_k: only the k most likely tokens. Tokens tied with the k-th stay, so that no choice hangs on
an id."""

from __future__ import annotations

import torch


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

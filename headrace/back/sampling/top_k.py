"""top_k: only the k most likely tokens. Tokens tied with the k-th stay, so that no choice hangs on an id."""

from __future__ import annotations

import torch


def keep_top_k_(z_KC: torch.Tensor, k_K: torch.Tensor, *, most: int) -> None:
    """Removes (-Inf) what is below each row's k-th greatest value; z [K, C], k int64 [K], k >= C keeps all.

    `most` is the greatest k, known to the host."""
    most = min(most, z_KC.shape[1])
    best = z_KC.topk(most, dim=1).values
    kth_K1 = best.gather(1, (k_K - 1).clamp(max=most - 1)[:, None])
    kth_K1.masked_fill_((k_K > most)[:, None], -torch.inf)
    z_KC.masked_fill_(z_KC < kth_K1, -torch.inf)

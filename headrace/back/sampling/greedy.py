"""Greedy choice: the argmax of each row; of equal logits the lowest token id, at any batch size (ENG-21, REG-026).

A NaN counts as the greatest value, so the value at the chosen token is finite exactly if the row holds neither NaN nor
+Inf and is not all -Inf: the check of the row costs no further pass over it.
"""

from __future__ import annotations

import numpy as np
import torch


def argmax_rows(logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest id among the greatest logits (or the first NaN) of each row, int64 [N], and the logit there.

    On the CPU numpy's argmax is used: the same result, several times as fast as torch's on one thread.
    """
    if logits_NV.device.type != "cpu":
        token_N = logits_NV.argmax(dim=1)
        return token_N, logits_NV.gather(1, token_N[:, None])[:, 0]
    host_NV = logits_NV.numpy()
    token_N = host_NV.argmax(axis=1)
    best_N = host_NV[np.arange(len(token_N)), token_N]
    return torch.from_numpy(token_N), torch.from_numpy(best_N)

"""min_p: tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024, "Turning
up the heat", section 3). In logits: z >= max z + log(min_p)."""

from __future__ import annotations

import torch


def keep_min_p_(z_KC: torch.Tensor, log_min_p_K1: torch.Tensor) -> None:
    """Removes (-Inf) less likely tokens; log(0) = -Inf keeps all."""
    least_K1 = z_KC.amax(1, keepdim=True) + log_min_p_K1
    z_KC.masked_fill_(z_KC < least_K1, -torch.inf)

"""top_p (nucleus): the smallest set of the most likely tokens whose probability reaches p (Holtzman
et al. 2020, "The curious case of neural text degeneration", section 3.1). Tokens tied with the last
one stay."""

from __future__ import annotations

import torch

from headrace.back.kernels.nucleus.op import Nucleus


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

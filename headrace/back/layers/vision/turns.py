"""The angles by which the heads of vision towers turn: functions of a patch's row and column.

N patches, D head_dim, F = D / 4 frequencies of an axis, H = D / 2 angles of a head.
"""

from __future__ import annotations

import torch

from headrace.back.kernels.patch_places.op import frequencies, rows_then_columns


def columns_then_rows(place_2N: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """The column's, then the row's, both counted from one (Llama 4)."""
    return rows_then_columns(place_2N.flip(0) + 1, head_dim, theta)


def columns_first(place_2N: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """The column's, then the row's (Step 3.7)."""
    return rows_then_columns(place_2N.flip(0), head_dim, theta)


def columns_beside_rows(place_2N: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """Of each frequency the column's, then the row's (Kimi team 2025, Kimi-VL)."""
    angles_2NF = place_2N.flip(0)[..., None] * frequencies(head_dim // 2, theta, place_2N.device)
    return angles_2NF.permute(1, 2, 0).flatten(1)


def alternating(place_2N: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """Of frequencies twice as dense rows have every other, columns the rest (Agrawal et al. 2024,
    Pixtral)."""
    frequencies_H = frequencies(head_dim, theta, place_2N.device)
    frequencies_2F = torch.stack((frequencies_H[0::2], frequencies_H[1::2]))
    return (place_2N[..., None] * frequencies_2F[:, None]).permute(1, 0, 2).flatten(1)


def still_rows_columns(place_2N: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """Of a third of the head each: the time's, which is none in a picture, the row's and the
    column's (MiniMax-M3)."""
    angles_2NF = place_2N[..., None] * frequencies(2 * (head_dim // 3 // 2), theta, place_2N.device)
    return torch.cat((torch.zeros_like(angles_2NF[0]), angles_2NF[0], angles_2NF[1]), dim=1)

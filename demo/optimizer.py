"""Muon for the matrices, AdamW for the embedding and the norms.

Muon (K. Jordan, 2024) steps along the orthogonalized momentum; the step is scaled by
0.2 * sqrt(longer side) so that one learning rate and one weight decay fit both kinds of parameters
(Liu et al., "Muon is scalable for LLM training", 2025, section 2.2). Matrices of one shape are stacked
and orthogonalized together, because at this size the launches cost more than the arithmetic.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon:
    """Momentum and orthogonalized steps for all 2-D weights but the embedding."""

    def __init__(self, model: nn.Module, *, momentum: float = 0.95, decay: float = 0.05) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                groups[parameter.shape].append(parameter)
        self.groups = list(groups.values())
        self.velocity = [torch.zeros_like(torch.stack(list(group))) for group in self.groups]
        self.momentum = momentum
        self.decay = decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step at the learning rate; gradients are taken from the parameters."""
        for group, velocity in zip(self.groups, self.velocity, strict=True):
            gradient = torch.stack([parameter.grad for parameter in group])
            velocity.lerp_(gradient, 1 - self.momentum)
            update = orthogonalize(gradient.lerp(velocity, self.momentum))
            update *= 0.2 * max(update.shape[-2:]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.decay).add_(change, alpha=-rate)

    def state(self) -> list[Tensor]:
        """What a checkpoint must hold."""
        return self.velocity

    def load(self, velocity: list[Tensor]) -> None:
        """Takes the state of a checkpoint."""
        for own, saved in zip(self.velocity, velocity, strict=True):
            own.copy_(saved)


def orthogonalize(stacked: Tensor) -> Tensor:
    """The nearest half-orthogonal matrices, by five Newton-Schulz steps in bf16; [N, R, C]."""
    a, b, c = _NEWTON_SCHULZ
    x = stacked.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()


def adamw(model: nn.Module, *, rate: float) -> torch.optim.AdamW:
    """AdamW over what Muon leaves: embedding and norms."""
    left = [p for n, p in model.named_parameters() if p.dim() < 2 or "embed" in n]
    fused = left[0].is_cuda
    return torch.optim.AdamW(left, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)

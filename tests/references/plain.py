"""What references of decoders share: random checkpoints by their shapes, norms, rotations, attention and MLPs over one
row, whole, in float32. T tokens, E hidden size, H heads, K KV heads, D head_dim, X experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]


def random_tensors(shapes: Shapes, *, seed: int = 11) -> Tensors:
    """Matrices that keep the size of what goes in; vectors near zero, or near one where they are weights of norms."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            made[name] = noise * 1.2 / shape[-1] ** 0.5
        else:
            made[name] = 0.2 * noise + ("norm" in name and not name.endswith("bias"))
    return made


def of_layer(weights: Tensors, prefix: str) -> Tensors:
    """Those below the prefix, without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


def norm(x: torch.Tensor, weight: torch.Tensor | float, eps: float) -> torch.Tensor:
    """By the root mean square."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x_THD: torch.Tensor, theta: float, *, share: float = 1.0) -> torch.Tensor:
    """By their places in the row: the first share of each head, its halves as pairs."""
    half = int(x_THD.shape[-1] * share) // 2
    speed = theta ** (-torch.arange(half) / half)
    angle_T1D = (torch.arange(len(x_THD))[:, None] * speed)[:, None]
    first, second, rest = x_THD.tensor_split((half, 2 * half), -1)
    cos, sin = angle_T1D.cos(), angle_T1D.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def attended(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    *,
    scale: float | None = None,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    sees_HTT: torch.Tensor | None = None,
) -> torch.Tensor:
    """y_TX. `change`: of the scaled scores [H, T, T]; `sees_HTT`: what is seen besides what comes later, [T, T] or for
    each head."""
    group = q_THD.shape[1] // k_TKD.shape[1]
    k_HTD, v_HTD = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k_TKD, v_TKD))
    scores = q_THD.transpose(0, 1) @ k_HTD.transpose(1, 2)
    scores = scores * (q_THD.shape[-1] ** -0.5 if scale is None else scale)
    if change is not None:
        scores = change(scores)
    sees = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    sees = sees if sees_HTT is None else sees & sees_HTT
    weights = scores.masked_fill(~sees, -math.inf).softmax(-1)
    return (weights @ v_HTD).transpose(0, 1).flatten(1)


def window(tokens: int, width: int) -> torch.Tensor:
    """[T, T]: the last `width` positions, the own one among them."""
    place = torch.arange(tokens)
    return place[None] > place[:, None] - width


def mlp(
    own: Tensors,
    name: str,
    x_TE: torch.Tensor,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    act: Callable[[torch.Tensor], torch.Tensor] = F.silu,
) -> torch.Tensor:
    """Gated; `parts`: gate, up and down."""
    gate, up, down = (own[f"{name}.{part}.weight"] for part in parts)
    return (act(x_TE @ gate.T) * (x_TE @ up.T)) @ down.T


def weighed(weight_TX: torch.Tensor, expert: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """The sum of what all experts make of all tokens, times the weights, 0 where one is not chosen."""
    return sum(weight_TX[:, i, None] * expert(i) for i in range(weight_TX.shape[1]))


def best(score_TX: torch.Tensor, count: int) -> torch.Tensor:
    """The scores without all but the best of each token."""
    chosen = score_TX.topk(count, -1).indices
    return torch.zeros_like(score_TX).scatter(1, chosen, score_TX.gather(1, chosen))

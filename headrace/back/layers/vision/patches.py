"""The first layer of a vision tower: rows of uint8 pixels to hidden size, one GEMM.

Rescaling and normalization are folded into the weight: with pixels x, means m and deviations s of
the channels, W (x / 255 - m) / s + b = W' (x - 128) + b', where x - 128 is exact in any float.
A convolution whose stride is its size is this GEMM. N rows, B bytes of a row, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.scope import Scope, not_loaded
from headrace.base.config.media import ImageNorm

HALF = 128


@dataclass(frozen=True, kw_only=True)
class PatchSpec:
    """`patch` pixels a side, `frames` in the weight; mean and deviation of red, green and blue,
    unless the checkpoint's processor states others (Scope.image_norm).
    `name`: of the convolution. `linear`: the checkpoint holds [E, patch * patch * 3], channels
    last; `flat`: [E, 3 * frames * patch * patch]. `inside`: the model itself does this, behind what
    the checkpoint's processor does."""

    patch: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    frames: int = 1
    bias: bool = True
    name: str = "patch_embed.proj"
    linear: bool = False
    flat: bool = False
    inside: bool = False

    @property
    def row_bytes(self) -> int:
        """Of a row with one frame."""
        return 3 * self.patch**2


class PatchEmbedding:
    """rows_NB uint8 -> x_NE. A row of one frame stands for `frames` equal ones."""

    def __init__(self, scope: Scope, width: int, spec: PatchSpec) -> None:
        self._scope = scope
        self._spec = spec
        side = (spec.patch, spec.patch)
        shape = (*((spec.frames,) if spec.frames > 1 else ()), *side)
        flat = (3 * spec.frames * spec.patch**2,)
        inputs = flat if spec.linear or spec.flat else (3, *shape)
        at = scope / spec.name
        self._weight = at.param("weight", (width, *inputs))
        self._bias = at.param("bias", (width,), init="zeros") if spec.bias else None
        self._image = self._video = not_loaded
        scope.on_finish(self._finish)

    def embed(self, rows_NB: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x_NB = rows_NB.to(self._scope.dtype).sub_(HALF)
        one_frame = x_NB.shape[1] == self._spec.row_bytes
        embedded: torch.Tensor = (self._image if one_frame else self._video)(x_NB)
        return embedded

    def _finish(self) -> None:
        spec, scope = self._spec, self._scope
        weight = self._weight.take().float()
        if spec.linear:
            weight = weight.unflatten(1, (spec.patch, spec.patch, 3)).permute(0, 3, 1, 2)
        weight = weight.reshape(weight.shape[0], 3, spec.frames, -1)
        mean, std = (
            torch.tensor(values, device=weight.device)[None, :, None, None]
            for values in norm_of(spec, scope.image_norm)
        )
        bias_E = (weight * ((HALF / 255 - mean) / std)).sum((1, 2, 3))
        if self._bias is not None:
            bias_E += self._bias.take().float()
        weight = weight / (255 * std)
        bias_E = bias_E.to(scope.dtype)
        if spec.frames > 1:
            video_EB = weight.flatten(1).to(scope.dtype).contiguous()
            self._video = bind_linear(scope, video_EB, bias_E)
        image_EB = weight.sum(2).flatten(1).to(scope.dtype).contiguous()
        self._image = bind_linear(scope, image_EB, bias_E)


def norm_of(spec: PatchSpec, stated: ImageNorm | None) -> ImageNorm:
    """Mean and deviation of values between 0 and 1."""
    if stated is None:
        return spec.mean, spec.std
    if not spec.inside:
        return stated
    pairs = list(zip(*stated, spec.mean, spec.std, strict=True))
    mean = [first + scale * own for first, scale, own, _ in pairs]
    std = [scale * own for _, scale, _, own in pairs]
    return (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])


class WholePictures:
    """Pixels of rows of squares where they are seen, for towers that begin with convolutions that
    overlap, or with more patches than an input has rows. `spec`: mean and deviation of colours, and
    the side of the squares, whose order is that of a grid."""

    def __init__(self, scope: Scope, spec: PatchSpec) -> None:
        self._scope, self._spec = scope, spec
        self._mean_C, self._scale_C = torch.empty(0), torch.empty(0)
        scope.on_finish(self._finish)

    def of(self, rows_NB: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """[1, H, W, 3] of one picture, normalized."""
        (_, h, w), side = grid, self._spec.patch
        pixels = rows_NB.view(h, w, 3, side, side).permute(0, 3, 1, 4, 2)
        pixels = pixels.reshape(1, h * side, w * side, 3).float()
        return ((pixels - self._mean_C) * self._scale_C).to(self._scope.dtype)

    def _finish(self) -> None:
        mean, std = norm_of(self._spec, self._scope.image_norm)
        self._mean_C = 255 * torch.tensor(mean, device=self._scope.device)
        self._scale_C = 1 / (255 * torch.tensor(std, device=self._scope.device))

"""The conformer of Universal Speech Models, as Gemma 3n and Gemma 4 hear (Zhang et al. 2023; Gulati
et al. 2020): half an MLP, attention to the near past with places relative to the query (Dai et al.
2019, appendix B), a depthwise convolution over the past, the other half of the MLP, a norm.

T positions of all inputs, S positions that one sees, H heads, D of a head, E width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from headrace.back.kernels.upload import planned
from headrace.back.layers.clipped import ClippedLinear
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import RMS
from headrace.back.layers.scope import Scope

NORM_EPS = 1e-6
"""Of the norms that the config's epsilon does not reach."""


@dataclass(frozen=True, kw_only=True)
class UsmNames:
    """Where a layer's tensors lie: both halves of the MLP, attention's linear layers and scales,
    that of relative places, the layer behind attention, the norms around it and the last one."""

    mlps: tuple[str, str] = ("feed_forward1", "feed_forward2")
    attention: str = "self_attn"
    places: str = "self_attn.relative_k_proj"
    out: str = "self_attn.post"
    norms: tuple[str, str, str] = ("norm_pre_attn", "norm_post_attn", "norm_out")


@dataclass(frozen=True, kw_only=True)
class UsmLayerSpec:
    """left, right: positions before (itself among them) and behind the query that it sees. places:
    the distances of the first one it sees and of the last one whose place counts. cap: of
    attention's logits. key_scale: of keys. share: of what each half of the MLP adds. clip: values
    are cut to it. clipped: linear layers have learned bounds. module: where their weights lie below
    their names."""

    width: int
    heads: int
    left: int
    right: int
    places: tuple[int, int]
    cap: float
    key_scale: float
    taps: int
    share: float
    clip: float
    eps: float
    clipped: bool
    module: str = "linear"
    names: UsmNames = UsmNames()

    def linear(self, scope: Scope, inputs: int, outputs: int) -> ClippedLinear:
        """A linear layer of this name."""
        return ClippedLinear(scope, inputs, outputs, clipped=self.clipped, module=self.module)


@dataclass(frozen=True, slots=True)
class NearPositions:
    """place_TS: the positions that each one sees, of which `seen_TS` are within its input; first_T:
    how many positions of its input lie before each."""

    place_TS: torch.Tensor
    seen_TS: torch.Tensor
    first_T: torch.Tensor


def near_positions(sizes: Sequence[int], spec: UsmLayerSpec, device: torch.device) -> NearPositions:
    """Of inputs of so many positions, end to end."""
    starts = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
    ends = np.repeat(np.cumsum(sizes), sizes)
    own = np.arange(len(starts))
    near = own[:, None] + np.arange(1 - spec.left, spec.right + 1)
    inside = (near >= starts[:, None]) & (near < ends[:, None])
    return NearPositions(
        place_TS=planned(np.clip(near, 0, len(own) - 1), device),
        seen_TS=planned(inside, device),
        first_T=planned(own - starts, device),
    )


class UsmLayer:
    """x_TE -> x_TE."""

    def __init__(self, scope: Scope, spec: UsmLayerSpec) -> None:
        names, width = spec.names, spec.width
        self._spec = spec
        self._mlps = [UsmHalfMLP(scope / name, spec) for name in names.mlps]
        self._attention = UsmAttention(scope, spec)
        self._convolution = UsmConvolution(scope / "lconv1d", spec)
        self._norms = [RMS.build(scope / name, width, eps=NORM_EPS) for name in names.norms]

    def forward(self, x_TE: torch.Tensor, near: NearPositions) -> torch.Tensor:
        """See the class."""
        clip = _bound(self._spec.clip, x_TE)
        before, behind, last = self._norms
        x_TE = self._mlps[0].forward(x_TE)
        y_TE = self._attention.forward(before.norm(x_TE.clamp(-clip, clip)), near)
        x_TE = x_TE + behind.norm(y_TE.clamp(-clip, clip))
        x_TE = self._convolution.forward(x_TE, near.first_T)
        x_TE = self._mlps[1].forward(x_TE)
        return last.norm(x_TE.clamp(-clip, clip))


class UsmHalfMLP:
    """x_TE -> x_TE: an MLP without a gate, of whose result a share is added."""

    def __init__(self, scope: Scope, spec: UsmLayerSpec) -> None:
        width = spec.width
        self._spec = spec
        self._before, self._behind = (
            RMS.build(scope / name, width, eps=NORM_EPS)
            for name in ("pre_layer_norm", "post_layer_norm")
        )
        self._up = spec.linear(scope / "ffw_layer_1", width, 4 * width)
        self._down = spec.linear(scope / "ffw_layer_2", 4 * width, width)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        clip = _bound(self._spec.clip, x_TE)
        y_TE = self._before.norm(x_TE.clamp(-clip, clip))
        y_TE = self._down.project(F.silu(self._up.project(y_TE))).clamp(-clip, clip)
        return x_TE + self._behind.norm(y_TE) * self._spec.share


class UsmAttention:
    """x_TE -> y_TE over the positions near each."""

    def __init__(self, scope: Scope, spec: UsmLayerSpec) -> None:
        names, width = spec.names, spec.width
        inside = scope / names.attention
        self._spec, self._scope = spec, scope
        self._head_dim = width // spec.heads
        self._qkv = [spec.linear(inside / f"{one}_proj", width, width) for one in "qkv"]
        self._out = spec.linear(scope / names.out, width, width)
        self._places = WholeLinear(scope / names.places, width, width)
        self._scale = inside.param("per_dim_scale", (self._head_dim,))
        self._scale_D = torch.empty(0)
        self._places_SHD = torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        """Places are functions of the weights alone."""
        spec, device = self._spec, self._scope.device
        scale_D = F.softplus(self._scale.take().float())
        self._scale_D = scale_D * (self._head_dim**-0.5 / math.log(2))
        furthest, nearest = spec.places
        distance_S = torch.arange(furthest, nearest - 1, -1, device=device)
        step = math.log(10_000.0) / max(spec.width // 2 - 1, 1)
        scales = torch.exp(torch.arange(spec.width // 2, device=device) * -step)
        angles = distance_S[:, None] * scales
        sines_SE = torch.cat([angles.sin(), angles.cos()], dim=1).to(self._scope.dtype)
        place_SE = self._places.project(sines_SE)
        seen = spec.left + spec.right
        place_SE = F.pad(place_SE, (0, 0, 0, max(0, seen - place_SE.shape[0])))[:seen]
        self._places_SHD = place_SE.float().unflatten(1, (spec.heads, -1))

    def forward(self, x_TE: torch.Tensor, near: NearPositions) -> torch.Tensor:
        """See the class."""
        spec = self._spec
        q_THD, k_THD, v_THD = (
            linear.project(x_TE).float().unflatten(1, (spec.heads, -1)) for linear in self._qkv
        )
        q_THD = q_THD * self._scale_D
        k_TSHD = (k_THD * spec.key_scale)[near.place_TS]
        score_THS = torch.einsum("thd,tshd->ths", q_THD, k_TSHD + self._places_SHD)
        score_THS = torch.tanh(score_THS / spec.cap) * spec.cap
        score_THS = score_THS.masked_fill(~near.seen_TS[:, None], -torch.inf)
        y_THD = torch.einsum("ths,tshd->thd", score_THS.softmax(-1), v_THD[near.place_TS])
        return self._out.project(y_THD.flatten(1).to(x_TE.dtype))


class UsmConvolution:
    """x_TE -> x_TE: a gated depthwise convolution over the past of the same input."""

    def __init__(self, scope: Scope, spec: UsmLayerSpec) -> None:
        width = spec.width
        self._spec = spec
        self._before, self._middle = (
            RMS.build(scope / name, width, eps=spec.eps) for name in ("pre_layer_norm", "conv_norm")
        )
        self._start = spec.linear(scope / "linear_start", width, 2 * width)
        self._end = spec.linear(scope / "linear_end", width, width)
        self._kernel = scope.param("depthwise_conv1d.weight", (width, 1, spec.taps))
        self._taps_KE = torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._taps_KE = self._kernel.take()[:, 0].T.contiguous()

    def forward(self, x_TE: torch.Tensor, first_T: torch.Tensor) -> torch.Tensor:
        """See the class; `first_T` as in NearPositions."""
        clip, taps = _bound(self._spec.clip, x_TE), self._taps_KE.shape[0]
        y_TE = F.glu(self._start.project(self._before.norm(x_TE)), dim=-1)
        sum_TE = y_TE * self._taps_KE[-1]
        for back in range(1, min(taps, y_TE.shape[0])):
            past_TE = F.pad(y_TE[:-back], (0, 0, back, 0)) * (first_T >= back)[:, None]
            sum_TE = sum_TE + past_TE * self._taps_KE[-1 - back]
        y_TE = F.silu(self._middle.norm(sum_TE.clamp(-clip, clip)))
        return x_TE + self._end.project(y_TE)


def _bound(clip: float, x_TE: torch.Tensor) -> float:
    return min(clip, torch.finfo(x_TE.dtype).max)

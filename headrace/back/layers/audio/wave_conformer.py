"""The conformer of wav2vec 2.0's successors (Gulati et al. 2020; Wang et al. 2020): half an MLP,
attention with places relative to the query in one of three ways, a gated depthwise convolution, the
other half of the MLP, a norm. transformers 5.23, modeling_wav2vec2_conformer.py,
modeling_wav2vec2_bert.py, modeling_seamless_m4t.py.

Inputs are read one after the other. S positions, H heads, D of a head, E width, P places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.kernels.upload import planned
from headrace.back.layers.audio.conformer_branches import EPS, Activation
from headrace.back.layers.audio.fast_conformer import (
    RelativeAttention,
    RelativeAttentionSpec,
    RelativeNames,
    relative_places,
)
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.base.wire.media import Strides

NAMES = RelativeNames(
    query="linear_q",
    key="linear_k",
    value="linear_v",
    out="linear_out",
    places="linear_pos",
    biases=("pos_bias_u", "pos_bias_v"),
)
QUERIES = 512


@dataclass(frozen=True, kw_only=True)
class WaveConformerSpec:
    """places: "relative" (sines of distances, Dai et al. 2019), "relative_key" (a learned row for
    each distance up to `reach` before and behind, Shaw et al. 2018), "rotary" (what queries and
    keys are made of turns, by `theta`), "none". backward: the convolution sees nothing behind and
    has a norm over the width; else it sees both sides and has a batch norm. blocks: positions that
    see each other, and how many such blocks before them are seen (-1: all); 0: all see all."""

    width: int
    inner: int
    heads: int
    layers: int
    taps: int
    eps: float
    activation: Activation
    places: str
    reach: tuple[int, int] = (0, 0)
    theta: float = 10_000.0
    backward: bool = False
    blocks: tuple[int, int] = (0, -1)


class WaveConformer:
    """x_SE -> x_SE of one input."""

    def __init__(self, scope: Scope, spec: WaveConformerSpec) -> None:
        self._spec = spec
        self._layers = [
            WaveConformerLayer(scope / "encoder.layers" / str(index), spec)
            for index in range(spec.layers)
        ]

    def forward(self, x_SE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        seen = self._seen(x_SE)
        place = self._places(x_SE)
        for layer in self._layers:
            x_SE = layer.forward(x_SE, place, seen)
        return x_SE

    def _places(self, x_SE: torch.Tensor) -> torch.Tensor | None:
        """What layers ask for: sines of distances, or the turns [2, S, 1, D] of places."""
        spec, size = self._spec, x_SE.shape[0]
        if spec.places == "relative":
            return planned(relative_places(size, spec.width), x_SE.device).to(x_SE.dtype)
        if spec.places != "rotary":
            return None
        dims = spec.width // spec.heads
        scales = spec.theta ** -(torch.arange(0, dims, 2).float() / dims)
        angles = torch.arange(size)[:, None].float() * scales
        doubled = torch.cat((angles, angles), dim=1)[:, None]
        turns = torch.stack((doubled.cos(), doubled.sin()))
        return planned(turns, x_SE.device).to(x_SE.dtype)

    def _seen(self, x_SE: torch.Tensor) -> torch.Tensor | None:
        """[S, S]: which keys a query sees; None: all."""
        size, before = self._spec.blocks
        if not size:
            return None
        block = torch.arange(x_SE.shape[0], device=x_SE.device) // size
        back = block[:, None] - block
        return (back >= 0) & (back <= before) if before >= 0 else back >= 0


class WaveConformerLayer:
    """x_SE -> x_SE."""

    def __init__(self, scope: Scope, spec: WaveConformerSpec) -> None:
        self._first, self._second = (NamedMLP(scope / name, spec) for name in ("ffn1", "ffn2"))
        self._attention = placed_attention(scope / "self_attn", spec)
        self._convolution = WaveConvolution(scope / "conv_module", spec)
        names = ("ffn1", "self_attn", "ffn2", "final")
        self._norms = [
            LAYER.build(scope / f"{name}_layer_norm", spec.width, eps=spec.eps) for name in names
        ]

    def forward(
        self, x_SE: torch.Tensor, place: torch.Tensor | None, seen: torch.Tensor | None
    ) -> torch.Tensor:
        """See WaveConformer."""
        first, attention, second, last = self._norms
        x_SE = x_SE + 0.5 * self._first.forward(first.norm(x_SE))
        y_SE = attention.norm(x_SE)
        if isinstance(self._attention, RelativeAttention):
            assert place is not None and seen is None, "distances of all positions"
            x_SE = x_SE + self._attention.forward(y_SE, place, x_SE.shape[0])
        else:
            x_SE = x_SE + self._attention.forward(y_SE, place, seen)
        x_SE = x_SE + self._convolution.forward(x_SE)
        x_SE = x_SE + 0.5 * self._second.forward(second.norm(x_SE))
        return last.norm(x_SE)


class NamedMLP:
    """x_SE -> y_SE; `activation`: where it is not that of the layers."""

    def __init__(
        self, scope: Scope, spec: WaveConformerSpec, *, activation: Activation | None = None
    ) -> None:
        self._activation = activation or spec.activation
        self._up = WholeLinear(scope / "intermediate_dense", spec.width, spec.inner, bias=True)
        self._down = WholeLinear(scope / "output_dense", spec.inner, spec.width, bias=True)

    def forward(self, x_SE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self._down.project(self._activation(self._up.project(x_SE)))


class PlacedAttention:
    """x_SE -> y_SE with turns, learned rows of distances, or no places."""

    def __init__(self, scope: Scope, spec: WaveConformerSpec, places: str) -> None:
        self._spec, self._places, width = spec, places, spec.width
        self._query, self._key, self._value, self._out = (
            WholeLinear(scope / f"linear_{name}", width, width, bias=True)
            for name in ("q", "k", "v", "out")
        )
        self._rows = None
        if places == "relative_key":
            shape = (sum(spec.reach) + 1, width // spec.heads)
            self._rows = scope.param("distance_embedding.weight", shape)
        self._row_PD = torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        if self._rows is not None:
            self._row_PD = self._rows.take()

    def forward(
        self, x_SE: torch.Tensor, turns: torch.Tensor | None, seen_SS: torch.Tensor | None
    ) -> torch.Tensor:
        """See WaveConformer."""
        heads = self._spec.heads
        from_SE = x_SE
        if turns is not None:
            x_SHD = x_SE.unflatten(1, (heads, -1))
            low, high = x_SHD.chunk(2, dim=-1)
            turned = x_SHD * turns[0] + torch.cat((-high, low), dim=-1) * turns[1]
            from_SE = turned.flatten(1)
        q_HSD, k_HSD, v_HSD = (
            one.project(source).unflatten(1, (heads, -1)).transpose(0, 1)
            for one, source in (
                (self._query, from_SE),
                (self._key, from_SE),
                (self._value, x_SE),
            )
        )
        parts = [
            self._attended(q_HSD[:, at : at + QUERIES], k_HSD, v_HSD, at, seen_SS)
            for at in range(0, x_SE.shape[0], QUERIES)
        ]
        return self._out.project(torch.cat(parts, dim=1).transpose(0, 1).flatten(1))

    def _attended(
        self,
        q_HCD: torch.Tensor,
        k_HSD: torch.Tensor,
        v_HSD: torch.Tensor,
        at: int,
        seen_SS: torch.Tensor | None,
    ) -> torch.Tensor:
        count, size = q_HCD.shape[1], k_HSD.shape[1]
        mask = None if seen_SS is None else seen_SS[at : at + count][None]
        if self._rows is not None:
            before, behind = self._spec.reach
            place = torch.arange(size, device=q_HCD.device)
            distance_CS = (place - place[at : at + count, None]).clamp(-before, behind) + before
            score_HCP = q_HCD @ self._row_PD.T * q_HCD.shape[2] ** -0.5
            index = distance_CS.expand(q_HCD.shape[0], -1, -1)
            bias_HCS = score_HCP.gather(2, index)
            mask = bias_HCS if mask is None else bias_HCS.masked_fill(~mask, -torch.inf)
        every = None if mask is None else mask[None]
        return F.scaled_dot_product_attention(q_HCD[None], k_HSD[None], v_HSD[None], every)[0]


def placed_attention(scope: Scope, spec: WaveConformerSpec) -> RelativeAttention | PlacedAttention:
    """By `spec.places`."""
    if spec.places != "relative":
        return PlacedAttention(scope, spec, spec.places)
    return RelativeAttention(
        scope, RelativeAttentionSpec(width=spec.width, heads=spec.heads, bias=True, names=NAMES)
    )


class WaveConvolution:
    """x_SE -> y_SE."""

    def __init__(self, scope: Scope, spec: WaveConformerSpec) -> None:
        self._spec, width = spec, spec.width
        self._norm = LAYER.build(scope / "layer_norm", width, eps=spec.eps)
        shapes: dict[str, tuple[int, ...]] = {
            "pointwise_conv1.weight": (2 * width, width, 1),
            "depthwise_conv.weight": (width, 1, spec.taps),
            "pointwise_conv2.weight": (width, width, 1),
        }
        self._within = None
        if spec.backward:
            self._within = LAYER.build(scope / "depthwise_layer_norm", width, eps=spec.eps)
        else:
            names = ("running_mean", "running_var", "weight", "bias")
            shapes |= {f"batch_norm.{name}": (width,) for name in names}
        self._params = {name: scope.param(name, shape) for name, shape in shapes.items()}
        self._weights: dict[str, torch.Tensor] = {}
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = {name: param.take() for name, param in self._params.items()}

    def forward(self, x_SE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        at, taps = self._weights, self._spec.taps
        up_SX = F.linear(self._norm.norm(x_SE), at["pointwise_conv1.weight"][:, :, 0])
        sides = (taps - 1, 0) if self._spec.backward else ((taps - 1) // 2,) * 2
        y_AES = F.pad(F.glu(up_SX, dim=-1).T[None], sides)
        y_AES = F.conv1d(y_AES, at["depthwise_conv.weight"], groups=x_SE.shape[1])
        if self._within is not None:
            y_SE = self._within.norm(y_AES[0].T.contiguous())
        else:
            names = ("running_mean", "running_var", "weight", "bias")
            mean, variance, weight, bias = (at[f"batch_norm.{name}"] for name in names)
            y_SE = F.batch_norm(y_AES, mean, variance, weight, bias, eps=EPS)[0].T
        return F.linear(self._spec.activation(y_SE), at["pointwise_conv2.weight"][:, :, 0])


@dataclass(frozen=True, kw_only=True)
class FrameConformerSpec:
    """A conformer over frames (wav2vec2-BERT): a norm, a linear layer, the layers."""

    bands: int
    layers: WaveConformerSpec

    @property
    def width(self) -> int:
        """Of a position."""
        return self.layers.width

    @property
    def strides(self) -> Strides:
        """A position for each frame."""
        return ()

    def build(self, scope: Scope) -> FrameConformer:
        """See ConformerSpec."""
        return FrameConformer(scope, self)


class FrameConformer:
    """frames_NM -> x_SE of one input."""

    def __init__(self, scope: Scope, spec: FrameConformerSpec) -> None:
        self.width = spec.width
        inside, layers = scope / "feature_projection", spec.layers
        self._norm = LAYER.build(inside / "layer_norm", spec.bands, eps=layers.eps)
        self._projection = WholeLinear(inside / "projection", spec.bands, layers.width, bias=True)
        self._layers = WaveConformer(scope, layers)

    def forward(self, frames_NM: torch.Tensor, *, ghosts: int = 0) -> torch.Tensor:
        """See Conformer; there are no ghosts."""
        assert not ghosts, ghosts
        return self._layers.forward(self._projection.project(self._norm.norm(frames_NM)))

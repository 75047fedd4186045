"""A tower that hears in time: convolutions and attention that see what was before alone, attention
no farther than a window (Voxtral Realtime, Mistral AI 2026; transformers 5.23,
modeling_voxtral_realtime.py). What it gives of a sound's beginning does not change with what
follows.

Inputs are read one after the other. N frames, S positions, H heads, D of a head, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.kernels.upload import planned
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import RMS
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.plain_tower import ProjectorSpec
from headrace.back.parallel.mesh import Mesh
from headrace.base.wire.media import MediaForm, SoundSteps

QUERIES = 512
"""That attend at a time."""
MOST_FRAMES = 180_000
"""Half an hour."""


@dataclass(frozen=True, kw_only=True)
class CausalTowerSpec:
    """window: positions that one sees, itself among them. beside: positions that become one token.
    theta: of places."""

    bands: int
    width: int
    inner: int
    heads: int
    head_dim: int
    layers: int
    eps: float
    window: int
    theta: float
    beside: int
    activation: Callable[[torch.Tensor], torch.Tensor]
    projector: ProjectorSpec


class CausalTower:
    """`MediaEncoder`, whose tokens are added to those that stand in their places. `whole` is the
    scope of the checkpoint, `scope` the tower's."""

    rope = None
    layers = 0

    def __init__(self, whole: Scope, scope: Scope, spec: CausalTowerSpec) -> None:
        whole, scope = (
            replace(one, mesh=Mesh(), online=None, adapters=None) for one in (whole, scope)
        )
        self._spec = spec
        inside = scope / "embedder"
        self._convolutions = [
            (
                inside.param(f"{name}.weight", (spec.width, inputs, 3)),
                inside.param(f"{name}.bias", (spec.width,)),
            )
            for name, inputs in (("conv1", spec.bands), ("conv2", spec.width))
        ]
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._layers = [
            CausalLayer(scope / "layers" / str(index), spec) for index in range(spec.layers)
        ]
        self._norm = RMS.build(scope / "norm", spec.width, eps=spec.eps)
        self._projector = spec.projector.build(whole)
        self.width, self.dtype = spec.projector.outputs, scope.dtype
        self.forms = (
            MediaForm(
                kind="audio",
                row_bytes=4 * spec.bands,
                max_rows=MOST_FRAMES,
                max_t=1,
                sound=SoundSteps(strides=((2, 2, 0),), pool=spec.beside),
                adds=True,
            ),
        )
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = [(weight.take(), bias.take()) for weight, bias in self._convolutions]

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder. Positions that fill no token are left out."""
        frames_NM = rows_NB.view(torch.float32).to(self.dtype)
        inputs = frames_NM.split([t * h * w for t, h, w in grids])
        x_SE = torch.cat([self._encoded(one) for one in inputs])
        return self._projector.merge(x_SE.reshape(-1, self._spec.beside * self._spec.width))

    def _encoded(self, frames_NM: torch.Tensor) -> torch.Tensor:
        (first, first_bias), (second, second_bias) = self._weights
        x_AEN = F.gelu(F.conv1d(F.pad(frames_NM.T[None], (2, 0)), first, first_bias))
        x_AES = F.gelu(F.conv1d(F.pad(x_AEN, (1, 0)), second, second_bias, stride=2))
        x_SE = x_AES[0].T
        x_SE = x_SE[: len(x_SE) // self._spec.beside * self._spec.beside].contiguous()
        turns = _turns(len(x_SE), self._spec, x_SE)
        for layer in self._layers:
            x_SE = layer.forward(x_SE, turns)
        return self._norm.norm(x_SE)


def _turns(
    size: int, spec: CausalTowerSpec, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [S, 1, D] of each place."""
    exponents = torch.arange(0, spec.head_dim, 2).float() / spec.head_dim
    angles = torch.arange(size)[:, None].float() * spec.theta**-exponents
    doubled = planned(torch.cat((angles, angles), dim=1)[:, None], like.device)
    return doubled.cos().to(like.dtype), doubled.sin().to(like.dtype)


class CausalLayer:
    """x_SE -> x_SE."""

    def __init__(self, scope: Scope, spec: CausalTowerSpec) -> None:
        self._spec, width, heads = spec, spec.width, spec.heads * spec.head_dim
        attention, mlp = scope / "self_attn", scope / "mlp"
        self._query = WholeLinear(attention / "q_proj", width, heads, bias=True)
        self._key = WholeLinear(attention / "k_proj", width, heads)
        self._value = WholeLinear(attention / "v_proj", width, heads, bias=True)
        self._out = WholeLinear(attention / "o_proj", heads, width, bias=True)
        self._gate = WholeLinear(mlp / "gate_proj", width, spec.inner)
        self._up = WholeLinear(mlp / "up_proj", width, spec.inner)
        self._down = WholeLinear(mlp / "down_proj", spec.inner, width, bias=True)
        self._norms = [
            RMS.build(scope / name, width, eps=spec.eps)
            for name in ("self_attn_layer_norm", "final_layer_norm")
        ]

    def forward(self, x_SE: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """`turns`: cosines and sines of places."""
        before, middle = self._norms
        x_SE = x_SE + self._attended(before.norm(x_SE), turns)
        y_SE = middle.norm(x_SE)
        gate_SI = self._spec.activation(self._gate.project(y_SE))
        return x_SE + self._down.project(gate_SI * self._up.project(y_SE))

    def _attended(
        self, x_SE: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        spec = self._spec
        q_SHD, k_SHD, v_SHD = (
            one.project(x_SE).unflatten(1, (spec.heads, spec.head_dim))
            for one in (self._query, self._key, self._value)
        )
        q_HSD, k_HSD = (_turned(one, turns).transpose(0, 1) for one in (q_SHD, k_SHD))
        v_HSD = v_SHD.transpose(0, 1)
        parts = []
        for at in range(0, x_SE.shape[0], QUERIES):
            end = min(at + QUERIES, x_SE.shape[0])
            first = max(0, at + 1 - spec.window)
            place = torch.arange(first, end, device=x_SE.device)
            back = place[at - first :, None] - place
            seen = (back >= 0) & (back < spec.window)
            each = (q_HSD[:, at:end], k_HSD[:, first:end], v_HSD[:, first:end])
            q, k, v = (one[None] for one in each)
            parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen)[0])
        return self._out.project(torch.cat(parts, dim=1).transpose(0, 1).flatten(1))


def _turned(x_SHD: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    low, high = x_SHD.chunk(2, dim=-1)
    return x_SHD * turns[0] + torch.cat((-high, low), dim=-1) * turns[1]

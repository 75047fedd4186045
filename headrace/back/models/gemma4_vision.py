"""Gemma 4 with images of any ratio, and with sound where it has that tower too (gemma4_audio.py):
its own tower, the mean of each window of patches, a norm and one linear layer. In larger sizes the
tokens of an image see each other in layers with a window (transformers 5.23, modeling_gemma4.py).

Every rank computes the whole tower. N patches, M tokens, E width of the tower, H heads, D of a
head, F width of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.back.kernels.patch_places.op import coordinates
from headrace.back.kernels.span_attention.op import OP as SPAN_ATTENTION
from headrace.back.kernels.span_attention.op import SpanAttentionProblem
from headrace.back.kernels.upload import planned
from headrace.back.layers.clipped import ClippedLinear
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import ElementwiseActivation
from headrace.back.layers.norm import RMS, RMS_NO_WEIGHT
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.towers import Towers
from headrace.back.layers.vision.encoder import Grid, MediaEncoder
from headrace.back.layers.vision.grids import frame_lengths, starts_of
from headrace.back.layers.vision.patches import PatchEmbedding, PatchSpec
from headrace.back.models import gemma4
from headrace.back.models.blocks import Decoder
from headrace.back.models.gemma4_audio import gemma4_audio_tower
from headrace.back.models.vision import ACTIVATIONS, HALF, parts_of, text_alone, with_media
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MediaForm


@dataclass(frozen=True, kw_only=True)
class Gemma4TowerSpec:
    """`clipped`: what goes into linear layers and comes out of them is cut to learned bounds.
    `standardized`: the pooled means are moved and scaled by column. `mutual`: see MediaForm."""

    width: int
    inner: int
    layers: int
    heads: int
    head_dim: int
    eps: float
    activation: str
    patch: int
    pool: int
    positions: int
    theta: float
    outputs: int
    clipped: bool
    standardized: bool
    mutual: str


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Gemma4ForConditionalGeneration."""
    inside = replace(scope, base_within="model.language_model")
    if config.section("vision_config") is None:
        text = config.section("text_config") or config
        return text_alone(inside, text, "the checkpoint has no vision tower")
    text, vision = parts_of(config)
    mutual = text.choice("use_bidirectional_attention", ("all", "vision"), None) == "vision"
    towers: MediaEncoder = Gemma4Tower(
        scope / "model", _spec(text, vision, "input" if mutual else "")
    )
    audio = config.section("audio_config")
    if audio is not None:
        towers = Towers(towers, gemma4_audio_tower(scope / "model", audio, text))
    inside = replace(inside, mutual="local" if mutual else "")
    return with_media(scope, gemma4.build(inside, text), towers)


def _spec(text: ConfigReader, vision: ConfigReader, mutual: str) -> Gemma4TowerSpec:
    width, heads = (
        vision.int("hidden_size", 768, ge=1),
        vision.int("num_attention_heads", 12, ge=1),
    )
    if vision.int("num_key_value_heads", heads, ge=1) != heads:
        raise vision.wrong("num_key_value_heads", f"num_attention_heads ({heads})")
    rope = vision.section("rope_parameters") or vision
    return Gemma4TowerSpec(
        width=width,
        inner=vision.int("intermediate_size", 3072, ge=1),
        layers=vision.int("num_hidden_layers", 16, ge=1),
        heads=heads,
        head_dim=vision.int("head_dim", 64, ge=4),
        eps=vision.float("rms_norm_eps", 1e-6, ge=0.0),
        activation=ACTIVATIONS[
            vision.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
        ],
        patch=vision.int("patch_size", 16, ge=1),
        pool=vision.int("pooling_kernel_size", 3, ge=1),
        positions=vision.int("position_embedding_size", 10_240, ge=1),
        theta=rope.float("rope_theta", 100.0, ge=1.0),
        outputs=text.int("hidden_size", ge=1),
        clipped=vision.bool("use_clipped_linears", False),
        standardized=vision.bool("standardize", False),
        mutual=mutual,
    )


class Gemma4Tower:
    """`MediaEncoder`; `scope` is that of tower and projection."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, spec: Gemma4TowerSpec) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        tower, projector = scope / "vision_tower", scope / "embed_vision"
        self._spec, self._scope = spec, scope
        patches = PatchSpec(
            patch=spec.patch,
            mean=HALF,
            std=HALF,
            bias=False,
            name="patch_embedder.input_proj",
            linear=True,
            inside=True,
        )
        self._patches = PatchEmbedding(tower, spec.width, patches)
        shape = (2, spec.positions, spec.width)
        self._positions = (tower / "patch_embedder").param("position_embedding_table", shape)
        self._layers = [
            Gemma4VisionLayer(tower / "encoder.layers" / str(index), spec)
            for index in range(spec.layers)
        ]
        names = ("std_bias", "std_scale") if spec.standardized else ()
        self._standard = [tower.param(name, (spec.width,)) for name in names]
        self._norm = RMS_NO_WEIGHT.build(projector, spec.width, eps=spec.eps)
        self._project = WholeLinear(projector / "embedding_projection", spec.width, spec.outputs)
        self.width = spec.outputs
        self.dtype = scope.dtype
        self.forms = (
            MediaForm(
                kind="image",
                row_bytes=patches.row_bytes,
                patch=spec.patch,
                merge=spec.pool,
                max_t=1,
                mutual=spec.mutual,
            ),
        )
        exponents = torch.arange(0, spec.head_dim // 2, 2, device=scope.device).float()
        self._frequencies = 1.0 / spec.theta ** (exponents / (spec.head_dim // 2))
        self._table_2PE = torch.empty(0)
        self._standards: list[torch.Tensor] = []
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._table_2PE = self._positions.take()
        self._standards = [one.take().float() for one in self._standard]

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        spec = self._spec
        at_2N = np.concatenate([coordinates(grid, spec.pool) for grid in grids], axis=1)
        y_N, x_N = planned(at_2N, rows_NB.device)
        x_NE = self._patches.embed(rows_NB)
        x_NE = x_NE + (self._table_2PE[0][x_N] + self._table_2PE[1][y_N])
        angles = [place_N[:, None] * self._frequencies for place_N in (x_N, y_N)]
        angles_ND = torch.cat([part for angle in angles for part in (angle, angle)], dim=1)
        turns = angles_ND.cos()[:, None].to(self.dtype), angles_ND.sin()[:, None].to(self.dtype)
        starts = starts_of(frame_lengths(grids))
        for layer in self._layers:
            x_NE = layer.forward(x_NE, turns, starts)
        mean_ME = x_NE.view(-1, spec.pool**2, spec.width).float().mean(1) * spec.width**0.5
        if self._standards:
            mean_ME = (mean_ME - self._standards[0]) * self._standards[1]
        return self._project.project(self._norm.norm(mean_ME.to(self.dtype)))


class Gemma4VisionLayer:
    """x_NE -> x_NE: norms before and behind both branches; heads are normed, and turn by column in
    their first half and by row in their second."""

    def __init__(self, scope: Scope, spec: Gemma4TowerSpec) -> None:
        attention, mlp, size = scope / "self_attn", scope / "mlp", spec.heads * spec.head_dim
        self._spec, self._scope = spec, scope
        self._norms = [
            RMS.build(scope / name, spec.width, eps=spec.eps)
            for name in (
                *("input_layernorm", "post_attention_layernorm"),
                *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
            )
        ]
        clipped = spec.clipped
        self._qkv = [
            ClippedLinear(attention / f"{one}_proj", spec.width, size, clipped=clipped)
            for one in "qkv"
        ]
        self._head_norms = [
            *(RMS.build(attention / f"{one}_norm", spec.head_dim, eps=spec.eps) for one in "qk"),
            RMS_NO_WEIGHT.build(attention, spec.head_dim, eps=spec.eps),
        ]
        self._out = ClippedLinear(attention / "o_proj", size, spec.width, clipped=clipped)
        self._gate, self._up = (
            ClippedLinear(mlp / name, spec.width, spec.inner, clipped=clipped)
            for name in ("gate_proj", "up_proj")
        )
        self._down = ClippedLinear(mlp / "down_proj", spec.inner, spec.width, clipped=clipped)
        self._activation = ElementwiseActivation(scope, spec.activation)
        self._attend = not_loaded
        scope.on_finish(self._finish)

    def forward(
        self, x_NE: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], starts: Sequence[int]
    ) -> torch.Tensor:
        """`turns`: cosines and sines [N, 1, D]."""
        before, behind, before_mlp, behind_mlp = self._norms
        y_NE = before.norm(x_NE)
        q_NHD, k_NHD, v_NHD = (
            norm.norm(linear.project(y_NE).unflatten(1, (self._spec.heads, -1)))
            for linear, norm in zip(self._qkv, self._head_norms, strict=True)
        )
        q_NHD, k_NHD = _turned(q_NHD, turns), _turned(k_NHD, turns)
        y_NHD = self._attend(q_NHD, k_NHD, v_NHD, starts)
        x_NE = x_NE + behind.norm(self._out.project(y_NHD.reshape(x_NE.shape[0], -1)))
        y_NE = before_mlp.norm(x_NE)
        gate_NI = self._activation.apply(self._gate.project(y_NE))
        return x_NE + behind_mlp.norm(self._down.project(gate_NI * self._up.project(y_NE)))

    def _finish(self) -> None:
        spec = self._spec
        problem = SpanAttentionProblem(
            device=self._scope.kind,
            dtype=self._scope.dtype,
            heads=spec.heads,
            kv_heads=spec.heads,
            head_dim=spec.head_dim,
            scale=1.0,
        )
        self._attend = self._scope.bind(SPAN_ATTENTION, problem)


def _turned(x_NHD: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Each half of a head rotated by itself, its own halves against each other."""
    cos, sin = turns
    first, second, third, fourth = x_NHD.chunk(4, dim=-1)
    return x_NHD * cos + torch.cat((-second, first, -fourth, third), dim=-1) * sin

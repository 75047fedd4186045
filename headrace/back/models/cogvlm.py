"""CogVLM and CogVLM2: Llama's decoder whose tokens of images have weights of their own, behind
EVA2-CLIP's tower. All patches of a picture have one position, between those of two learned rows
(Wang et al. 2023, CogVLM; Hong et al. 2024, CogVLM2; names and keys of the published checkpoints).

N patches, M windows, E width of the tower, F of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from headrace.back.attention.plan import Batch
from headrace.back.layers.attention_names import AttentionNames
from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.modal_attention import ModalAttentionSpec, ModalMLPSpec, TokenKinds
from headrace.back.layers.norm import LAYER, NormSpec
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.vision.axes_rope import AxesRope, PromptPositions
from headrace.back.layers.vision.encoder import Grid, Passes
from headrace.back.layers.vision.layer import VisionLayerNames
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.back.models.decoder_layer import DecoderLayer, DecoderSizes, Stream
from headrace.back.models.vision import (
    CLIP_MEAN,
    CLIP_STD,
    LayerDefaults,
    square,
    tower_layer,
    with_media,
)
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MediaSpan

SECOND = "num_multi_query_heads"
"""A key that CogVLM2's configs have alone."""
EVA = LayerDefaults(
    width=1792, heads=16, inner=15_360, activation="gelu", heads_keys=("num_heads",)
)
LAYER_NAMES = VisionLayerNames(
    before_attention="input_layernorm",
    before_mlp="post_attention_layernorm",
    attention="attention",
    merged="query_key_value",
    out="dense",
)
TEXT_NAMES = AttentionNames(merged="language_expert_query_key_value", out="language_expert_dense")
MEDIA_NAMES = ("vision_expert_query_key_value", "vision_expert_dense")
MLP_NAMES = ("mlp.language_mlp", "mlp.vision_mlp")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """CogVLMForCausalLM."""
    sizes = read_sizes(config, eps=1e-5)
    second, kinds = SECOND in config, TokenKinds()
    rope = read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions)
    projector = EvaProjectorSpec(
        width=config.required_section("vision_config").int("hidden_size", EVA.width, ge=1),
        outputs=sizes.width,
        inner=sizes.inner,
        merge=2 if second else 1,
    )
    layer = KindsLayerSpec(
        mixer=ModalAttentionSpec(
            **plain_attention(sizes),
            rope=rope,
            names=TEXT_NAMES,
            kinds=kinds,
            media_names=MEDIA_NAMES,
            media_bias=second,
        ),
        feed_forward=ModalMLPSpec(kinds=kinds, names=MLP_NAMES),
        kinds=kinds,
    )
    tower = CogTower(
        scope, _tower(config.required_section("vision_config"), projector), rope, kinds
    )
    decoder = Decoder(scope, DecoderSpec(sizes=sizes, layers=(layer,) * sizes.layers))
    return with_media(scope, decoder, tower)


@dataclass(frozen=True, kw_only=True)
class KindsLayerSpec(LayerSpec):
    """A layer that sees which tokens are images'."""

    kinds: TokenKinds

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> KindsLayer:
        """See DecoderLayerSpec."""
        return KindsLayer(scope, cache, self, sizes, norms)


class KindsLayer(DecoderLayer):
    """The first layer tells all others."""

    takes_adapters = False

    def __init__(
        self, scope: Scope, cache: int, spec: KindsLayerSpec, sizes: DecoderSizes, norms: NormSpec
    ) -> None:
        super().__init__(scope, cache, spec, sizes, norms)
        self._kinds, self._is_first = spec.kinds, cache == 0

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        if self._is_first:
            self._kinds.see(batch)
        if last and batch.last_token_batch is not None and batch.logits_at_N is not None:
            self._kinds.go_on(batch.logits_at_N)
        return super().forward(stream, batch, last=last)


def _tower(vision: ConfigReader, projector: EvaProjectorSpec) -> PlainTowerSpec:
    patch, side = square(vision)
    if side % projector.merge:
        raise vision.wrong("image_size", f"such that {projector.merge} divides {side} patches")
    layer = tower_layer(vision, EVA, LAYER_NAMES, after=True)
    rows = vision.int("num_positions", side**2 + 1)
    if rows != side**2 + 1:
        raise vision.wrong("num_positions", f"{side**2 + 1}, one for each patch and one more")
    return PlainTowerSpec(
        patches=PatchSpec(patch=patch, mean=CLIP_MEAN, std=CLIP_STD, name="patch_embedding.proj"),
        layer=layer,
        layers=vision.int("num_hidden_layers", 63, ge=1),
        projector=projector,
        side=side,
        positions=("patch_embedding.position_embedding.weight", (rows, layer.width)),
        class_token=("patch_embedding.cls_embedding", (1, layer.width)),
        layers_name="transformer.layers",
    )


@dataclass(frozen=True, kw_only=True)
class EvaProjectorSpec:
    """Windows of `merge` patches a side by one layer, where there are such, one more with a norm,
    and a gated MLP."""

    width: int
    outputs: int
    inner: int
    merge: int

    def build(self, scope: Scope) -> EvaProjector:
        """See ProjectorSpec."""
        return EvaProjector(scope / "model.vision", self)


class EvaProjector:
    """x_NE -> y_MF by EvaProjectorSpec."""

    def __init__(self, scope: Scope, spec: EvaProjectorSpec) -> None:
        inside, width = scope / "linear_proj", spec.outputs
        self._scope, self._spec = scope, spec
        self._window = None
        if spec.merge > 1:
            shape = (spec.width, spec.width, spec.merge, spec.merge)
            self._window = scope.param("conv.weight", shape)
            self._window_bias = scope.param("conv.bias", (spec.width,), init="zeros")
        self._first = WholeLinear(inside / "linear_proj", spec.width, width)
        self._norm = LAYER.build(inside / "norm1", width, eps=1e-5)
        self._gate, self._up = (
            WholeLinear(inside / name, width, spec.inner) for name in ("gate_proj", "dense_h_to_4h")
        )
        self._down = WholeLinear(inside / "dense_4h_to_h", spec.inner, width)
        self._reduce = not_loaded
        scope.on_finish(self._finish)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See Projector."""
        if self._window is not None:
            x_MWE = x_NE.view(-1, self._spec.merge**2, self._spec.width)
            x_NE = self._reduce(x_MWE.transpose(1, 2).flatten(1))
        x_MF = F.gelu(self._norm.norm(self._first.project(x_NE)))
        return self._down.project(F.silu(self._gate.project(x_MF)) * self._up.project(x_MF))

    def _finish(self) -> None:
        if self._window is not None:
            weight = self._window.take().flatten(1).contiguous()
            self._reduce = bind_linear(self._scope, weight, self._window_bias.take())


class CogTower(PlainTower):
    """A plain tower with a learned row on either side of each input; `scope`: of the checkpoint."""

    def __init__(
        self, scope: Scope, spec: PlainTowerSpec, rope: RopeSpec, kinds: TokenKinds
    ) -> None:
        super().__init__(scope, scope / "model.vision", spec, OnePlaceRope(scope, rope))
        width = spec.projector.outputs
        self._ends = [scope.param(f"model.vision.{name}", (1, 1, width)) for name in ("boi", "eoi")]
        self._ends_2F, self._kinds = torch.empty(0), kinds
        self.forms = tuple(msgspec.structs.replace(form, extra=2) for form in self.forms)
        scope.on_finish(self._take_ends)

    def _take_ends(self) -> None:
        self._ends_2F = torch.cat([one.take().view(1, -1) for one in self._ends])
        self._kinds.end_E = self._ends_2F[1]

    def passes(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> Passes:
        """See PlainTower."""
        y_MF = yield from super().passes(kind, rows_NB, grids)
        begin, end = self._ends_2F.split(1)
        counts = [t * h * w // self._spec.projector.merge**2 for t, h, w in grids]
        return torch.cat([row for one in y_MF.split(counts) for row in (begin, one, end)])


class OnePlaceRope(AxesRope):
    """An input's first token, all between and its last one have three positions."""

    marks_behind = 1

    def __init__(self, scope: Scope, spec: RopeSpec) -> None:
        super().__init__(scope, spec, axis_of_pair=(0,) * len(spec.frequencies), merge=1)

    def positions(self, spans: Sequence[MediaSpan], length: int) -> PromptPositions:
        """See AxesRope."""
        steps_P = np.ones(length, np.int64)
        for span in spans:
            steps_P[span.offset + 2 : span.end - 1] = 0
        position_P = np.cumsum(steps_P) - 1
        return PromptPositions(
            position_3P=np.tile(position_P, (3, 1)), delta=int(position_P[-1]) + 1 - length
        )

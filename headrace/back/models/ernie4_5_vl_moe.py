"""ERNIE 4.5 VL with experts: ERNIE's decoder whose tokens of images have experts of their own, with
positions in three axes of which rows and columns take turns, behind Qwen2-VL's tower and two MLPs
between norms (Baidu 2025, ERNIE 4.5; transformers 5.23, modeling_ernie4_5_vl_moe.py; images)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headrace.back.attention.plan import Batch
from headrace.back.kernels.linear.op import Linear
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.gemms import bind_linear
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import GATED_MLP, GatedMLPSpec
from headrace.back.layers.moe.mixture import MixtureSpec, RouterSpec
from headrace.back.layers.moe.modal import ModalMixture, ModalMixtureSpec
from headrace.back.layers.moe.weights import SeparateExperts
from headrace.back.layers.norm import LAYER, RMS, NormSpec
from headrace.back.layers.rope import RopeSpec, read_rope
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.vision.axes_rope import AxesRope
from headrace.back.layers.vision.layer import VisionLayerNames, VisionLayerSpec
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.tower import TowerSpec, VisionTower
from headrace.back.models.blocks import Decoder, DecoderSpec, LayerSpec, plain_attention, read_sizes
from headrace.back.models.decoder_layer import DecoderLayer, DecoderSizes, Stream
from headrace.back.models.moe import sparse_by_type
from headrace.back.models.vision import ACTIVATIONS, CLIP_MEAN, CLIP_STD, parts_of, with_media
from headrace.base.config.hf import ConfigReader

BIAS = "moe_statics.e_score_correction_bias"
IDS = {
    "image_token_id": 100_295,
    "video_token_id": 103_367,
    "image_start_token_id": 101_304,
    "image_end_token_id": 101_305,
    "video_start_token_id": 101_306,
    "video_end_token_id": 101_307,
}
RENAMED = ((r"^model\.vision_model\.", "vision_model."),)
SECTIONS = (22, 22, 20)
NAMES = VisionLayerNames()


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Ernie4_5_VLMoeForConditionalGeneration, Ernie4_5_VL_MoeForConditionalGeneration."""
    text, vision = parts_of(config)
    sizes = read_sizes(text, eps=1e-5, tied=True)
    if text.bool("use_bias", False):
        raise text.wrong("use_bias", "false where there are experts")
    rope = read_rope(
        text,
        head_dim=sizes.head_dim,
        max_positions=scope.max_positions,
        default_theta=500_000.0,
        layout="pairs",
    )
    ids = tuple(config.int(key, default, ge=0) for key, default in IDS.items())
    attention = AttentionSpec(**plain_attention(sizes), rope=rope)
    mixture = _mixture(text, ids)
    layers = tuple(
        ModalLayerSpec(mixer=attention, feed_forward=mixture)
        if sparse
        else LayerSpec(mixer=attention, feed_forward=GATED_MLP)
        for sparse in sparse_by_type(text, sizes.layers, dense=1)
    )
    tower = VisionTower(scope, _tower(text, vision, sizes), _axes(scope, text, vision, rope))
    decoder = Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))
    return with_media(scope, decoder, tower, renamed=RENAMED)


def _axes(scope: Scope, text: ConfigReader, vision: ConfigReader, rope: RopeSpec) -> AxesRope:
    """Rows and columns take turns, behind them is time."""
    values = text.section("rope_parameters") or text
    rows, columns, steps = values.list("mrope_section", SECTIONS, of=int, length=3)
    if rows != columns or rows + columns + steps != len(rope.frequencies):
        wanted = f"two equal numbers and one, with sum {len(rope.frequencies)}"
        raise values.wrong("mrope_section", wanted)
    merge = vision.int("spatial_merge_size", 2, ge=1, le=16)
    axes = AxesRope(scope, rope, axis_of_pair=(1, 2) * rows + (0,) * steps, merge=merge)
    axes.marks_behind = 1
    return axes


def _mixture(text: ConfigReader, ids: tuple[int, ...]) -> ModalMixtureSpec:
    experts = text.int("moe_num_experts", 64, ge=1, aliases=("num_experts",))
    of_text, of_media = text.list("moe_intermediate_size", (1536, 512), of=int, length=2)
    top_k = text.int("moe_k", 6, ge=1, le=experts, aliases=("num_experts_per_tok",))
    shared = text.int("moe_num_shared_experts", 2, ge=0)
    mixtures = [
        MixtureSpec(
            router=RouterSpec(
                experts=experts,
                top_k=top_k,
                renormalize=True,
                weight=weight,
                transposed=True,
                bias_name=BIAS,
                bias_dims=2,
                bias_row=(row, 2),
            ),
            inner=inner,
            layout=SeparateExperts(first=row * experts),
        )
        for row, (weight, inner) in enumerate((("weight", of_text), ("weight_1", of_media)))
    ]
    mlp = GatedMLPSpec(name="mlp.shared_experts", inner=of_text * shared)
    return ModalMixtureSpec(
        text=mixtures[0], media=mixtures[1], shared=mlp if shared else None, media_ids=ids
    )


class ModalLayerSpec(LayerSpec):
    """A layer with experts by modality."""

    def build(self, scope: Scope, cache: int, sizes: DecoderSizes, norms: NormSpec) -> ModalLayer:
        """See DecoderLayerSpec."""
        return ModalLayer(scope, cache, self, sizes, norms)


class ModalLayer(DecoderLayer):
    """A layer that tells its experts which tokens are images'."""

    takes_adapters = False

    def forward(self, stream: Stream, batch: Batch, *, last: bool) -> Stream:
        """See Layer."""
        is_cut = last and batch.last_token_batch is not None
        assert isinstance(self.mlp, ModalMixture)
        self.mlp.look(batch, batch.logits_at_N if is_cut else None)
        return super().forward(stream, batch, last=last)


def _tower(text: ConfigReader, vision: ConfigReader, sizes: DecoderSizes) -> TowerSpec:
    width, heads = vision.int("hidden_size", 1280, ge=1), vision.int("num_heads", 16, ge=1)
    eps = vision.float("rms_norm_eps", 1e-6, ge=0.0)
    layer = VisionLayerSpec(
        width=width,
        inner=vision.int("intermediate_size", 5120, ge=1),
        heads=heads,
        head_dim=width // heads,
        eps=eps,
        activation=ACTIVATIONS[vision.choice("hidden_act", ACTIVATIONS, "quick_gelu")],
        norm=LAYER,
        rotary=True,
        names=NAMES,
    )
    return TowerSpec(
        patches=PatchSpec(
            patch=vision.int("patch_size", 14, ge=1, le=1024),
            mean=CLIP_MEAN,
            std=CLIP_STD,
            bias=False,
            flat=True,
            name="vision_model.patch_embed.proj",
        ),
        layer=layer,
        layers=vision.int("depth", 32, ge=1),
        merger=TwoMlpsSpec(
            width=width,
            outputs=sizes.width,
            merge=vision.int("spatial_merge_size", 2, ge=1, le=16),
            eps=eps,
            last_eps=sizes.eps,
        ),
        video=False,
        behind="vision_model.ln",
        names=("vision_model.blocks", "model.resampler_model", "", ""),
    )


@dataclass(frozen=True, kw_only=True)
class TwoMlpsSpec:
    """Windows side by side through an MLP with a norm behind it, the two equal frames that a
    picture is through another, one linear layer and a norm."""

    width: int
    outputs: int
    merge: int
    eps: float
    last_eps: float

    def build(self, scope: Scope, name: str, *, norm_merged: bool = False) -> TwoMlps:
        """Within the scope of the checkpoint."""
        assert not norm_merged, "it has norms of its own"
        return TwoMlps(scope / name, self)


class TwoMlps:
    """x_NE -> y_MF by TwoMlpsSpec."""

    def __init__(self, scope: Scope, spec: TwoMlpsSpec) -> None:
        self._scope, self._window = scope, spec.width * spec.merge**2
        window, frames = self._window, scope / "temporal_linear"
        self._up, self._down = (
            WholeLinear(scope / f"spatial_linear.{i}", window, window, bias=True) for i in (0, 2)
        )
        self._norm, self._frames_norm = (
            LAYER.build(inside / "3", window, eps=spec.eps)
            for inside in (scope / "spatial_linear", frames)
        )
        self._weight = frames.param("0.weight", (window, 2 * window))
        self._bias = frames.param("0.bias", (window,), init="zeros")
        self._frames_down = WholeLinear(frames / "2", window, window, bias=True)
        self._out = WholeLinear(scope / "mlp", window, spec.outputs, bias=True)
        self._last = RMS.build(scope / "after_norm", spec.outputs, eps=spec.last_eps)
        self._frames_up: Linear = not_loaded
        scope.on_finish(self._finish)

    def merge(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x_MI = F.gelu(self._up.project(x_NE.view(-1, self._window)))
        x_MI = self._norm.norm(self._down.project(x_MI))
        x_MI = self._frames_down.project(F.gelu(self._frames_up(x_MI)))
        return self._last.norm(self._out.project(self._frames_norm.norm(x_MI)))

    def _finish(self) -> None:
        halves: Sequence[torch.Tensor] = self._weight.take().float().chunk(2, dim=1)
        weight = (halves[0] + halves[1]).to(self._scope.dtype)
        self._frames_up = bind_linear(self._scope, weight.contiguous(), self._bias.take())

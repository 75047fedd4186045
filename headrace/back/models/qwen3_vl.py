"""Qwen3-VL, dense and with experts: Qwen 3's decoder with positions in three axes that take turns,
behind a vision tower with learned positions; what some of its layers see is added behind the first
layers of the decoder (Bai et al. 2025, "Qwen3-VL"; Meng et al. 2024, "DeepStack")."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.mlp import GATED_MLP
from headrace.back.layers.moe.weights import TransposedExperts
from headrace.back.layers.norm import LAYER
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.axes_rope import AxesRope, interleaved
from headrace.back.layers.vision.layer import VisionLayerNames, VisionLayerSpec
from headrace.back.layers.vision.merger import MergerSpec
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.tower import TowerSpec, VisionTower
from headrace.back.models.blocks import ACTIVATIONS, Decoder, read_sizes
from headrace.back.models.moe import feed_forwards, sparse_layers
from headrace.back.models.qwen2_moe import qwen_mixture
from headrace.back.models.qwen3 import qwen3_decoder
from headrace.back.models.vision import HALF, parts_of, with_media
from headrace.base.config.hf import ConfigReader

EPS = 1e-6

THETA = 5_000_000.0
EXPERTS = ("num_experts", "num_local_experts")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration."""
    text, vision = parts_of(config)
    sizes = read_sizes(text)
    rope = qwen3_axes(scope, text, vision, head_dim=sizes.head_dim, theta=THETA)
    tower = VisionTower(scope / "model.visual", qwen3_tower(vision), rope)
    mixes = any(key in text for key in EXPERTS)
    if mixes:
        mixture = replace(qwen_mixture(text, renormalize=True), layout=TransposedExperts())
        branches = feed_forwards(mixture, sparse_layers(text, sizes.layers))
    else:
        branches = (GATED_MLP,) * sizes.layers
    inside = replace(scope, base_within="model.language_model")
    decoder = qwen3_decoder(inside, text, sizes, branches, default_theta=THETA)
    return with_media(scope, decoder, tower)


def qwen3_axes(
    scope: Scope,
    text: ConfigReader,
    vision: ConfigReader,
    *,
    head_dim: int,
    theta: float,
    share: float = 1.0,
    lengths: tuple[int, int, int] = (24, 20, 20),
    positions_per_s: float | None = None,
    behind_time: bool = False,
) -> AxesRope:
    """The decoder's positions; `theta`, `share` and `lengths` are the family's defaults."""
    spec = read_rope(
        text,
        head_dim=head_dim,
        max_positions=scope.max_positions,
        default_theta=theta,
        default_share=share,
    )
    values = text.section("rope_parameters") or text.section("rope_scaling") or text
    stated = values.list("mrope_section", lengths, of=int, length=3)
    if sum(stated) != len(spec.frequencies):
        raise values.wrong("mrope_section", f"three numbers with sum {len(spec.frequencies)}")
    merge = vision.int("spatial_merge_size", 2, ge=1)
    return AxesRope(
        scope,
        spec,
        axis_of_pair=interleaved(stated),
        merge=merge,
        positions_per_s=positions_per_s,
        behind_time=behind_time,
    )


def qwen3_tower(vision: ConfigReader) -> TowerSpec:
    """The tower of Qwen3-VL, and of Qwen 3.5, which adds nothing behind layers."""
    width, heads = vision.int("hidden_size", 1152, ge=1), vision.int("num_heads", 16, ge=1)
    merge, positions = (
        vision.int("spatial_merge_size", 2, ge=1),
        vision.int("num_position_embeddings", 2304, ge=1),
    )
    if int(positions**0.5) ** 2 != positions:
        raise vision.wrong("num_position_embeddings", "a square")
    layer = VisionLayerSpec(
        width=width,
        inner=vision.int("intermediate_size", 4304, ge=1),
        heads=heads,
        head_dim=width // heads,
        eps=EPS,
        activation=ACTIVATIONS[vision.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")],
        norm=LAYER,
        rotary=True,
        names=VisionLayerNames(mlp=("linear_fc1", "linear_fc2")),
    )
    return TowerSpec(
        patches=PatchSpec(
            patch=vision.int("patch_size", 16, ge=1),
            frames=vision.int("temporal_patch_size", 2, ge=1),
            mean=HALF,
            std=HALF,
        ),
        layer=layer,
        layers=vision.int("depth", 27, ge=1),
        merger=MergerSpec(
            width=width,
            outputs=vision.int("out_hidden_size", 3584, ge=1),
            merge=merge,
            norm=LAYER,
            eps=EPS,
            names=("norm", "linear_fc1", "linear_fc2"),
        ),
        positions=positions,
        deepstack=vision.list("deepstack_visual_indexes", (), of=int),
        max_t=1,
    )

"""DeepSeek-OCR 2: experts behind plain attention read what learned queries gather from SAM's
patches, in the order that suits the text (Wei et al. 2026; transformers 5.23,
modeling_deepseek_ocr2.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.query_encoder import QueryEncoder, QueryEncoderSpec
from headrace.back.layers.vision.sam import SamSpec, SamTower
from headrace.back.models.blocks import (
    Decoder,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.moe import feed_forwards, routed_mixture, sparse_by_type
from headrace.back.models.vision import ACTIVATIONS, HALF, parts_of, square, with_media
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MediaForm, Packing

MERGE = 4
SIDES = (48, 64)
"""Patches a side of tiles and of the whole, of which every sixteenth becomes a token."""
QUERIES = ("query_768", "query_1024")


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """DeepseekOcr2ForConditionalGeneration; DeepseekOCR2ForCausalLM, as its authors publish it, its
    keys in these (media_keys.py)."""
    text, vision = parts_of(config)
    sam, encoder = (vision.required_section(name) for name in ("sam_config", "encoder_config"))
    queries = _encoder_spec(encoder)
    tower = DeepseekOcr2Tower(
        scope / "model", _sam_spec(sam, queries.width), queries, text.int("hidden_size", ge=1)
    )
    return with_media(scope, _decoder(scope, text), tower)


def _decoder(scope: Scope, text: ConfigReader) -> Decoder:
    sizes = read_sizes(text)
    bias = text.bool("attention_bias", False)
    attention = AttentionSpec(
        **plain_attention(sizes),
        rope=read_rope(text, head_dim=sizes.head_dim, max_positions=scope.max_positions),
        qkv_bias=bias,
        out_bias=bias,
    )
    method = text.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    mixture = routed_mixture(text, grouped=method == "group_limited_greedy")
    sparse = sparse_by_type(text, sizes.layers, dense=1)
    layers = tuple(
        LayerSpec(mixer=attention, feed_forward=each) for each in feed_forwards(mixture, sparse)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers))


def _sam_spec(sam: ConfigReader, outputs: int) -> SamSpec:
    for key in ("use_abs_pos", "use_rel_pos"):
        if not sam.bool(key, True):
            raise sam.wrong(key, "true")
    patch, side = square(ConfigReader({"image_size": 1024, "patch_size": 16, **sam.raw}, sam.where))
    width = sam.int("hidden_size", 768, ge=1)
    narrowed = sam.list("downsample_channels", (512, 896), of=int, length=2)
    if narrowed[1] != outputs:
        raise sam.wrong("downsample_channels", f"that end with the encoder's width ({outputs})")
    ratio = sam.float("mlp_ratio", 4.0, ge=0.0)
    return SamSpec(
        patches=PatchSpec(patch=patch, mean=HALF, std=HALF, name="patch_embed.proj"),
        width=width,
        inner=sam.int("mlp_dim", int(width * ratio), ge=1),
        heads=sam.int("num_attention_heads", 12, ge=1),
        layers=sam.int("num_hidden_layers", 12, ge=1),
        side=side,
        window=sam.int("window_size", 14, ge=1),
        full_layers=sam.list("global_attn_indexes", (2, 5, 8, 11), of=int),
        eps=sam.float("layer_norm_eps", 1e-6, ge=0.0),
        activation=ACTIVATIONS[sam.choice("hidden_act", ACTIVATIONS, "gelu")],
        middle=sam.int("output_channels", 256, ge=1),
        narrowed=(narrowed[0], narrowed[1]),
        bias=sam.bool("qkv_bias", True),
    )


def _encoder_spec(encoder: ConfigReader) -> QueryEncoderSpec:
    sizes = read_sizes(encoder)
    types = encoder.list("layer_types", ("full_attention",), of=str)
    if set(types) != {"full_attention"}:
        raise encoder.wrong("layer_types", "full_attention")
    return QueryEncoderSpec(
        width=sizes.width,
        inner=sizes.inner,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        layers=sizes.layers,
        eps=sizes.eps,
        activation=sizes.activation,
        rope=read_rope(
            encoder,
            head_dim=sizes.head_dim,
            max_positions=2 * (max(SIDES) // MERGE) ** 2,
            default_theta=1_000_000.0,
        ),
    )


class DeepseekOcr2Tower:
    """`MediaEncoder`; `scope` is that of all but the head. A tile and the whole are inputs of their
    own, behind the latter stands a learned row."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, sam: SamSpec, encoder: QueryEncoderSpec, outputs: int) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        within = scope / "qwen2_model"
        self._sam = SamTower(scope / "sam_model", sam)
        self._encoder = QueryEncoder(within / "model.model", encoder)
        self._params = [
            (within / name).param("weight", ((side // MERGE) ** 2, encoder.width))
            for name, side in zip(QUERIES, SIDES, strict=True)
        ]
        self._project = WholeLinear(scope / "projector.layers", encoder.width, outputs, bias=True)
        self._separator = scope.param("view_seperator", (outputs,))
        self._queries: dict[int, torch.Tensor] = {}
        self._separator_1F = torch.empty(0)
        self.width, self.dtype = outputs, scope.dtype
        self.forms = (
            MediaForm(
                kind="image",
                row_bytes=sam.patches.row_bytes,
                patch=sam.patches.patch,
                merge=MERGE,
                sides=tuple((side, side) for side in SIDES),
                max_t=1,
                packing=Packing(tails=True),
            ),
        )
        scope.on_finish(self._finish)

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        parts = rows_NB.split([t * h * w for t, h, w in grids])
        rows = [self._encoded(part, grid[1]) for part, grid in zip(parts, grids, strict=True)]
        return torch.cat((self._project.project(torch.cat(rows)), self._separator_1F))

    def _encoded(self, rows_NB: torch.Tensor, side: int) -> torch.Tensor:
        """What the queries make of a square, [S * S / 16, E]."""
        windows = side // MERGE
        rows = rows_NB.view(windows, windows, MERGE, MERGE, -1).transpose(1, 2)
        features = self._sam.forward(rows.reshape(rows_NB.shape), side)
        return self._encoder.gather(features[0].flatten(1).T, self._queries[side])

    def _finish(self) -> None:
        taken = zip(SIDES, self._params, strict=True)
        self._queries = {side: param.take() for side, param in taken}
        self._separator_1F = self._separator.take()[None]

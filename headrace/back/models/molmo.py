"""Molmo 1: Qwen 2's or OLMo 2's layers, under OLMo's names, behind CLIP's tower. Outputs of two of
its layers stand side by side; of a window of 2 x 2 patches an attention makes one row, whose query
is their mean (Deitke et al. 2024, Molmo and PixMo; names and sizes of the published checkpoints).

A picture is cut into squares that overlap. What overlaps arrives once: the squares are taken out of
the whole here. N patches, M windows, S squares, E width of the tower, F of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from headrace.back.kernels.patch_places.op import coordinates
from headrace.back.kernels.upload import planned
from headrace.back.layers.attention import AttentionSpec, QKNorm
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import LAYER, NormPlacement
from headrace.back.layers.rope import read_rope
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid, Passes, run_through
from headrace.back.layers.vision.layer import VisionLayerNames
from headrace.back.layers.vision.merger import NoProjector
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models import hf_olmo
from headrace.back.models.blocks import (
    Decoder,
    DecoderSizes,
    DecoderSpec,
    LayerSpec,
    plain_attention,
    read_sizes,
)
from headrace.back.models.media_keys import MOLMO_MORE_WORDS as MORE_WORDS
from headrace.back.models.vision import CLIP_MEAN, CLIP_STD, LayerDefaults, tower_layer, with_media
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MediaForm

UNSAID = -1e30
"""Their logits: finite, so that what is computed from them is no NaN."""
BEFORE = NormPlacement(before_attention="attn_norm", before_mlp="ff_norm")
BEHIND = NormPlacement(after_attention="attn_norm", after_mlp="ff_norm")
RENAMED = (*hf_olmo.RENAMED, (r"(blocks\.\d+)\.([qk]_norm)\.", r"\1.attn.\2."))
UNREAD = (r"model\.vision_backbone\.image_vit\.transformer\.resblocks\.\d+\..*",)
"""Of the layers behind those that are taken."""
MERGE = 2
MARGIN = 4
"""Patches of a square that its neighbour has too, on each side half of the overlap."""
MOST_SQUARES = 36
PADDED, PARTLY = 1, 2
"""What the byte behind a patch's pixels says: no pixel of it, or not each, is the picture's."""
CLIP = LayerDefaults(
    width=1024,
    heads=16,
    inner=4096,
    eps=1e-5,
    activation="quick_gelu",
    eps_key="image_norm_eps",
    width_keys=("image_emb_dim",),
    heads_keys=("image_num_heads",),
    inner_keys=("image_mlp_dim",),
)
LAYER_NAMES = VisionLayerNames(
    before_attention="attention_norm",
    before_mlp="ffn_norm",
    attention="attention",
    merged=None,
    qkv=("wq", "wk", "wv"),
    out="wo",
    mlp_module="feed_forward",
    mlp=("w1", "w2"),
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MolmoForCausalLM."""
    config.choice("layer_norm_type", ("rms",), "rms")
    sizes = _sizes(config)
    stated = config.section("vision_backbone") or ConfigReader({}, config.where)
    tower = MolmoTower(scope / "model.vision_backbone", _tower(stated), sizes)
    decoder = with_media(scope, _decoder(scope, config, sizes), tower)
    decoder.weights = replace(decoder.weights, ignored=(*decoder.weights.ignored, *UNREAD))
    return decoder


def _sizes(config: ConfigReader) -> DecoderSizes:
    """`intermediate_size` counts gates and ups; the vocabulary is that of what is said."""
    sizes = read_sizes(config)
    return replace(sizes, inner=sizes.inner // 2, vocabulary=sizes.vocabulary - MORE_WORDS)


def _decoder(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> Decoder:
    norm = QKNorm(over="width", eps=sizes.eps)
    layer = LayerSpec(
        mixer=AttentionSpec(
            **plain_attention(sizes),
            rope=read_rope(config, head_dim=sizes.head_dim, max_positions=scope.max_positions),
            qkv_bias=config.bool("qkv_bias", False),
            clip=config.float("clip_qkv", None, ge=0.0),
            qk_norm=norm if config.bool("attention_layer_norm", False) else None,
            names=hf_olmo.ATTENTION,
        ),
        feed_forward=hf_olmo.MLP,
        placement=BEHIND if config.bool("norm_after", False) else BEFORE,
    )
    return MolmoDecoder(
        scope,
        DecoderSpec(
            sizes=sizes,
            layers=(layer,) * sizes.layers,
            names=hf_olmo.NAMES,
            embedding_tables=(
                ("embedding", sizes.vocabulary),
                ("new_embedding", MORE_WORDS),
            ),
            media_rows=MORE_WORDS,
            renamed=RENAMED,
        ),
    )


class MolmoDecoder(Decoder):
    """Words of the second table are read, and never said."""

    def __init__(self, scope: Scope, spec: DecoderSpec) -> None:
        super().__init__(scope, spec)
        self.logits_width += MORE_WORDS

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """See Decoder."""
        return F.pad(super().logits(hidden_NE), (0, MORE_WORDS), value=UNSAID)


def _tower(stated: ConfigReader) -> PlainTowerSpec:
    """CLIP's at its one size, as far as two of its layers, counted from behind."""
    layer = tower_layer(stated, CLIP, LAYER_NAMES)
    patch = stated.int("image_patch_size", 14, ge=1, le=1024)
    height, width = stated.list("image_default_input_size", (336, 336), of=int, length=2)
    if height != width or height % (2 * patch) or height < (2 * MARGIN + MERGE) * patch:
        raise stated.wrong("image_default_input_size", "squares of an even number of patches")
    layers, side = stated.int("image_num_layers", 23, ge=9), height // patch
    taken = (layers - 1, layers - 8)
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=patch,
            mean=CLIP_MEAN,
            std=CLIP_STD,
            bias=False,
            name="patch_embedding",
            linear=True,
        ),
        layer=layer,
        layers=max(taken),
        taken=taken,
        projector=NoProjector(outputs=layer.width * len(taken), merge=MERGE),
        side=side,
        positions=("positional_embedding", (side**2 + 1, layer.width)),
        class_token=("class_embedding", (layer.width,)),
        before=TowerNorm(name="pre_ln", norm=LAYER),
        layers_name="transformer.resblocks",
    )


class WindowPool:
    """x_NE -> y_MF: of a window's patches one row by attention, then a gated MLP."""

    def __init__(self, scope: Scope, spec: PlainTowerSpec, sizes: DecoderSizes) -> None:
        layer, pool = spec.layer, scope / "image_pooling_2d"
        self._inputs, self._heads = spec.projector.outputs, layer.heads
        self._query, self._key, self._value = (
            WholeLinear(pool / name, self._inputs, layer.width, bias=True)
            for name in ("wq", "wk", "wv")
        )
        self._out = WholeLinear(pool / "wo", layer.width, layer.width, bias=True)
        inside = scope / "image_projector"
        self._gate, self._up = (
            WholeLinear(inside / name, layer.width, sizes.inner) for name in ("w1", "w3")
        )
        self._down = WholeLinear(inside / "w2", sizes.inner, sizes.width)

    def pooled(self, x_NE: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x_MWE = x_NE.view(-1, MERGE**2, self._inputs)
        query = self._query.project(x_MWE.mean(1)).unflatten(1, (self._heads, 1, -1))
        key, value = (
            one.project(x_NE).view(x_MWE.shape[0], MERGE**2, self._heads, -1).transpose(1, 2)
            for one in (self._key, self._value)
        )
        y_ME = self._out.project(F.scaled_dot_product_attention(query, key, value).flatten(1))
        return self._down.project(F.silu(self._gate.project(y_ME)) * self._up.project(y_ME))


class MolmoTower:
    """`MediaEncoder`; `scope`: of all that sees. An input is a square, or a whole that squares are
    taken out of, side by side with a margin. A square's patches are marked with what its successor
    has of the picture: so do the published weights' processor and training, whose marks begin one
    square late."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, spec: PlainTowerSpec, sizes: DecoderSizes) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        self._tower = PlainTower(scope, scope / "image_vit", spec)
        self._pool = WindowPool(scope, spec, sizes)
        self._marks = scope.param("pad_embed", (2, spec.projector.outputs))
        self._marks_3E = torch.empty(0)
        self._side, self._pixels = spec.side, spec.patches.row_bytes
        self.width, self.dtype = sizes.width, scope.dtype
        self.forms = (
            MediaForm(
                kind="image",
                row_bytes=self._pixels + 1,
                patch=spec.patches.patch,
                merge=MERGE,
                sides=wholes_of(spec.side),
                breaks=1,
                max_t=1,
                adds=True,
            ),
        )
        scope.on_finish(self._finish)

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        return run_through(self.passes(kind, rows_NB, grids))

    def rests(self, kind: str) -> int:
        """See RestingEncoder."""
        return self._tower.rests(kind)

    def passes(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> Passes:
        """See RestingEncoder."""
        side, device = self._side, rows_NB.device
        squares = [squares_of(grid, side) for grid in grids]
        first = np.cumsum([0, *(h * w for _, h, w in grids)])
        places = [one.patches_SN + start for one, start in zip(squares, first, strict=False)]
        at_N = planned(np.concatenate(places).ravel(), device)
        count = sum(len(one) for one in places)
        x_NE = yield from self._tower.passes(
            kind, rows_NB[:, : self._pixels].index_select(0, at_N), [(1, side, side)] * count
        )
        marks_N = rows_NB[:, self._pixels].long()
        x_NE = x_NE + self._marks_3E.index_select(0, self._marked(marks_N, squares, first))
        windows = np.cumsum([0, *(len(one) * (side // MERGE) ** 2 for one in places)])
        kept = [one.windows_M + start for one, start in zip(squares, windows, strict=False)]
        pooled_MF = self._pool.pooled(x_NE)
        return pooled_MF.index_select(0, planned(np.concatenate(kept), device))

    def _marked(
        self, marks_N: torch.Tensor, squares: Sequence[Squares], first: np.ndarray
    ) -> torch.Tensor:
        """What each patch of each square is marked with."""
        parts = []
        for one, start in zip(squares, first, strict=False):
            late = one.patches_SN if len(one.patches_SN) == 1 else one.patches_SN[1:]
            parts.append(marks_N.index_select(0, planned(late.ravel() + start, marks_N.device)))
            if len(one.patches_SN) > 1:
                parts.append(marks_N.new_full((self._side**2,), PARTLY))
        return torch.cat(parts)

    def _finish(self) -> None:
        self._marks_3E = F.pad(self._marks.take(), (0, 0, 1, 0))


@dataclass(frozen=True, kw_only=True)
class Squares:
    """patches_SN: of each square the patches of the whole, in windows; windows_M: of each window of
    the whole the one that is taken, of all squares'."""

    patches_SN: np.ndarray
    windows_M: np.ndarray


def squares_of(grid: Grid, side: int) -> Squares:
    """The squares of side x side patches, `side - 2 * MARGIN` apart; a window is taken from the
    square that it is farther inside of."""
    _, h, w = grid
    step = side - 2 * MARGIN
    down, across = (h - 2 * MARGIN) // step, (w - 2 * MARGIN) // step
    row_N, column_N = coordinates(grid, MERGE)
    index_HW = np.empty((h, w), np.int64)
    index_HW[row_N, column_N] = np.arange(h * w)
    inside_2N = coordinates((1, side, side), MERGE)
    corners = [(i * step, j * step) for i in range(down) for j in range(across)]
    patches = [index_HW[inside_2N[0] + top, inside_2N[1] + left] for top, left in corners]
    at_2M = np.indices((h // MERGE, w // MERGE)).reshape(2, -1) * MERGE
    limits = np.array([[down - 1], [across - 1]])
    square_2M = np.clip((at_2M - MARGIN) // step, 0, limits)
    inner_2M = (at_2M - square_2M * step) // MERGE
    half = side // MERGE
    windows_M = (square_2M[0] * across + square_2M[1]) * half**2 + inner_2M[0] * half + inner_2M[1]
    return Squares(patches_SN=np.stack(patches), windows_M=windows_M)


def wholes_of(side: int) -> tuple[tuple[int, int], ...]:
    """Of all wholes of so many squares, the largest of those that most checkpoints have first."""
    step, counts = side - 2 * MARGIN, range(1, MOST_SQUARES + 1)
    tilings = [(i, j) for i in counts for j in counts if i * j <= MOST_SQUARES]
    tilings.sort(key=lambda one: (one != (3, 4), one[0] * one[1]))
    return tuple((i * step + 2 * MARGIN, j * step + 2 * MARGIN) for i, j in tilings)

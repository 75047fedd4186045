"""Ovis 2.5 and 2.6: pictures of any size and video through SigLIP 2's layers, most of which may see
windows alone, whose outputs become mixtures of the words of a visual vocabulary; two of its words
stand around each input (Lu et al. 2025, Ovis2.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.grids import bicubic
from headrace.back.layers.vision.merger import SideBySideSpec
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.tower import TowerSpec, VisionTower
from headrace.back.models.blocks import Decoder
from headrace.back.models.families import text_config
from headrace.back.models.ovis2 import VisualWordsSpec
from headrace.back.models.vision import HALF, siglip_layer, text_decoder, with_media
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader

MARKS = 4
"""Words of the vocabulary that stand around images and, behind these two, around videos."""
NAMES = ("visual_tokenizer.head.0", "visual_tokenizer.head.1", "vte")
UNUSED = r"visual_tokenizer\.vit\.vision_model\.(post_layernorm|head)\..*"
"""What stands behind the layers is not taken."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Ovis2_5, Ovis2_6ForCausalLM, Ovis2_6_MoeForCausalLM."""
    vision = config.required_section("vit_config")
    text = ConfigReader(text_config(config.raw), f"{config.where}: llm_config")
    tower = _tower(vision)
    words = VisualWordsSpec(
        width=tower.layer.width,
        outputs=text.int("hidden_size", ge=1),
        merge=tower.merger.merge,
        words=config.int("visual_vocab_size", 65_536, ge=MARKS + 1),
        marks=MARKS,
        names=NAMES,
    )
    encoder = MarkedWords(scope, tower, words)
    decoder = text_decoder(scope / "llm", text)
    decoder.weights = replace(decoder.weights, ignored=(*decoder.weights.ignored, UNUSED))
    return with_media(scope, decoder, encoder)


def _tower(vision: ConfigReader) -> TowerSpec:
    vision.choice("model_type", ("siglip2_navit",), "siglip2_navit")
    for key in ("preserve_original_pe", "use_rope"):
        if not vision.bool(key, True):
            raise vision.wrong(key, "true")
    if vision.int("temporal_patch_size", 1) != 1:
        raise vision.wrong("temporal_patch_size", "1")
    patch, merge = vision.int("patch_size", 16, ge=1), vision.int("hidden_stride", 2, ge=1, le=16)
    table = vision.int("num_patches", -1)
    side = int(table**0.5) if table > 0 else vision.int("image_size", 512, ge=patch) // patch
    layer = replace(siglip_layer(vision, default_width=1152, default_heads=16), rotary=True)
    layers = vision.int("num_hidden_layers", 27, ge=1)
    stated = vision.raw.get("fullatt_block_indexes")
    full = tuple(range(layers))
    if isinstance(stated, str) and stated:
        full = tuple(int(one) for one in stated.split("|") if one.isdecimal())
    elif isinstance(stated, list) and stated:
        full = vision.list("fullatt_block_indexes", of=int)
    window = vision.int("window_size", 112, ge=1) // merge // patch
    if window < 1 and len(full) < layers:
        raise vision.wrong("window_size", f"at least {merge * patch} pixels")
    return TowerSpec(
        patches=PatchSpec(
            patch=patch,
            mean=HALF,
            std=HALF,
            name="embeddings.patch_embedding",
            flat=table > 0,
        ),
        layer=layer,
        layers=layers,
        merger=SideBySideSpec(width=layer.width, merge=merge),
        positions=side**2,
        taps=bicubic,
        window=window if len(full) < layers else None,
        full_layers=full,
        names=("encoder.layers", "", "", "embeddings.position_embedding"),
    )


class MarkedWords:
    """`MediaEncoder`: a tower whose windows become mixtures of words, between two words more."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, tower: TowerSpec, words: VisualWordsSpec) -> None:
        whole = replace(scope, mesh=Mesh(), online=None, adapters=None)
        self._tower = VisionTower(whole / "visual_tokenizer.vit.vision_model", tower, None)
        self._words = words.build(whole)
        self._merge = tower.merger.merge
        self.forms = tuple(msgspec.structs.replace(form, extra=2) for form in self._tower.forms)
        self.width = words.outputs
        self.dtype = scope.dtype

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        y_MF = self._words.merge(self._tower.encode(kind, rows_NB, grids))
        first = 0 if kind == "image" else 2
        before, behind = self._words.marks[first : first + 2].split(1)
        counts = [t * h * w // self._merge**2 for t, h, w in grids]
        return torch.cat([row for one in y_MF.split(counts) for row in (before, one, behind)])

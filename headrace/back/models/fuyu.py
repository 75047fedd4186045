"""Fuyu: Persimmon's decoder, which reads patches of any number through one linear layer, rows of
them broken by tokens of text (Bavishi et al. 2023; transformers 5.23, modeling_fuyu.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.patches import PatchEmbedding, PatchSpec
from headrace.back.models.blocks import Decoder
from headrace.back.models.families import text_config
from headrace.back.models.vision import HALF, text_decoder, with_media
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MediaForm


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """FuyuForCausalLM."""
    text = ConfigReader(text_config(config.raw), f"{config.where}: text_config")
    patch = PatchSpec(
        patch=config.int("patch_size", 30, ge=1, le=1024),
        mean=HALF,
        std=HALF,
        linear=True,
        name="vision_embed_tokens",
    )
    tower = LinearPatches(scope, patch, text.int("hidden_size", ge=1))
    return with_media(scope, text_decoder(scope / "language_model", text), tower)


class LinearPatches:
    """`MediaEncoder`: a patch is a token. `scope` is the checkpoint's."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, spec: PatchSpec, width: int) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        self._patches = PatchEmbedding(scope, width, spec)
        self.width, self.dtype = width, scope.dtype
        self.forms = (
            MediaForm(kind="image", row_bytes=spec.row_bytes, patch=spec.patch, breaks=1, max_t=1),
        )

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        return self._patches.embed(rows_NB)

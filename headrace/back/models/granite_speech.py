"""Granite Speech: Granite's decoder behind a conformer and a Q-former over windows of its
positions. The low-rank adapter that comes with the checkpoint runs where sound is heard alone
(launch/adapters.py). transformers 5.23, modeling_granite_speech.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from headrace.back.layers.audio.query_windows import QueryWindows, QueryWindowsSpec
from headrace.back.layers.audio.shaw_conformer import ShawConformer, ShawConformerSpec
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.models.blocks import Decoder
from headrace.back.models.families import text_config
from headrace.back.models.vision import text_decoder, with_media
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MediaForm, SoundSteps

UNREAD = r"encoder\.layers\.\d+\.conv\.batch_norm\.num_batches_tracked"


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """GraniteSpeechForConditionalGeneration, GraniteSpeechPlusForConditionalGeneration."""
    text = ConfigReader(text_config(config.raw), f"{config.where}: text_config")
    encoder = config.required_section("encoder_config")
    queries = config.required_section("projector_config")
    window, kept = config.int("window_size", 15, ge=1), config.int("downsample_rate", 5, ge=1)
    if window % kept:
        raise config.wrong("downsample_rate", f"a divisor of window_size ({window})")
    conformer = _conformer(encoder)
    reader = QueryWindowsSpec(
        inputs=conformer.outputs,
        width=queries.int("hidden_size", 768, ge=1),
        inner=queries.int("intermediate_size", 3072, ge=1),
        heads=queries.int("num_attention_heads", 12, ge=1),
        layers=queries.int("num_hidden_layers", 12, ge=1),
        every=queries.int("cross_attention_frequency", 2, ge=1),
        eps=queries.float("layer_norm_eps", 1e-12, ge=0.0),
        queries=window // kept,
        outputs=text.int("hidden_size", ge=1),
    )
    scale = text.float("embedding_multiplier", 1.0)
    tower = GraniteSpeechTower(scope, conformer, reader, window=window, scale=scale)
    decoder = with_media(scope, text_decoder(scope / "language_model", text), tower)
    decoder.weights = replace(decoder.weights, ignored=(*decoder.weights.ignored, UNREAD))
    return decoder


def _conformer(encoder: ConfigReader) -> ShawConformerSpec:
    width, heads = encoder.int("hidden_dim", 1024, ge=1), encoder.int("num_heads", 8, ge=1)
    block, places = (
        encoder.int("context_size", 200, ge=1),
        encoder.int("max_pos_emb", 512, ge=1),
    )
    if block > places:
        raise encoder.wrong("context_size", f"at most max_pos_emb ({places})")
    layers = encoder.int("num_layers", 10, ge=1)
    shown = encoder.list("cat_hidden_layers", None, of=int) or ()
    if any(not 0 <= layer < layers for layer in shown):
        raise encoder.wrong("cat_hidden_layers", f"numbers from 0 to {layers - 1}")
    return ShawConformerSpec(
        inputs=encoder.int("input_dim", 160, ge=1),
        width=width,
        inner=width * encoder.int("feedforward_mult", 4, ge=1),
        layers=layers,
        heads=heads,
        head_dim=encoder.int("dim_head", width // heads, ge=1),
        block=block,
        places=places,
        taps=encoder.int("conv_kernel_size", 15, ge=1),
        expansion=encoder.int("conv_expansion_factor", 2, ge=1),
        labels=encoder.int("output_dim", 42, ge=1),
        shown=tuple(sorted(set(shown))),
    )


class GraniteSpeechTower:
    """`MediaEncoder`; `scope` is the checkpoint's. `scale`: of what it gives, as of embeddings."""

    rope = None
    layers = 0

    def __init__(
        self,
        scope: Scope,
        conformer: ShawConformerSpec,
        queries: QueryWindowsSpec,
        *,
        window: int,
        scale: float,
    ) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        self._window, self._scale = window, scale
        self._conformer = ShawConformer(scope / "encoder", conformer)
        self._queries = QueryWindows(scope / "projector", queries)
        self.width, self.dtype = queries.outputs, scope.dtype
        self.forms = (
            MediaForm(
                kind="audio",
                row_bytes=4 * conformer.inputs,
                max_t=1,
                sound=SoundSteps(chunk=window, per_chunk=queries.queries),
            ),
        )

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder. The last window of an input is filled up with zeros."""
        sizes = [t * h * w for t, h, w in grids]
        x_TE = self._conformer.forward(rows_NB.view(torch.float32).to(self.dtype), sizes)
        windows = [
            F.pad(one, (0, 0, 0, -len(one) % self._window)).unflatten(0, (-1, self._window))
            for one in x_TE.split(sizes)
        ]
        return self._queries.forward(torch.cat(windows)) * self._scale

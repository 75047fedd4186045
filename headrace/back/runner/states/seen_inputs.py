"""The state of encoder-decoders whose encoder reads images among its tokens, or nothing else.

The core keeps the books of what the encoder of images gives (core/encoder_cache.py), as it does for
decoders that see; `MediaSpan.offset` counts the tokens that the request's encoder reads. Rows of
images are needed in the request's first step alone: from then on the cross caches hold what was
made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import numpy as np
import torch

from headrace.back.attention.plan import Batch, EncodedTokens, EncoderBatch
from headrace.back.kernels.upload import to_device
from headrace.back.layers.vision.encoder import MediaEncoder
from headrace.back.runner.batch import StepShape
from headrace.back.runner.memory import KVMemory
from headrace.back.runner.states.encoder_cache import (
    CACHE_TOKENS,
    EncoderCache,
    FilesFactory,
    rows_beside,
)
from headrace.back.runner.states.encoder_inputs import EncoderInputs
from headrace.base.wire.media import MEDIA_HOOK, MediaPayload, MediaSpan
from headrace.base.wire.step import RowStart


class SeenInputs(EncoderInputs):
    """EncoderInputs with an encoder cache. `_spans`: of the rows that wait for their first step;
    `_step_spans`: of a step's rows, by their place in it."""

    media_tokens = CACHE_TOKENS

    def __init__(
        self,
        memory: KVMemory,
        device: torch.device,
        *,
        max_rows: int,
        encoder: MediaEncoder,
        files: FilesFactory | None = None,
    ) -> None:
        super().__init__(memory, device, max_rows=max_rows)
        assert not encoder.layers, "rows enter the encoder's first layer alone"
        self.media_width = encoder.width
        stored = None if files is None else files(encoder.width, encoder.dtype)
        self.cache = EncoderCache(encoder, device, stored)
        self._encoder = encoder
        self._media_rows: dict[str, int] | None = None
        self._spans: dict[int, tuple[MediaSpan, ...]] = {}
        self._step_spans: dict[int, tuple[MediaSpan, ...]] = {}

    @property
    def media_rows(self) -> dict[str, int]:  # type: ignore[override]  # timed when first asked for
        """See ModelState."""
        if self._media_rows is None:
            self._media_rows = rows_beside(self._encoder, self._device)
        return self._media_rows

    def take(self, payloads: Mapping[str, bytes]) -> None:
        """See ModelState."""
        payload = payloads.get(MEDIA_HOOK)
        if payload is not None:
            self.cache.take(msgspec.msgpack.decode(payload, type=MediaPayload))

    def forget_content(self) -> None:
        """See ModelState: the core says which inputs go."""
        if self.cache.files is not None:
            self.cache.files.end()

    def end(self, rows: np.ndarray) -> None:
        """See EncoderInputs."""
        super().end(rows)
        for row in rows.tolist():
            self._spans.pop(row, None)

    def start(self, start: RowStart) -> None:
        """See EncoderInputs."""
        super().start(start)
        self._spans[start.row] = start.media

    def prepare(self, batch: Batch, shape: StepShape) -> Batch:
        """See EncoderInputs."""
        rows = enumerate(shape.rows.tolist())
        self._step_spans = {at: self._spans.pop(row, ()) for at, row in rows}
        return super().prepare(batch, shape)

    def _encoder_batch(self, batch: Batch, inputs: list[tuple[int, np.ndarray]]) -> EncoderBatch:
        return replace(super()._encoder_batch(batch, inputs), seen=self._seen(inputs))

    def _seen(self, inputs: list[tuple[int, np.ndarray]]) -> EncodedTokens | None:
        """The rows of a pass's images, which are encoded now if they are not yet."""
        starts = np.cumsum([0, *(one.size for _, one in inputs)])
        spans = [
            (span, int(start))
            for start, (at, _) in zip(starts, inputs, strict=False)
            for span in self._step_spans[at]
        ]
        if not spans:
            return None
        self.cache.encode([span.key for span, _ in spans])
        places = [self.cache.slots(span, 0, span.num_tokens) for span, _ in spans]
        at_M = [
            start + span.offset + seen
            for (span, start), (seen, _) in zip(spans, places, strict=True)
        ]
        return EncodedTokens(
            at_M=to_device(np.concatenate(at_M), self._device),
            rows_ME=self.cache.rows(np.concatenate([slots for _, slots in places])),
        )

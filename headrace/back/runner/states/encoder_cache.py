"""The encoder cache of a worker: inputs by key, as pixels on the host until they are encoded, then
as rows of an arena of the device. The core keeps the books (core/encoder_cache.py).

C tokens of the arena, W its width, M tokens of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.kernels.upload import to_device
from headrace.back.layers.vision.encoder import MediaEncoder
from headrace.back.layers.vision.packing import packed
from headrace.base.wire.media import MediaContent, MediaPayload, MediaSpan

CACHE_TOKENS = 32_768
"""Tokens of all inputs that the workers hold at a time, and so of one request at most."""
ENCODE_ROWS = 16_384
"""Patches that one pass of the encoder takes, unless one input has more: bounds its memory."""


@dataclass(slots=True)
class _Entry:
    """An input the workers hold. `content`: until it is encoded; slot_M: where its rows lie in the
    arena, from then on."""

    content: MediaContent | None
    slot_M: np.ndarray | None = None


class EncoderCache:
    """Encoded inputs by key, as the core says. arena_CW: their rows, and one of zeros."""

    def __init__(self, encoder: MediaEncoder, device: torch.device) -> None:
        width = encoder.width * (1 + encoder.layers)
        self._encoder, self._device = encoder, device
        self.arena_CW = torch.empty(CACHE_TOKENS + 1, width, dtype=encoder.dtype, device=device)
        self.arena_CW[CACHE_TOKENS] = 0  # stands for text
        self._entries: dict[bytes, _Entry] = {}
        self._free = np.arange(CACHE_TOKENS, dtype=np.int64)
        self._forms = {form.kind: form for form in encoder.forms}
        self._marks_KW: torch.Tensor | None = None
        self.num_encoded = 0

    def take(self, payload: MediaPayload) -> None:
        """Drops and takes in what a step's payload says."""
        for key in payload.evicted:
            entry = self._entries.pop(key, None)
            if entry is not None and entry.slot_M is not None:
                self._free = np.concatenate((self._free, entry.slot_M))
        for content in payload.added:
            if content.key not in self._entries:
                self._entries[content.key] = _Entry(content)

    def encode(self, keys: Sequence[bytes]) -> None:
        """Makes sure that these inputs are encoded."""
        waiting: dict[str, list[_Entry]] = {}
        for key in dict.fromkeys(keys):
            entry = self._entries[key]
            if entry.content is not None and entry.content.embedded:
                self._place([entry], self._embedded(entry.content))
            elif entry.content is not None:
                waiting.setdefault(entry.content.kind, []).append(entry)
        for kind, entries in waiting.items():
            for part in _passes(entries):
                self._encode(kind, part)

    def _encode(self, kind: str, entries: list[_Entry]) -> None:
        contents = [entry.content for entry in entries if entry.content is not None]
        pixels = np.frombuffer(b"".join(content.rows for content in contents), np.uint8)
        form, grids = self._forms[kind], [content.grid for content in contents]
        rows_NB = to_device(pixels.reshape(-1, form.row_bytes), self._device)
        cuts = [content.cut for content in contents]
        y_MW = self._encoder.encode(kind, rows_NB, grids)
        if form.packing is not None and form.packing.marks:
            self._marks_KW = y_MW[-len(form.packing.marks) :].clone()
        y_MW = packed(y_MW, form, grids, cuts)
        tokens = [form.num_rows(grid, cut) for grid, cut in zip(grids, cuts, strict=True)]
        assert y_MW.shape[0] == sum(tokens), (y_MW.shape, tokens)
        self._place(entries, y_MW, tokens)
        self.num_encoded += len(entries)

    def _embedded(self, content: MediaContent) -> torch.Tensor:
        """[M, W]: the rows of an input that come with it."""
        width = self.arena_CW.shape[1]
        rows_MW = np.frombuffer(content.rows, "<f4").reshape(-1, width)
        return to_device(rows_MW, self._device).to(self.arena_CW.dtype)

    def _place(self, entries: list[_Entry], y_MW: torch.Tensor, tokens: Sequence[int] = ()) -> None:
        """Puts rows into the arena; `tokens`: of each entry, if there are several."""
        tokens = tokens or [y_MW.shape[0]]
        assert sum(tokens) <= self._free.size, tokens
        slot_M, self._free = np.split(self._free, [sum(tokens)])
        self.arena_CW.index_copy_(0, to_device(slot_M, self._device), y_MW)
        places = np.split(slot_M, np.cumsum(tokens)[:-1])
        for entry, place in zip(entries, places, strict=True):
            entry.content, entry.slot_M = None, place

    def slots(self, span: MediaSpan, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Of tokens start .. end-1 of an encoded input, those that are no breaks, relative to
        `start`, and where they lie."""
        slot_M, form = self._entries[span.key].slot_M, self._forms[span.kind]
        assert slot_M is not None, span.key
        if not form.breaks:
            return np.arange(end - start), slot_M[span.first + start : span.first + end]
        width = form.row_width(span.grid)
        row, column = np.divmod(np.arange(start, end), width + form.breaks)
        seen = np.flatnonzero(column < width)
        return seen, slot_M[(row * width + column)[seen]]

    def marks(self, index_K: np.ndarray, key: bytes) -> torch.Tensor:
        """The learned rows of marks, [K, W]; `key`: of an input that tells them with its own."""
        if self._marks_KW is None:
            self.encode([key])
        assert self._marks_KW is not None
        return self._marks_KW.index_select(0, to_device(index_K, self._device))

    def rows(self, slot_M: np.ndarray) -> torch.Tensor:
        """What lies there, [M, W]."""
        return self.arena_CW.index_select(0, to_device(slot_M, self._device))


def _passes(entries: list[_Entry]) -> list[list[_Entry]]:
    passes: list[list[_Entry]] = []
    room = 0
    for entry in entries:
        assert entry.content is not None
        t, h, w = entry.content.grid
        if t * h * w > room or not passes:
            passes.append([])
            room = ENCODE_ROWS
        passes[-1].append(entry)
        room -= t * h * w
    return passes

"""The encoder cache of a worker: inputs by key, as pixels on the host until they are encoded, then
as rows of an arena of the device. The core keeps the books (core/encoder_cache.py). A pass over one
input may rest between layers, so that steps of the decoder come in between (`advance`).

C tokens of the arena, W its width, M tokens of inputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from headrace.back.kernels.upload import to_device
from headrace.back.layers.vision.encoder import MediaEncoder, Passes, resting, run_through
from headrace.back.layers.vision.packing import packed
from headrace.back.runner.states.encoded_files import EncodedFiles
from headrace.back.runner.warmup_media import KEY, grid_of
from headrace.base.wire.media import (
    MediaContent,
    MediaForm,
    MediaPayload,
    MediaSpan,
    MediaWork,
)

CACHE_TOKENS = 32_768
"""Tokens of all inputs that the workers hold at a time, and so of one request at most."""
ENCODE_ROWS = 16_384
"""Patches that one pass of the encoder takes, unless one input has more: bounds its memory."""


FilesFactory: TypeAlias = Callable[[int, torch.dtype], EncodedFiles]
"""Makes the files of an encoder, from the numbers of a row and their type."""


@dataclass(slots=True)
class _Entry:
    """An input the workers hold. `content`: until it is encoded; slot_M: where its rows lie in the
    arena, from then on. `passes`: a pass over it that rests, behind so many layers."""

    content: MediaContent | None
    slot_M: np.ndarray | None = None
    passes: Passes | None = None
    rested: int = 0


class EncoderCache:
    """Encoded inputs by key, as the core says. arena_CW: their rows, and one of zeros."""

    def __init__(
        self, encoder: MediaEncoder, device: torch.device, files: EncodedFiles | None = None
    ) -> None:
        """`files`: what other servers have encoded; None: they tell nothing."""
        width = encoder.width * (1 + encoder.layers)
        self._encoder, self._device = encoder, device
        self.arena_CW = torch.empty(CACHE_TOKENS + 1, width, dtype=encoder.dtype, device=device)
        self.arena_CW[CACHE_TOKENS] = 0  # stands for text
        self._entries: dict[bytes, _Entry] = {}
        self._free = np.arange(CACHE_TOKENS, dtype=np.int64)
        self._forms = {form.kind: form for form in encoder.forms}
        self._marks_KW: torch.Tensor | None = None
        self.num_encoded = 0
        self.files = files

    def take(self, payload: MediaPayload) -> None:
        """Drops and takes in what a step's payload says."""
        for key in payload.evicted:
            entry = self._entries.pop(key, None)
            if entry is not None and entry.slot_M is not None:
                self._free = np.concatenate((self._free, entry.slot_M))
        for content in payload.added:
            if content.key not in self._entries:
                self._entries[content.key] = _Entry(content)
                self._load(content)
        if payload.work:
            self.advance(payload.work)

    def _load(self, content: MediaContent) -> None:
        """Takes in what another server has encoded, if it has."""
        if self.files is None or not self._is_stored(content):
            return
        tokens = self._forms[content.kind].num_rows(content.grid, content.cut)
        rows_MW = self.files.load(content, tokens)
        if rows_MW is not None:
            self._place([self._entries[content.key]], rows_MW.to(self._device))

    def _is_stored(self, content: MediaContent) -> bool:
        """Whether the rows of an input are all that its pass gives: not those of marks."""
        packing = self._forms[content.kind].packing
        plain = packing is None or not packing.marks
        return plain and not content.embedded and content.key != KEY  # a warm-up has to encode

    def advance(self, work: Sequence[MediaWork]) -> None:
        """Goes on with passes as far as each is to be; one that is run again finds them there."""
        self.encode([one.key for one in work if one.parts == 1])
        for one in work:
            if one.parts > 1:
                self._go_on(self._entries[one.key], one)

    def _go_on(self, entry: _Entry, work: MediaWork) -> None:
        content = entry.content
        if content is None:
            return
        encoder = resting(self._encoder, content.kind)
        if work.done == work.parts or encoder is None or content.embedded:
            self.encode([content.key])
            return
        if entry.passes is None:
            entry.passes = encoder.passes(content.kind, self._pixels([content]), [content.grid])
        until = (encoder.rests(content.kind) + 1) * work.done // work.parts  # layers
        while entry.rested < until:
            next(entry.passes)
            entry.rested += 1

    def encode(self, keys: Sequence[bytes]) -> None:
        """Makes sure that these inputs are encoded."""
        waiting: dict[str, list[_Entry]] = {}
        for key in dict.fromkeys(keys):
            entry = self._entries[key]
            if entry.content is not None and entry.content.embedded:
                self._place([entry], self._embedded(entry.content))
            elif entry.passes is not None and entry.content is not None:
                passes, entry.passes = entry.passes, None
                self._take_in([entry], [entry.content], run_through(passes))
            elif entry.content is not None:
                waiting.setdefault(entry.content.kind, []).append(entry)
        for kind, entries in waiting.items():
            for part in _passes(entries):
                self._encode(kind, part)

    def _encode(self, kind: str, entries: list[_Entry]) -> None:
        contents = [entry.content for entry in entries if entry.content is not None]
        grids = [content.grid for content in contents]
        y_MW = self._encoder.encode(kind, self._pixels(contents), grids)
        self._take_in(entries, contents, y_MW)

    def _pixels(self, contents: Sequence[MediaContent]) -> torch.Tensor:
        """rows_NB of inputs of one kind."""
        pixels = np.frombuffer(b"".join(content.rows for content in contents), np.uint8)
        row_bytes = self._forms[contents[0].kind].row_bytes
        return to_device(pixels.reshape(-1, row_bytes), self._device)

    def _take_in(
        self, entries: list[_Entry], contents: Sequence[MediaContent], y_MW: torch.Tensor
    ) -> None:
        """What the encoder gave for inputs of one kind is put into the arena."""
        form, cuts = self._forms[contents[0].kind], [content.cut for content in contents]
        grids = [content.grid for content in contents]
        if form.packing is not None and form.packing.marks:
            self._marks_KW = y_MW[-len(form.packing.marks) :].clone()
        y_MW = packed(y_MW, form, grids, cuts)
        tokens = [form.num_rows(grid, cut) for grid, cut in zip(grids, cuts, strict=True)]
        assert y_MW.shape[0] == sum(tokens), (y_MW.shape, tokens)
        self._place(entries, y_MW, tokens)
        if self.files is not None and self._is_stored(contents[0]):
            for content, rows_MW in zip(contents, y_MW.split(tokens), strict=True):
                self.files.save(content, rows_MW)
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


SLICE_S = 0.015
"""What an encoder may take beside a step on a device whose passes are timed."""
TIMED_TOKENS = 1024
CPU_ROWS = 64
"""Where a pass is cut at every layer, for the decodes beside it."""


def rows_beside(encoder: MediaEncoder, device: torch.device) -> dict[str, int]:
    """See WorkerFacts.media_rows: of kinds whose passes may rest. A GPU's are timed."""
    return {
        form.kind: CPU_ROWS if device.type == "cpu" else _timed_rows(encoder, form, device)
        for form in encoder.forms
        if resting(encoder, form.kind) is not None
    }


@torch.inference_mode()
def _timed_rows(encoder: MediaEncoder, form: MediaForm, device: torch.device) -> int:
    """Rows that the encoder of a kind takes in SLICE_S, by the quickest of some passes: the first
    ones may load and plan kernels."""
    once, grid = resting(encoder, form.kind), grid_of(form, TIMED_TOKENS)
    assert once is not None
    rows_NB = torch.zeros(math.prod(grid), form.row_bytes, dtype=torch.uint8, device=device)
    seconds = math.inf
    for _ in range(4):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        run_through(once.passes(form.kind, rows_NB, [grid]))
        torch.cuda.synchronize(device)
        seconds = min(seconds, time.perf_counter() - begin)
    return max(1, int(SLICE_S * len(rows_NB) / seconds))


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

"""Showings as rows of patches and tokens, as the server would make them of the same messages.

Tokens are bytes (their values are their ids) and a few control tokens behind them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import numpy as np
from PIL import Image, ImageFilter

from demo.sees.item import Clip, Medium, Showing
from demo.sees.shapes import comparing, counting, in_order, placing, relating
from demo.sees.texts import Fonts, reading, reading_lines
from headrace.base.config.media import ProcessorSettings
from headrace.front.media.processing import ProcessedMedia, Sampling
from headrace.front.media.processors.qwen_vl import QwenVisionProcessor

CONTROL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
CONTROL_ID = {name: 256 + number for number, name in enumerate(CONTROL)}
SETTINGS = ProcessorSettings(
    patch=8, merge=2, temporal=2, image_pixels=(192 * 192, 256 * 256), video_pixels=(64 * 64, 16 * 96 * 96),
    pixels_of_all_frames=True, stamped=True, fps=2.0, min_frames=4, max_frames=16,
)  # fmt: skip
PATCHES = 8192
"""Of a row."""
TOKENS = 4096
"""Of a row."""
ROW = np.dtype(
    [
        ("patches", np.uint8, (PATCHES, 384)), ("places", np.int16, (PATCHES, 4)), ("picture", np.int16, PATCHES),
        ("tokens", np.int16, TOKENS), ("slots", np.int16, TOKENS), ("positions", np.int16, (TOKENS, 3)),
        ("targets", np.int16, TOKENS), ("document", np.int16, TOKENS),
    ]
)  # fmt: skip
SYSTEM = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You see images and answer questions about them.",
)
_PROCESSOR = QwenVisionProcessor(SETTINGS)
_WAITING = 16


@dataclass
class Packed:
    """One conversation: tokens, and patches of its pictures, each with what stands beside it in ROW."""

    tokens: list[int] = field(default_factory=list)
    learnt: list[bool] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    pictures: list[np.ndarray] = field(default_factory=list)
    places: list[np.ndarray] = field(default_factory=list)
    next: int = 0

    @property
    def num_patches(self) -> int:
        """Of all pictures."""
        return sum(len(one) for one in self.pictures)

    def text(self, text: str, *, learnt: bool = False) -> None:
        """Bytes and control tokens."""
        for number, part in enumerate(text.split("<|")):
            if number:
                name, _, part = part.partition("|>")
                self._token(CONTROL_ID[f"<|{name}|>"], learnt)
            for byte in part.encode():
                self._token(byte, learnt)

    def medium(self, made: ProcessedMedia, placeholder: str) -> None:
        """A picture's tokens, or a clip's with their times."""
        for part in made.layout:
            if isinstance(part, str):
                self.text(part)
            else:
                one = made.inputs[part]
                self._picture(one.grid, one.rows, CONTROL_ID[placeholder])

    def _token(self, token: int, learnt: bool) -> None:
        self.tokens.append(token)
        self.learnt.append(learnt)
        self.slots.append(-1)
        self.positions.append((self.next,) * 3)
        self.next += 1

    def _picture(self, grid: tuple[int, int, int], rows: np.ndarray, placeholder: int) -> None:
        _, high, wide = grid
        first = self.num_patches // 4
        if rows.shape[1] == 192:
            rows = np.repeat(rows.reshape(-1, 3, 1, 64), 2, axis=2).reshape(-1, 384)
        self.pictures.append(rows)
        windows = np.indices((high, wide), np.int16).reshape(2, high // 2, 2, wide // 2, 2)
        at = windows.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
        self.places.append(
            np.concatenate((at, np.broadcast_to(np.int16([high, wide]), at.shape)), axis=1)
        )
        for row in range(high // 2):
            for column in range(wide // 2):
                self.tokens.append(placeholder)
                self.learnt.append(False)
                self.slots.append(first)
                self.positions.append((self.next, self.next + row, self.next + column))
                first += 1
        self.next += max(high, wide) // 2


def conversation(showing: Showing, *, system: str = "", after: bool = False) -> Packed:
    """The whole of it in the chat format; `after`: media stand behind the first question."""
    packed = Packed()
    if system:
        packed.text(f"<|im_start|>system\n{system}<|im_end|>\n")
    for number, turn in enumerate(showing.turns):
        packed.text("<|im_start|>user\n")
        if after:
            packed.text(turn.question)
        if number == 0:
            for medium in showing.media:
                _put(packed, medium)
        if not after:
            packed.text(turn.question)
        packed.text("<|im_end|>\n<|im_start|>assistant\n")
        packed.text(turn.answer + "<|im_end|>", learnt=True)
        packed.text("\n")
    return packed


def _put(packed: Packed, medium: Medium) -> None:
    """A clip's frames have marks of their own inside of its marks, as in transformers 5.23."""
    packed.text("<|vision_start|>")
    if isinstance(medium, Clip):
        sampling = Sampling(len(medium.frames), medium.rate)
        indices = _PROCESSOR.frames_of(sampling)
        frames = [medium.frames[i] for i in indices]
        packed.medium(_PROCESSOR.video(frames, indices, sampling), "<|video_pad|>")
    else:
        packed.medium(_PROCESSOR.image(medium), "<|image_pad|>")
    packed.text("<|vision_end|>")


def any_showing(rng: Random, fonts: Fonts) -> Showing:
    """Of any task, as training draws them."""
    kind = rng.random()
    if kind < 0.24:
        return reading(rng, fonts)
    if kind < 0.46:
        return reading_lines(rng, fonts)
    if kind < 0.59:
        return counting(rng)
    if kind < 0.68:
        return placing(rng)
    if kind < 0.76:
        return relating(rng)
    return comparing(rng) if kind < 0.92 else in_order(rng)


def worn(rng: Random, medium: Medium) -> Medium:
    """Sometimes as a lossy file or a little blurred."""
    if isinstance(medium, Clip):
        if rng.random() < 0.5:
            return medium
        kept = {id(frame): _lossy(frame, rng.randint(40, 95)) for frame in medium.frames}
        return Clip(frames=tuple(kept[id(frame)] for frame in medium.frames), rate=medium.rate)
    if rng.random() < 0.2:
        return _lossy(medium, rng.randint(45, 95))
    if rng.random() < 0.06:
        return medium.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.7)))
    return medium


def _lossy(picture: Image.Image, quality: int) -> Image.Image:
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=quality)
    return Image.open(data).convert("RGB")


def training_conversation(rng: Random, fonts: Fonts) -> Packed:
    """One conversation to learn."""
    showing = any_showing(rng, fonts)
    showing = Showing(media=tuple(worn(rng, one) for one in showing.media), turns=showing.turns)
    system = rng.choice(SYSTEM) if rng.random() < 0.08 else ""
    return conversation(showing, system=system, after=rng.random() < 0.25)


def row_of(packed: list[Packed]) -> np.ndarray:
    """The conversations end to end; what is left is padding of documents of its own."""
    row = np.zeros((), ROW)
    row["slots"], row["targets"] = -1, -100
    row["places"][:, 2:] = 2
    at = token_at = number = 0
    for document, one in enumerate(packed, 1):
        size = len(one.tokens)
        here = slice(token_at, token_at + size)
        row["tokens"][here] = one.tokens
        slots = np.array(one.slots)
        row["slots"][here] = np.where(slots >= 0, slots + at // 4, -1)
        row["positions"][here] = one.positions
        learnt = np.array(one.learnt[1:])
        row["targets"][token_at : token_at + size - 1] = np.where(learnt, one.tokens[1:], -100)
        row["document"][here] = document
        token_at += size
        for picture, places in zip(one.pictures, one.places, strict=True):
            number += 1
            row["patches"][at : at + len(picture)] = picture
            row["places"][at : at + len(picture)] = places
            row["picture"][at : at + len(picture)] = number
            at += len(picture)
    return row


def rows(seed: str, fonts: Fonts) -> Iterator[np.ndarray]:
    """Endless rows to learn."""
    rng = Random(seed)
    waiting: list[Packed] = []
    while True:
        chosen: list[Packed] = []
        patches, tokens = PATCHES, TOKENS
        while True:
            while len(waiting) < _WAITING:
                waiting.append(training_conversation(rng, fonts))
            fits = (
                i
                for i, one in enumerate(waiting)
                if len(one.tokens) <= tokens and one.num_patches <= patches
            )
            found = next(fits, None)
            if found is None:
                break
            one = waiting.pop(found)
            chosen.append(one)
            patches, tokens = patches - one.num_patches, tokens - len(one.tokens)
        yield row_of(chosen)

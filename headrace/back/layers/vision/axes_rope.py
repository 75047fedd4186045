"""Rotary positions in three axes (time, height, width) for the tokens of images and video within a
text (Wang et al. 2024, Qwen2-VL, section 2.1; transformers 5.23, `get_rope_index`).

A token of text or of sound has one position in all axes. A picture's tokens have the coordinates of
their windows from the next position on, and the text behind it goes on max(h, w) further: so
positions fall behind places, and the answer's are moved by a number of the row
(`PromptPositions.delta`).

T query tokens, P places of a prompt, R rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.back.kernels.upload import to_device
from headrace.back.layers.rope import RopeSpec, rope_table
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.grids import kept_windows
from headrace.base.wire.media import PROMPT, MediaSpan

SOUNDING = {"video", "audio"}
LIKE_TEXT = {"audio", PROMPT}
"""Kinds whose tokens have positions as those of text."""


@dataclass(frozen=True, kw_only=True)
class PromptPositions:
    """position_3P int64: time, height, width of each place of a prompt (or other axes, as the rope
    has them); `delta`: how far those behind it are from their places."""

    position_3P: np.ndarray
    delta: int

    def of(self, place_T: np.ndarray) -> np.ndarray:
        """int64 [3, T]: the positions of these places of the prompt, or behind it."""
        length = self.position_3P.shape[1]
        known_3T = self.position_3P[:, np.minimum(place_T, length - 1)]
        positions: np.ndarray = np.where(place_T < length, known_3T, place_T + self.delta)
        return positions


class AxesRope:
    """The table of a decoder's rotary positions, read by axis. `axis_of_pair`: the axis that turns
    each pair of dimensions. `merge`: patches per side of a token's window. `positions_per_s`: how
    far apart steps of a video are in time for each second between them; None: 1 whatever the
    time. `behind_time`: the text behind a video begins behind its greatest position in any axis,
    not only in height and width. `marks_behind`: tokens of text behind the last input that steps
    tell from others too. `paired_marks`: the two tokens before a video with sound have one
    position, and the two behind it.

    A video with its sound stands in parts, one right behind the other: both count from where the
    first of them begins."""

    axes = 3
    marks_behind = 0

    def __init__(
        self,
        scope: Scope,
        spec: RopeSpec,
        *,
        axis_of_pair: Sequence[int],
        merge: int,
        positions_per_s: float | None = None,
        behind_time: bool = False,
        paired_marks: bool = False,
    ) -> None:
        assert len(axis_of_pair) == len(spec.frequencies), (axis_of_pair, spec)
        self._merge = merge
        self._positions_per_s = positions_per_s
        self._behind_time = behind_time
        self._paired_marks = paired_marks
        self._axis = torch.tensor(axis_of_pair, device=scope.device)
        self._table_PR = torch.empty(0)
        self._scope = scope
        self._spec = spec
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        scope, spec = self._scope, self._spec
        if spec not in scope.ledger.tables:
            scope.ledger.tables[spec] = rope_table(spec, scope.max_positions).to(scope.device)
        self._table_PR = scope.ledger.tables[spec]

    def positions(self, spans: Sequence[MediaSpan], length: int) -> PromptPositions:
        """Of a prompt of `length` tokens with these inputs, in order."""
        parts: list[np.ndarray] = []
        place = position = repeated = 0
        for group in _groups(spans):
            first, sounds = group[0], len(group) > 1
            if first.kind in LIKE_TEXT:
                continue
            before = _text(position, first.offset - place, repeated)
            repeated = int(sounds and self._paired_marks)
            if repeated:
                before = np.concatenate((before[:, :-1], before[:, -2:-1]), axis=1)
            position = int(before[0, -1]) + 1 if before.size else position
            parts.append(before)
            parts += [position + self._part(span) for span in group]
            if self._behind_time or sounds:
                position += max(self._reach(span) for span in group) + 1
            else:
                position += max(first.grid[1], first.grid[2]) // self._merge
            place = group[-1].end
        behind = _text(position, length - place, repeated)
        parts.append(behind)
        position = int(behind[0, -1]) + 1 if behind.size else position
        return PromptPositions(position_3P=np.concatenate(parts, axis=1), delta=position - length)

    def _part(self, span: MediaSpan) -> np.ndarray:
        """Of the tokens of a span, from where its video begins."""
        if span.kind == "audio":
            return _text(span.first, span.num_tokens)
        at_3P = self._coordinates(span)
        shown_3P = at_3P[:, kept_windows(span.cut, at_3P.shape[1])]
        return shown_3P[:, span.first : span.first + span.num_tokens]

    def _reach(self, span: MediaSpan) -> int:
        """The greatest of its positions in any axis, also of what is not shown."""
        if span.kind == "audio":
            return span.first + span.num_tokens - 1
        return int(self._coordinates(span).max())

    def _coordinates(self, span: MediaSpan) -> np.ndarray:
        t, h, w = span.grid
        at = np.indices((t, h // self._merge, w // self._merge)).reshape(3, -1)
        if self._positions_per_s is not None and span.kind == "video":
            at[0] = (at[0] * (self._positions_per_s * span.step_s)).astype(np.int64)
        return at

    def table(self, position_3T: np.ndarray) -> torch.Tensor:
        """table_TR: the cosines and sines of tokens at these positions, float32."""
        return self.turns(to_device(position_3T, self._table_PR.device))

    def turns(self, place_3T: torch.Tensor) -> torch.Tensor:
        """The same of positions on the device."""
        place_TH = place_3T.index_select(0, self._axis).T
        cos_PH, sin_PH = self._table_PR.chunk(2, dim=1)
        return torch.cat((cos_PH.gather(0, place_TH), sin_PH.gather(0, place_TH)), dim=1)


class PlaceRope(AxesRope):
    """Positions are places, but for windows of images: of the last three axes these have their
    column, their row and the number of their image. An image's tokens are one, a row of windows
    with one more behind each, and one (Tencent 2025, HunyuanOCR; transformers 5.23,
    modeling_hunyuan_vl.py). `sections`: pairs of each axis. The first and the second dimensions of
    pairs turn by axes of their own (`RopeSpec.halves`)."""

    def __init__(
        self, scope: Scope, spec: RopeSpec, *, sections: Sequence[int], merge: int
    ) -> None:
        super().__init__(scope, spec, axis_of_pair=(0,) * len(spec.frequencies), merge=merge)
        self.axes = len(sections)
        axes = [axis for axis, count in enumerate(sections) for _ in range(2 * count)]
        self._axis_of_dim = torch.tensor(axes, device=scope.device)

    def positions(self, spans: Sequence[MediaSpan], length: int) -> PromptPositions:
        """See AxesRope."""
        position_AP = np.tile(np.arange(length), (self.axes, 1))
        for number, span in enumerate(span for span in spans if span.kind not in LIKE_TEXT):
            rows, columns = span.grid[1] // self._merge, span.grid[2] // self._merge + 1
            row, column = np.indices((rows, columns)).reshape(2, -1)
            inside = slice(span.offset + 1, span.end - 1)
            position_AP[-3:, inside] = np.stack((column, row, np.full_like(row, number)))
        return PromptPositions(position_3P=position_AP, delta=0)

    def turns(self, place_3T: torch.Tensor) -> torch.Tensor:
        """table_TX: cosines and sines of the first dimensions of pairs, then of the second."""
        place_TD = place_3T.index_select(0, self._axis_of_dim).T
        cos_PH, sin_PH = self._table_PR.chunk(2, dim=1)
        halves = place_TD.chunk(2, dim=1)
        return torch.cat(
            [part.gather(0, half) for half in halves for part in (cos_PH, sin_PH)], dim=1
        )


def _text(first: int, count: int, repeated: int = 0) -> np.ndarray:
    """Of so many tokens; `repeated`: the second has the position of the first."""
    place = np.arange(first, first + count)
    place[1:] -= repeated
    return np.broadcast_to(place, (3, count))


def _groups(spans: Sequence[MediaSpan]) -> list[list[MediaSpan]]:
    """A video's parts and those of its sound together, which stand one right behind the other; any
    other input by itself."""
    groups: list[list[MediaSpan]] = []
    for span in spans:
        group = groups[-1] if groups else []
        joins = span.first > 0 or (bool(group) and {group[0].kind, span.kind} == SOUNDING)
        if group and joins and group[0].kind == "video" and group[-1].end == span.offset:
            group.append(span)
        else:
            groups.append([span])
    return groups


def sections(lengths: Sequence[int]) -> tuple[int, ...]:
    """The axis of each pair where a head's pairs are cut into one part for each axis."""
    return tuple(axis % 3 for axis, length in enumerate(lengths) for _ in range(length))


def spread(lengths: Sequence[int]) -> tuple[int, ...]:
    """The axis of each pair where each axis is spread evenly over them: the next is the one of
    which the least share was placed, but for that of the pair before; the last pair is time's
    (openPangu-VL)."""
    counts = [lengths[0] - 1, *lengths[1:]]
    placed = [0] * len(counts)
    axes: list[int] = []
    for _ in range(sum(counts)):
        left = [axis for axis, count in enumerate(counts) if placed[axis] < count]
        others = [axis for axis in left if axes[-1:] != [axis]] or left
        best = min(others, key=lambda axis: (placed[axis] / counts[axis], axis))
        axes.append(best)
        placed[best] += 1
    return (*axes, 0)


def interleaved(lengths: Sequence[int]) -> tuple[int, ...]:
    """The axis of each pair where the axes take turns, and time has those that are left."""
    axes = [0] * sum(lengths)
    for axis in (1, 2):
        for pair in range(axis, min(3 * lengths[axis], len(axes)), 3):
            axes[pair] = axis
    return tuple(axes)

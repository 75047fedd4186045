"""The state of models that take images and video: the encoder cache, and per row what its prompt's
placeholders stand for.

The core keeps the books (core/encoder_cache.py): a step's payload says which inputs go and which
come. One that comes waits as pixels on the host until a prompt's chunk first reaches its tokens;
then it is encoded, and its rows lie in an arena of the device. Steps that reach placeholders
(`host_until`) are run by themselves, or recorded with places for what the host says of each token
(media_places.py); in all others each row's positions are moved by one number, on the device, so
that they are recorded as those of text are.

C tokens of the arena, W its width, M rows of the runner, T query tokens of the step, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from headrace.back.attention.mutual import with_mutual
from headrace.back.attention.plan import Batch, EncodedTokens
from headrace.back.kernels.position_shift.op import (
    ADD_OP,
    SUBTRACT_OP,
    PositionShift,
    PositionShiftProblem,
)
from headrace.back.kernels.upload import to_device
from headrace.back.layers.vision.axes_rope import PromptPositions
from headrace.back.layers.vision.encoder import MediaEncoder
from headrace.back.runner.batch import StepShape
from headrace.back.runner.states.encoder_cache import (
    CACHE_TOKENS,
    EncoderCache,
    FilesFactory,
    rows_beside,
)
from headrace.back.runner.states.media_places import MediaPlaces
from headrace.back.runner.states.state import ModelState
from headrace.base.wire.media import MEDIA_HOOK, MediaPayload, MediaSpan
from headrace.base.wire.step import RowStart


@dataclass(frozen=True, slots=True)
class _RowMedia:
    """What a row's prompt has beside text; its positions, where these are not its places; the spans
    whose tokens see each other; the places of marks, and which they are."""

    spans: tuple[MediaSpan, ...]
    positions: PromptPositions | None
    mutual: tuple[tuple[int, int], ...] = ()
    marks: tuple[tuple[int, int], ...] = ()


class Media:
    """The ModelState of a model with an encoder, around the one its decoder has by itself."""

    def __init__(
        self,
        base: ModelState,
        encoder: MediaEncoder,
        *,
        max_rows: int,
        device: torch.device,
        files: FilesFactory | None = None,
    ) -> None:
        self.in_graphs = base.in_graphs
        self.repeatable = base.repeatable
        self.pools_whole = base.pools_whole
        self.media_tokens = CACHE_TOKENS
        self.media_width = encoder.width * (1 + encoder.layers)
        self.host_until: np.ndarray | None = np.zeros(max_rows + 1, np.int64)
        stored = None if files is None else files(self.media_width, encoder.dtype)
        self.cache = EncoderCache(encoder, device, stored)
        self._base, self._encoder, self._device = base, encoder, device
        self._rows: dict[int, _RowMedia] = {}
        self._mutual = {form.kind: form.mutual for form in encoder.forms}
        self._adds = any(form.adds for form in encoder.forms)
        packings = [form.packing for form in encoder.forms if form.packing is not None]
        ids = next((packing.marks for packing in packings if packing.marks), ())
        self._marks = {token: index for index, token in enumerate(ids)}
        self._whole_prompts = "prompt" in self._mutual.values()
        self._delta_M = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._places: MediaPlaces | None = None
        self._media_rows: dict[str, int] | None = None
        self._shift = self._shift_back = _leave
        if encoder.rope is not None:
            problem = PositionShiftProblem(device=device.type)
            self._shift = ADD_OP.choose(problem).bind()
            self._shift_back = SUBTRACT_OP.choose(problem).bind()

    @property
    def media_rows(self) -> dict[str, int]:
        """See ModelState; found out when it is first asked for, behind the warm-up."""
        if self._media_rows is None:
            self._media_rows = rows_beside(self._encoder, self._device)
        return self._media_rows

    def take(self, payloads: Mapping[str, bytes]) -> None:
        """See ModelState."""
        payload = payloads.get(MEDIA_HOOK)
        if payload is not None:
            self.cache.take(msgspec.msgpack.decode(payload, type=MediaPayload))
        self._base.take(payloads)

    def forget_content(self) -> None:
        """See ModelState: the core says which inputs go."""
        if self.cache.files is not None:
            self.cache.files.end()
        self._base.forget_content()

    def end(self, rows: np.ndarray) -> None:
        """See ModelState."""
        self._forget(rows)
        self._base.end(rows)

    def _forget(self, rows: np.ndarray) -> None:
        assert self.host_until is not None
        self.host_until[rows] = 0
        for row in rows.tolist():
            if self._rows.pop(row, None) is not None:
                self._delta_M[row] = 0

    def start(self, start: RowStart) -> None:
        """See ModelState. Another core may have left the row without its end."""
        self._base.start(start)
        self._forget(np.asarray([start.row]))
        if not start.media and not self._whole_prompts:
            return
        assert self.host_until is not None
        until = start.num_prompt if self._whole_prompts else start.media[-1].end
        marks = _marks_of(start, self._marks)
        until = max(until, marks[-1][0] + 1 if marks else 0)
        positions = None
        if self._encoder.rope is not None:
            positions = self._encoder.rope.positions(start.media, start.num_prompt)
            marks_end = start.media[-1].end + self._encoder.rope.marks_behind if start.media else 0
            until = max(until, _plain_from(positions), marks_end)
            self._delta_M[start.row] = positions.delta
        self.host_until[start.row] = until
        self._rows[start.row] = _RowMedia(start.media, positions, self._spans(start), marks)

    def _spans(self, start: RowStart) -> tuple[tuple[int, int], ...]:
        """The spans of the prompt whose tokens see each other."""
        if self._whole_prompts:
            return ((0, start.num_prompt),)
        return tuple((one.offset, one.end) for one in start.media if self._mutual[one.kind])

    def recorded_media(self, max_tokens: int) -> MediaPlaces | None:
        """See ModelState: not where tokens see those behind them, or marks have learned rows."""
        encoder = self._encoder
        apart = bool(self._marks) or any(self._mutual.values())
        if apart or (encoder.rope is not None and encoder.rope.marks_behind):
            return None
        self._places = MediaPlaces(
            self.cache.arena_CW,
            encoder.rope,
            self._tokens,
            width=encoder.width,
            adds=self._adds,
            max_tokens=max_tokens,
        )
        return self._places

    def _tokens(self, shape: StepShape) -> tuple[np.ndarray, np.ndarray | None]:
        """What a step's tokens are, for MediaPlaces; their inputs are encoded."""
        slot_T = np.full(len(shape.position_T), CACHE_TOKENS, np.int64)
        wanted, _, _ = self._wanted(shape, self._reached(shape))
        self.cache.encode([span.key for span, *_ in wanted])
        for span, low, high, at in wanted:
            seen, slots = self.cache.slots(span, low, high)
            slot_T[at + seen] = slots
        return slot_T, None if self._encoder.rope is None else self._positions(shape)

    def prepare(self, batch: Batch, shape: StepShape) -> Batch:
        """The batch with what the encoder gives in place of placeholders."""
        batch = self._base.prepare(batch, shape)
        reached = self._reached(shape)
        if not reached:
            return batch
        encoded = self._encoded(shape, reached)
        batch = self._with_mutual(batch, shape)
        batch = replace(batch, encoded_behind=lambda: self._encoded(shape, reached, ahead=1))
        if self._encoder.rope is None:
            return replace(batch, encoded=encoded)
        table_TR = self._encoder.rope.table(self._positions(shape))
        place_T = torch.arange(table_TR.shape[0], device=table_TR.device)
        if self._encoder.rope.marks_behind:
            batch = replace(batch, media_T=self._up_to_media(shape, reached))
        return replace(batch, encoded=encoded, rope_table_TR=table_TR, positions_T=place_T)

    def _up_to_media(self, shape: StepShape, reached: list[int]) -> torch.Tensor:
        """bool [T]: tokens before their row's `host_until`."""
        assert self.host_until is not None
        before_T = np.zeros(len(shape.position_T), bool)
        for index in reached:
            own = slice(*shape.query_start[index : index + 2].tolist())
            before_T[own] = shape.position_T[own] < self.host_until[shape.rows[index]]
        return to_device(before_T, self._device)

    def _with_mutual(self, batch: Batch, shape: StepShape) -> Batch:
        """The batch with plans in which tokens of spans see each other, if there are any."""
        if not any(self._mutual.values()):
            return batch
        rows = (self._rows.get(row) for row in shape.rows.tolist())
        spans = [() if row is None else row.mutual for row in rows]
        return replace(batch, plans=tuple(with_mutual(plan, spans) for plan in batch.plans))

    def _reached(self, shape: StepShape) -> list[int]:
        """The rows of the step, by index, with tokens before `host_until`."""
        assert self.host_until is not None
        first_R = shape.position_T[shape.query_start[:-1]]
        return np.flatnonzero(first_R < self.host_until[shape.rows]).tolist()

    def _wanted(
        self, shape: StepShape, reached: list[int], ahead: int = 0
    ) -> tuple[list[tuple[MediaSpan, int, int, int]], list[tuple[int, int]], bytes]:
        """The parts of inputs that the step's placeholders stand for: first and last token, and
        where the first one is in the step; the marks it reaches, each with its place; and the key
        of an input with marks. `ahead`: of the tokens so many places behind the step's."""
        wanted: list[tuple[MediaSpan, int, int, int]] = []
        marked: list[tuple[int, int]] = []
        key = b""
        for index in reached:
            begin, stop = shape.query_start[index : index + 2].tolist()
            first = int(shape.position_T[begin]) + ahead
            row = self._rows[int(shape.rows[index])]
            for place, mark in row.marks:
                if first <= place < first + stop - begin:
                    marked.append((begin + place - first, mark))
                    key = row.spans[0].key
            for span in row.spans:
                low, high = max(span.offset, first), min(span.end, first + stop - begin)
                if low < high:
                    place = begin + low - first
                    wanted.append((span, low - span.offset, high - span.offset, place))
        return wanted, marked, key

    def _encoded(
        self, shape: StepShape, reached: list[int], ahead: int = 0
    ) -> EncodedTokens | None:
        """The rows of the arena that the step's placeholders stand for; `ahead`: see _wanted."""
        wanted, marked, key = self._wanted(shape, reached, ahead)
        if not wanted and not marked:
            return None
        self.cache.encode([span.key for span, *_ in wanted])
        places = [self.cache.slots(span, low, high) for span, low, high, _ in wanted]
        none = [np.empty(0, np.int64)]
        slot_M = np.concatenate([slots for _, slots in places] or none)
        at_M = np.concatenate(
            [at + seen for (*_, at), (seen, _) in zip(wanted, places, strict=True)] or none
        )
        rows_MW = self.cache.rows(slot_M)
        if marked:
            at_K, mark_K = np.array(marked, np.int64).T
            at_M = np.concatenate((at_M, at_K))
            rows_MW = torch.cat((rows_MW, self.cache.marks(mark_K, key)))
        parts = rows_MW.split(self._encoder.width, dim=1)
        return EncodedTokens(
            at_M=to_device(at_M, self._device),
            rows_ME=parts[0],
            layers=tuple(parts[1:]),
            adds=self._adds,
        )

    def _positions(self, shape: StepShape) -> np.ndarray:
        """int64 [3, T]: the positions of every token of the step, in each axis of the rope."""
        assert self._encoder.rope is not None
        position_3T = np.tile(shape.position_T, (self._encoder.rope.axes, 1))
        for index, row in enumerate(shape.rows.tolist()):
            media = self._rows.get(row)
            if media is None or media.positions is None:
                continue
            begin, stop = shape.query_start[index : index + 2].tolist()
            position_3T[:, begin:stop] = media.positions.of(shape.position_T[begin:stop])
        return position_3T

    def before(self, batch: Batch) -> None:
        """See ModelState."""
        if batch.rope_table_TR is None:
            self._move(self._shift, batch)
        elif self._places is not None:
            self._places.turn(batch)
        self._base.before(batch)

    def after(self, batch: Batch, hidden_TE: torch.Tensor) -> None:
        """See ModelState. The positions of a recorded step are read behind it too."""
        self._base.after(batch, hidden_TE)
        if batch.rope_table_TR is None:
            self._move(self._shift_back, batch)

    def verifying(self, batch: Batch) -> Batch:
        """See ModelState."""
        return self._base.verifying(batch)

    def accept(self, batch: Batch, length_M: torch.Tensor) -> None:
        """See ModelState."""
        self._base.accept(batch, length_M)

    def _move(self, shift: PositionShift, batch: Batch) -> None:
        if self._encoder.rope is None:  # positions are places
            return
        assert batch.row_R is not None
        shift(batch.row_R, batch.plans[0].query_start_R1, self._delta_M, batch.positions_T)


def _marks_of(start: RowStart, marks: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """The places of marks in a prompt, and which they are."""
    if not marks:
        return ()
    prompt = start.tokens[: start.num_prompt]
    places = np.flatnonzero(np.isin(prompt, list(marks)))
    return tuple((int(place), marks[int(prompt[place])]) for place in places)


def _leave(*arguments: torch.Tensor) -> None:
    """Positions are places: nothing moves."""


def _plain_from(positions: PromptPositions) -> int:
    """The first place from which on all positions are places moved by `delta`."""
    place_P = np.arange(positions.position_3P.shape[1]) + positions.delta
    moved = (positions.position_3P != place_P).any(axis=0)
    return int(np.flatnonzero(moved)[-1]) + 1 if moved.any() else 0

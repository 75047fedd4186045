"""Placeholders: a token for each medium in the prompt becomes as many as its inputs have.

A prompt comes either with one placeholder for each medium, as chat templates write it, or with all
of them already; which of both follows from their number. So a prompt as text and as token ids gives
the same ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from headrace.base.config.media import MediaSpec
from headrace.base.errors import ContextTooLong, InvalidRequest
from headrace.base.wire.media import MAX_REQUEST_BYTES, MediaInput
from headrace.front.media.processing import Layout

EncodeText = Callable[[str], list[int]]
MOST_NEWLINES = 8
"""Of one token, as far as they are joined."""


class PreparedMedium(msgspec.Struct, frozen=True, kw_only=True):
    """A medium, processed: `kind` (image, video, audio) is whose placeholder stands for it;
    `inputs` have no offset yet, `layout` as in ProcessedMedia."""

    kind: str
    inputs: tuple[MediaInput, ...]
    layout: Layout
    row_break: str = ""
    row: tuple[int, int] = (0, 0)
    merge: int = 1

    @property
    def num_placeholders(self) -> int:
        """Placeholders of all its inputs; what breaks their rows is text."""
        return sum(self.rows_of(each) for each in self.inputs)

    @property
    def num_bytes(self) -> int:
        """Of the rows of all its inputs."""
        return sum(len(each.rows) for each in self.inputs)

    def rows_of(self, one: MediaInput) -> int:
        """Placeholders of an input."""
        if not self.row_break:
            return one.num_tokens
        row, breaks = self.row
        if row:
            whole, rest = divmod(one.num_tokens + breaks, row + breaks)
            return whole * row + max(0, rest - breaks)
        t, h, w = one.grid
        return t * h * w // self.merge**2

    def tokens_of(self, one: MediaInput, token: int, encode: EncodeText) -> list[int]:
        """What stands for an input: rows of placeholders, with the break between them."""
        count = self.rows_of(one)
        if not self.row_break:
            return [token] * count
        width = self.row[0] or one.grid[2] // self.merge
        tokens = [token] * min(width, count)
        for begin in range(width, count, width):
            tokens += [*encode(self.row_break), *[token] * min(width, count - begin)]
        return tokens


class MediaBudget:
    """The tokens, and the bytes of rows, that the media of one prompt may have together."""

    def __init__(self, most: int | None) -> None:
        self._most, self._taken, self._bytes = most, 0, 0

    def take(self, media: Sequence[PreparedMedium], field: str) -> None:
        """Of one more part; InvalidRequest or ContextTooLong, with the field, beyond a bound."""
        self._taken += sum(each.num_placeholders for each in media)
        self._bytes += sum(each.num_bytes for each in media)
        if self._bytes > MAX_REQUEST_BYTES:
            raise InvalidRequest(
                f"{field}: the media of this prompt take {self._bytes} bytes once they are decoded; at most "
                f"{MAX_REQUEST_BYTES} are allowed: send fewer or smaller ones",
                field=field,
            )
        if self._most is not None and self._taken > self._most:
            raise ContextTooLong(
                f"prompt is too long: its media alone have {self._taken} tokens or more > "
                f"{self._most} maximum",
                field=field,
            )


def expanded(
    ids: list[int],
    media: Sequence[PreparedMedium],
    spec: MediaSpec,
    encode: EncodeText,
    *,
    field: str,
) -> tuple[list[int], tuple[MediaInput, ...]]:
    """The prompt with every placeholder, and the inputs at their offsets; InvalidRequest where the
    numbers do not fit."""
    tokens = spec.tokens
    waiting = {kind: [each for each in media if each.kind == kind] for kind in tokens}
    ids = _with_placeholders(ids, spec, len(waiting["image"]))
    if spec.video_soft is not None and spec.video_token not in ids:  # all is expanded
        waiting = {kind: [] for kind in tokens} | {"image": list(media)}
    present = {
        token: _is_expanded(kind, ids.count(token), waiting[kind], field)
        for kind, token in tokens.items()
        if token is not None and waiting[kind]
    }
    kinds = {token: kind for kind, token in tokens.items() if token in present and waiting[kind]}
    total = len(waiting["image"])
    whole: list[int] = []
    inputs: list[MediaInput] = []
    edges: list[int] = []
    position = 0
    while position < len(ids):
        token = ids[position]
        kind = kinds.get(token)
        if kind is None or not waiting[kind]:
            whole.append(token)
            position += 1
            continue
        medium = waiting[kind].pop(0)
        if present[token] or _is_written(medium, whole, encode):
            position = _taken(ids, position, medium, whole, inputs, encode, field)
            continue
        edges.append(len(whole))
        if spec.numbered is not None and kind == "image":
            number = total - len(waiting[kind]) - 1
            whole += encode(f"{spec.numbered[0]}{number}{spec.numbered[1]}")
        leads = isinstance(medium.layout[0], str)
        if spec.shares_ends and leads and edges[-2:-1] == [len(whole)]:
            medium = msgspec.structs.replace(medium, layout=medium.layout[1:])
        soft = spec.video_soft if kind == "video" else None
        _write(medium, token if soft is None else soft, encode, whole, inputs, tokens)
        edges.append(len(whole))
        position += 1
    if spec.joins_newlines and edges:
        whole, inputs = _with_joined_newlines(whole, inputs, edges, encode)
    return whole, tuple(inputs)


def _with_placeholders(ids: list[int], spec: MediaSpec, num_images: int) -> list[int]:
    """With a placeholder for each mark, where marks are what stands for images, or before all else
    where nothing does."""
    mark, token = spec.image_mark, spec.image_token
    if spec.alone and token is not None and ids[:1] != [token]:  # whatever the text has in it
        return [*[token] * num_images, *ids]
    if spec.ahead is not None and token is not None and not {mark, token} & set(ids):
        begin = len(spec.ahead) if tuple(ids[: len(spec.ahead)]) == spec.ahead else 0
        return [*spec.ahead, *[token] * num_images, *ids[begin:]]
    if mark is None or token is None or not num_images:
        return ids
    if ids.count(mark) != num_images or token in ids:
        return ids
    return [token if each == mark else each for each in ids]


def _with_joined_newlines(
    whole: list[int], inputs: list[MediaInput], edges: list[int], encode: EncodeText
) -> tuple[list[int], list[MediaInput]]:
    """Newlines that meet where an image was written become the tokens that their text has."""
    runs = {encode("\n" * count)[0]: count for count in range(MOST_NEWLINES, 0, -1)}
    offsets = [one.offset for one in inputs]
    for edge in reversed(edges):
        first = last = edge
        while first and whole[first - 1] in runs:
            first -= 1
        while last < len(whole) and whole[last] in runs:
            last += 1
        if first == edge or last == edge:
            continue
        joined = encode("\n" * sum(runs[token] for token in whole[first:last]))
        whole = [*whole[:first], *joined, *whole[last:]]
        change = len(joined) - (last - first)
        offsets = [at + change if at >= last else at for at in offsets]
    moved = zip(inputs, offsets, strict=True)
    return whole, [msgspec.structs.replace(one, offset=at) for one, at in moved]


def _is_expanded(kind: str, count: int, media: list[PreparedMedium], field: str) -> bool:
    """Whether all placeholders of this kind are there, or one for each medium."""
    whole = sum(each.num_placeholders for each in media)
    if count not in (len(media), whole):
        raise InvalidRequest(
            f"{field}: {count} placeholders of {kind} stand in the prompt; allowed are "
            f"{len(media)} (one for each {kind}) or {whole} (one for each of its tokens)",
            field=field,
        )
    return count != len(media)


def _is_written(medium: PreparedMedium, whole: list[int], encode: EncodeText) -> bool:
    """Where one placeholder is all there is: whether the text before it is there too."""
    if medium.num_placeholders != 1 or not isinstance(medium.layout[0], str):
        return False
    lead = encode(medium.layout[0])
    return whole[len(whole) - len(lead) :] == lead


def _taken(
    ids: list[int],
    position: int,
    medium: PreparedMedium,
    whole: list[int],
    inputs: list[MediaInput],
    encode: EncodeText,
    field: str,
) -> int:
    """Takes over placeholders that are there; the position behind the last."""
    token = ids[position]
    if len(medium.inputs) == 1 and any(isinstance(piece, tuple) for piece in medium.layout):
        first = len(whole)
        _write(medium, token, encode, whole, inputs, {medium.kind: token})
        if ids[position : position + len(whole) - first] != whole[first:]:
            raise InvalidRequest(
                f"{field}: its placeholders of {medium.kind} and the text between them are not "
                "those of the input; one placeholder stands for all",
                field=field,
            )
        return position + len(whole) - first
    for each in medium.inputs:
        while position < len(ids) and ids[position] != token:
            whole.append(ids[position])
            position += 1
        tokens = medium.tokens_of(each, token, encode)
        run = ids[position : position + len(tokens)]
        if run != tokens:
            raise InvalidRequest(
                f"{field}: {run.count(token)} placeholders in a row; {tokens.count(token)} of "
                f"{medium.kind} are needed there",
                field=field,
            )
        inputs.append(msgspec.structs.replace(each, offset=len(whole)))
        whole += run
        position += len(tokens)
    return position


def _write(
    medium: PreparedMedium,
    token: int,
    encode: EncodeText,
    whole: list[int],
    inputs: list[MediaInput],
    tokens: Mapping[str, int | None],
) -> None:
    for piece in medium.layout:
        if isinstance(piece, str):
            whole += encode(piece)
            continue
        if isinstance(piece, tuple):
            inputs.append(_part(medium.inputs[piece[0]], len(whole), *piece[1:]))
            own = tokens[inputs[-1].kind]
            assert own is not None, "the model takes this kind"
            whole += [own] * piece[2]
            continue
        each = medium.inputs[piece]
        inputs.append(msgspec.structs.replace(each, offset=len(whole)))
        whole += medium.tokens_of(each, token, encode)


def _part(whole: MediaInput, offset: int, first: int, count: int) -> MediaInput:
    """Some of an input's tokens; its content stands with the first."""
    rows = b"" if first else whole.rows
    return msgspec.structs.replace(whole, offset=offset, first=first, num_tokens=count, rows=rows)

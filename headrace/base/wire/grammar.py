"""What the text of an answer must look like, in one form for every dialect and every backend.

A `Node` is a small tree: literals, JSON under a schema, regular expressions and whole grammars as
leaves; sequences, alternatives, repetitions and triggered tags above them. The front makes it
(front/text/structure), the core's grammar hook compiles it (core/grammar). `Constraint` is the
hook's part of a request.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

GRAMMAR_HOOK = "grammar"
"""Key of a `Constraint` in `EngineRequest.hook_payloads`, and of the masks in a step's deferred
inputs."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the text of an answer must be; exactly one of the first six.

    `json` is a JSON schema (an object or its text), `json_object` any JSON object, `regex` a
    pattern for the whole text (Rust's syntax), `choice` a list of texts, `grammar` Lark or GBNF,
    `structural_tag` free text with tagged parts. The others are about JSON: no white space but one
    space after `,` and `:`; a pattern for white space; objects have no properties but those named
    unless their schema says so.
    """

    json: dict[str, Any] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None


class Literal(msgspec.Struct, frozen=True, tag="literal"):
    """Exactly this text."""

    text: str


class Token(msgspec.Struct, frozen=True, tag="token"):
    """The special token of this name, not its letters; a vocabulary that has no such token spells
    it."""

    text: str


class Json(msgspec.Struct, frozen=True, tag="json"):
    """JSON that a schema (JSON text) allows. `compact`: no white space but one space after `,` and
    `:`.

    `whitespace`: a regular expression for the white space between tokens; None: a bounded stretch
    of any.
    """

    schema: str
    compact: bool = False
    whitespace: str | None = None


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """Text that the whole pattern matches (Rust's syntax: no look-around, no back-references)."""

    pattern: str


class Lark(msgspec.Struct, frozen=True, tag="lark"):
    """Text of a grammar in the Lark dialect, from its rule `start`."""

    text: str


class Ebnf(msgspec.Struct, frozen=True, tag="ebnf"):
    """Text of a grammar in GBNF, the EBNF dialect with `root ::=`."""

    text: str


class Until(msgspec.Struct, frozen=True, tag="until"):
    """Any text up to the first `stop`, and `stop` itself."""

    stop: str


class Sequence(msgspec.Struct, frozen=True, tag="sequence"):
    """One after the other."""

    items: tuple[Node, ...]


class Either(msgspec.Struct, frozen=True, tag="either"):
    """One of them."""

    items: tuple[Node, ...]


class Repeat(msgspec.Struct, frozen=True, tag="repeat"):
    """`item` at least once, at most `most` times (None: any number), with `separator` between."""

    item: Node
    most: int | None = None
    separator: str = ""


class Tag(msgspec.Struct, frozen=True):
    """`begin` (it starts with a trigger), then `content`, then `end`."""

    begin: str
    content: Node
    end: str


class Triggered(msgspec.Struct, frozen=True, tag="triggered"):
    """Free text in which each trigger must go on as one of the tags.

    `at_least_one`: the text is tags alone, one or more. `stop_after_first`: it ends with the first
    tag.
    """

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    at_least_one: bool = False
    stop_after_first: bool = False


Node: TypeAlias = (
    Literal | Token | Json | Regex | Lark | Ebnf | Until | Sequence | Either | Repeat | Triggered
)


class ReasoningRule(msgspec.Struct, frozen=True, kw_only=True):
    """The reasoning before the answer: what opens and closes it, and whether the prompt has opened
    it already.

    The grammar holds from behind `close` on. `may_open`: the answer may begin with `open`. After
    `budget` tokens of reasoning `close` is all that may follow (None: no bound). `until`: what ends
    the reasoning too, as a call that begins within it, where only its length is bounded.
    """

    open: str
    close: str
    inside: bool
    may_open: bool
    budget: int | None = None
    until: tuple[str, ...] = ()


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the grammar hook is told about a request; at least one of both. `field`: what errors
    name."""

    grammar: Node | None = None
    reasoning: ReasoningRule | None = None
    field: str = "structured_outputs"


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """What each token id adds to a text. Special tokens have their name here, and no text in an
    answer.

    `width` is that of the logits: ids from len(pieces) on have no token and are never allowed.
    """

    pieces: list[bytes]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    width: int


_CONSTRAINT_ENCODER = msgspec.msgpack.Encoder()
_CONSTRAINT_DECODER = msgspec.msgpack.Decoder(Constraint)


def pack(constraint: Constraint) -> msgspec.Raw:
    """The constraint as it stands in `EngineRequest.hook_payloads`."""
    return msgspec.Raw(_CONSTRAINT_ENCODER.encode(constraint))


def unpack(raw: msgspec.Raw) -> Constraint:
    """The constraint of a request; DecodeError or ValidationError if it is none."""
    return _CONSTRAINT_DECODER.decode(raw)


def key_of(node: Node) -> bytes:
    """The bytes that name a node: equal for equal nodes."""
    return _CONSTRAINT_ENCODER.encode(node)


Int32 = npt.NDArray[np.int32]
NOTHING = memoryview(b"")
"""A deferred payload without masks."""


class StepMasks(NamedTuple):
    """The masks of a step: K of them int32 [K, words], each of the token `offsets` [K] places
    behind the first that `rows` [K] sample; beyond 0 only behind drafts."""

    rows: Int32
    masks: Int32
    offsets: Int32

    def of_newest(self) -> StepMasks:
        """Those of steps without drafts."""
        first = self.offsets == 0
        if first.all():
            return self
        return StepMasks(self.rows[first], self.masks[first], self.offsets[first])


class MaskBuffer:
    """The payload of a step's masks, filled in place and handed on without a copy: K, words, masks
    [K, words], rows [K], offsets [K], little-endian int32.

    The same memory is used at every step; what was handed out is good until the next `begin`. So
    masks of a step must not be begun before the step that had the last ones has landed.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        self._data = np.zeros(2, "<i4")
        self._keys: list[tuple[Int32, int]] = []
        self._count = 0

    def begin(self, rows: Int32) -> Int32:
        """Room for masks of these rows [K]: [K, words], with whatever was in it."""
        self._keys.clear()
        self._count = 0
        return self.add(rows, offset=0)

    def add(self, rows: Int32, *, offset: int) -> Int32:
        """Room for more, of tokens so many places behind; the room for the others may move."""
        first, self._count = self._count, self._count + len(rows)
        self._keys.append((rows, offset))
        size = 2 + self._count * (2 + self._words)
        if size > self._data.size:
            grown = np.zeros(max(size, 2 * self._data.size), "<i4")
            grown[: self._data.size] = self._data
            self._data = grown
        at = 2 + first * self._words
        return self._data[at : at + len(rows) * self._words].reshape(len(rows), self._words)

    def payload(self) -> memoryview:
        """What was begun last, as bytes."""
        count, end = self._count, 2 + self._count * self._words
        self._data[0], self._data[1] = count, self._words
        np.concatenate([rows for rows, _ in self._keys], out=self._data[end : end + count])
        offsets = [np.full(len(rows), offset, np.int32) for rows, offset in self._keys]
        np.concatenate(offsets, out=self._data[end + count : end + 2 * count])
        return self._data[: end + 2 * count].data.cast("B")


def pack_masks(rows: Int32, masks: Int32) -> memoryview:
    """The payload of masks [K, words] of the newest tokens of rows [K], in memory of its own."""
    if not len(rows):
        return NOTHING
    buffer = MaskBuffer(masks.shape[1])
    buffer.begin(rows)[:] = masks
    return buffer.payload()


def unpack_masks(payload: memoryview) -> StepMasks:
    """The masks of a payload."""
    if not payload:
        none = np.zeros(0, np.int32)
        return StepMasks(none, np.zeros((0, 0), np.int32), none)
    words = np.frombuffer(payload, "<i4")
    count, width = int(words[0]), int(words[1])
    end = 2 + count * width
    masks = words[2:end].reshape(count, width)
    return StepMasks(words[end : end + count], masks, words[end + count : end + 2 * count])

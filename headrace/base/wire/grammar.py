"""What the text of an answer must look like, in one form for every dialect and every backend.

A `Node` is a small tree: literals, JSON under a schema, regular expressions and whole grammars as
leaves; sequences, alternatives, repetitions and triggered tags above them. The front makes it
(front/text/structure), the core's grammar hook compiles it (core/grammar). `Constraint` is the
hook's part of a request.
"""

from __future__ import annotations

from typing import Any, TypeAlias

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


class MaskBuffer:
    """The payload of a step's masks, filled in place and handed on without a copy: K, words, rows
    [K], masks [K, words], little-endian int32.

    The same memory is used at every step; what was handed out is good until the next `begin`. So
    masks of a step must not be begun before the step that had the last ones has landed.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        self._data = np.zeros(0, "<i4")

    def begin(self, rows: Int32) -> Int32:
        """Room for masks of these rows [K]: [K, words], with whatever was in it."""
        count = len(rows)
        size = 2 + count * (1 + self._words)
        if size > self._data.size:
            self._data = np.zeros(max(size, 2 * self._data.size), "<i4")
        self._data[0], self._data[1] = count, self._words
        self._data[2 : 2 + count] = rows
        return self._data[2 + count : size].reshape(count, self._words)

    def payload(self) -> memoryview:
        """What was begun last, as bytes."""
        count = int(self._data[0])
        return self._data[: 2 + count * (1 + self._words)].data.cast("B")


def pack_masks(rows: Int32, masks: Int32) -> memoryview:
    """The payload of masks [K, words] of the rows [K], in memory of its own."""
    if not len(rows):
        return NOTHING
    buffer = MaskBuffer(masks.shape[1])
    buffer.begin(rows)[:] = masks
    return buffer.payload()


def unpack_masks(payload: memoryview) -> tuple[Int32, Int32]:
    """Rows [K] and masks [K, words] of a payload."""
    if not payload:
        return np.zeros(0, np.int32), np.zeros((0, 0), np.int32)
    words = np.frombuffer(payload, "<i4")
    count, width = int(words[0]), int(words[1])
    return words[2 : 2 + count], words[2 + count :].reshape(count, width)

"""A tokenizer as the rest of the package sees it: text to ids and back, and control tokens kept
apart from text that spells them.

The formats live in files of their own; `tokenizer_files.py` chooses one. There are four ways to
encode: `encode` for a raw prompt, in which control tokens are recognised; `encode_plain` for text
in which nothing is a control token; `encode_guarded` for the output of a chat template, in which
only the template's own control tokens are, and `encode_written` for what a grammar makes the model
write. A tokenizer is never changed after it was loaded, so that threads may share it.

A template puts the texts of users between control tokens that it writes itself, and both come out
as one string. So that they can be told apart afterwards, three of Unicode's noncharacters (which no
text may hold) are used:

    BREAK   put into every text that goes into the template, wherever a control token could begin or
            end
    OPEN, CLOSE   around the number of a control token: its spelling, and the only one, that
                  `encode_guarded` knows
"""

from __future__ import annotations

import codecs
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from headrace.base.errors import ContextTooLong, InvalidRequest
from headrace.front.text.patterns import any_character, any_of
from headrace.front.text.threads import TEXT_THREADS

BREAK, OPEN, CLOSE, MARK, VECTORS = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
_RESERVED = str.maketrans(dict.fromkeys((BREAK, OPEN, CLOSE, MARK, VECTORS), "\ufffd"))
MAX_TEXT_CHARS = 4 << 20
"""The longest text that is tokenized although the model could not hold it: seconds of work."""
MAX_DEPTH = 64
_UTF8 = codecs.getincrementaldecoder("utf-8")


class TokenizerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside a vocabulary (tokenizer_config.json, or the metadata of a GGUF file).

    `special_tokens` are the variables a chat template sees (`bos_token`, `eos_token`, ...).
    `add_bos` and `add_eos` override what the vocabulary's own post-processor does; None leaves it
    alone. `tokenizer_class`: as that file names it.
    """

    special_tokens: dict[str, str] = {}
    chat_template: str | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    tokenizer_class: str | None = None


class Pieces(dict[int, str | bytes]):
    """What each token adds to a text, filled on first use: text if it is whole characters, else its
    bytes."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens

    def __missing__(self, token_id: int) -> str | bytes:
        piece: str | bytes
        if self._skip and token_id in self._tokenizer.special_ids:
            piece = ""
        else:
            piece = self._tokenizer.token_bytes(token_id)
            with contextlib.suppress(UnicodeDecodeError):
                piece = piece.decode()
        self[token_id] = piece
        return piece


class Tokenizer(ABC):
    """Text to token ids and back.

    `num_ids` is one more than the greatest id. `special_ids` are dropped from answers by default.
    `longest_token`: the most characters one token stands for, which bounds a text that can fit.
    `drop_first_space`: a text loses one leading space (SentencePiece vocabularies).
    """

    num_ids: int
    special_ids: frozenset[int]
    longest_token: int
    drop_first_space: bool = False
    facts: TokenizerFacts

    def __init__(self, facts: TokenizerFacts) -> None:
        self.facts = facts
        self.pieces = Pieces(self, skip_special_tokens=False)
        self.pieces_without_special = Pieces(self, skip_special_tokens=True)

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Encodes with control tokens recognised, and adds the vocabulary's own at the ends."""

    @abstractmethod
    def _encode_bare(self, text: str) -> list[int]:
        """Encodes with control tokens recognised and nothing added."""

    @abstractmethod
    def encode_plain(self, text: str) -> list[int]:
        """Encodes ordinary text: what spells a control token is text too."""

    @abstractmethod
    def encode_guarded(self, text: str) -> list[int]:
        """Encodes the output of a template whose input went through `Guard.protect`."""

    def encode_written(self, text: str) -> list[int]:
        """Encodes text as a model writes it: only markup (<tool_call>) is its own token."""
        return self.encode_guarded(self.guard.protect_special(text))

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text; empty for an id that has none."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """The id of a token as it stands in the vocabulary."""

    @property
    @abstractmethod
    def guard(self) -> Guard:
        """Keeps the text of users apart from control tokens."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """The ids of a raw prompt. With `max_tokens`, what cannot fit is refused at once."""
        if max_tokens is not None:
            self.check_length(text, max_tokens)
        if not add_special_tokens:
            return self._encode_bare(text)
        facts = self.facts
        if facts.add_bos is None and facts.add_eos is None:
            return self._encode(text)
        ids = self._encode_bare(text)
        bos, eos = self.special_id("bos_token"), self.special_id("eos_token")
        if facts.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        if facts.add_eos and eos is not None:
            ids.append(eos)
        return ids

    def with_special(self, ids: list[int]) -> list[int]:
        """Ids of a rendered chat with the special tokens of a raw prompt, none of them doubled."""
        before, after = self.special_around()
        before = [] if ids[: len(before)] == before else before
        after = [] if after and ids[-len(after) :] == after else after
        return [*before, *ids, *after]

    def special_around(self) -> tuple[list[int], list[int]]:
        """The special tokens that stand before and behind a raw prompt."""
        bare, whole = self._encode_bare("x"), self.encode("x")
        at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]

    def encode_pair(
        self, first: str, second: str, *, second_tokens: int | None = None
    ) -> tuple[list[int], int]:
        """The ids of two texts as one prompt, of the second at most `second_tokens`, and where that
        begins for models with token types (0: not told)."""
        rest = self._encode_bare(second)
        return [*self.encode(first), *rest[:second_tokens]], 0

    async def encode_async(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        field: str = "prompt",
    ) -> list[int]:
        """`encode`, in a thread if the text is long, so that other requests go on meanwhile. What
        is refused is named by `field`."""
        self.check_length(text, max_tokens, field=field)
        encode = partial(self.encode, text, add_special_tokens=add_special_tokens)
        try:
            return await TEXT_THREADS.run(len(text), encode)
        except InvalidRequest as error:
            message = error.message.removeprefix(f"{error.field}: ")
            raise InvalidRequest(f"{field}: {message}", field=field) from None

    def check_length(self, text: str, max_tokens: int | None, *, field: str = "prompt") -> None:
        """Refuses a text that has more characters than `max_tokens` tokens can ever stand for, and
        without `max_tokens` (the rest will be cut off) one of more than MAX_TEXT_CHARS."""
        if max_tokens is None and len(text) > MAX_TEXT_CHARS:
            raise InvalidRequest(
                f"{field}: a text of {len(text)} characters given; allowed: {MAX_TEXT_CHARS}",
                field=field,
            )
        if max_tokens is not None and len(text) > max_tokens * self.longest_token:
            raise ContextTooLong(
                f"{field} is too long: {-(-len(text) // self.longest_token)} tokens > {max_tokens} maximum "
                f"(at least: it has {len(text)} characters)",
                field=field,
            )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; ids without a token are refused."""
        self.check_ids(ids)
        pieces = self.pieces_without_special if skip_special_tokens else self.pieces
        text = decode_pieces(list(map(pieces.__getitem__, ids)))
        return text[1:] if self.drop_first_space and text.startswith(" ") else text

    def check_ids(self, ids: Collection[int], *, field: str = "tokens") -> None:
        """Refuses ids that this vocabulary does not have; `field` is where the caller gave them."""
        low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= self.num_ids:
            raise InvalidRequest(
                f"{field}: {low if low < 0 else high} is not a token id "
                f"(0 to {self.num_ids - 1} are)",
                field=field,
            )

    def vocabulary_token(self, token_id: int) -> str:
        """A token as it stands in the vocabulary (Ġword), where that is text."""
        return self.token_text(token_id)

    def token_text(self, token_id: int) -> str:
        """A token as people read it; bytes that are no character become U+FFFD."""
        piece = self.pieces[token_id]
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def special_id(self, name: str) -> int | None:
        """The id of a special token by its role, such as "bos_token"."""
        token = self.facts.special_tokens.get(name)
        return None if token is None else self.token_id(token)


class Detokenizer:
    """Turns the tokens of one answer into text, as they come. Bytes that do not yet make a whole
    character are held back, so that no answer ever holds half of one; the texts joined are the text
    of the whole, however it was cut. The plain case costs one look-up per token (about 0.1 us).

    `pieces` replaces the tokenizer's own table. `continues`: the text follows a prompt, so its
    first space is its own; otherwise the first space of a SentencePiece vocabulary is dropped, as
    `Tokenizer.decode` does.
    """

    __slots__ = ("_decoder", "_drop_space", "_held", "_pieces", "_reserved")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        continues: bool = True,
        pieces: Mapping[int, str | bytes] | None = None,
    ) -> None:
        own = tokenizer.pieces_without_special if skip_special_tokens else tokenizer.pieces
        self._pieces = own if pieces is None else pieces
        # characters that such a table uses as marks must not arise from bytes
        self._reserved = pieces is not None
        self._decoder = _UTF8(errors="replace")
        self._held = False
        self._drop_space = tokenizer.drop_first_space and not continues

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        text = ""
        pieces = self._pieces
        for token_id in ids:
            piece = pieces[token_id]
            text += piece if type(piece) is str and not self._held else self._through(piece)
        return text if not self._drop_space else self._without_space(text)

    def finish(self) -> str:
        """What is left: bytes that never became a character, as U+FFFD."""
        return self._decoder.decode(b"", True)

    def _through(self, piece: str | bytes) -> str:
        text = self._decoder.decode(piece.encode() if isinstance(piece, str) else piece)
        self._held = bool(self._decoder.getstate()[0])
        return neutral(text) if self._reserved and isinstance(piece, bytes) else text

    def _without_space(self, text: str) -> str:
        if not text:
            return text
        self._drop_space = False
        return text.removeprefix(" ")


class Guard:
    """The control tokens of one vocabulary and the text that may not become one. `protect` guards a
    text before rendering; `resolve` turns the control tokens of the rendered text, which are
    unbroken only where the template itself wrote them, into their guarded spelling and drops every
    BREAK.

    `special` are control tokens wherever they come from; `markup` (<think>, <tool_call>) is control
    in what users and tools say, but an assistant's earlier words may hold it.

    Invariant: no control token appears unbroken in what `protect` returned, nor can one arise by
    joining protected texts with each other. Tokens of one character cannot be broken and are not
    guarded.
    """

    def __init__(self, special: Iterable[str], markup: Iterable[str] = ()) -> None:
        special = [token for token in special if len(token) > 1]
        self.tokens = tuple(dict.fromkeys([*special, *(t for t in markup if len(t) > 1)]))
        self.spellings = {token: f"{OPEN}{i}{CLOSE}" for i, token in enumerate(self.tokens)}
        self._joined = "\0".join(self.tokens)
        self._all = _Breaks(self.tokens)
        self._special = _Breaks(special)
        self._any = any_of(self.tokens)
        self._markup = any_of(self.tokens[len(dict.fromkeys(special)) :])

    def protect(self, text: str) -> str:
        """`text` with a BREAK wherever a control token could begin or end."""
        return self._all.put(neutral(text))

    def protect_special(self, text: str) -> str:
        """As `protect`, but markup stays what it is."""
        text = neutral(text)
        if self._markup is None:
            return self._special.put(text)
        between = self._markup.split(text)
        markup = [*self._markup.findall(text), ""]
        return "".join(self._special.put(t) + m for t, m in zip(between, markup, strict=True))

    def protect_name(self, text: str) -> str:
        """As `protect`, for names, which templates may put between the halves of a control token
        ("<|" name "|>")."""
        text = self.protect(text)
        return text[0] + BREAK + text[1:] if len(text) > 1 and text in self._joined else text

    def protect_tree(self, value: Any, field: str, depth: int = 0) -> Any:
        """`value` (JSON) with every text in it protected, keys included; what is none is refused by
        `field`."""
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{field}: nested deeper than {MAX_DEPTH}", field=field)
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, dict):
            return {
                self.protect(str(k)): self.protect_tree(v, field, depth + 1)
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.protect_tree(item, field, depth + 1) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        why = f"{field}: {type(value).__name__} is not a JSON value"
        raise InvalidRequest(why, field=field)

    def resolve(self, rendered: str) -> str:
        """A rendered template with its own control tokens in their guarded spelling, and no
        BREAK."""
        if self._any is not None:
            rendered = self._any.sub(lambda match: self.spellings[match[0]], rendered)
        return rendered.replace(BREAK, "")


def decode_pieces(pieces: Sequence[str | bytes]) -> str:
    """Joins pieces; malformed UTF-8 becomes U+FFFD."""
    try:
        return "".join(pieces)  # type: ignore[arg-type]  # mostly texts, and the error tells
    except TypeError:  # some piece is no whole character
        joined = b"".join(p.encode() if isinstance(p, str) else p for p in pieces)
        return joined.decode(errors="replace")


class _Breaks:
    """Where a text must be broken so that no part of it can be part of one of `tokens`."""

    def __init__(self, tokens: Iterable[str]) -> None:
        tokens = list(tokens)
        self._first = any_character(token[0] for token in tokens)
        self._last = any_character(token[-1] for token in tokens)

    def put(self, text: str) -> str:
        if self._first is None or self._last is None:
            return text
        return self._last.sub(BREAK + r"\g<0>", self._first.sub(r"\g<0>" + BREAK, text))


def neutral(text: str) -> str:
    """`text` without the characters that the guard reserves; they become U+FFFD."""
    return text if text.isascii() else text.translate(_RESERVED)


def unguard(text: str) -> str:
    """`text` without the marks of a guard."""
    return text.replace(BREAK, "").replace(MARK, "")

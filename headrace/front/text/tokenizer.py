"""A tokenizer as the rest of the house sees it: text to ids and back, with the facts that templates
and limits need.

The formats live in files of their own (`tokenizer_json`, `tokenizer_sentencepiece`,
`tokenizer_tiktoken`, `gguf_tokenizer`) and are imported on use. There are four ways to encode:
`encode` for a raw prompt, in which control tokens are recognised; `encode_plain` for text in which
nothing is a control token; `encode_guarded` for the output of a chat template, in which only the
template's own control tokens are (see `guard.py`), and `encode_written` for what a grammar
makes the model write. A tokenizer is never changed after it was loaded, so that threads may share
it.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import CheckpointError, ContextTooLong, InvalidRequest
from headrace.base.registry import Registry
from headrace.front.text.guard import Guard

_THREAD_CHARS = 8192


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


class TokenizerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside a vocabulary (tokenizer_config.json, or the metadata of a GGUF file).

    `special_tokens` are the variables a chat template sees (`bos_token`, `eos_token`, ...).
    `add_bos` and `add_eos` override what the vocabulary's own post-processor does; None leaves it
    alone.
    """

    special_tokens: dict[str, str] = {}
    chat_template: str | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None


class Tokenizer(ABC):
    """Text to token ids and back.

    `num_ids` is one more than the greatest id. `special_ids` are dropped from answers by default.
    `longest_token` is the most characters one token can stand for, which bounds how long a text can
    be and still fit. `drop_first_space`: a text that starts with its first token loses one leading
    space (SentencePiece vocabularies).
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
        """Encodes with control tokens recognised and the vocabulary's own prefix and suffix tokens
        added."""

    @abstractmethod
    def _encode_bare(self, text: str) -> list[int]:
        """Encodes with control tokens recognised and nothing added."""

    @abstractmethod
    def encode_plain(self, text: str) -> list[int]:
        """Encodes ordinary text: what spells a control token is text too."""

    @abstractmethod
    def encode_guarded(self, text: str) -> list[int]:
        """Encodes the output of a template whose input went through `guard.protect`."""

    def encode_written(self, text: str) -> list[int]:
        """Encodes text as a model writes it: markup (<tool_call>) is its own token, a special
        token's name is text."""
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
        """The ids of a raw prompt. With `max_tokens`, what cannot fit is refused before any work
        ."""
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
        """Ids of a rendered chat with the special tokens that a raw prompt gets; one that is there
        is not doubled."""
        bare, whole = self._encode_bare("x"), self.encode("x")
        at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        before, after = whole[:at], whole[at + len(bare) :]
        before = [] if ids[: len(before)] == before else before
        after = [] if after and ids[-len(after) :] == after else after
        return [*before, *ids, *after]

    def encode_pair(
        self, first: str, second: str, *, second_tokens: int | None = None
    ) -> tuple[list[int], int]:
        """The ids of two texts as one prompt, and where the second begins for models with token
        types (0: not told).

        `second_tokens` keeps only so many tokens of the second text.
        """
        rest = self._encode_bare(second)
        return [*self.encode(first), *rest[:second_tokens]], 0

    async def encode_async(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """`encode`, in a thread if the text is long, so that other requests go on meanwhile."""
        if len(text) < _THREAD_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
        return await asyncio.to_thread(
            self.encode, text, add_special_tokens=add_special_tokens, max_tokens=max_tokens
        )

    def check_length(self, text: str, max_tokens: int | None, *, field: str = "prompt") -> None:
        """Refuses a text that has more characters than `max_tokens` tokens can ever stand for."""
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

    def token_text(self, token_id: int) -> str:
        """A token as people read it; bytes that are no character become U+FFFD."""
        piece = self.pieces[token_id]
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def special_id(self, name: str) -> int | None:
        """The id of a special token by its role, such as "bos_token"."""
        token = self.facts.special_tokens.get(name)
        return None if token is None else self.token_id(token)


def decode_pieces(pieces: Sequence[str | bytes]) -> str:
    """Joins pieces; malformed UTF-8 becomes U+FFFD."""
    try:
        return "".join(pieces)  # type: ignore[arg-type]  # mostly texts, and the error tells
    except TypeError:  # some piece is no whole character
        joined = b"".join(p.encode() if isinstance(p, str) else p for p in pieces)
        return joined.decode(errors="replace")


_FORMATS: Registry[Callable[[str], Tokenizer]] = Registry(
    "tokenizer format",
    {
        "gguf": "headrace.front.text.gguf_tokenizer:gguf_tokenizer",
        "json": "headrace.front.text.tokenizer_json:load_json",
        "sentencepiece": "headrace.front.text.tokenizer_sentencepiece:load_sentencepiece",
        "tiktoken": "headrace.front.text.tokenizer_tiktoken:load_tiktoken",
    },
)


def load_tokenizer(path: str, *, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model folder or a GGUF file; a folder without one is refused by the names
    looked for.

    `chat_template` replaces the model's own. The guard has to know it: markup that it writes is
    control markup.
    """
    kind, file = _find(Path(path))
    tokenizer = _FORMATS.load(kind)(str(file))
    if chat_template is not None:
        tokenizer.facts = msgspec.structs.replace(tokenizer.facts, chat_template=chat_template)
    return tokenizer


def _find(place: Path) -> tuple[str, Path]:
    if place.is_file() and place.suffix == ".gguf":
        return "gguf", place
    if not place.is_dir():
        raise CheckpointError(f"tokenizer: {place} is neither a folder nor a GGUF file")
    if (place / "tokenizer.json").is_file():
        return "json", place / "tokenizer.json"
    for file in (place / "tokenizer.model", place / "spiece.model", *place.glob("*.tiktoken")):
        if file.is_file():
            return ("tiktoken" if _is_tiktoken(file) else "sentencepiece"), file
    raise CheckpointError(
        f"tokenizer: {place} holds none of tokenizer.json, tokenizer.model, spiece.model, *.tiktoken"
    )


def _is_tiktoken(path: Path) -> bool:
    """A tiktoken file is lines of base64 and a rank; a SentencePiece model is binary."""
    with path.open("rb") as file:
        head = file.read(64).split(b"\n", 1)[0]
    token, _, rank = head.partition(b" ")
    return bool(token) and rank.strip().isdigit()


def check_vocabulary(tokenizer: Tokenizer, width: int) -> None:
    """CheckpointError if ordinary tokens lie beyond the model's `width` logits: the tokenizer is
    another model's, and every client would be told that its text cannot be. Special tokens there
    are left over in some checkpoints and stay unused."""
    beyond = [i for i in range(width, tokenizer.num_ids) if i not in tokenizer.special_ids]
    if beyond:
        raise CheckpointError(
            f"the tokenizer does not fit the model: it has token ids up to {beyond[-1]}, the model "
            f"(vocab_size) up to {width - 1}; name another with --tokenizer",
            field="tokenizer",
        )


def read_facts(folder: Path) -> TokenizerFacts:
    """Reads tokenizer_config.json, special_tokens_map.json and a chat template file, as far as they
    exist."""
    config = {
        **_read_json(folder / "special_tokens_map.json"),
        **_read_json(folder / "tokenizer_config.json"),
    }
    special = {
        name: text
        for name, value in config.items()
        if name.endswith("_token") and (text := _token_text(value)) is not None
    }
    return TokenizerFacts(
        special_tokens=special,
        chat_template=_chat_template(folder, config.get("chat_template")),
        add_bos=_flag(config.get("add_bos_token")),
        add_eos=_flag(config.get("add_eos_token")),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path.name}: not a JSON object ({error})") from error


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _chat_template(folder: Path, configured: object) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(configured, list):
        named = {
            item.get("name"): item.get("template") for item in configured if isinstance(item, dict)
        }
        configured = named.get("default")
    if configured is None:
        configured = _read_json(folder / "chat_template.json").get("chat_template")
    return configured if isinstance(configured, str) else None

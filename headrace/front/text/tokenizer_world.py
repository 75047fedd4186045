"""RWKV's World vocabulary: strings of bytes, of which the longest that fits is taken at each place
of a text; no merges, no words. Token 0 ends a text.

It lies in `rwkv_vocab_*.txt` beside a model (lines of an id, a Python literal of text or bytes, and
its length in bytes), or in a GGUF file, as bytes in a Python literal without its quotes.
"""

from __future__ import annotations

import ast
import re
from functools import cached_property
from pathlib import Path

import msgspec

from headrace.base.config.gguf import GGUFFile
from headrace.base.errors import CheckpointError
from headrace.front.text.tokenizer import Guard, Tokenizer, TokenizerFacts, neutral
from headrace.front.text.tokenizer_files import read_facts
from headrace.front.text.tokenizer_sentencepiece import encode_between

END = "<s>"
"""What token 0 is called where nobody names it."""
TEMPLATE_NAME = "rwkv-world"
"""What GGUF files name instead of a template."""
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}User: {{ message['content'] | trim }}\n\n"
    "{% elif message['role'] == 'system' %}System: {{ message['content'] | trim }}\n\n"
    "{% else %}Assistant: {{ message['content'] | trim }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""The chat that World models were trained on: names of speakers, turns that end with two lines."""
_ESCAPED = re.compile(rb"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_LETTERS = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
_CONTROL, _UNUSED = 3, 5


class ListedTokenizer(Tokenizer):
    """A vocabulary whose tokens stand for the bytes that are listed. `tokens`: of ordinary tokens,
    by their ids; `special`: control tokens' ids. How a text is cut, `encode_plain` says."""

    def __init__(
        self, tokens: dict[int, bytes], special: dict[str, int], facts: TokenizerFacts
    ) -> None:
        super().__init__(facts)
        self._special = special
        self._ids = {token: number for number, token in reversed(tokens.items())}
        self._bytes = tokens | {number: token.encode() for token, number in special.items()}
        self.special_ids = frozenset(special.values())
        self.num_ids = max(self._bytes, default=-1) + 1
        self.longest_token = max(map(len, tokens.values()), default=1)

    def token_id(self, token: str) -> int | None:
        if token in self._special:
            return self._special[token]
        return self._ids.get(token.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def _encode(self, text: str) -> list[int]:
        return self._encode_bare(text)

    def _encode_bare(self, text: str) -> list[int]:
        return self.encode_guarded(neutral(text))

    def encode_guarded(self, text: str) -> list[int]:
        ids = [self._special[token] for token in self.guard.tokens]
        return encode_between(self.guard.resolve(text), ids, self.encode_plain)

    @cached_property
    def guard(self) -> Guard:
        return Guard(self._special)


class WorldTokenizer(ListedTokenizer):
    """The longest token at each place."""

    def __init__(
        self, tokens: dict[int, bytes], special: dict[str, int], facts: TokenizerFacts
    ) -> None:
        super().__init__(tokens, special, facts)
        missing = [byte for byte in range(256) if bytes((byte,)) not in self._ids]
        if missing:
            raise CheckpointError(
                f"tokenizer: the vocabulary lacks {len(missing)} of the 256 bytes, "
                f"{missing[0]} among them: some texts have no tokens"
            )
        lengths: dict[bytes, set[int]] = {}
        for token in self._ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {head: sorted(several, reverse=True) for head, several in lengths.items()}

    def encode_plain(self, text: str) -> list[int]:
        data, ids, place = text.encode(errors="replace"), [], 0
        tokens, lengths = self._ids, self._lengths
        while place < len(data):
            for length in lengths.get(data[place : place + 2], ()):
                number = tokens.get(data[place : place + length])
                if number is not None and place + length <= len(data):
                    break
            else:
                length = 1
                number = tokens[data[place : place + 1]]
            ids.append(number)
            place += length
        return ids


def load_world(path: str) -> WorldTokenizer:
    """The vocabulary of a text file; CheckpointError names the line that is wrong."""
    file = Path(path)
    tokens: dict[int, bytes] = {}
    for place, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        number, _, rest = line.partition(" ")
        literal, _, length = rest.rpartition(" ")
        try:
            value = ast.literal_eval(literal)
            token = value.encode() if isinstance(value, str) else bytes(value)
            if int(number) < 1 or len(token) != int(length) or not token:
                raise ValueError(f"{len(token)} bytes")
            tokens.setdefault(int(number), token)
        except (ValueError, SyntaxError, TypeError, MemoryError) as error:
            raise CheckpointError(
                f"{file.name}: line {place} is not an id of at least 1, a literal and its length "
                f"in bytes ({error})"
            ) from error
    facts = read_facts(file.parent)
    end = facts.special_tokens.get("eos_token", END)
    template = facts.chat_template or TEMPLATE
    facts = msgspec.structs.replace(
        facts,
        special_tokens={"eos_token": end, **facts.special_tokens},
        chat_template=template,
    )
    return WorldTokenizer(tokens, {end: 0}, facts)


def world_of_gguf(file: GGUFFile, tokens: list[str], kinds: list[int]) -> WorldTokenizer:
    """The same of a GGUF file's tokens, of the types `kinds`; those that are never used stand for
    nothing."""
    known: dict[int, bytes] = {}
    special: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == _CONTROL:
            special[token] = number
        elif kind != _UNUSED:
            known[number] = _unescaped(token)
    template = file.text("tokenizer.chat_template") or TEMPLATE
    end = file.whole("tokenizer.ggml.eos_token_id") or 0
    facts = TokenizerFacts(
        special_tokens={"eos_token": tokens[end]} if end < len(tokens) else {},
        chat_template=TEMPLATE if template == TEMPLATE_NAME else template,
        add_bos=file.flag("tokenizer.ggml.add_bos_token", False),
    )
    return WorldTokenizer(known, special, facts)


def _unescaped(token: str) -> bytes:
    """The bytes of a literal without its quotes."""

    def one(match: re.Match[bytes]) -> bytes:
        escape = match[1]
        if len(escape) > 1:
            return bytes((int(escape[1:], 16),))
        return _LETTERS.get(escape, escape)

    return _ESCAPED.sub(one, token.encode())

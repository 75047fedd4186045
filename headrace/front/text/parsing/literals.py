"""Python-like literals to JSON: lists, tuples, dictionaries, texts, numbers, True, False, None.
Nothing is evaluated.

The text is translated token by token and the result checked by a JSON decoder, so that the time is
linear and nesting cannot exhaust the stack.
"""

from __future__ import annotations

import json
import re

import msgspec

_WORDS = {"True": "true", "False": "false", "None": "null"}
_TOKEN = re.compile(r"\s+|[\[\](){},:]|[^\s\[\](){},:'\"]+")
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(\n)|([\\'\"abfnrtv0]))"
)
_CONTROL = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}
_BRACKETS = {"(": "[", ")": "]"}


def quoted(text: str) -> str:
    """A JSON text."""
    return json.dumps(text, ensure_ascii=False)


def json_of_python(text: str) -> str | None:
    """The JSON of a Python literal; None if it is none. Neighbouring texts are one, as in
    Python."""
    tokens: list[str] = []
    at, after_text = 0, False
    while at < len(text):
        if text[at] in "'\"":
            end = _string_end(text, at)
            if end is None:
                return None
            piece = quoted(_decoded(text[at + 1 : end - 1]))
            if after_text:
                piece = tokens.pop()[:-1] + piece[1:]
            tokens.append(piece)
            at, after_text = end, True
            continue
        match = _TOKEN.match(text, at)
        assert match is not None
        at = match.end()
        if not match[0].isspace():
            _add(tokens, match[0])
            after_text = False
    return checked("".join(tokens))


def json_of_bare(text: str, quote: str) -> str | None:
    """The JSON of a literal whose texts stand between two `quote` tags and whose keys may be bare
    words; else None."""
    tokens: list[str] = []
    pieces = text.split(quote)
    if len(pieces) % 2 == 0:
        return None
    for i, piece in enumerate(pieces):
        if i % 2:
            tokens.append(quoted(piece))
            continue
        at = 0
        while match := _TOKEN.match(piece, at):
            at = match.end()
            if match[0] == ":" and tokens and _is_word(tokens[-1]):
                tokens[-1] = quoted(tokens[-1])
            if not match[0].isspace():
                _add(tokens, match[0])
        if at < len(piece):
            return None
    return checked("".join(tokens))


def checked(text: str) -> str | None:
    """`text` if it is JSON."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None
    return text


def _add(tokens: list[str], token: str) -> None:
    if token in ")]}" and tokens and tokens[-1] == ",":
        tokens.pop()
    tokens.append(_BRACKETS.get(token, _WORDS.get(token, token)))


def _is_word(token: str) -> bool:
    return not token.startswith('"') and token not in "[]{},:"


def _string_end(text: str, at: int) -> int | None:
    quote, at = text[at], at + 1
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] == quote:
            return at + 1
        else:
            nearest = [place for place in (text.find(quote, at), text.find("\\", at)) if place >= 0]
            if not nearest:
                return None
            at = min(nearest)
    return None


def _decoded(text: str) -> str:
    """A Python text without its escapes; halves of surrogate pairs are joined, lone ones become
    U+FFFD."""
    if "\\" not in text:
        return text
    plain = _ESCAPE.sub(_escaped, text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _escaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code:
        number = int(code, 16)
        return chr(number) if number < 0x110000 else "\ufffd"
    return "" if match[4] else _CONTROL.get(match[5], match[5])

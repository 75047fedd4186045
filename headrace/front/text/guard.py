"""Keeps what users write apart from control tokens, through any template.

A template puts the texts of users between control tokens that it writes itself, and both come out
as one string. So that they can be told apart afterwards, three of Unicode's noncharacters (which no
text may hold) are used:

    BREAK   put into every text that goes into the template, wherever a control token could begin or
            end
    OPEN, CLOSE   around the number of a control token: its spelling, and the only one, that
                  `encode_guarded` knows

`protect` guards a text before rendering; `resolve` turns the control tokens of the rendered text,
which are unbroken only where the template itself wrote them, into their guarded spelling and drops
every BREAK.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias

BREAK, OPEN, CLOSE, MARK = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_RESERVED = str.maketrans(dict.fromkeys((BREAK, OPEN, CLOSE, MARK), "\ufffd"))
_Trie: TypeAlias = "dict[str, _Trie]"


class Guard:
    """The control tokens of one vocabulary and the text that may not become one.

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
        self._any = _any_of(self.tokens)
        self._markup = _any_of(self.tokens[len(dict.fromkeys(special)) :])

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

    def resolve(self, rendered: str) -> str:
        """A rendered template with its own control tokens in their guarded spelling, and no
        BREAK."""
        if self._any is not None:
            rendered = self._any.sub(lambda match: self.spellings[match[0]], rendered)
        return rendered.replace(BREAK, "")


class _Breaks:
    """Where a text must be broken so that no part of it can be part of one of `tokens`."""

    def __init__(self, tokens: Iterable[str]) -> None:
        tokens = list(tokens)
        self._first = _characters(token[0] for token in tokens)
        self._last = _characters(token[-1] for token in tokens)

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


def _characters(characters: Iterable[str]) -> re.Pattern[str] | None:
    escaped = "".join(re.escape(character) for character in sorted(set(characters)))
    return re.compile(f"[{escaped}]") if escaped else None


def _any_of(tokens: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile(_pattern(tokens)) if tokens else None


def _pattern(tokens: Iterable[str]) -> str:
    """A pattern for the longest of `tokens` at a place, as a trie: its time does not grow with
    their number."""
    root: _Trie = {}
    for token in tokens:
        node = root
        for character in token:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branch(root)


def _branch(node: _Trie) -> str:
    choices = [re.escape(key) + _branch(child) for key, child in sorted(node.items()) if key]
    if not choices:
        return ""
    body = choices[0] if len(choices) == 1 and "" not in node else f"(?:{'|'.join(choices)})"
    return f"{body}?" if "" in node else body

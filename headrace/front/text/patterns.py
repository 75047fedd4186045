"""Patterns that find one of many texts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias

_Trie: TypeAlias = "dict[str, _Trie]"


def any_character(characters: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that matches any of these characters; None: there are none."""
    escaped = "".join(re.escape(character) for character in sorted(set(characters)))
    return re.compile(f"[{escaped}]") if escaped else None


def any_of(tokens: tuple[str, ...]) -> re.Pattern[str] | None:
    """A pattern that matches the longest of `tokens` at a place; None: there are none."""
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

r"""Patterns that mean the same whatever a backend makes of them.

`\d`, `\w` and `\s` are ASCII, as in ECMA-262 (of `\s` its ASCII part); under the wider, Unicode
reading the same texts pass, but for negated classes. An optional group is written as one with an
empty alternative: in schemas, xgrammar 0.2 reads `(?:a[0-9]+)?` as if each part of it were
optional.
"""

from __future__ import annotations

import re

_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\v"}
_OPTIONAL = re.compile(r"\)\?\??")
_PARTS = re.compile(r"\\.?|[\[\]]|[^\\\[\]]+", re.DOTALL)


def portable(pattern: str) -> str:
    """The pattern with those classes and groups spelled out; everything else as it was. Linear in
    the pattern."""
    parts: list[str] = []
    inside = False
    for match in _PARTS.finditer(pattern):
        part = match[0]
        if len(part) == 2 and part[0] == "\\" and part[1] in _CLASSES:
            spelled = _CLASSES[part[1]]
            part = spelled if inside else f"[{spelled}]"
        elif part == "[":
            inside = True
        elif part == "]":
            inside = False
        elif not inside:
            part = _OPTIONAL.sub("|)", part)
        parts.append(part)
    return "".join(parts)

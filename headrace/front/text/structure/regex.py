r"""What `\d`, `\w` and `\s` mean: ASCII, as in ECMA-262 (of `\s` its ASCII part), whatever a
backend makes of them.

Under the wider, Unicode reading the same texts pass, but for negated classes.
"""

from __future__ import annotations

import re

_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\v"}
_PARTS = re.compile(r"\\.?|[\[\]]|[^\\\[\]]+", re.DOTALL)


def ascii_classes(pattern: str) -> str:
    """The pattern with those classes spelled out; everything else as it was. Linear in the
    pattern."""
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
        parts.append(part)
    return "".join(parts)

"""Tools that a chat offers: what one must be so that a call of it can be written."""

from __future__ import annotations

import re
from typing import Any

from headrace.base.errors import InvalidRequest

_BREAKS_CALLS = re.compile(r'["\\\x00-\x1f\x7f]')


def check_tool(tool: dict[str, Any], field: str) -> str:
    """The name of a function, which can be written into a call; other kinds of tool are refused."""
    kind, function = tool.get("type"), tool.get("function")
    if kind != "function":
        raise InvalidRequest(
            f"{field}.type: {kind!r:.80} given; allowed: 'function'", field=f"{field}.type"
        )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidRequest(
            f"{field}.function.name: a text is needed", field=f"{field}.function.name"
        )
    if _BREAKS_CALLS.search(name):
        raise InvalidRequest(
            f"{field}.function.name: {name!r:.80} given; quotation marks, backslashes and control characters are not "
            "allowed: a call is written with the name as it is",
            field=f"{field}.function.name",
        )
    return name

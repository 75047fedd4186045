"""JSON through Python's own parser: for bodies that the fast one refuses without saying plainly
why."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from headrace.base.errors import InvalidRequest


def read_slowly(body: bytes) -> Any:
    """What Python's own parser makes of the body; its reasons for refusing one are in plain
    words."""
    try:
        text = body.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise InvalidRequest("a text holds a lone surrogate, which is no character") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {error.msg} at byte {error.pos}"
        ) from None
    except ValueError:
        raise InvalidRequest("the body is not valid JSON: a number has too many digits") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)[:100]
        raise InvalidRequest(f"the key {twice!r} occurs twice in one object", field=twice)
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the body is not valid JSON: {name} is not a JSON number")

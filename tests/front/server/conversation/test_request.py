"""Every bound of a request: the value on it is taken, the next one beyond is refused by name at once (P8/T8)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from msgspec import Meta

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.request import ChatRequest, CompletionRequest, parse
from tests.spent import assert_within

LEAST = {ChatRequest: {"messages": [{}]}, CompletionRequest: {"prompt": "x"}}
Case = tuple[Any, str, Any, Any]


def metas(kind: Any) -> Iterator[tuple[Any, Meta]]:
    """The bounded types a field may have at its top, each with its bound."""
    for part in [kind, *get_args(kind)]:
        for meta in getattr(part, "__metadata__", ()):
            if isinstance(meta, Meta):
                yield get_args(part)[0], meta


def beyond(kind: Any, meta: Meta) -> Iterator[tuple[Any, Any]]:
    """(the last value that is allowed, the first that is not), for each end of a number or a text."""
    if kind in (int, float):
        up = (lambda x: x + 1) if kind is int else (lambda x: math.nextafter(x, math.inf))
        down = (lambda x: x - 1) if kind is int else (lambda x: math.nextafter(x, -math.inf))
        if meta.ge is not None:
            yield meta.ge, down(meta.ge)
        if meta.gt is not None:
            yield up(meta.gt), meta.gt
        if meta.le is not None:
            yield meta.le, up(meta.le)
        if meta.lt is not None:
            yield down(meta.lt), meta.lt
    elif kind is str and meta.max_length is not None:
        yield text(meta.max_length, meta), text(meta.max_length + 1, meta)
    elif kind is str and meta.min_length is not None:
        yield text(meta.min_length, meta), ""


def text(length: int, meta: Meta) -> str:
    """A text of this length that the pattern allows, if there is one: words, or a list of numbers."""
    made = ("x" * length, ("1," * length)[: length - 1] + "1")
    return next(one for one in made if re.search(meta.pattern or "", one))


def cases() -> Iterator[Case]:
    for request in LEAST:
        for field in msgspec.structs.fields(request):
            for kind, meta in metas(field.type):
                for allowed, refused in beyond(kind, meta):
                    yield request, field.name, allowed, refused


CASES = list(cases())


def test_the_bounds_are_found() -> None:
    assert len(CASES) > 80, len(CASES)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("request_type", "name", "allowed", "refused"), CASES, ids=lambda value: str(value)[-24:]
)
def test_a_bound_is_exact(request_type: Any, name: str, allowed: Any, refused: Any) -> None:
    least = LEAST[request_type]
    assert getattr(parse({**least, name: allowed}, request_type), name) == allowed

    def refuse() -> None:
        with pytest.raises(InvalidRequest) as caught:
            parse({**least, name: refused}, request_type)
        assert caught.value.field == name

    assert_within(refuse, 0.05)

"""Bodies: the same documents as Python's own parser, what is ambiguous refused, and no walk over the values."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import InvalidRequest
from headrace.front.server.http import limits
from headrace.front.server.http.limits import (
    EXPLAINED_BYTES,
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    MAX_JSON_VALUES,
    PIECE_BYTES,
    parse_json,
)
from tests.spent import assert_within

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ['"', "\\", '\\"', '":"', "{[", '{"a":1}', "\\\\", "é", "🙂", "\x00"]
)
TREES = st.recursive(
    SCALARS | TEXT, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=30
)


PIECES = st.sampled_from([2, 3, 16, PIECE_BYTES])
"""Into which a large body is cut."""


@given(TREES, st.booleans(), st.sampled_from([None, 1]), PIECES)
def test_every_document_is_read_as_python_reads_it(
    tree: Any, ascii_: bool, indent: int, piece_bytes: int
) -> None:
    body = json.dumps(tree, ensure_ascii=ascii_, indent=indent).encode()
    with mock.patch.object(limits, "PIECE_BYTES", piece_bytes):
        assert parse_json(body) == json.loads(body)


@given(st.dictionaries(TEXT, TREES, min_size=1), st.data(), PIECES)
def test_a_key_that_occurs_twice_is_found_wherever_it_stands(
    tree: dict[str, Any], data: st.DataObject, piece_bytes: int
) -> None:
    key = data.draw(st.sampled_from(sorted(tree)))
    doubled = json.dumps(tree)[:-1] + f", {json.dumps(key)}: 1}}"
    for body in (doubled, f"[1, {doubled}]", f'{{"x": {{"y": {doubled}}}}}'):
        with (
            mock.patch.object(limits, "PIECE_BYTES", piece_bytes),
            pytest.raises(InvalidRequest, match="twice"),
        ):
            parse_json(body.encode())


def test_a_doubled_key_of_a_large_body_is_found_too() -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        parse_json(b'{"a": 1, "a": [' + b"0," * EXPLAINED_BYTES + b"0]}")


@pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_depth_is_allowed_up_to_the_limit_and_not_one_more(opening: str, closing: str) -> None:
    levels = opening.count("[") + opening.count("{")
    fits = MAX_JSON_DEPTH // levels
    parse_json((opening * fits + "1" + closing * fits).encode())
    for deeper in (fits + 1, 500, 100_000):
        with pytest.raises(InvalidRequest, match="deeper than 64"):
            parse_json((opening * deeper + "1" + closing * deeper).encode())


@pytest.mark.serial
@pytest.mark.parametrize("container", ["[]", "{}", '{"[{": ["{"]}'])
def test_objects_and_arrays_are_allowed_up_to_the_limit_and_not_one_more(container: str) -> None:
    """T9, P9: they are counted before one of them is made."""
    fits = (MAX_JSON_CONTAINERS - 1) // (container.count("[]") + 2 * container.count(":") or 1)
    parse_json(f"[{','.join([container] * fits)}]".encode())
    beyond = f"[{','.join([container] * fits + [container] * 2)}]".encode()

    def refused() -> None:
        with pytest.raises(InvalidRequest, match=f"objects and arrays; {MAX_JSON_CONTAINERS} are"):
            parse_json(beyond)

    assert_within(refused, 0.1)


def test_values_are_allowed_up_to_the_limit_and_not_one_more() -> None:
    """P9: the streams of the process wait while they are made; they are counted before."""
    numbers = b"[" + b"7," * (MAX_JSON_VALUES - 1) + b"7]"
    assert len(parse_json(numbers)) == MAX_JSON_VALUES
    with pytest.raises(InvalidRequest, match=f"more than {MAX_JSON_VALUES} values"):
        parse_json(b"[7," + numbers[1:])
    parse_json(b'["' + b"," * MAX_JSON_VALUES + b'"]')


def test_a_body_takes_little_beside_what_is_made_of_it() -> None:
    """T9: the pieces between its quotes, as a list, took 80 MB."""
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = json.dumps([part] * 60_000).encode()
    tracemalloc.start()
    try:
        document = parse_json(body)
        made, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(document) == 60_000
    assert peak - made < 4 * len(body)


def test_brackets_inside_texts_are_no_depth() -> None:
    assert parse_json(json.dumps(["[" * 1000 + '\\"{' * 100]).encode())


@pytest.mark.parametrize(
    "body",
    [b'{"a":"\\ud800"}', b'["\\udc00\\ud800"]', b'{"\\uDFFF": 1}', b'[1e999, "\\ud83d"]'],
)
def test_a_lone_surrogate_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        parse_json(body)


def test_a_body_that_is_too_large_to_explain_is_still_refused() -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_json(b"[" + b"1," * EXPLAINED_BYTES + b"NaN]")


@pytest.mark.serial
def test_many_numbers_cost_a_few_nanoseconds_each() -> None:
    """A walk over the values took 180 ns each and held up every stream of the process (P9)."""
    body = b'{"tokens": [' + b"0, " * 1_000_000 + b"0]}"
    assert_within(lambda: parse_json(body), 0.15)

"""A tool's input as it goes out to Anthropic's clients: one object, whatever the model writes and however it is cut."""

from __future__ import annotations

import json
import time
from typing import Any

import jiter
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.front.server.anthropic.arguments import INVALID, ToolInput

Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
Objects = st.dictionaries(st.text(max_size=4), Json, max_size=4)
Pieces = st.text(alphabet='{}[]":,\\ut1e-. \nfalsnrd8c\x01ü', max_size=40)


def sent(text: str, cuts: list[int]) -> tuple[list[str], dict[str, Any]]:
    """The pieces that go out, and the object."""
    made, found, at = ToolInput(), [], 0
    for cut in [*cuts, len(text)]:
        found.append(made.push(text[at : at + cut]))
        at += cut
    found.append(made.push(text[at:]))
    found.append(made.end())
    return [piece for piece in found if piece], made.value


def check_parseable(pieces: list[str]) -> None:
    """As the client does: the pieces so far, after each of them."""
    for i in range(1, len(pieces) + 1):
        jiter.from_json("".join(pieces[:i]).encode(), partial_mode=True)


Cuts = st.lists(st.integers(0, 7), max_size=30)


@given(Objects, st.booleans(), st.sampled_from([None, 1]), Cuts)
def test_an_object_goes_out_as_it_was_written(
    given: dict[str, Any], ascii: bool, indent: int | None, cuts: list[int]
) -> None:
    text = json.dumps(given, ensure_ascii=ascii, indent=indent)
    pieces, value = sent(text, cuts)
    assert "".join(pieces) == text and value == json.loads(text)
    check_parseable(pieces)


@given(Objects, Pieces, st.data(), Cuts)
def test_what_is_none_goes_out_as_one_that_says_so(
    given: dict[str, Any], broken: str, data: st.DataObject, cuts: list[int]
) -> None:
    text = json.dumps(given)
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + broken + text[data.draw(st.integers(at, len(text))) :]
    pieces, value = sent(text, cuts)
    assert json.loads("".join(pieces) or "{}") == value
    check_parseable(pieces)
    try:
        wanted = jiter.from_json(text.encode(), allow_inf_nan=False)
    except ValueError:
        wanted = None
    if isinstance(wanted, dict) and INVALID not in value:
        assert value == wanted
    elif text.strip() in ("", "null"):
        assert value == {}
    else:
        assert value[INVALID] == text


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"a": 1, "b": tru}', {"a": 1}),
        ('{"a": "x\ny"}', {"a": "x"}),
        ('{"a": {"b": [1, {"c": 2', {"a": {"b": [1, {}]}}),
        ('{"path": "/tm', {"path": "/tm"}),
        ("{'a': 1}", {}),
        ('{"a": 1} and more', {"a": 1}),
        ("[1]", {}),
        ('"x"', {}),
        ("{", {}),
        ('{"a": "\\ud800"}', {"a": ""}),
        ('{"a": 1e999, "b": NaN}', None),
    ],
)
def test_the_whole_text_stands_beside_what_was_out(text: str, kept: dict[str, Any] | None) -> None:
    value = sent(text, [1] * len(text))[1]
    assert value.pop(INVALID) == text
    assert kept is None or value == kept


def test_values_go_out_while_they_come() -> None:
    made = ToolInput()
    assert made.push('{"content": "line one') == '{"content": "line one'
    assert made.push("\\nline two") == "\\nline two"
    assert made.push("\\") == "" and made.push("u00") == "" and made.push("fc") == "\\u00fc"
    assert made.push('", "n": 1') == '"' and made.push("2") == "" and made.push("}") == ', "n": 12'
    assert made.end() == "}"


@example("a")
@given(st.text(max_size=5))
def test_no_arguments_are_no_properties(space: str) -> None:
    assert sent(" " * len(space), [])[1] == {} == sent(" null ", [1])[1]


@pytest.mark.parametrize("unit", ['"a', "[", '{"a":', '"k": "v", ', "\\", "1", "\\ud83d\\ude00"])
def test_time_is_linear(unit: str) -> None:
    def seconds(count: int) -> float:
        text = '{"x": "y", ' + unit * count
        best = 9.0
        for _ in range(3):
            made, begin = ToolInput(), time.process_time()
            for at in range(0, len(text), 16):
                made.push(text[at : at + 16])
            made.end()
            best = min(best, time.process_time() - begin)
        return best

    assert seconds(40_000) < 3.2 * seconds(20_000) + 0.01

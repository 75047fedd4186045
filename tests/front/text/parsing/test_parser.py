"""REG-096, REG-100; API-09, API-10; P12, P14."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.robustness.parsers import (
    ADVERSARIAL,
    MESSAGES,
    Make,
    linear,
    mangled,
    own_calls,
    own_thought,
    thought,
)
from headrace.front.text.parsing.engine import CallArguments, CallBegin, CallEnd, Content
from headrace.front.text.parsing.families import REASONING_FAMILIES, TOOL_FAMILIES, tool_family
from headrace.front.text.parsing.writing import write_calls
from tests.covering import first_of_each
from tests.front.text.parsing.golden import GOLDEN, SCHEMAS, Golden, meaning, parse, parser_of

EXAMPLES = settings(max_examples=150, deadline=None)
SOME = settings(max_examples=40, deadline=None)  # where each family has its own


FAMILIES = [family.name for family in TOOL_FAMILIES]
THOUGHTS = [family.name for family in REASONING_FAMILIES]
SYNTAXES = first_of_each(FAMILIES, [type(family.grammar) for family in TOOL_FAMILIES])
THOUGHT_SYNTAXES = first_of_each(
    THOUGHTS,
    [
        (tags.always, tags.kept, bool(tags.frame), bool(tags.until), type(tags.messages))
        for tags in (family.tags for family in REASONING_FAMILIES)
    ],
)
WORDS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_calls>", "</tool_calls>", "<function=f>"),
    *("</function>", "<parameter=s>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "<|python_tag|>", '{"name": "f", ', '"arguments": {', '"parameters": {"a": 1}', "}", "{"),
    *('"', "\\", "[", "]", ",", ";", ":", "\n", " ", "f", "1", "é", "<", "</", "null", '"name": "g"'),
    *("<seed:tool_call>", "</seed:tool_call>", '<minimax:tool_call><invoke name="f">'),
    *('<parameter name="s">', "</invoke>"),
]  # fmt: skip
hostile = st.lists(st.sampled_from(WORDS), max_size=40).map("".join)
_TAG = re.compile(r"</?[^<>]+>|\[[A-Z_]+\]")


def words_of(family: str) -> list[str]:
    """The tags of a family and the pieces of its calls."""
    row = tool_family(family)
    assert row is not None
    values = msgspec.to_builtins(row.grammar).values()
    listed = [v for value in values if isinstance(value, list | tuple) for v in value]
    grammar = [v for v in (*values, *listed) if isinstance(v, str) and v]
    written = write_calls(row.writing, [("f", {"s": "x", "a": 1}), ("g", {})])
    return [*grammar, *_TAG.findall(written), *_TAG.split(written), written]


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, at, i = [], 0, 0
    while at < len(text):
        size = sizes[i % len(sizes)]
        pieces.append(text[at : at + size])
        at, i = at + size, i + 1
    return pieces


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: f"{g.tools}:{g.text[:24]!r}")
def test_a_text_means_what_its_family_says(golden: Golden) -> None:
    parts = parse(parser_of(golden.tools, golden.think, inside=golden.inside), [golden.text])
    content, reasoning, calls, complete = meaning(parts)
    assert (content, reasoning) == (golden.content, golden.reasoning)
    assert [(name, json.loads(text)) for name, text in calls] == golden.calls
    assert complete == len(golden.calls)


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: f"{g.tools}:{g.text[:24]!r}")
def test_every_cut_into_two_and_every_even_cut_gives_the_same_parts(golden: Golden) -> None:
    def run(pieces: list[str]) -> object:
        return parse(parser_of(golden.tools, golden.think, inside=golden.inside), pieces)

    text, whole = golden.text, run([golden.text])
    for at in range(1, len(text)):
        assert run([text[:at], text[at:]]) == whole
    for size in range(1, 17):
        assert run(cut(text, [size])) == whole


@pytest.mark.parametrize("family", [*SYNTAXES, "none"])
@SOME
@given(
    text=hostile, sizes=st.lists(st.integers(1, 16), min_size=1, max_size=8), inside=st.booleans()
)
def test_any_cut_of_any_text_gives_the_same_parts(
    family: str, text: str, sizes: list[int], inside: bool
) -> None:
    whole = parse(parser_of(family, inside=inside), [text])
    assert parse(parser_of(family, inside=inside), cut(text, sizes)) == whole
    meaning(whole)


@pytest.mark.parametrize("family", SYNTAXES)
@SOME
@given(data=st.data(), sizes=st.lists(st.integers(1, 16), min_size=1, max_size=8))
def test_any_cut_of_a_mangled_call_gives_the_same_parts(
    family: str, data: st.DataObject, sizes: list[int]
) -> None:
    words = st.sampled_from([*words_of(family), *WORDS, "x" * 300, "true", "'"])
    text = "".join(data.draw(st.lists(words, max_size=16)))
    think = own_thought(family)
    whole = parse(parser_of(family, think), [text])
    assert parse(parser_of(family, think), cut(text, sizes)) == whole
    meaning(whole)


_names = st.sampled_from(["f", "g", "get_weather", "a.b-c"])
_plain = st.text(alphabet="abz 09.,:;'é水(){}[]\n", max_size=12)
_values = st.one_of(
    _plain, st.integers(-(2**53), 2**53), st.booleans(), st.none(),
    st.lists(st.integers(0, 9) | _plain, max_size=3),
    st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), _plain | st.integers(0, 9), max_size=2),
)  # fmt: skip
_arguments = st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), _values, max_size=4)


def _schema(value: object) -> dict[str, object]:
    return {"type": "string"} if isinstance(value, str) else {}


@pytest.mark.parametrize("family", SYNTAXES)
@SOME
@given(
    calls=st.lists(st.tuples(_names, _arguments), min_size=1, max_size=3, unique_by=lambda c: c[0]),
    size=st.integers(1, 16),
)
def test_a_written_call_is_read_back(
    family: str, calls: list[tuple[str, dict[str, object]]], size: int
) -> None:
    """The row's own way of writing, which grammars are made from, is the one it reads."""
    row = tool_family(family)
    assert row is not None
    schemas = {name: {k: _schema(v) for k, v in given.items()} for name, given in calls}
    think = own_thought(family) if family in MESSAGES else "none"
    parser = parser_of(family, think, schemas=schemas)
    parts = parse(parser, cut(write_calls(row.writing, calls), [size]))
    content, _, found, complete = meaning(parts)
    assert [(name, json.loads(text)) for name, text in found] == calls
    assert (content.strip(), complete) == ("", len(calls))


@pytest.mark.parametrize("family", SYNTAXES)
@SOME
@given(text=st.text(alphabet='ab<>{}[]"\\/:,_ \n', max_size=60))
def test_text_without_a_call_is_kept_to_the_character(family: str, text: str) -> None:
    parts = parse(parser_of(family, "none"), [text])
    assert "".join(p.text for p in parts if isinstance(p, Content)) == text


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@EXAMPLES
@given(
    arguments=st.dictionaries(st.text(max_size=6), values, max_size=4),
    ascii_only=st.booleans(),
    size=st.integers(1, 16),
)
def test_arguments_go_out_as_the_model_wrote_them(
    arguments: dict[str, object], ascii_only: bool, size: int
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    text = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    parts = parse(parser_of("hermes"), cut(text, [size]))
    assert meaning(parts) == ("", "", [("f", written)], 1)


@EXAMPLES
@given(
    value=st.text(max_size=30).filter(lambda text: "</parameter>" not in text),
    size=st.integers(1, 16),
)
def test_a_text_parameter_is_quoted_once(value: str, size: int) -> None:
    text = f"<tool_call><function=f><parameter=s>\n{value}\n</parameter></function></tool_call>"
    (((_, arguments),)) = meaning(parse(parser_of("qwen3_coder"), cut(text, [size])))[2]
    assert json.loads(arguments) == {"s": value}


def test_arguments_stream_while_they_are_written() -> None:
    parser = parser_of("hermes")
    parser.push('<tool_call>{"name": "f", "arguments": {"s": "one')
    assert parser.push(" two") == [CallArguments(0, " two")]


def test_an_unfinished_call_keeps_what_it_has_and_is_not_complete() -> None:
    parts = parse(parser_of("hermes"), ['<tool_call>{"name": "f", "arguments": {"s": "on'])
    assert meaning(parts) == ("", "", [("f", '{"s": "on')], 0)


def test_with_one_call_allowed_nothing_follows_it() -> None:
    parser = parser_of("hermes", only_one_call=True)
    call = '<tool_call>{"name": "g"}</tool_call>'
    parts = parser.push(call + call + "more")
    assert parser.closed and isinstance(parts[-1], CallEnd) and parser.called
    assert sum(isinstance(part, CallBegin) for part in parts) == 1
    assert parser.finish() == []


def test_without_offered_tools_calls_are_text() -> None:
    text = '<tool_call>{"name": "g"}</tool_call>'
    assert parse(parser_of("hermes", schemas=None), [text]) == [Content(text)]


def _assert_linear(
    tools: str, makes: Sequence[Make], length: int, size: int, think: str = "qwen3"
) -> None:
    """T12: t(2n) / t(n) <= 2.3."""
    _, over = linear(tools, think, makes, length, size)
    assert not over


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "glm45"])
@pytest.mark.parametrize("size", [1 << 20, 7])
def test_time_is_linear_in_any_text(family: str, size: int) -> None:
    _assert_linear(family, ADVERSARIAL, 1 << 20 if size > 1000 else 1 << 16, size)


@pytest.mark.covering(0)
@pytest.mark.parametrize("family", SYNTAXES)
def test_time_is_linear_in_a_mangled_call(family: str) -> None:
    _assert_linear(family, mangled(family), 1 << 16, 1 << 20)
    _assert_linear(family, mangled(family), 1 << 13, 7)


@pytest.mark.covering(0)
@pytest.mark.parametrize("think", THOUGHT_SYNTAXES)
def test_time_is_linear_in_mangled_reasoning(think: str) -> None:
    tools = own_calls(think)
    _assert_linear(tools, thought(think), 1 << 16, 1 << 20, think)
    _assert_linear(tools, thought(think), 1 << 13, 7, think)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("think", THOUGHTS)
def test_time_is_linear_in_mangled_reasoning_of_1_mb(think: str) -> None:
    tools = own_calls(think)
    for size in (1 << 20, 7):
        _assert_linear(tools, thought(think), 1 << 20, size, think)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_time_is_linear_in_any_text_of_1_mb_for_every_format(family: str) -> None:
    _assert_linear(family, ADVERSARIAL, 1 << 20, 1 << 20)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_time_is_linear_in_a_mangled_call_of_1_mb(family: str) -> None:
    _assert_linear(family, mangled(family), 1 << 20, 1 << 20)


def test_values_are_parsed_and_never_evaluated() -> None:
    hostile_value = "().__class__.__mro__[1].__subclasses__()"
    text = f"<tool_call><function=f><parameter=o>{hostile_value}</parameter></function></tool_call>"
    ((_, arguments),) = meaning(parse(parser_of("qwen3_coder"), [text]))[2]
    assert json.loads(arguments) == {"o": hostile_value}
    deep = "[" * 100_000
    text = f"<tool_call><function=f><parameter=o>{deep}</parameter></function></tool_call>"
    ((_, arguments),) = meaning(parse(parser_of("qwen3_coder"), [text]))[2]
    assert json.loads(arguments) == {"o": deep}
    assert SCHEMAS["f"]["o"] == {"type": "object"}

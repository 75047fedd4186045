"""The formats that model families write in, as data, and how a chat template shows which one a checkpoint uses.

A row's `marks` are texts that only templates of this format contain; the first row whose marks are all there is taken,
so rows stand from special to general. Names are those that users of other servers know. Nothing here encodes text or
looks into a tokenizer, so rows can be used from any thread (REG-101).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from headrace.base.errors import ConfigError
from headrace.front.text.parsing.json_calls import JsonKeys
from headrace.front.text.parsing.reasoning import ReasoningTags
from headrace.front.text.parsing.tagged_json import JsonTags
from headrace.front.text.parsing.xml_parameters import ParameterTags


class BareTags(msgspec.Struct, frozen=True, kw_only=True):
    """The bare JSON grammar: an optional tag before it, and the keys."""

    prefix: str = ""
    keys: JsonKeys = JsonKeys()


ToolGrammar = JsonTags | BareTags | ParameterTags


class ToolFamily(msgspec.Struct, frozen=True, kw_only=True):
    """One format of tool calls."""

    name: str
    marks: tuple[str, ...]
    grammar: ToolGrammar


class ReasoningFamily(msgspec.Struct, frozen=True, kw_only=True):
    """One format of reasoning."""

    name: str
    marks: tuple[str, ...]
    tags: ReasoningTags


_FUNCTION_TAGS = {
    "name_open": "<function=",
    "name_end": (">",),
    "function_close": "</function>",
    "key_open": "<parameter=",
    "key_end": ">",
    "value_close": "</parameter>",
    "breaks": True,
}
_INVOKE_TAGS = {
    "name_open": '<invoke name="',
    "name_end": ('">',),
    "function_close": "</invoke>",
    "key_open": '<parameter name="',
    "key_end": '">',
    "value_close": "</parameter>",
}

TOOL_FAMILIES: tuple[ToolFamily, ...] = (
    ToolFamily(
        name="seed_oss",
        marks=("<seed:tool_call>",),
        grammar=ParameterTags(
            open="<seed:tool_call>",
            close="</seed:tool_call>",
            **_FUNCTION_TAGS,  # type: ignore[arg-type]
        ),
    ),
    ToolFamily(
        name="minimax_m2",
        marks=("<minimax:tool_call>",),
        grammar=ParameterTags(
            open="<minimax:tool_call>",
            close="</minimax:tool_call>",
            **_INVOKE_TAGS,  # type: ignore[arg-type]
        ),
    ),
    ToolFamily(
        name="qwen3_coder",
        marks=("<tool_call>", "<function=", "<parameter="),
        grammar=ParameterTags(
            open="<tool_call>",
            close="</tool_call>",
            **_FUNCTION_TAGS,  # type: ignore[arg-type]
        ),
    ),
    ToolFamily(
        name="glm45",
        marks=("<tool_call>", "<arg_key>", "<arg_value>"),
        grammar=ParameterTags(
            open="<tool_call>",
            close="</tool_call>",
            name_open="",
            name_end=("\n",),
            function_close="",
            key_open="<arg_key>",
            key_end="</arg_key>",
            value_open="<arg_value>",
            value_close="</arg_value>",
        ),
    ),
    ToolFamily(
        name="jamba",
        marks=("<tool_calls>",),
        grammar=JsonTags(open="<tool_calls>", close="</tool_calls>"),
    ),
    ToolFamily(
        name="hermes",
        marks=("<tool_call>",),
        grammar=JsonTags(open="<tool_call>", close="</tool_call>"),
    ),
    ToolFamily(
        name="llama3_json",
        marks=('"parameters": dictionary of argument name',),
        grammar=BareTags(prefix="<|python_tag|>"),
    ),
)
REASONING_FAMILIES: tuple[ReasoningFamily, ...] = (
    ReasoningFamily(
        name="seed_oss",
        marks=("<seed:think>",),
        tags=ReasoningTags(open="<seed:think>", close="</seed:think>"),
    ),
    ReasoningFamily(
        name="deepseek_r1",
        marks=("</think>", "<｜Assistant｜>"),
        tags=ReasoningTags(open="<think>", close="</think>", always=True),
    ),
    ReasoningFamily(
        name="minimax_m2",
        marks=("</think>", "<minimax:tool_call>"),
        tags=ReasoningTags(open="<think>", close="</think>", always=True),
    ),
    ReasoningFamily(
        name="qwen3",
        marks=("<think>", "</think>"),
        tags=ReasoningTags(open="<think>", close="</think>"),
    ),
)
NONE = "none"


class Choice(msgspec.Struct, frozen=True):
    """A format's name (or "none"), and why."""

    name: str
    why: str


F = TypeVar("F", ToolFamily, ReasoningFamily)


def choose_tools(template: str | None) -> Choice:
    """The format of tool calls that a chat template shows."""
    return _choose(TOOL_FAMILIES, template)


def choose_reasoning(template: str | None) -> Choice:
    """The format of reasoning that a chat template shows."""
    return _choose(REASONING_FAMILIES, template)


def tool_family(name: str) -> ToolFamily | None:
    """The row of that name, None for "none"; ConfigError lists the names there are."""
    return _named(TOOL_FAMILIES, name, "--tool-parser")


def reasoning_family(name: str) -> ReasoningFamily | None:
    """The row of that name, None for "none"; ConfigError lists the names there are."""
    return _named(REASONING_FAMILIES, name, "--reasoning-parser")


def _choose(rows: Sequence[F], template: str | None) -> Choice:
    if template is None:
        return Choice(NONE, "there is no chat template")
    for row in rows:
        if all(mark in template for mark in row.marks):
            return Choice(row.name, f"the chat template has {' and '.join(row.marks)}")
    return Choice(NONE, "the chat template shows no known format")


def _named(rows: Sequence[F], name: str, option: str) -> F | None:
    if name == NONE:
        return None
    for row in rows:
        if row.name == name:
            return row
    known = ", ".join(["auto", NONE, *sorted(row.name for row in rows)])
    raise ConfigError(f"{option}: {name!r} is not known; allowed: {known}", field=option)

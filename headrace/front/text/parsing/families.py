"""Which of the formats a checkpoint writes in: chosen by its chat template, else by its model_type,
or by name.

The formats are rows (families_tools.py, families_reasoning.py), under names that users of other
servers know. Nothing here encodes text or looks into a tokenizer, so rows can be used from any
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from headrace.base import extensions
from headrace.base.errors import ConfigError
from headrace.front.text.parsing.families_reasoning import REASONING_FAMILIES, ReasoningFamily
from headrace.front.text.parsing.families_tools import TOOL_FAMILIES
from headrace.front.text.parsing.rows import BareTags, ToolFamily, ToolGrammar

__all__ = [
    "NONE",
    "REASONING_FAMILIES",
    "TOOL_FAMILIES",
    "BareTags",
    "Choice",
    "ReasoningFamily",
    "ToolFamily",
    "ToolGrammar",
    "choose_reasoning",
    "choose_tools",
    "reasoning_family",
    "tool_family",
]
NONE = "none"


class Choice(msgspec.Struct, frozen=True):
    """A format's name (or "none"), and why."""

    name: str
    why: str


F = TypeVar("F", ToolFamily, ReasoningFamily)


def choose_tools(template: str | None, model_type: str = "") -> Choice:
    """The format of tool calls that a chat template shows, or that models of this type write."""
    return _choose(TOOL_FAMILIES, template, model_type)


def choose_reasoning(template: str | None, model_type: str = "") -> Choice:
    """The format of reasoning that a chat template shows, or that models of this type write."""
    return _choose(REASONING_FAMILIES, template, model_type)


def tool_family(name: str, template: str | None = None) -> ToolFamily | None:
    """The row of that name, None for "none"; ConfigError lists the names there are. Releases of one
    family that differ share a name, and the chat template tells which it is."""
    if name in extensions.allowed(extensions.TOOL_PARSERS):
        return _foreign(extensions.TOOL_PARSERS, name, ToolFamily)
    return _named(TOOL_FAMILIES, name, "--tool-parser", template or "")


def reasoning_family(name: str, template: str | None = None) -> ReasoningFamily | None:
    """As `tool_family`, for reasoning."""
    if name in extensions.allowed(extensions.REASONING_PARSERS):
        return _foreign(extensions.REASONING_PARSERS, name, ReasoningFamily)
    return _named(REASONING_FAMILIES, name, "--reasoning-parser", template or "")


def _foreign(group: str, name: str, kind: type[F]) -> F:
    row = extensions.load(group, name)
    if not isinstance(row, kind):
        raise ConfigError(
            f"extension {name}: a {kind.__name__} is wanted, it is a {type(row).__name__}",
            field="extensions",
        )
    return row


def _choose(rows: Sequence[F], template: str | None, model_type: str) -> Choice:
    if template is None:
        return Choice(NONE, "there is no chat template")
    for row in rows:
        if _shows(template, row) and (not row.only_models or model_type in row.models):
            return Choice(row.name, f"the chat template has {' and '.join(row.marks)}")
    for row in rows:
        # a template that does not know of tools or reasoning is no reason to look for them
        if model_type in row.models and _speaks_of(row, template):
            return Choice(row.name, f"models of type {model_type} write so")
    return Choice(NONE, "the chat template shows no known format")


def _shows(template: str, row: ToolFamily | ReasoningFamily) -> bool:
    return bool(row.marks) and all(mark in template for mark in row.marks)


def _speaks_of(row: F, template: str) -> bool:
    return ("tools" if isinstance(row, ToolFamily) else "think") in template


def _named(rows: Sequence[F], name: str, option: str, template: str) -> F | None:
    if name == NONE:
        return None
    named: list[F] = [row for row in rows if name in _names(row)]
    shown: list[F] = [row for row in named if _shows(template, row)]
    own: list[F] = [row for row in named if name == row.name]
    if named:
        return (shown or own or named)[0]
    raise ConfigError(f"{option}: {name!r} is not known; allowed: {_all_names(rows)}", field=option)


def _names(row: ToolFamily | ReasoningFamily) -> tuple[str, ...]:
    return (row.name, *row.aliases)


def _all_names(rows: Sequence[ToolFamily | ReasoningFamily]) -> str:
    return ", ".join(["auto", NONE, *sorted({name for row in rows for name in _names(row)})])

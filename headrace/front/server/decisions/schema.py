"""Requests of the decision routes: fields, types and bounds."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.front.server.http.limits import Name

MAX_QUESTIONS = 400
MAX_OPTIONS = 255
Json = dict[str, Any]
Words = str | Annotated[list[Any], Meta(min_length=1, max_length=1024)]
Label = Annotated[str, Meta(min_length=1, max_length=4096)]


class Predicate(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="predicate"):
    """How likely is it that a statement is true."""

    instructions: Words
    name: Label | None = None


class ChoiceOption(msgspec.Struct, frozen=True, kw_only=True):
    """One of the options. A text and a boolean that reads the same are distinct."""

    value: Label | bool
    description: str | None = None


class DecisionChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="choice"):
    """Which of the options it is."""

    instructions: Words
    choices: Annotated[list[ChoiceOption], Meta(min_length=2, max_length=MAX_OPTIONS)]
    name: Label | None = None


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a scale."""

    label: Label
    description: str | None = None


class Score(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="score"):
    """Where on a scale it is."""

    instructions: Words
    levels: Annotated[list[Level], Meta(min_length=2, max_length=MAX_OPTIONS)]
    name: Label | None = None


class DecisionsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/decisions. `input`: a text, or items as in /v1/responses."""

    input: str | Annotated[list[Json], Meta(min_length=1, max_length=4096)]
    questions: Annotated[
        list[Predicate | DecisionChoice | Score], Meta(min_length=1, max_length=MAX_QUESTIONS)
    ]
    model: Name | None = None
    safety_identifier: Annotated[str, Meta(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=1024)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=86400)] | None = None


class Noul(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="noul"):
    """How likely is it that a statement is true; `criteria` may say what "true" and "false"
    mean."""

    instructions: Any
    criteria: Json | None = None


class NamedChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="choice"):
    """Which of the options it is, each with its description or null."""

    instructions: Any
    criteria: Annotated[dict[Label, Any], Meta(min_length=2, max_length=MAX_OPTIONS)]


class NamedScore(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="score"):
    """Where on a scale it is; `criteria` are its levels, the lowest first."""

    instructions: Any
    criteria: Annotated[list[Any], Meta(min_length=2, max_length=MAX_OPTIONS)]


class SystemOneRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/systemone. `state`, instructions and criteria are texts or JSON, which is shown to
    the model as such."""

    state: Any
    questions: Annotated[
        dict[Label, Noul | NamedChoice | NamedScore],
        Meta(min_length=1, max_length=MAX_QUESTIONS),
    ]
    model: Name | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=86400)] | None = None

"""What a conversation asks of the form of its answer: a response format, structured outputs, forced
tool calls, and how the model reasons before that. Every dialect's request arrives here as the
fields of `ChatRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.base.errors import InvalidRequest
from headrace.base.wire.grammar import (
    Either,
    Json,
    Literal,
    Node,
    ReasoningRule,
    Sequence,
    StructuredOutputs,
)
from headrace.front.server.conversation.request import ChatRequest, Common
from headrace.front.text.parsing.engine import unmarked
from headrace.front.text.parsing.families import tool_family
from headrace.front.text.parsing.families_reasoning import ReasoningTags
from headrace.front.text.parsing.parser import AnswerFormat, OutputParser, begins_inside
from headrace.front.text.parsing.xml_parameters import schemas_of
from headrace.front.text.structure.requested import node_of
from headrace.front.text.structure.tools import required_calls, strict_calls

PLAIN_CALLS = "llama3_json"
"""How calls are written where the model's own way is not known: a bare JSON object with name and
parameters."""


_GUIDED = ("json", "regex", "choice", "grammar")


ANSWER_FORM = (
    *("response_format", "structured_outputs", "guided_whitespace_pattern"),
    *(f"guided_{kind}" for kind in _GUIDED),
)
"""The fields of a request that say what its answer must look like."""


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What an answer must be, what errors about it name, and the reasoning before it. Empty: it is
    free."""

    grammar: Node | None = None
    field: str = "structured_outputs"
    reasoning: ReasoningRule | None = None


FREE = Structure()


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """What a chat asks of its answer's form, before its prompt is known.

    `asked`, under the name `field`: a grammar. `offered`: the tools that may be called; `forced`:
    those of which one must be. `one_call`: several at once are off; `one_forced`: one call ends the
    answer. `budget`: reasoning tokens. `unfinished`: the text of the message that is continued."""

    asked: StructuredOutputs | None = None
    field: str = "structured_outputs"
    offered: list[dict[str, Any]] | None = None
    forced: list[dict[str, Any]] | None = None
    one_call: bool = False
    one_forced: bool = False
    budget: int | None = None
    unfinished: str | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing is asked, as by most."""
        parts = (self.asked, self.offered, self.forced, self.budget)
        return all(part is None for part in parts)


def form_of(request: ChatRequest) -> AnswerForm:
    """The form that a chat asks for, whose tools are functions and narrowed."""
    asked, name = asked_of(request)
    one_call = request.parallel_tool_calls is False
    return AnswerForm(
        asked=asked,
        field=name,
        offered=request.tools if request.tool_choice != "none" else None,
        forced=forced_tools(request),
        one_call=one_call,
        one_forced=one_call or isinstance(request.tool_choice, dict),
        budget=request.thinking_token_budget,
        unfinished=unfinished_text(request),
    )


def narrowed(request: ChatRequest) -> ChatRequest:
    """The request with `allowed_tools` carried out: only those tools are offered, under the mode
    given."""
    choice = request.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return request
    allowed = choice.get("allowed_tools")
    allowed = allowed if isinstance(allowed, dict) else choice  # flat in some dialects
    mode, listed = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise InvalidRequest(
            "tool_choice.allowed_tools: needs a mode (auto or required) and a list of tools",
            field="tool_choice",
        )
    names = {_name_of(tool) for tool in listed if isinstance(tool, dict)}
    tools = [tool for tool in request.tools or [] if _name_of(tool) in names]
    for name in names - {_name_of(tool) for tool in tools}:
        raise _unknown_tool(name, request.tools or [])
    return msgspec.structs.replace(request, tools=tools, tool_choice=mode)


def forced_tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools one of which must be called; None where none must."""
    choice, tools = request.tool_choice, request.tools or []
    if choice == "required":
        return tools
    if not isinstance(choice, dict):
        return None
    name = _name_of(choice)
    if choice.get("type") != "function" or name is None:
        raise InvalidRequest(
            "tool_choice: allowed are 'none', 'auto', 'required', "
            "{type: function, function: {name}} and {type: allowed_tools}",
            field="tool_choice",
        )
    named = [tool for tool in tools if _name_of(tool) == name]
    if not named:
        raise _unknown_tool(name, tools)
    return named


def tool_format(form: AnswerForm, answers: AnswerFormat) -> AnswerFormat:
    """How the answer is written. A model whose format of calls is not known writes forced ones as
    plain JSON."""
    if answers.tools is not None or form.forced is None:
        return answers
    return msgspec.structs.replace(answers, tools=tool_family(PLAIN_CALLS))


def structure_of(form: AnswerForm, answers: AnswerFormat, *, prompt_tail: str) -> Structure:
    """The structure of a conversation's answer; `prompt_tail` is how the prompt ends."""
    if form.is_free:
        return FREE
    name = form.field
    grammar = None if form.asked is None else node_of(form.asked, field=name)
    if form.forced is not None:
        # response_format is about the text of an answer, and there is none; some clients send it
        # along.
        if grammar is not None and not name.startswith("response_format"):
            raise InvalidRequest(
                f"tool_choice: a call is forced, which excludes {name}", field="tool_choice"
            )
        grammar, name = _forced(form, form.forced, answers), "tools"
    elif form.offered:
        grammar, name = _offered(form, form.offered, answers, grammar)
    tags = None if answers.reasoning is None else answers.reasoning.tags
    if grammar is not None and name != "tools" and tags is not None:
        grammar = _behind(tags.answer, grammar, prompt_tail)
    rule = _rule(form, tags, prompt_tail, constrained=grammar is not None)
    return Structure(grammar=grammar, field=name, reasoning=rule)


def plain_structure(request: Common) -> Structure:
    """The structure of a completion: nothing is known of reasoning or tools."""
    asked, field = asked_of(request)
    if asked is None:
        return FREE
    return Structure(grammar=node_of(asked, field=field), field=field)


def _behind(lead: str, grammar: Node, prompt_tail: str) -> Node:
    """A grammar behind what the model's answers begin with, unless the prompt has written it."""
    if not lead or prompt_tail.rstrip().endswith(lead):
        return grammar
    return Sequence((Literal(unmarked(lead)), grammar))


def _forced(form: AnswerForm, tools: list[dict[str, Any]], answers: AnswerFormat) -> Node:
    family = tool_format(form, answers).tools
    assert family is not None
    return required_calls(tools, family.writing, at_most_one=form.one_forced)


def _offered(
    form: AnswerForm, tools: list[dict[str, Any]], answers: AnswerFormat, grammar: Node | None
) -> tuple[Node | None, str]:
    """Tools beside a JSON format: an answer or calls. Strict tools: a call, once begun, obeys its
    schema."""
    if answers.tools is None:
        return grammar, form.field
    writing = answers.tools.writing
    if isinstance(grammar, Json):
        calls = required_calls(tools, writing, at_most_one=form.one_call)
        return Either((grammar, calls)), form.field
    if grammar is None and any(_is_strict(tool) for tool in tools):
        return strict_calls(tools, writing), "tools"
    return grammar, form.field


def asked_of(request: Common) -> tuple[StructuredOutputs | None, str]:
    """What response_format, structured_outputs or the old guided_* fields ask for, and which of
    them it was."""
    guided = {
        kind: value for kind in _GUIDED if (value := getattr(request, f"guided_{kind}")) is not None
    }
    names = [f"guided_{kind}" for kind in guided]
    names += ["structured_outputs"] if request.structured_outputs is not None else []
    asked = _response_format(request.response_format)
    names += ["response_format"] if asked is not None else []
    if len(names) > 1:
        raise InvalidRequest(f"{names[1]}: excludes {names[0]}", field=names[1])
    if asked is not None:
        return asked
    if guided:
        whitespace = request.guided_whitespace_pattern
        fields = {**guided, "whitespace_pattern": whitespace}
        return msgspec.convert(fields, StructuredOutputs), names[0]
    return request.structured_outputs, "structured_outputs"


def _response_format(
    response_format: dict[str, Any] | None,
) -> tuple[StructuredOutputs, str] | None:
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True), "response_format"
    if kind == "json_schema":
        return _json_schema(response_format.get("json_schema"))
    if kind == "structural_tag":
        return StructuredOutputs(structural_tag=response_format), "response_format"
    allowed = "'text', 'json_object', 'json_schema', 'structural_tag'"
    raise InvalidRequest(
        f"response_format.type: {str(kind)[:40]!r} given; allowed: {allowed}",
        field="response_format.type",
    )


def _json_schema(json_schema: Any) -> tuple[StructuredOutputs, str]:
    field = "response_format.json_schema"
    if not isinstance(json_schema, dict):
        raise InvalidRequest(f"{field}: an object with name and schema is needed", field=field)
    schema = json_schema.get("schema")
    if schema is None:
        return StructuredOutputs(json_object=True), field
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{field}.schema: must be an object", field=f"{field}.schema")
    closed = json_schema.get("strict") is True
    structure = StructuredOutputs(json=schema, disable_additional_properties=closed)
    return structure, f"{field}.schema"


def _rule(
    form: AnswerForm, tags: ReasoningTags | None, prompt_tail: str, *, constrained: bool
) -> ReasoningRule | None:
    """How the answer begins: inside of reasoning, maybe with it, or behind it."""
    budget = form.budget
    if tags is None:
        if budget is not None:
            raise InvalidRequest(
                "thinking_token_budget: no reasoning format is known for this model",
                field="thinking_token_budget",
            )
        return None
    if budget is None and not constrained:
        return None
    unfinished = form.unfinished
    inside = begins_inside(tags, prompt_tail, unfinished=unfinished)
    over = prompt_tail.rstrip().endswith(tags.close) or bool(unfinished)
    close = unmarked(tags.close)
    if tags.messages is not None:  # what follows the reasoning is another message
        close = unmarked(tags.messages.next)
    return ReasoningRule(
        open=unmarked(tags.open),
        close=close,
        inside=inside,
        may_open=not inside and not over,
        budget=budget,
        until=tuple(map(unmarked, tags.until)) if form.offered else (),
    )


def unfinished_text(request: ChatRequest) -> str | None:
    """The text of the message that is continued, if one is."""
    if not request.continue_final_message:
        return None
    content = request.messages[-1].get("content")
    return content if isinstance(content, str) else ""


def _name_of(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, Mapping) and function.get("strict") is True


def _unknown_tool(name: str | None, tools: list[dict[str, Any]]) -> InvalidRequest:
    known = ", ".join(str(_name_of(tool))[:64] for tool in tools[:32])
    return InvalidRequest(
        f"tool_choice: there is no tool {str(name)[:64]!r} (tools: {known})", field="tool_choice"
    )


def parser_of(form: AnswerForm, answers: AnswerFormat, *, prompt_tail: str) -> OutputParser | None:
    """A parser for one choice; None where the text is the content. `prompt_tail` is how the prompt
    ends."""
    return tool_format(form, answers).parser(
        prompt_tail=prompt_tail,
        unfinished=form.unfinished,
        schemas=None if form.offered is None else schemas_of(form.offered),
        only_one_call=form.one_call,
    )

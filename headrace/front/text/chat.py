"""Chat templates: messages to token ids.

Messages, as clients send them, are checked and brought into the one shape that templates expect:
every text goes through `Guard.protect`, so that no template can turn it into a control token; what
came as `reasoning` or `reasoning_content` goes on as both. The template runs in a process that can
be killed (`templates.py`). The limits are checked before the work: number of characters before
rendering, size of the rendering before encoding.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack

import msgspec

from headrace.base.errors import ContextTooLong, InvalidRequest
from headrace.front.text.chat_tools import check_tool, template_call
from headrace.front.text.files import file_text
from headrace.front.text.media_parts import NO_TOKEN, VECTORS_PART, MediaMark, with_mark, with_marks
from headrace.front.text.prompt_tokens import KEPT_CHARS, PromptTokens
from headrace.front.text.templates import LoopRenderer, TemplateLimits, TemplatePool, text_size
from headrace.front.text.threads import TEXT_THREADS
from headrace.front.text.tokenizer import MARK, VECTORS, Guard, Tokenizer, neutral, unguard

# Arguments that clients send whatever the model is; a template that does not read one is not
# changed by it.
COMMON_ARGUMENTS = frozenset(
    ["enable_thinking", "thinking", "reasoning_effort", "thinking_budget", "verbosity"]
)
# Names that are never arguments: the renderer's own variables, and options of other renderers.
_OWN_NAMES = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")
_OPTIONS = ("continue_final_message", "conversation", "tokenize", "chat_template", "return_dict")
_SIZE_OPTIONS = ("return_tensors", "padding", "truncation", "max_length")
_RESERVED = frozenset((*_OWN_NAMES, *_OPTIONS, *_SIZE_OPTIONS))
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
ROLES = ("developer", "system", "user", "assistant", "tool", "function")
MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
_REASONING = ("reasoning_content", "reasoning")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
SHORT_BYTES = 8192
"""So much is rendered and encoded without a thread."""
Messages = Sequence[dict[str, Any]]


class RenderOptions(TypedDict, total=False):
    """How to render. `add_generation_prompt` (true): open the assistant's turn.
    `continue_final_message` (false): leave the last message open. `tools`: what the model may call.
    `kwargs`: further variables of the template. `tenant`: whose prompt it is; None: nobody's, of
    which nothing is kept."""

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[dict[str, Any]] | None
    kwargs: Mapping[str, Any] | None
    tenant: str | None


class ChatTemplate:
    """One template for one tokenizer. Thread-safe."""

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        *,
        limits: TemplateLimits | None = None,
        pool: TemplatePool | None = None,
        max_tokens: int | None = None,
        any_role: bool = False,
    ) -> None:
        """`source` None: the model has no template, and every render is refused. `max_tokens`
        bounds a prompt. `any_role`: roles that OpenAI does not know reach the template."""
        self.source = source
        self._tokenizer = tokenizer
        self._limits = limits or TemplateLimits()
        self._pool = pool or TemplatePool(self._limits)
        self._short = LoopRenderer(self._pool)
        self._max_tokens = max_tokens
        self._any_role = any_role
        self._names: frozenset[str] | None = None
        self._prompt_tokens = PromptTokens(tokenizer)

    def render(self, messages: Messages, **options: Unpack[RenderOptions]) -> list[int]:
        """The prompt as ids."""
        return self._encoded(self._render(messages, options), options.get("tenant"))

    async def render_async(self, messages: Messages, **options: Unpack[RenderOptions]) -> list[int]:
        """`render`, in a thread where there is much text, so that other requests go on
        meanwhile."""
        if self._names is None or len(msgspec.json.encode([messages, options])) > SHORT_BYTES:
            rendered = await asyncio.to_thread(self._render, messages, options)
        else:
            rendered = await self._short.render(*self._prepared(messages, options))
            rendered = _cut(rendered) if options.get("continue_final_message") else rendered
        return await TEXT_THREADS.run(
            len(rendered), partial(self._encoded, rendered, options.get("tenant"))
        )

    def render_text(self, messages: Messages, **options: Unpack[RenderOptions]) -> str:
        """The prompt as people read it. Do not encode it: it no longer tells users' text from
        control tokens."""
        return unguard(self._render(messages, options))

    def warm_up(self) -> None:
        """Starts a process and compiles the template in it; a template that does not compile is
        refused."""
        self._argument_names()

    def close(self) -> None:
        """Ends the processes."""
        self._short.close()
        self._pool.close()

    def _encoded(self, rendered: str, tenant: str | None) -> list[int]:
        self._tokenizer.check_length(rendered, self._max_tokens, field="messages")
        if VECTORS in rendered:
            return self._encoded_around(rendered.split(VECTORS))
        return (
            self._tokenizer.encode_guarded(rendered)
            if tenant is None or len(rendered) < KEPT_CHARS
            else self._prompt_tokens.encode(rendered, tenant)
        )

    def _encoded_around(self, texts: Sequence[str]) -> list[int]:
        """Texts with NO_TOKEN between them."""
        first, *others = (self._tokenizer.encode_guarded(text) for text in texts)
        return [*first, *(token for ids in others for token in (NO_TOKEN, *ids))]

    def _render(self, messages: Messages, options: RenderOptions) -> str:
        rendered = self._pool.render(*self._prepared(messages, options))
        return _cut(rendered) if options.get("continue_final_message") else rendered

    def _prepared(self, messages: Messages, options: RenderOptions) -> tuple[str, dict[str, Any]]:
        """The template and its variables, checked and guarded."""
        add_generation_prompt = options.get("add_generation_prompt", True)
        continue_final_message = options.get("continue_final_message", False)
        tools, kwargs = options.get("tools"), options.get("kwargs") or {}
        source = self._source()
        self._check_size([messages, tools, dict(kwargs)])
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message: true excludes add_generation_prompt: true",
                field="continue_final_message",
            )
        guard = self._tokenizer.guard
        messages_with_mark = template_messages(
            messages, guard, developer_role="developer" in source, any_role=self._any_role
        )
        if continue_final_message:
            messages_with_mark[-1]["content"] = with_mark(messages_with_mark[-1]["content"])
        self._check_arguments(kwargs)
        return source, {
            **self._tokenizer.facts.special_tokens,
            **guard.protect_tree(dict(kwargs), "chat_template_kwargs"),
            "messages": messages_with_mark,
            "tools": self._tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }

    def _source(self) -> str:
        if self.source is None:
            raise InvalidRequest(
                "messages: this model has no chat template; use /v1/completions", field="messages"
            )
        return self.source

    def _check_size(self, messages: Any) -> None:
        if self._max_tokens is None:
            return
        size, most = text_size(messages), self._max_tokens * self._tokenizer.longest_token
        if size > most:
            raise ContextTooLong(
                f"prompt is too long: {-(-size // self._tokenizer.longest_token)} tokens > "
                f"{self._max_tokens} maximum (at least: it has {size} characters)",
                field="messages",
            )

    def _tools(self, tools: Sequence[dict[str, Any]] | None) -> Any:
        if not tools:
            return None
        if len(tools) > MAX_TOOLS:
            raise InvalidRequest(f"tools: {len(tools)} are more than {MAX_TOOLS}", field="tools")
        protected_tools = self._tokenizer.guard.protect_tree(list(tools), "tools")
        names: set[str] = set()
        for i, tool in enumerate(tools):
            name = check_tool(tool, f"tools[{i}]")
            if name in names:
                raise _bad(f"tools[{i}].function.name", f"{name!r:.80} is offered twice")
            names.add(name)
        return protected_tools

    def _check_arguments(self, kwargs: Mapping[str, Any]) -> None:
        special = self._tokenizer.facts.special_tokens
        for name in kwargs:
            if name in _RESERVED or name in special:
                raise InvalidRequest(
                    f"chat_template_kwargs.{name}: this name is reserved",
                    field="chat_template_kwargs",
                )
            if name not in COMMON_ARGUMENTS and name not in self._argument_names():
                known = sorted(
                    (self._argument_names() | COMMON_ARGUMENTS) - _RESERVED - set(special)
                )
                raise InvalidRequest(
                    f"chat_template_kwargs.{name:.80}: this model's template has no such argument "
                    f"(it has {', '.join(known)})",
                    field="chat_template_kwargs",
                )

    def _argument_names(self) -> frozenset[str]:
        if self._names is None:
            self._names = frozenset(self._pool.names(self._source()))
        return self._names


def _cut(rendered: str) -> str:
    """The rendering up to the end of the last message's own text."""
    end = rendered.rfind(MARK)
    if end < 0:
        raise InvalidRequest(
            "continue_final_message: the chat template does not render the last message's content",
            field="continue_final_message",
        )
    return rendered[:end].replace(MARK, "")


def template_messages(
    messages: Sequence[dict[str, Any]], guard: Guard, *, developer_role: bool, any_role: bool
) -> list[dict[str, Any]]:
    """The messages a template sees. Without `developer_role` a developer reads as system.
    `any_role`: a role may be any word."""
    if not messages:
        raise InvalidRequest(
            "messages: an empty list; at least one message is needed", field="messages"
        )
    if len(messages) > MAX_MESSAGES:
        raise _bad("messages", f"{len(messages)} messages are more than {MAX_MESSAGES}")
    rendered = []
    for i, message in enumerate(messages):
        _check_role(message, f"messages[{i}]", any_role=any_role)
        rendered.append(_message(message, f"messages[{i}]", guard))
    for message in rendered:
        if message["role"] == "developer" and not developer_role:
            message["role"] = "system"
    return rendered


def _check_role(message: Any, field: str, *, any_role: bool) -> None:
    if not isinstance(message, dict):
        raise _bad(field, f"{type(message).__name__} is not a message (an object)")
    role = message.get("role")
    if role in ROLES or (any_role and isinstance(role, str) and _ROLE.fullmatch(role)):
        return
    raise _bad(f"{field}.role", f"{role!r:.80} is none of {', '.join(ROLES)}")


def _message(message: dict[str, Any], field: str, guard: Guard) -> dict[str, Any]:
    role = message["role"]
    rendered: dict[str, Any] = {
        "role": role if role in ROLES else guard.protect_name(role),
        "content": _content(message, f"{field}.content", guard),
    }
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            rendered[name] = guard.protect_name(_text(message[name], f"{field}.{name}"))
    if role == "assistant":
        _assistant(message, rendered, field, guard)
    return rendered


def _assistant(message: dict[str, Any], rendered: dict[str, Any], field: str, guard: Guard) -> None:
    for name in _REASONING:
        if message.get(name):
            text = guard.protect(_text(message[name], f"{field}.{name}"))
            rendered["reasoning_content"] = rendered["reasoning"] = text
            break
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise _bad(f"{field}.tool_calls", f"{type(calls).__name__} is not a list")
        rendered["tool_calls"] = [
            template_call(call, f"{field}.tool_calls[{i}]", guard) for i, call in enumerate(calls)
        ]
    elif all(message.get(name) is None for name in ("content", "refusal", *_REASONING)):
        raise _bad(f"{field}.content", "null, and there are no tool_calls")


def _content(message: dict[str, Any], field: str, guard: Guard) -> str | list[dict[str, str]]:
    content = message.get("content")
    if isinstance(content, list) and any(isinstance(part, MediaMark) for part in content):
        return with_marks(
            [
                part
                if isinstance(part, MediaMark)
                else guard.protect(_text(_part(part, f"{field}[{i}]"), field))
                for i, part in enumerate(content)
            ]
        )
    if content is None and message["role"] == "assistant":
        return guard.protect(_text(message.get("refusal") or "", field))
    return _own_words(parts_text(content, field), message["role"], guard)


def parts_text(content: Any, field: str) -> str:
    """The text of a message's content, given as a text or as parts, which are joined by line
    breaks."""
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{field}[{i}]") for i, part in enumerate(content))
    return _text(content, field)


def _own_words(text: str, role: str, guard: Guard) -> str:
    """An assistant's earlier words may hold markup (<think>), which templates look for; never
    special tokens."""
    return guard.protect_special(text) if role == "assistant" else guard.protect(text)


def _part(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_file":
        return _text(file_text(part, field), field)
    if kind == "file":
        file = part.get("file")
        if not isinstance(file, dict):
            raise _bad(f"{field}.file", "an object with file_data and filename is needed")
        return _text(file_text(file, f"{field}.file"), f"{field}.file")
    if kind == VECTORS_PART:
        raise _bad(f"{field}.type", f"{kind!r} is not accepted: --enable-prompt-embeds is off")
    if kind not in _TEXT_PARTS:
        shown = repr(kind if isinstance(part, dict) else type(part).__name__)[:80]
        raise _bad(f"{field}.type", f"{shown} is not accepted by this model (only text is)")
    return _text(part.get(_TEXT_PARTS[kind]), f"{field}.{_TEXT_PARTS[kind]}")


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise _bad(field, f"{type(value).__name__} is not a text")
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise _bad(field, "holds half of a surrogate pair")
    return neutral(value)


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {what}", field=field)

"""Chat templates: messages to token ids.

The template runs in a process that can be killed (`template_pool`), on texts that no template can
turn into control tokens (`guard`). The limits are checked before the work: number of
characters before rendering, size of the rendering before encoding.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import msgspec

from headrace.base.errors import ContextTooLong, InvalidRequest
from headrace.front.text.chat_messages import protect_tree, template_messages, text_size
from headrace.front.text.guard import MARK, unguard
from headrace.front.text.template_loop import LoopRenderer
from headrace.front.text.template_pool import TemplateLimits, TemplatePool
from headrace.front.text.tokenizer import Tokenizer

# Arguments that clients send whatever the model is; a template that does not read one is not
# changed by it.
COMMON_ARGUMENTS = frozenset(
    ["enable_thinking", "thinking", "reasoning_effort", "thinking_budget", "verbosity"]
)
_BREAKS_CALLS = re.compile(r'["\\\x00-\x1f\x7f]')
# Names that are never arguments: the renderer's own variables, and options of other renderers.
_RESERVED = frozenset(
    [
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "conversation",
        "tokenize",
        "chat_template",
        "return_dict",
        "return_tensors",
        "padding",
        "truncation",
        "max_length",
        "raise_exception",
        "strftime_now",
    ]
)
MAX_TOOLS = 1024
SHORT_BYTES = 8192
Messages = Sequence[dict[str, Any]]
"""So much is rendered and encoded without a thread."""


class RenderOptions(TypedDict, total=False):
    """How to render. `add_generation_prompt` (true): open the assistant's turn.
    `continue_final_message` (false): leave the last message open. `tools`: what the model may call.
    `kwargs`: further variables of the template."""

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[dict[str, Any]] | None
    kwargs: Mapping[str, Any] | None


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
    ) -> None:
        """`source` None means that the model has no template: every render is refused. `max_tokens`
        bounds a prompt."""
        self.source = source
        self._tokenizer = tokenizer
        self._limits = limits or TemplateLimits()
        self._pool = pool or TemplatePool(self._limits)
        self._short = LoopRenderer(self._pool)
        self._max_tokens = max_tokens
        self._names: frozenset[str] | None = None

    def render(self, messages: Messages, **options: Unpack[RenderOptions]) -> list[int]:
        """The prompt as ids."""
        return self._encoded(self._render(messages, options))

    async def render_async(self, messages: Messages, **options: Unpack[RenderOptions]) -> list[int]:
        """`render`, in a thread where there is much text, so that other requests go on
        meanwhile."""
        if self._names is None or len(msgspec.json.encode([messages, options])) > SHORT_BYTES:
            return await asyncio.to_thread(self.render, messages, **options)
        rendered = await self._short.render(*self._prepared(messages, options))
        rendered = _cut(rendered) if options.get("continue_final_message") else rendered
        if len(rendered) > SHORT_BYTES:
            return await asyncio.to_thread(self._encoded, rendered)
        return self._encoded(rendered)

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

    def _encoded(self, rendered: str) -> list[int]:
        self._tokenizer.check_length(rendered, self._max_tokens)
        return self._tokenizer.encode_guarded(rendered)

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
            messages, guard, developer_role="developer" in source
        )
        if continue_final_message:
            messages_with_mark[-1]["content"] += MARK
        self._check_arguments(kwargs)
        return source, {
            **self._tokenizer.facts.special_tokens,
            **protect_tree(dict(kwargs), guard.protect, "chat_template_kwargs"),
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
        protected_tools = protect_tree(list(tools), self._tokenizer.guard.protect, "tools")
        for i, tool in enumerate(tools):
            _check_tool(tool, f"tools[{i}]")
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


def _check_tool(tool: dict[str, Any], field: str) -> None:
    """A function with a name that can be written into a call; other kinds of tool are refused."""
    kind, function = tool.get("type"), tool.get("function")
    if kind != "function":
        raise InvalidRequest(
            f"{field}.type: {kind!r:.80} given; allowed: 'function'", field=f"{field}.type"
        )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidRequest(
            f"{field}.function.name: a text is needed", field=f"{field}.function.name"
        )
    if _BREAKS_CALLS.search(name):
        raise InvalidRequest(
            f"{field}.function.name: {name!r:.80} given; quotation marks, backslashes and control characters are not "
            "allowed: a call is written with the name as it is",
            field=f"{field}.function.name",
        )


def _cut(rendered: str) -> str:
    """The rendering up to the end of the last message's own text."""
    end = rendered.rfind(MARK)
    if end < 0:
        raise InvalidRequest(
            "continue_final_message: the chat template does not render the last message's content",
            field="continue_final_message",
        )
    return rendered[:end].replace(MARK, "")

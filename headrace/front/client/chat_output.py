"""What a chat's answer says: reasoning, content and tool calls, for `LLM.chat` and the terminal.

The parsers are those of the served dialects (front/server/conversation/stages.py), which also count
and stream the same parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.base.config.resolved import TextSpec
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Generation
from headrace.front.text.parsing.engine import CallArguments, CallBegin, Content, Part, Reasoning
from headrace.front.text.parsing.parser import AnswerFormat, OutputParser
from headrace.front.text.parsing.xml_parameters import schemas_of
from headrace.front.text.tokenizer import Tokenizer


class ToolCallOutput(msgspec.Struct, kw_only=True):
    """A call the model asks for. `arguments`: JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


class ChatOutput(msgspec.Struct, kw_only=True):
    """An answer as far as it has come."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallOutput] = []

    def add(self, parts: Sequence[Part]) -> None:
        """More of it."""
        for part in parts:
            match part:
                case Reasoning():
                    self.reasoning += part.text
                case Content():
                    self.content += part.text
                case CallBegin():
                    self.tool_calls.append(ToolCallOutput(id=part.id, name=part.name))
                case CallArguments():
                    self.tool_calls[part.index].arguments += part.text

    def message(self) -> dict[str, Any]:
        """It as a message of the conversation that goes on; what was thought is not said again."""
        said: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            said["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return said


class ChatOutputParser:
    """Knows how the served model writes."""

    def __init__(self, text: TextSpec, tokenizer: Tokenizer) -> None:
        named = AnswerFormat.named(
            tool_parser=text.tool_parser, reasoning_parser=text.reasoning_parser
        )
        self._format = named.bound(tokenizer)
        self._tokenizer = tokenizer

    def parser(
        self,
        prompt_ids: list[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        unfinished: str | None = None,
    ) -> OutputParser:
        """A parser for one answer; see AnswerFormat.parser."""
        return (
            self._format.parser(
                prompt_tail=self._format.prompt_tail(self._tokenizer, prompt_ids),
                unfinished=unfinished,
                schemas=schemas_of(tools) if tools else None,
            )
            or OutputParser()
        )

    def generation(self, prompt_ids: list[int], params: SamplingParams) -> Generation:
        """The prompt, with the text spelled as the parser reads it."""
        skip = params.skip_special_tokens
        pieces = self._format.pieces and self._format.pieces_of(
            self._tokenizer, skip_special_tokens=skip
        )
        return Generation(prompt_ids=prompt_ids, params=params, pieces=pieces or None)

    def whole(self, parser: OutputParser, text: str) -> ChatOutput:
        """A complete answer."""
        output = ChatOutput()
        output.add(parser.push(text))
        output.add(parser.finish())
        return output

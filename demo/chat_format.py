"""The chat format as plain Python: a conversation as text pieces, each to be learnt or only read.

It writes what `chat_template.jinja` writes; the template is for engines, this is for training, where
millions of conversations are rendered and every piece must say whether the loss falls on it. A test
holds the two together.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from demo.tasks import Conversation, Message, Tool

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens: never shown to a user."""

MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
                 "</tool_response>")  # fmt: skip
"""One token each, but part of the text that parsers read."""

_TOOLS_OPEN = "# Tools\n\nYou may call these functions:\n<tools>"
_TOOLS_CLOSE = (
    "\n</tools>\n\nTo call a function, answer with:\n<tool_call>\n"
    '{"name": "function name", "arguments": {"argument": "value"}}\n</tool_call>'
)
_NO_THOUGHT = "<think>\n\n</think>\n\n"


class Piece(NamedTuple):
    """A run of text; `learnt` pieces are what the model itself has to write."""

    text: str
    learnt: bool


def pieces(conversation: Conversation) -> list[Piece]:
    """The whole conversation in the chat format, split where learning begins and ends."""
    found: list[Piece] = []
    pending = ""
    messages = conversation.messages
    if conversation.tools:
        pending += _tools_block(messages, conversation.tools)
        messages = messages[messages[0]["role"] == "system" :]
    previous = ""
    for message in messages:
        role = message["role"]
        if role == "assistant":
            pending += "<|im_start|>assistant\n"
            thought = message.get("reasoning_content", "") if conversation.thinking else ""
            if not thought:
                pending += _NO_THOUGHT
            opening = f"<think>\n{thought}\n</think>\n\n" if thought else ""
            found.append(Piece(pending, learnt=False))
            found.append(Piece(opening + _body(message) + "<|im_end|>", learnt=True))
            pending = "\n"
        elif role == "tool":
            if previous == "tool":
                pending = pending.removesuffix("<|im_end|>\n")
            else:
                pending += "<|im_start|>user"
            pending += f"\n<tool_response>\n{message['content']}\n</tool_response><|im_end|>\n"
        else:
            pending += f"<|im_start|>{role}\n{message['content']}<|im_end|>\n"
        previous = role
    return found


def _tools_block(messages: list[Message], tools: list[Tool]) -> str:
    lead = f"{messages[0]['content']}\n\n" if messages[0]["role"] == "system" else ""
    listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"<|im_start|>system\n{lead}{_TOOLS_OPEN}{listed}{_TOOLS_CLOSE}<|im_end|>\n"


def _body(message: Message) -> str:
    text = message["content"]
    for call in message.get("tool_calls", []):
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        gap = "\n" if text else ""
        text += f'{gap}<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n'
        text += "</tool_call>"
    return text

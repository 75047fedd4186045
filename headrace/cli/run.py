"""`headrace run MODEL [PROMPT]`: fetches a model if it is not there, and answers or chats."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from headrace.cli.chat import answer_once, chat, chat_line
from headrace.cli.downloading import download, is_absent_hub_id
from headrace.cli.model_argument import with_model


def main(argv: Sequence[str]) -> int:
    """With a prompt (words, or what stands on the input) one answer; without, a chat."""
    line = chat_line(
        "headrace run", "Answer a prompt, or chat; a hub id that is not there yet is fetched."
    )
    line.parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="what to answer")
    own, options = line.parse(argv)
    options = with_model(options, own.path)
    if is_absent_hub_id(options.model):
        download(options.model.model, options.model.revision)
    words = [" ".join(own.prompt)] if own.prompt else []
    if not sys.stdin.isatty() and (piped := sys.stdin.read().strip()):
        words.append(piped)
    if words:
        return asyncio.run(answer_once(options, own, "\n\n".join(words)))
    asyncio.run(chat(options, own))
    return 0

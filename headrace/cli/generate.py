"""`headrace generate [MODEL] --prompt TEXT`: continues prompts; with --chat each prompt is a user
message."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.base.config.options import CommandLine
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.cli.model_argument import add_model_argument, with_model
from headrace.cli.sampling_flags import add_sampling_flags, sampling_of
from headrace.cli.session import EngineSession, open_session
from headrace.front.client.events import Delta, Ended, Generation


def main(argv: Sequence[str]) -> int:
    """Continues every prompt and prints the answers in order."""
    line = CommandLine(
        "headrace generate",
        "Continue prompts.",
        groups=("model", "kv", "scheduler", "device", "adapters"),
    )
    add_model_argument(line)
    line.parser.add_argument(
        "--prompt", action="append", default=[], help="a prompt; may be repeated"
    )
    line.parser.add_argument("--file", help="a file with one prompt per line; - is standard input")
    line.parser.add_argument(
        "--chat", action="store_true", help="treat each prompt as a user's message"
    )
    line.parser.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    add_sampling_flags(line, max_tokens=256)
    own, options = line.parse(argv)
    prompts = own.prompt + _read_prompts(own.file)
    if not prompts:
        raise ConfigError("give at least one --prompt, or --file", field="--prompt")
    asyncio.run(_run(with_model(options, own.path), own, prompts))
    return 0


def _read_prompts(file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except OSError as error:
        raise ConfigError(
            f"--file: cannot read {file}: {error.strerror}", field="--file"
        ) from error
    return [line for line in text.splitlines() if line]


async def _run(options: Options, own: Any, prompts: list[str]) -> None:
    async with open_session(options) as session:
        answers = await asyncio.gather(*(_answer(session, own, prompt) for prompt in prompts))
        for prompt, (text, reason) in zip(prompts, answers, strict=True):
            if own.json:
                print(
                    json.dumps(
                        {"prompt": prompt, "text": text, "finish_reason": reason},
                        ensure_ascii=False,
                    )
                )
            else:
                print(text if own.chat else prompt + text)


async def _answer(session: EngineSession, own: Any, prompt: str) -> tuple[str, str]:
    if own.chat:
        ids = await session.template.render_async([{"role": "user", "content": prompt}])
    else:
        ids = session.engine.tokenizer.encode(prompt)
    text, reason = "", ""
    params = sampling_of(own, session.resolved.text.generation_defaults)
    async for event in session.engine.generate(Generation(prompt_ids=ids, params=params)):
        if isinstance(event, Delta):
            text += event.text
        elif isinstance(event, Ended):
            reason = event.reason
    return text, reason

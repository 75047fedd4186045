"""An engine for one command: core processes of its own, a client and the model's chat template."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.base.config.resolved import Resolved
from headrace.base.config.tree import Options
from headrace.front.client.chat_output import ChatOutputParser
from headrace.front.client.engine import AsyncLLM
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.tokenizer_files import check_vocabulary
from headrace.launch.local import start_local


class EngineSession:
    """What a command needs to ask the model something."""

    def __init__(self, engine: AsyncLLM, template: ChatTemplate, resolved: Resolved) -> None:
        self.engine = engine
        self.listener = ChatOutputParser(resolved.text, engine.tokenizer)
        self.template = template
        self.resolved = resolved


@asynccontextmanager
async def open_session(options: Options) -> AsyncIterator[EngineSession]:
    """Starts the engine of `options`; everything ends with the context."""
    local = start_local(options)
    try:
        text = local.resolved.text
        engine = AsyncLLM(text, local.socket_paths)
        check_vocabulary(engine.tokenizer, text.logits_width)
        await engine.start()
        template = ChatTemplate(text.chat_template, engine.tokenizer, max_tokens=text.max_model_len)
        try:
            yield EngineSession(engine, template, local.resolved)
        finally:
            template.close()
            await engine.close()
    finally:
        local.close()

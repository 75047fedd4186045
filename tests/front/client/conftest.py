from contextlib import asynccontextmanager

import pytest

from headrace.base.config.resolved import TextSpec
from headrace.front.client.engine import AsyncLLM
from headrace.front.client.limits import Limits
from tests.front.client.scripted_core import WIDTH, ScriptedCore, spell
from tests.front.text import vocabularies

LIMITS = Limits(heartbeat_s=0.05, hello_timeout_s=60)


@pytest.fixture
def tokenizer():
    return vocabularies.byte_level()


@pytest.fixture
def connect(tmp_path, tokenizer):
    """An AsyncLLM over scripted cores: `async with connect(follow) as (llm, core)`; `make`: another client."""

    @asynccontextmanager
    async def connect(follow=None, *, cores=1, limits=LIMITS, eos=(), make=AsyncLLM, **hello):
        follow = follow or spell(tokenizer.encode_plain("hello world. "))
        made = [ScriptedCore(tmp_path / f"core{i}", follow, **hello) for i in range(cores)]
        for core in made:
            await core.start()
        text = TextSpec(
            tokenizer_path="", chat_template=None, model_names=("m",), generation_defaults={},
            logits_width=WIDTH, eos_ids=tuple(eos), max_model_len=256,
        )  # fmt: skip
        llm = make(text, [core.path for core in made], limits=limits, tokenizer=tokenizer)
        try:
            await llm.start()
            yield (llm, made[0]) if cores == 1 else (llm, made)
        finally:
            await llm.close()
            for core in made:
                await core.stop()

    return connect

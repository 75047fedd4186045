"""Derendering leaves the event loop to others, and ends when its client leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.base.config.server_options import ServerOptions
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.openai import render, replay
from headrace.front.server.services import services_over
from headrace.front.text.threads import WorkStopped
from headrace.launch.resolve import server_spec

CHOICES = [{"index": i, "token_ids": [5] * 200} for i in range(16)]
BODY = {"request": {"prompt": "fox", "n": len(CHOICES)}, "response": {"choices": CHOICES}}


@pytest.fixture
async def context(connect: Any) -> AsyncIterator[RequestContext]:
    async with connect() as (llm, _):
        services = services_over(llm, llm.tokenizer, llm.text, server_spec(ServerOptions()))
        yield RequestContext(services=services, request_id="req-1")
        services.template.close()
        services.guest_templates.close()


async def test_much_is_derendered_in_a_thread_until_its_client_leaves(
    context: RequestContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, threads = replay.checkpoint, set[int]()
    begun, left, ended = threading.Event(), threading.Event(), threading.Event()

    def look() -> None:
        threads.add(threading.get_ident())
        begun.set()
        left.wait(300)
        try:
            checkpoint()
        except WorkStopped:
            ended.set()
            raise

    monkeypatch.setattr(replay, "checkpoint", look)
    task = asyncio.ensure_future(render.post_derender_completion(context, BODY))
    assert await asyncio.to_thread(begun.wait, 60), "the loop goes on meanwhile"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    left.set()
    assert await asyncio.to_thread(ended.wait, 60)
    assert threads and threading.get_ident() not in threads

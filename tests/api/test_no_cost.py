"""What is switched off costs nothing: a plain request runs the same lines of code as if the feature were not there.

Lines that run and not time: they are the same on every machine, and a feature that leaves a trace on the path of those
who do not use it is seen at once (OBS-01: no cost when off; API-21: off is free). Each line is counted, so that what
would run in a step that runs anyway is seen as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.base.config.resolved import Resolved
from headrace.base.config.tree import Options
from headrace.base.wire.request import EngineRequest
from headrace.front.client.engine import AsyncLLM
from headrace.front.client.limits import Limits
from headrace.front.server.conversation.tracing import Tracer
from headrace.front.server.services import services_over
from headrace.front.server.table import make_app
from headrace.launch.facts import resolve_options
from tests.api.lines import LineCounter, Lines, more
from tests.front.client.scripted_core import Follow, ScriptedCore, spell

ROOT = Path(__file__).resolve().parents[2]
TRACING = "front/server/conversation/tracing.py"
FEW, MANY = 4, 40
ANSWERS = 3


def core_lines(*words: str, **options: bool) -> Lines:
    """Of a plain request, in a process of its own."""
    command = [sys.executable, "-m", "tests.api.lines", json.dumps({"model": options}), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: Lines = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_attention_capture_that_nobody_asks_for_runs_the_same_lines() -> None:
    """API-21: a core that could capture does for a plain request what one that cannot does."""
    plain, able = core_lines(), core_lines(attention_capture=True)
    assert len(plain) > 40 and more(able, plain) == {} == more(plain, able)
    asked = core_lines("0", attention_capture=True)
    assert "back/runner/capture.py" in more(asked, able), "the measure sees it where it is used"


@pytest.fixture(scope="module")
def resolved() -> Resolved:
    return resolve_options(Options())


async def front_lines(
    resolved: Resolved, folder: Path, num_tokens: int, exporter: InMemorySpanExporter | None = None
) -> Lines:
    """Of a streamed completion over a core that says a token when the one before is out: one order of events."""
    text, patient = resolved.text, Limits(heartbeat_s=300, heartbeat_timeout_s=600)
    width = text.logits_width
    core = ScriptedCore(folder / "core", spell([0]), logits_width=width)
    engine = AsyncLLM(text, [core.path], limits=patient)
    services = services_over(engine, engine.tokenizer, text, resolved.server)
    services.warm = True
    if exporter is not None:
        services.tracer = Tracer("", model="m", exporter=exporter)
    core.follow = in_turn(core, spell(engine.tokenizer.encode_plain(" one"), width))
    async with core:
        await engine.start()
        found = await last_answer(letting_flow(core, make_app(services)), num_tokens)
        await engine.close()
    if services.tracer is not None:
        services.tracer.close()
    return {name: at for name, at in found.items() if name.startswith("front/")}


def in_turn(core: ScriptedCore, follow: Follow) -> Follow:
    """Says one token, and no other before it is let."""

    def once(request: EngineRequest, tokens: list[int]) -> np.ndarray:
        core.flow.clear()
        return follow(request, tokens)

    return once


def letting_flow(core: ScriptedCore, app: ASGIApp) -> ASGIApp:
    """The application; with what it sends the core goes on."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            await send(message)
            core.flow.set()

        await app(scope, receive, sent)

    return answered


async def last_answer(app: ASGIApp, num_tokens: int) -> Lines:
    """From the application's call to its return; those before it are there for what runs once."""
    counter = LineCounter()
    body = {"prompt": "hello", "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    ways = {"transport": httpx.ASGITransport(app), "base_url": "http://localhost"}
    with counter.installed():
        async with httpx.AsyncClient(**ways) as client:
            for _ in range(ANSWERS):
                with counter.counting():
                    answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200 and answer.text.count("data: ") > num_tokens
    return counter.lines()


async def test_tracing_is_a_matter_of_requests_and_never_of_tokens(
    resolved: Resolved, tmp_path: Path
) -> None:
    """Off, no line of it runs. On, it adds a few lines of the front where a request begins and ends. (The core knows
    nothing of it.)"""
    added = []
    for num_tokens in (FEW, MANY):
        exporter = InMemorySpanExporter()
        plain = await front_lines(resolved, tmp_path, num_tokens)
        traced = await front_lines(resolved, tmp_path, num_tokens, exporter)
        assert TRACING not in plain and TRACING in traced
        assert more(plain, traced) == {}
        assert len(exporter.get_finished_spans()) == 2 * ANSWERS
        added.append(more(traced, plain))
    few, many = added
    assert few == many
    few.pop(TRACING)
    allowed = ("app", "conversation/context", "conversation/stages")
    assert few.keys() <= {f"front/server/{name}.py" for name in allowed}
    assert sum(sum(lines.values()) for lines in few.values()) <= 10, few

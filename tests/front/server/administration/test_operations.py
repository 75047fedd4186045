"""What an operator does, over scripted cores: pauses that are whole, and answers that are true."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.base.config.server_options import ServerOptions
from headrace.base.errors import Conflict, NotFound
from headrace.front.client.engine import AsyncLLM
from headrace.front.server.administration import operations
from headrace.front.server.administration.parameters import (
    NoParameters,
    PauseParameters,
    RequestsParameters,
)
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.http.auth import ADMIN_TENANT
from headrace.front.server.native import health
from headrace.front.server.openai import models
from headrace.front.server.services import services_over
from headrace.launch.resolve import server_spec
from tests.front.client.test_engine import generation, run_one

NONE = NoParameters()


@contextmanager
def over(llm: AsyncLLM, tenant: str = "") -> Iterator[RequestContext]:
    services = services_over(llm, llm.tokenizer, llm.text, server_spec(ServerOptions()))
    services.warm = True
    try:
        yield RequestContext(services=services, request_id="req-1", tenant=tenant)
    finally:
        services.template.close()
        services.guest_templates.close()


PAUSED, RUNNING = {"paused": True, "mode": "keep"}, {"paused": False, "mode": ""}


async def test_a_pause_that_fails_on_one_replica_is_undone_on_all(connect: Any) -> None:
    """Each core goes back to what it was before this pause, which its token names."""
    async with connect(cores=2) as (llm, cores):
        cores[1].failing.add("pause")
        with over(llm) as context, pytest.raises(Conflict):
            await operations.pause(context, PauseParameters(mode="keep", clear_cache=False))
        for core in cores:
            pause, undo = [call for call in core.calls if call.operation != "ping"][-2:]
            assert (pause.operation, undo.operation) == ("pause", "undo_pause")
            assert pause.arguments["token"] == undo.arguments["token"] != ""


async def test_paused_is_what_holds_requests_back(connect: Any) -> None:
    async with connect(cores=2) as (llm, cores):
        cores[0].replies["is_paused"], cores[1].replies["is_paused"] = PAUSED, RUNNING
        with over(llm) as context:
            assert (await operations.is_paused(context, NONE))["is_paused"]
            cores[0].replies["is_paused"] = RUNNING
            assert not (await operations.is_paused(context, NONE))["is_paused"]
            cores[0].failing.add("is_paused")
            assert not (await operations.is_paused(context, NONE))["is_paused"], "one tells"


async def test_a_resume_reaches_the_others_where_one_fails(connect: Any) -> None:
    async with connect(cores=2) as (llm, cores):
        cores[0].failing.add("resume")
        with over(llm) as context, pytest.raises(Conflict):
            await operations.resume(context, NONE)
        assert "resume" in [call.operation for call in cores[1].calls]


async def readiness(context: RequestContext) -> tuple[int, str]:
    response = await health.probing(health.readiness)(context, None)
    return response.status_code, json.loads(response.body)["status"]


async def test_readiness_tells_of_pauses_sleep_and_lost_replicas(connect: Any) -> None:
    async with connect(cores=2) as (llm, cores):
        with over(llm) as context:
            assert await readiness(context) == (200, "ready")
            for held in ("paused", "asleep"):
                for core in cores:
                    core.announce(held=held)
                await llm.call_each("status")
                assert await readiness(context) == (503, held)
            assert not [call for core in cores for call in core.calls if call.operation != "status"]
            cores[0].announce(held="")
            await llm.call_each("status")
            assert (await readiness(context))[0] == 200
            await cores[1].stop()
            while llm.connected != (1, 2):
                await llm.call_each("status")
            assert await readiness(context) == (200, "degraded")
            await cores[1].start()


async def test_startup_tells_what_is_waited_for(connect: Any) -> None:
    async with connect() as (llm, _):
        with over(llm) as context:
            context.services.warm = False
            context.services.start_phase = "waiting for the engine to load"
            response = await health.get_startup(context, None)
            document = json.loads(response.body)
            assert response.status_code == 503 and document.pop("elapsed_s") >= 0
            assert document == {
                "status": "loading",
                "phase": "waiting for the engine to load",
                "engines_ready": 1,
                "engines": 1,
            }


async def test_a_key_reads_nothing_of_other_keys_in_the_ledger(connect: Any) -> None:
    async with connect() as (llm, core):
        waiting = {"aaaaaaaa": 2, "bbbbbbbb": 3, "no key": 1}
        core.replies["status"] = {"waiting": 6, "waiting_by_tenant": waiting}
        for tenant, seen in (
            ("a" * 32, {"aaaaaaaa": 2, "other keys": 4}),
            ("c" * 32, {"other keys": 6}),
            (ADMIN_TENANT, waiting),
            ("", waiting),
        ):
            with over(llm, tenant) as context:
                engine = (await operations.ledger(context, NONE))["engines"][0]
                assert engine == {"waiting": 6, "waiting_by_tenant": seen}


async def test_models_tell_the_length_that_the_pool_holds(connect: Any) -> None:
    async with connect(capacity_tokens=100) as (llm, _):
        with over(llm) as context:
            response = await models.get_models(context, None)
            assert json.loads(response.body)["data"][0]["max_model_len"] == 100


async def test_a_client_asks_for_its_own_requests_and_an_operator_for_all(connect: Any) -> None:
    async with connect() as (llm, core):
        core.flow.clear()
        own = generation(label="chatcmpl-" + "0" * 32, external_id="mine", tenant="a")
        task = asyncio.create_task(run_one(llm, own))
        await core.until(lambda: len(core.requests) == 1)
        for tenant, ident in (("a", "mine"), (ADMIN_TENANT, "mine"), ("b", own.label)):
            with over(llm, tenant) as context:
                assert (await operations.requests(context, RequestsParameters(id=ident)))[
                    "requests"
                ]
        with over(llm, "b") as context, pytest.raises(NotFound):
            await operations.requests(context, RequestsParameters(id="mine"))
        core.flow.set()
        await task

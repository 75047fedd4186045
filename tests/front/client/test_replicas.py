"""PAR-07: another number of engine cores, as an API process sees it: over scripted cores, which a
scripted parent starts and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.base.config.resolved import TextSpec
from headrace.base.errors import Conflict, DrainTimeout, EngineError, HeadraceError, InvalidRequest
from headrace.base.wire.request import AbortRequests
from headrace.front.client.connection import Connection
from headrace.front.client.engine import AsyncLLM
from headrace.front.text.tokenizer import Tokenizer
from headrace.launch.api_process import failure_at
from tests.front.client.conftest import LIMITS
from tests.front.client.scripted_core import WIDTH, ScriptedCore, spell

Started = tuple[AsyncLLM, list[ScriptedCore], list[int]]


@pytest.fixture
def serve(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., Any]:
    """An AsyncLLM over three cores, of which the first is always there; the parent does what it is asked at once."""

    @asynccontextmanager
    async def serve(
        *, fails: bool = False, share: bool = False, **hello: Any
    ) -> AsyncIterator[Started]:
        cores = [ScriptedCore(tmp_path / f"core{i}", spell([7, 8])) for i in range(3)]
        text = TextSpec(
            tokenizer_path="",
            chat_template=None,
            model_names=("m",),
            generation_defaults={},
            logits_width=WIDTH,
            eos_ids=(),
            max_model_len=256,
        )
        paths = [core.path for core in cores]
        llm = AsyncLLM(
            text, paths, limits=LIMITS, tokenizer=tokenizer, replicas=1, share_experts=share
        )
        asked, there = [1], [True, False, False]
        tasks: list[asyncio.Task[None]] = []

        async def carry_out(count: int) -> None:
            for i, core in enumerate(cores):
                if there[i] == (i < count):
                    continue
                if fails and i < count:
                    failure_at(core.path).write_text("no room")
                    continue
                there[i] = i < count
                if there[i] and hello:
                    core.announce(**hello)
                await (core.start() if there[i] else core.stop())

        def ask(count: int) -> None:
            asked.append(count)
            tasks.append(asyncio.ensure_future(carry_out(count)))

        llm.replicas.ask = ask
        await cores[0].start()
        try:
            await llm.start()
            yield llm, cores, asked
        finally:
            await asyncio.gather(*tasks)
            await llm.close()
            for core, is_there in zip(cores, there, strict=True):
                if is_there:
                    await core.stop()

    return serve


async def test_cores_come_and_go(serve: Any) -> None:
    async with serve() as (llm, cores, asked):
        assert llm.connected == (1, 1) and not llm.degraded
        await llm.replicas.scale(3, drain_s=1.0)
        assert llm.connected == (3, 3) and not llm.degraded and llm.ready
        assert len(await llm.call("status")) == 3
        await llm.replicas.scale(2, drain_s=1.0)
        assert llm.connected == (2, 2) and len(await llm.call_each("status")) == 2
        await llm.replicas.scale(2, drain_s=1.0)
        await llm.replicas.scale(1, drain_s=1.0)
        assert llm.connected == (1, 1) and asked == [1, 3, 2, 2, 1]
        asked_of_last = [call.operation for call in cores[2].calls if call.operation != "ping"]
        assert asked_of_last == ["status", "drain"]


async def test_a_drain_that_takes_too_long_is_undone(serve: Any) -> None:
    async with serve() as (llm, cores, asked):
        await llm.replicas.scale(2, drain_s=1.0)
        cores[1].replies["undo_drain"] = {}
        cores[1].mute = True
        waiting = asyncio.ensure_future(llm.replicas.scale(1, drain_s=0.05))
        await cores[1].until(lambda: "undo_drain" in [c.operation for c in cores[1].calls])
        assert llm.replicas.scaling
        with pytest.raises(Conflict, match="is being changed"):
            await llm.replicas.scale(2, drain_s=1.0)
        await cores[1].stop()  # nothing answers the undoing but its end
        with pytest.raises(DrainTimeout, match=r"0\.05 s are over") as caught:
            await waiting
        assert caught.value.status == 408 and asked == [1, 2] and not llm.replicas.scaling
        await cores[1].start()


async def test_a_drain_without_time_leaves_cores_that_take_requests(serve: Any) -> None:
    """They may not even have heard of it, and have nothing to tell of its end."""
    async with serve() as (llm, cores, _):
        await llm.replicas.scale(2, drain_s=1.0)
        cores[1].replies["undo_drain"] = {}
        with pytest.raises(DrainTimeout):
            await llm.replicas.scale(1, drain_s=0)
        assert llm.connected == (2, 2) and not llm.degraded


async def test_cores_that_share_out_experts_drain_meet_and_go_on(
    serve: Any, tmp_path: Path
) -> None:
    """Those that come or go are there while the experts change places."""
    async with serve(share=True) as (llm, cores, asked):
        for core in cores:
            core.replies |= {"undo_drain": {}, "share_experts": {}}
        await llm.replicas.scale(3, drain_s=1.0)
        assert llm.connected == (3, 3) and not llm.degraded
        await llm.replicas.scale(3, drain_s=1.0)
        await llm.replicas.scale(2, drain_s=1.0)
        assert llm.connected == (2, 2) and not llm.degraded and asked == [1, 3, 3, 3, 2]
        began = ["drain", "share_experts", "undo_drain"]
        first, _, last = (
            [c.operation for c in core.calls if c.operation in began] for core in cores
        )
        assert first == 2 * began and last == [*began[1:], *began[:2]]
        shared = [call.arguments for call in cores[1].calls if call.operation == "share_experts"]
        assert [one["cores"] for one in shared] == [3, 2]
        folders = {Path(one["folder"]) for one in shared}
        assert len(folders) == 2 and all(one.parent == tmp_path for one in folders)
        assert all(one.is_dir() for one in folders)


@pytest.mark.parametrize("count", [0, 4])
async def test_what_is_out_of_bounds_is_refused(serve: Any, count: int) -> None:
    async with serve() as (llm, _, asked):
        with pytest.raises(InvalidRequest, match=rf"{count} given; 1 \(--replicas\) to 3"):
            await llm.replicas.scale(count, drain_s=1.0)
        assert asked == [1]


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"fails": True}, EngineError, "cannot start: no room"),
        ({"weights_version": "7"}, Conflict, "weights were replaced"),
    ],
)
async def test_a_core_that_cannot_join_leaves_all_as_it_was(
    serve: Any, how: dict[str, Any], error: type[HeadraceError], words: str
) -> None:
    async with serve(**how) as (llm, _, asked):
        with pytest.raises(error, match=words):
            await llm.replicas.scale(2, drain_s=1.0)
        assert asked == [1, 2, 1] and llm.connected == (1, 1)


async def test_a_core_takes_requests_from_its_hello_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PAR-07: its first request may come before the task that has connected goes on."""
    async with ScriptedCore(tmp_path / "core", spell([7])) as core:
        receiver: Any = SimpleNamespace(on_lost=lambda: None)
        connection = Connection(core.path, receiver, LIMITS)
        loop, connected = asyncio.get_running_loop(), asyncio.Event()
        make = loop.create_unix_connection
        refusals: list[HeadraceError] = []

        async def late(*arguments: Any) -> Any:
            pair = await make(*arguments)
            await connection.wait_ready()
            try:
                connection.send(AbortRequests((5,)))
            except HeadraceError as error:
                refusals.append(error)
            connected.set()
            return pair

        monkeypatch.setattr(loop, "create_unix_connection", late)
        connection.start()
        await connected.wait()
        assert refusals == []
        await core.until(lambda: core.aborted == [5])
        await connection.close()

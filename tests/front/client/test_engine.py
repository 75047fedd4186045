import asyncio
import gc
import weakref
from contextlib import aclosing

import msgspec
import pytest

from headrace.base.errors import (
    Conflict,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    NotFound,
    Unavailable,
    WireError,
)
from headrace.base.wire.media import MediaInput
from headrace.base.wire.request import SamplingParams
from headrace.front.client.admission_retry import RETRY_S
from headrace.front.client.engine import AsyncLLM
from headrace.front.client.events import Delta, Ended, Generation, PromptScored, Started
from headrace.front.client.limits import Limits
from headrace.front.client.llm import run_one
from tests.front.client.conftest import LIMITS
from tests.front.client.scripted_core import spell

PINGED = Limits(heartbeat_s=0.01, heartbeat_timeout_s=1000.0, hello_timeout_s=300)


def age(llm, core=0):
    """As if the core had been silent for longer than it may be."""
    llm._cores[core].connection._heard_s -= 2000.0


def generation(prompt=(1, 2, 3), label="", external_id="", tenant="", **params):
    return Generation(
        prompt_ids=list(prompt),
        params=SamplingParams(**{"max_tokens": 8, **params}),
        label=label,
        external_id=external_id,
        tenant=tenant,
    )


async def events_of(llm, wanted):
    return [event async for event in llm.generate(wanted)]


async def test_events_come_in_order_and_fold_to_the_text(connect, tokenizer):
    async with connect() as (llm, _):
        events = await events_of(llm, generation(max_tokens=30))
        assert events[0] == Started(3)
        assert isinstance(events[-1], Ended)
        deltas = events[1:-1]
        assert all(isinstance(event, Delta) for event in deltas)
        ids = [i for event in deltas for i in event.token_ids]
        assert len(ids) == 30
        assert "".join(event.text for event in deltas) == tokenizer.decode(ids)
        assert (events[-1].reason, events[-1].num_output, events[-1].num_cached) == (
            "length",
            30,
            3,
        )


async def test_each_answer_reaches_its_own_reader(connect, tokenizer):
    def follow(request, tokens):
        return spell([int(request.prompt_ids()[0])])(request, tokens)

    async with connect(follow) as (llm, _):
        outputs = await asyncio.gather(
            *(run_one(llm, generation([i], max_tokens=5)) for i in range(40))
        )
        assert [output.outputs[0].token_ids for output in outputs] == [[i] * 5 for i in range(40)]
        assert llm.num_in_flight == 0


async def test_equal_labels_never_mix_requests(connect):
    """P6, T6: 100 concurrent requests with one label; aborting one leaves the others alone."""

    def follow(request, tokens):
        return spell([int(request.prompt_ids()[0])])(request, tokens)

    async with connect(follow) as (llm, core):
        core.flow.clear()
        wanted = [generation([i], label="same", max_tokens=4) for i in range(100)]
        tasks = [asyncio.create_task(run_one(llm, one)) for one in wanted]
        await core.until(lambda: len(core.requests) == 100)
        assert len({request.id for request in core.requests}) == 100
        tasks[7].cancel()
        await asyncio.gather(tasks[7], return_exceptions=True)
        core.flow.set()
        for i, task in enumerate(tasks):
            if i != 7:
                assert (await task).outputs[0].token_ids == [i] * 4


async def test_a_stop_string_over_several_tokens_ends_and_aborts(connect, tokenizer):
    ids = tokenizer.encode_plain("one two ST") + tokenizer.encode_plain("OP three")
    async with connect(spell(ids)) as (llm, core):
        output = await run_one(llm, generation(stop=("STOP",), max_tokens=200))
        answer = output.outputs[0]
        assert (answer.text, answer.finish_reason, answer.stop) == ("one two ", "stop", "STOP")
        await core.until(lambda: core.aborted == [core.requests[0].id])
        assert llm.num_in_flight == 0


async def test_include_stop_string(connect, tokenizer):
    async with connect(spell(tokenizer.encode_plain("a STOP b"))) as (llm, _):
        wanted = generation(stop=("STOP",), include_stop_str_in_output=True, max_tokens=200)
        assert (await run_one(llm, wanted)).text == "a STOP"


async def test_a_stop_string_does_not_count_before_min_tokens(connect, tokenizer):
    ids = tokenizer.encode_plain("x STOP ")
    async with connect(spell(ids)) as (llm, _):
        wanted = generation(stop=("STOP",), min_tokens=len(ids), max_tokens=200)
        assert (await run_one(llm, wanted)).text == "x STOP x "


@pytest.mark.parametrize("include", [True, False])
async def test_the_text_of_a_stop_id_is_left_out_unless_asked_for(connect, tokenizer, include):
    ids = tokenizer.encode_plain("hello!")
    async with connect(spell(ids)) as (llm, _):
        wanted = generation(stop_token_ids=(ids[-1],), include_stop_str_in_output=include)
        answer = (await run_one(llm, wanted)).outputs[0]
        assert answer.text == ("hello!" if include else "hello")
        assert (answer.finish_reason, answer.stop, answer.token_ids) == ("stop", ids[-1], ids)


async def test_eos_ends_unless_ignored(connect, tokenizer):
    eos = tokenizer.token_id("<|im_end|>")
    async with connect(spell([*tokenizer.encode_plain("hi"), eos]), eos=[eos]) as (llm, _):
        ended = await run_one(llm, generation(max_tokens=50))
        assert (ended.text, ended.outputs[0].stop) == ("hi", eos)
        ignored = await run_one(llm, generation(max_tokens=6, ignore_eos=True))
        assert ignored.outputs[0].finish_reason == "length"
        shown = await run_one(
            llm, generation(max_tokens=6, ignore_eos=True, skip_special_tokens=False)
        )
        assert "<|im_end|>" in shown.text and "<|im_end|>" not in ignored.text


async def test_closing_the_iterator_aborts_every_answer(connect):
    async with connect() as (llm, core):
        async with aclosing(llm.generate(generation(n=3, max_tokens=200))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
        assert llm.num_in_flight == 0
        await core.until(lambda: core.num_running == 0)
        assert set(core.aborted) == {request.id for request in core.requests}


async def test_a_dropped_iterator_aborts_too(connect):
    async with connect() as (llm, core):
        events = llm.generate(generation(max_tokens=200))
        await anext(events)
        del events
        gc.collect()
        await core.until(lambda: core.num_running == 0)


async def test_what_a_refused_generation_held_waits_for_no_collector(connect):
    """Defect: the stream kept the error, and the error's traceback the stream."""
    async with connect() as (llm, core):
        core.refuse = WireError("QueueFull", "the queue is full")
        gc.disable()
        try:
            try:
                await run_one(llm, generation())
            except Unavailable as error:
                held = weakref.ref(error)
            await core.until(lambda: held() is None)
        finally:
            gc.enable()


async def test_a_core_that_dies_fails_everything_at_once_and_is_found_again(connect):
    async with connect() as (llm, core):
        core.flow.clear()
        tasks = [asyncio.create_task(run_one(llm, generation())) for _ in range(5)]
        await core.until(lambda: len(core.requests) == 5)
        await core.stop()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineDead) for result in results)
        assert not llm.ready and not llm.alive
        with pytest.raises(Unavailable) as caught:
            await run_one(llm, generation())
        assert caught.value.retry_after_s
        with pytest.raises(InvalidRequest):  # the caller's mistake comes first
            await run_one(llm, generation(temperature=-1))
        core.flow.set()
        await core.start()
        await llm._cores[0].connection.wait_ready()
        assert llm.ready and llm.alive
        assert (await run_one(llm, generation())).outputs[0].finish_reason == "length"


async def test_what_came_before_a_failure_is_still_read(connect):
    async with connect() as (llm, core):
        events = llm.generate(generation(max_tokens=250))
        assert await anext(events) == Started(3)
        await core.until(lambda: len(core._running) == 1)
        await llm.call("status")
        await core.stop()
        while llm.ready:
            await asyncio.sleep(0)
        delta = await anext(events)
        assert isinstance(delta, Delta) and delta.token_ids
        with pytest.raises(EngineDead):
            _ = [event async for event in events]
        await core.start()


async def test_a_refusal_of_the_core_is_raised_before_any_event(connect):
    async with connect() as (llm, core):
        core.refuse = WireError("Unavailable", "the queue is full", None, 2.0)
        with pytest.raises(Unavailable, match="queue is full") as caught:
            await anext(llm.generate(generation()))
        assert caught.value.retry_after_s == 2.0
        core.refuse = WireError("NonFiniteLogits", "nan")
        with pytest.raises(Exception, match="nan"):
            await run_one(llm, generation(n=3))
        assert llm.num_in_flight == 0


@pytest.mark.parametrize("prompt", [(1, 2, 3), tuple(range(1, 100))], ids=["at once", "shared"])
@pytest.mark.parametrize("full_for", [(2,), (1, 3), (2, 3, 4, 5, 6)])
async def test_answers_that_find_no_room_wait_where_another_one_found_some(
    connect, prompt, full_for
):
    """n > 1 is admitted as a whole: what has begun is not lost to a 503 in the middle."""
    async with connect() as (llm, core):
        core.full_for = full_for if len(prompt) < 64 else tuple(i for i in full_for if i > 1)
        events = await events_of(llm, generation(prompt, n=3, max_tokens=4))
        ended = [event for event in events if isinstance(event, Ended)]
        assert sorted(event.index for event in ended) == [0, 1, 2]
        assert {(event.reason, event.num_output) for event in ended} == {("length", 4)}
        assert len(core.requests) == 3 + len(core.full_for)
        assert llm.num_in_flight == 0


async def test_where_no_answer_finds_room_the_request_is_refused_at_once(connect):
    async with connect() as (llm, core):
        core.full_for = range(1, 100)
        with pytest.raises(Unavailable, match="full"):
            await events_of(llm, generation(n=3))
        await asyncio.sleep(3 * RETRY_S)
        assert len(core.requests) == 3, "nothing is sent again for nobody"
        assert llm.num_in_flight == 0


async def test_who_waits_for_room_is_forgotten_with_its_reader(connect):
    async with connect() as (llm, core):
        core.full_for = range(2, 100)
        core.flow.clear()
        async with aclosing(llm.generate(generation(n=2, max_tokens=4))) as events:
            reading = asyncio.create_task(anext(events))
            await core.until(lambda: len(core.requests) >= 3)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await core.until(lambda: core.num_running == 0)
        sent = len(core.requests)
        await asyncio.sleep(3 * RETRY_S)
        assert len(core.requests) == sent and llm.num_in_flight == 0


async def test_the_wait_for_room_ends_with_the_deadline_or_the_core(connect):
    async with connect() as (llm, core):
        core.full_for = range(2, 10_000)
        wanted = msgspec.structs.replace(generation(n=2, max_tokens=4), deadline_s=0.3)
        with pytest.raises(DeadlineExceeded, match="not started within"):
            await events_of(llm, wanted)
        core.full_for = range(len(core.requests) + 2, 10_000)
        reading = asyncio.create_task(events_of(llm, generation(n=2, max_tokens=4)))
        before = len(core.requests)
        await core.until(lambda: len(core.requests) > before + 2)
        await core.stop()
        with pytest.raises((Unavailable, EngineDead)):
            await reading


async def test_a_slow_reader_gets_merged_deltas(connect, tokenizer):
    """Reliability 1.7: coalesced first."""
    async with connect() as (llm, core):
        events = llm.generate(generation(max_tokens=200))
        assert await anext(events) == Started(3)
        await core.until(lambda: core.num_running == 0)
        await llm.call("status")  # a round trip: everything sent before has arrived
        rest = [event async for event in events]
        assert len(rest) <= 3
        assert sum(len(event.token_ids) for event in rest[:-1]) == 200


async def test_a_reader_that_never_reads_loses_its_request_only(connect):
    """Reliability 1.7: then aborted, without slowing others."""
    limits = Limits(max_pending_bytes=2000)
    async with connect(limits=limits) as (llm, core):
        stalled = llm.generate(generation(max_tokens=250))
        await anext(stalled)
        other = await run_one(llm, generation(max_tokens=100))
        assert len(other.outputs[0].token_ids) == 100
        await core.until(lambda: core.num_running == 0)
        with pytest.raises(DeadlineExceeded, match="nobody read"):
            _ = [event async for event in stalled]
        assert core.aborted == [core.requests[0].id]


async def test_requests_spread_over_the_cores(connect):
    async with connect(cores=2) as (llm, cores):
        for core in cores:
            core.flow.clear()
        tasks = [asyncio.create_task(run_one(llm, generation())) for _ in range(6)]
        for core in cores:
            await core.until(lambda core=core: len(core.requests) == 3)
            core.flow.set()
        await asyncio.gather(*tasks)


async def test_explain_asks_the_core_that_has_the_request(connect):
    async with connect() as (llm, core):
        core.flow.clear()
        task = asyncio.create_task(run_one(llm, generation(label="cmpl-1")))
        await core.until(lambda: len(core.requests) == 1)
        told = await llm.explain("cmpl-1")
        assert told == {"id": "cmpl-1", "requests": [{"asked": core.requests[0].id}]}
        with pytest.raises(NotFound, match="'other' is not in flight"):
            await llm.explain("other")
        core.flow.set()
        await task
        with pytest.raises(NotFound):
            await llm.explain("cmpl-1")


async def test_a_request_is_explained_by_the_id_its_client_chose_to_its_tenant_alone(connect):
    """And through any API process: the cores are asked, which know the requests of all."""
    async with connect() as (llm, core):
        core.flow.clear()
        own = generation(label="cmpl-1", external_id="mine", tenant="a")
        task = asyncio.create_task(run_one(llm, own))
        await core.until(lambda: len(core.requests) == 1)
        other = AsyncLLM(llm.text, [core.path], limits=llm.limits, tokenizer=llm.tokenizer)
        await other.start()
        for label, tenant in (("cmpl-1", None), ("mine", "a"), ("mine", None)):
            found = await other.explain(label, tenant=tenant)
            assert found["requests"] == [{"asked": core.requests[0].id}]
        with pytest.raises(NotFound):
            await other.explain("mine", tenant="b")
        await other.close()
        core.flow.set()
        await task


async def test_one_of_two_cores_that_is_gone_leaves_the_engine_alive_and_degraded(connect):
    async with connect(cores=2) as (llm, cores):
        assert llm.alive and not llm.degraded and llm.connected == (2, 2)
        await cores[0].stop()
        while llm.connected != (1, 2):
            await asyncio.sleep(0)
        assert llm.alive and llm.ready and llm.degraded
        await run_one(llm, generation(max_tokens=2))
        assert len(cores[1].requests) == 1
        await cores[0].start()  # for the end of the fixture


async def test_a_core_that_is_stuck_gets_nothing_while_another_one_answers(connect):
    async with connect(cores=2, limits=PINGED) as (llm, cores):
        cores[0].mute = True
        while not llm.degraded:
            age(llm)
            await asyncio.sleep(0.01)
        for _ in range(4):
            await run_one(llm, generation(max_tokens=2))
        assert not cores[0].requests and len(cores[1].requests) == 4


async def test_a_core_whose_answers_are_not_to_be_expected_lowers_health(connect):
    async with connect(failing="only NaN") as (llm, _):
        assert llm.ready and not llm.alive and llm.trouble == "only NaN"


async def test_each_core_gives_a_reply_or_its_error(connect):
    async with connect(cores=2) as (llm, cores):
        cores[0].failing.add("pause")
        failed, paused = await llm.call_each("pause", mode="keep")
        assert isinstance(failed, Conflict) and paused == {"operation": "pause", "mode": "keep"}


async def test_the_pool_bounds_what_a_request_may_hold(connect):
    async with connect(capacity_tokens=100) as (llm, _):
        assert llm.context_tokens == 100


async def test_calls_reach_every_core_and_errors_come_back(connect):
    async with connect(cores=2) as (llm, _):
        assert await llm.call("pause", mode="keep") == [{"operation": "pause", "mode": "keep"}] * 2
        with pytest.raises(Exception, match="not now"):
            await llm.call("fail")


async def test_n_answers_share_a_long_prompt(connect):
    """Answers 1.. wait for the first one's prompt, then find its blocks in the prefix cache."""
    async with connect() as (llm, core):
        core.flow.clear()
        task = asyncio.create_task(run_one(llm, generation(range(100), n=4)))
        await core.until(lambda: len(core.requests) == 1)
        core.flow.set()
        output = await task
        assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
        assert len(core.requests) == 4


async def test_prompt_scores_come_once_before_the_first_delta(connect):
    async with connect() as (llm, _):
        events = await events_of(llm, generation([5, 6, 7, 8], prompt_logprobs=0, n=2))
        kinds = [type(event) for event in events]
        assert kinds.count(PromptScored) == 1 and kinds[1] is PromptScored
        scores = events[1].scores
        assert scores[0] is None
        assert [score.token.id for score in scores[1:]] == [6, 7, 8]
        assert [score.token.logprob for score in scores[1:]] == [-6.0, -7.0, -8.0]


async def test_max_tokens_zero_scores_the_prompt_alone(connect):
    async with connect() as (llm, _):
        events = await events_of(llm, generation([5, 6], prompt_logprobs=0, max_tokens=0))
        assert [type(event) for event in events] == [Started, PromptScored, Ended]
        assert events[-1].reason == "length"


async def test_logprobs_name_token_alternatives_and_asked_ids(connect, tokenizer):
    ids = tokenizer.encode_plain("é")
    async with connect(spell(ids)) as (llm, _):
        wanted = generation(max_tokens=len(ids), logprobs=2, logprob_token_ids=(65,))
        answer = (await run_one(llm, wanted)).outputs[0]
        assert [s.token.id for s in answer.logprobs] == ids
        assert all(len(s.top) == 2 and [t.id for t in s.named] == [65] for s in answer.logprobs)
        assert b"".join(s.token.data for s in answer.logprobs) == "é".encode()
        assert answer.cumulative_logprob == pytest.approx(-0.5 * len(ids))
        assert answer.logprobs[0].token.rank == 1


async def test_start_gives_up_when_no_core_comes(tmp_path, tokenizer, connect):
    async with connect() as (llm, _):
        text = llm.text
    from headrace.front.client.engine import AsyncLLM

    limits = Limits(hello_timeout_s=0.05)
    absent = AsyncLLM(text, [str(tmp_path / "absent")], limits=limits, tokenizer=tokenizer)
    with pytest.raises(Unavailable, match="not ready after"):
        await absent.start()
    await absent.close()


async def test_a_malformed_frame_ends_the_connection_not_the_client(tmp_path, connect):
    async with connect() as (llm, core):
        task = asyncio.create_task(run_one(llm, generation(max_tokens=250)))
        await core.until(lambda: len(core.requests) == 1)
        core._writers[-1].write(b"\x04\x00\x00\x00\xff\xff\xff\xff")
        with pytest.raises(EngineDead):
            await task
        await llm._cores[0].connection.wait_ready()
        await run_one(llm, generation())


async def test_a_silent_core_is_pinged(connect):
    async with connect(limits=LIMITS) as (llm, core):
        await core.until(lambda: any(call.operation == "ping" for call in core.calls))
        assert llm.alive


async def test_a_core_that_answers_no_more_is_not_alive(connect):
    """REG-111: connected, but stuck."""
    async with connect(limits=PINGED) as (llm, core):
        assert llm.alive
        age(llm)
        while not llm.alive:  # until it has answered a ping
            await asyncio.sleep(0.01)
        core.mute = True
        while llm.alive:  # an answer may be on its way yet
            age(llm)
            await asyncio.sleep(0.01)
        assert llm.ready  # it may come back: requests are still taken


async def test_a_full_core_is_refused_at_the_door(connect):
    """Reliability 1.2: known before the body is read; the wait grows with those already told to come back."""
    async with connect(max_running=1, max_in_flight=2) as (llm, core):
        core.flow.clear()
        runs = [asyncio.ensure_future(run_one(llm, generation(max_tokens=2))) for _ in range(2)]
        await core.until(lambda: core.num_running == 2)
        with pytest.raises(
            Unavailable, match="2 requests run or wait already, at most 2"
        ) as caught:
            llm.check_queue()
        assert 1 <= caught.value.retry_after_s <= 1.25
        core.flow.set()
        await asyncio.gather(*runs)
        llm.check_queue()


def pixels_of(name: int) -> MediaInput:
    shape = {"kind": "image", "offset": 0, "num_tokens": 1, "grid": (1, 1, 1)}
    return MediaInput(key=name.to_bytes(32, "little"), rows=bytes(256 << 10), **shape)


async def test_pixels_go_to_a_core_once_and_again_when_it_has_them_no_more(connect):
    async with connect() as (llm, core):
        wanted = msgspec.structs.replace(generation([1]), media=(pixels_of(1),))
        first, second = await run_one(llm, wanted), await run_one(llm, wanted)
        assert first == second
        assert [len(one.media[0].rows) for one in core.requests] == [256 << 10, 0]
        core.forgets_media = True
        assert await run_one(llm, wanted) == first
        both = msgspec.structs.replace(wanted, media=(pixels_of(1), pixels_of(2)))
        await run_one(llm, both)
        sent = [[len(one.rows) >> 10 for one in request.media] for request in core.requests[2:]]
        assert sent == [[0], [256], [256, 256]]
        await core.stop()
        async with asyncio.timeout(300):
            while llm.ready:
                await asyncio.sleep(0.005)
        await core.start()
        await llm.wait_ready()
        core.forgets_media = False
        await run_one(llm, wanted)
        assert core.requests[-1].media[0].rows


async def test_requests_with_media_wait_for_room_and_are_not_refused(connect):
    """Forty whose pixels together are ten times what may wait unsent."""
    limits = Limits(heartbeat_s=0.05, hello_timeout_s=20, max_unsent_bytes=1 << 20)
    async with connect(limits=limits) as (llm, core):
        wanted = [
            msgspec.structs.replace(generation([i]), media=(pixels_of(i),)) for i in range(40)
        ]
        outputs = await asyncio.gather(*(run_one(llm, one) for one in wanted))
        assert len(outputs) == len(core.requests) == 40
        with pytest.raises(Unavailable, match="does not take requests now"):
            for one in wanted:
                core_of = llm._least_loaded()
                core_of.connection.send(llm._checker.request(one, llm.bounds, 7))

"""Speech to text over a WebSocket, by the openai library and by frames as vLLM's clients send them (API-01, API-02)."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openai
import pytest
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from headrace.front.media.log_mel import RATE
from tests.api.serving import Served, eventually
from tests.api.speech import tone, wav

DONE = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"


def encoded(samples: np.ndarray) -> str:
    return base64.b64encode(samples.tobytes()).decode()


def one_shot(client: openai.OpenAI, samples: np.ndarray, **more: Any) -> str:
    file = ("a.wav", wav(samples))
    return client.audio.transcriptions.create(model="ear", file=file, **more).text


def session(**audio: Any) -> dict[str, Any]:
    form = {"type": "audio/pcm", "rate": RATE}
    heard = {"model": "ear", "language": "de"}
    return {
        "type": "transcription",
        "audio": {"input": {"format": form, "transcription": heard, **audio}},
    }


@contextmanager
def opened(served: Served, query: str = "", **more: Any) -> Iterator[ClientConnection]:
    url = served.url.replace("http", "ws") + "/v1/realtime" + query
    with connect(url, **more) as socket:
        assert told(socket)["type"] == "session.created"
        yield socket


def told(socket: ClientConnection) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(socket.recv(timeout=300))
    return event


def until(socket: ClientConnection, kind: str) -> list[dict[str, Any]]:
    events = [told(socket)]
    while events[-1]["type"] != kind:
        assert events[-1]["type"] != "error", events[-1]
        events.append(told(socket))
    return events


def send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager")  # by the client
def test_the_official_client_commits_turns_and_reads_what_a_file_says(
    ear: Served, ear_client: openai.OpenAI
) -> None:
    turns = [tone(1.7, 300.0), tone(0.6, 900.0)]
    with ear_client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        assert connection.recv().type == "session.created"
        settings: Any = session(turn_detection=None)
        connection.session.update(session=settings)
        updated: Any = connection.recv()
        assert updated.type == "session.updated" and updated.session.type == "transcription"
        last = None
        for turn in turns:
            for at in range(0, len(turn), 1600):
                connection.input_audio_buffer.append(audio=encoded(turn[at : at + 1600]))
            connection.input_audio_buffer.commit()
            events: list[Any] = [connection.recv()]
            while events[-1].type != DONE:
                events.append(connection.recv())
            kinds = [event.type for event in events]
            first = ["input_audio_buffer.committed", "conversation.item.added"]
            assert kinds[:3] == [*first, "conversation.item.done"]
            assert events[0].previous_item_id == last
            last = events[0].item_id
            assert {event.item_id for event in events[3:]} == {last}
            told = "".join(event.delta for event in events[3:-1])
            assert told == events[-1].transcript == one_shot(ear_client, turn, language="de")
            assert events[-1].usage.seconds == int(np.ceil(len(turn) / RATE))


def test_turns_are_detected_and_heard_as_files_of_their_samples(
    ear: Served, ear_client: openai.OpenAI
) -> None:
    quiet = np.zeros(RATE, np.int16)
    sounds = np.concatenate([quiet, tone(0.7, 400.0), quiet, tone(0.9, 800.0), quiet])
    voice = {"type": "server_vad", "prefix_padding_ms": 200, "silence_duration_ms": 300}
    with opened(ear, "?model=ear") as socket:
        send(socket, "session.update", session=session(turn_detection=voice))
        assert told(socket)["session"]["audio"]["input"]["turn_detection"]["threshold"] == 0.5
        for at in range(0, len(sounds), 1000):
            send(socket, "input_audio_buffer.append", audio=encoded(sounds[at : at + 1000]))
        events = until(socket, DONE) + until(socket, DONE)
    times: dict[str, list[int]] = {}
    for event in events:
        for name in ("audio_start_ms", "audio_end_ms"):
            if name in event:
                times.setdefault(event["item_id"], []).append(event[name])
    assert list(times.values()) == [[800, 2000], [2500, 3900]]
    done = [event for event in events if event["type"] == DONE]
    assert [event["item_id"] for event in done] == list(times)
    for event, (start, end) in zip(done, times.values(), strict=True):
        samples = sounds[start * 16 : end * 16]
        assert event["transcript"] == one_shot(ear_client, samples, language="de")


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_growing_text_of_vllms_dialect_ends_with_the_final_commit(
    ear: Served, ear_client: openai.OpenAI, early: bool
) -> None:
    """REG-095: a final commit of nothing is done too."""
    samples = np.concatenate([tone(0.9), tone(0.8, 900.0), tone(0.7, 150.0)])
    with opened(ear) as socket:
        send(socket, "session.update", model="ear")
        if early:
            send(socket, "input_audio_buffer.commit", final=False)
        for at in range(0, len(samples), 1280):
            send(socket, "input_audio_buffer.append", audio=encoded(samples[at : at + 1280]))
        if early:  # windows that are complete are told before the end
            assert told(socket)["type"] == "transcription.delta"
        send(socket, "input_audio_buffer.commit", final=True)
        events = until(socket, "transcription.done")
        text, usage = events[-1]["text"], events[-1]["usage"]
        assert text == one_shot(ear_client, samples)
        assert text.endswith("".join(event["delta"] for event in events[:-1]))
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
        send(socket, "input_audio_buffer.commit", final=True)  # of nothing
        assert until(socket, "transcription.done")[-1]["type"] == "transcription.done"


@pytest.mark.parametrize(
    ("first", "message", "code", "said"),
    [
        (False, {"type": "input_audio_buffer.append", "audio": ""}, "model_not_validated", "model"),
        (False, {"type": "session.update", "model": "x"}, "model_not_found", "'x' is not served"),
        (True, {"type": "input_audio_buffer.append", "audio": "%"}, "invalid_audio", "base64"),
        (True, {"type": "response.create"}, "unknown_event", "response.create"),
        (True, "{", "invalid_json", "JSON"),
    ],
)
def test_vllms_clients_are_told_what_is_wrong(
    ear: Served, first: bool, message: Any, code: str, said: str
) -> None:
    with opened(ear) as socket:
        if first:
            send(socket, "session.update", model="ear")
        socket.send(message if isinstance(message, str) else json.dumps(message))
        event = told(socket)
        assert event["type"] == "error" and event["code"] == code and said in event["error"]


@pytest.mark.parametrize(
    ("message", "code", "said"),
    [
        ({"type": "input_audio_buffer.commit"}, "input_audio_buffer_commit_empty", "0 ms"),
        ({"type": "input_audio_buffer.append", "audio": "="}, None, "base64"),
        ({"type": "input_audio_buffer.append"}, None, "audio: this field is required"),
        ({"type": "conversation.item.create"}, None, "allowed: session.update"),
        (
            {"type": "session.update", "session": {"type": "realtime"}},
            "unsupported_feature",
            "this server transcribes",
        ),
        (
            {"type": "session.update", "session": session(turn_detection={"type": "semantic_vad"})},
            "unsupported_feature",
            "server_vad",
        ),
        (
            {"type": "session.update", "session": session(transcription={"model": "other"})},
            "model_not_found",
            "available: ear",
        ),
        (
            {"type": "session.update", "session": session(transcription={"language": "fr"})},
            None,
            "known: de, en",
        ),
    ],
)
def test_openais_clients_are_told_what_is_wrong(
    ear: Served, message: dict[str, Any], code: str | None, said: str
) -> None:
    with opened(ear, "?model=ear") as socket:
        socket.send(json.dumps({**message, "event_id": "mine"}))
        event = told(socket)
        assert event["type"] == "error" and event["error"]["event_id"] == "mine"
        assert event["error"]["code"] == code and said in event["error"]["message"], event


def test_what_cannot_begin_is_refused(ear: Served, server: Served) -> None:
    for served, query in ((ear, "?model=other"), (server, "")):
        url = served.url.replace("http", "ws") + "/v1/realtime" + query
        with connect(url) as socket:
            assert told(socket)["type"] == "error"
            with pytest.raises(ConnectionClosed):
                socket.recv(timeout=300)


def test_deltas_come_with_scores_where_a_session_includes_them(
    ear: Served, ear_client: openai.OpenAI
) -> None:
    samples = tone(0.8)
    with opened(ear) as socket:
        asked = session(turn_detection=None)
        asked["audio"]["input"]["transcription"] |= {"language": "de", "keywords": ["w5", "w7"]}
        asked["include"] = ["item.input_audio_transcription.logprobs"]
        send(socket, "session.update", session=asked)
        updated = told(socket)["session"]
        assert updated["include"] == asked["include"]
        assert updated["audio"]["input"]["transcription"]["prompt"] == "w5, w7"
        send(socket, "input_audio_buffer.append", audio=encoded(samples))
        send(socket, "input_audio_buffer.commit")
        events = until(socket, DONE)
    (delta,) = [event for event in events if event["type"].endswith("transcription.delta")]
    words = re.findall(r"w\d+", "".join(one["token"] for one in delta["logprobs"]))
    assert words and words == re.findall(r"w\d+", delta["delta"])
    assert all(one["logprob"] <= 0 for one in delta["logprobs"])


def test_a_cleared_buffer_is_heard_by_nobody(ear: Served, ear_client: openai.OpenAI) -> None:
    kept = tone(0.5, 700.0)
    with opened(ear, "?model=ear") as socket:
        send(socket, "session.update", session=session(turn_detection=None))
        send(socket, "input_audio_buffer.append", audio=encoded(tone(0.8)))
        send(socket, "input_audio_buffer.clear")
        send(socket, "input_audio_buffer.append", audio=encoded(kept))
        send(socket, "input_audio_buffer.commit")
        events = until(socket, DONE)
    assert "input_audio_buffer.cleared" in [event["type"] for event in events]
    assert events[-1]["transcript"] == one_shot(ear_client, kept, language="de")


def test_a_client_that_leaves_takes_its_sound_with_it(ear: Served) -> None:
    with opened(ear) as socket:
        send(socket, "session.update", model="ear")
        send(socket, "input_audio_buffer.commit", final=False)
        sound = encoded(np.tile(tone(1.0), 60))
        send(socket, "input_audio_buffer.append", audio=sound)
        assert told(socket)["type"] == "transcription.delta"
    eventually(ear.at_rest, within_s=30)


@pytest.mark.slow
def test_twenty_connections_at_the_pace_of_speech(ear: Served, ear_client: openai.OpenAI) -> None:
    """Each hears its own sound, in chunks of 80 ms, and is answered soon after its last one."""
    sounds = [tone(3.0, 200.0 + 40.0 * i) for i in range(20)]
    wanted = [one_shot(ear_client, one) for one in sounds]

    async def spoken(samples: np.ndarray) -> tuple[str, float]:
        url = ear.url.replace("http", "ws") + "/v1/realtime"
        async with connect_async(url) as socket:
            await socket.recv()
            await socket.send(json.dumps({"type": "session.update", "model": "ear"}))
            commit = {"type": "input_audio_buffer.commit", "final": False}
            await socket.send(json.dumps(commit))
            begin = time.monotonic()
            for number, at in enumerate(range(0, len(samples), 1280), start=1):
                chunk = encoded(samples[at : at + 1280])
                await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": chunk}))
                await asyncio.sleep(max(0.0, begin + number * 0.08 - time.monotonic()))
            await socket.send(json.dumps({**commit, "final": True}))
            said, text = time.monotonic(), ""
            while True:
                event = json.loads(await asyncio.wait_for(socket.recv(), 60))
                assert event["type"] != "error", event
                if event["type"] == "transcription.done":
                    assert event["text"] == text
                    return text, time.monotonic() - said
                text += event["delta"]

    async def all_spoken() -> list[tuple[str, float]]:
        return await asyncio.gather(*map(spoken, sounds))

    found = asyncio.run(all_spoken())
    assert [text for text, _ in found] == wanted
    print("seconds behind the end:", sorted(round(late, 2) for _, late in found))
    eventually(ear.at_rest, within_s=30)

"""Speech to text over a real socket, by the openai library: a tiny random Whisper that hears a second at a time."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
import torch
from transformers.models.whisper.generation_whisper import (
    _dynamic_time_warping,
    _median_filter,
)

from headrace.front.media.log_mel import RATE, LogMel
from headrace.front.media.quiet import windows
from headrace.front.text.alignment import timed_words
from headrace.front.text.transcript import SpeechSegment, segments_of, subrip, webvtt
from tests.api.serving import NO_TLS, Served
from tests.api.speech import BANDS, FRAMES, ID, SPECIAL, VOCABULARY, WORDS, tone, wav

LIKELIEST: dict[str, Any] = {"temperature": 0.2, "extra_body": {"top_k": 1}}
"""The likeliest token each time, and no second try, however unlikely the text."""


def encoded(samples: np.ndarray, kind: str) -> bytes:
    data = io.BytesIO()
    with av.open(data, "w", format=kind) as container:
        stream = container.add_stream(kind, rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.rate = RATE
        resampler = av.AudioResampler(
            format=stream.format, layout="mono", rate=RATE, frame_size=1152
        )
        for piece in (frame, None):
            for one in resampler.resample(piece):
                container.mux(stream.encode(one))
        container.mux(stream.encode(None))
    return data.getvalue()


def expected(oracle: Any, samples: np.ndarray, begins: list[str]) -> list[int]:
    """The greedy tokens of a window, without those that are suppressed."""
    features = LogMel(BANDS, FRAMES).features(samples)
    ids = [ID[word] for word in begins]
    banned = [ID[word] for word in (*SPECIAL[1:], "w3")]
    with torch.inference_mode():
        heard = oracle.get_encoder()(torch.from_numpy(features)[None])
        while len(ids) < 24:
            logits = oracle(encoder_outputs=heard, decoder_input_ids=torch.tensor([ids])).logits[
                0, -1
            ]
            logits[banned] -= 100.0
            token = int(logits.argmax())
            if token == ID["<|endoftext|>"]:
                break
            ids.append(token)
    return ids[len(begins) :]


def language_of(oracle: Any, samples: np.ndarray) -> str:
    features = torch.from_numpy(LogMel(BANDS, FRAMES).features(samples))[None]
    with torch.inference_mode():
        start = torch.tensor([[ID["<|startoftranscript|>"]]])
        logits = oracle(input_features=features, decoder_input_ids=start).logits[0, -1]
    return max(("en", "de"), key=lambda code: float(logits[ID[f"<|{code}|>"]]))


def words(ids: list[int]) -> list[str]:
    return [VOCABULARY[i] for i in ids if i < len(WORDS)]


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3"])
def test_a_stream_tells_what_the_reference_hears(
    whisper: tuple[Path, Any], ear_client: openai.OpenAI, kind: str
) -> None:
    samples = tone(0.8)
    data = wav(samples) if kind == "wav" else encoded(samples, kind)
    stream = ear_client.audio.transcriptions.create(
        model="ear", file=(f"a.{kind}", data), language="de", stream=True
    )
    events = list(stream)
    assert {event.type for event in events[:-1]} <= {"transcript.text.delta"}
    done = events[-1]
    assert done.type == "transcript.text.done" and done.usage.seconds == 1
    assert "".join(event.delta for event in events[:-1]) == done.text
    if kind != "mp3":  # which loses something
        begins = ["<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"]
        ids = expected(whisper[1], samples, begins)
        assert re.findall(r"w\d+", done.text) == words(ids)


def test_all_formats_tell_the_same_segments(
    whisper: tuple[Path, Any], ear_client: openai.OpenAI
) -> None:
    samples = np.concatenate([tone(0.9), tone(0.8, 900.0), tone(0.7, 150.0)])
    ask = {"model": "ear", "file": ("a.wav", wav(samples)), "language": "en", "temperature": 0.2}
    create = ear_client.audio.transcriptions.create
    told = create(**ask, response_format="verbose_json", timestamp_granularities=["segment"])
    assert told.language == "en" and abs(told.duration - 2.4) < 0.01
    cuts = [end / RATE for _, end in windows(samples, RATE)]
    assert len(cuts) >= 3
    for segment in told.segments or []:
        assert 0 <= segment.start <= segment.end <= cuts[-1]
        assert segment.temperature == 0.2 and 0 <= segment.no_speech_prob <= 1
    subtitles = create(**ask, response_format="srt")
    cues = [cue for cue in str(subtitles).split("\n\n") if cue.strip()]
    times = re.compile(r"\d+\n00:00:0\d,\d{3} --> 00:00:0\d,\d{3}\n.+", re.S)
    assert all(times.match(cue) for cue in cues), cues
    assert str(create(**ask, response_format="vtt")).startswith("WEBVTT\n")
    plain = create(**ask, response_format="text")
    assert isinstance(plain, str) and plain.endswith("\n")


def test_the_language_is_found_out(
    whisper: tuple[Path, Any], ear: Served, ear_client: openai.OpenAI
) -> None:
    """MUL-07"""
    samples = tone(0.6, 700.0)
    told = ear_client.audio.transcriptions.create(
        model="ear", file=("a.wav", wav(samples)), response_format="verbose_json"
    )
    assert told.language == language_of(whisper[1], samples)
    # The library calls its own translations deprecated.
    answer = httpx.post(
        ear.url + "/v1/audio/translations",
        files={"file": ("a.wav", wav(samples))},
        data={"model": "ear", "response_format": "verbose_json"},
        verify=NO_TLS,
        timeout=300,
    )
    assert answer.status_code == 200 and answer.json()["task"] == "translate"


def test_tokens_have_the_scores_of_the_reference(
    whisper: tuple[Path, Any], ear_client: openai.OpenAI
) -> None:
    samples = tone(0.7, 500.0)
    told = ear_client.audio.transcriptions.create(
        model="ear",
        file=("a.wav", wav(samples)),
        language="de",
        include=["logprobs"],
        **LIKELIEST,
    )
    begins = ["<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"]
    ids = [*(ID[word] for word in begins), *expected(whisper[1], samples, begins)]
    features = torch.from_numpy(LogMel(BANDS, FRAMES).features(samples))[None]
    with torch.inference_mode():
        logits = whisper[1](input_features=features, decoder_input_ids=torch.tensor([ids])).logits
    scores = logits[0].log_softmax(-1)
    assert told.logprobs and told.logprobs[0].token
    assert len(told.logprobs) in (len(ids) - 4, len(ids) - 3)  # with the token that ends it
    for place, one in zip(range(4, len(ids)), told.logprobs, strict=False):
        assert one.token is not None and one.token.strip() == VOCABULARY[ids[place]]
        assert abs((one.logprob or 0.0) - float(scores[place - 1, ids[place]])) < 1e-3


def test_words_that_may_occur_and_languages_are_named(
    whisper: tuple[Path, Any], ear_client: openai.OpenAI
) -> None:
    samples = tone(0.6, 700.0)

    def text(**fields: Any) -> Any:
        return ear_client.audio.transcriptions.create(
            model="ear", file=("a.wav", wav(samples)), **fields
        )

    named = text(language="en", keywords=["w5", "w7"], prompt="w9")
    assert named.text == text(language="en", prompt="w5, w7. w9").text
    assert (
        text(language="en", extra_body={"hotwords": "w5"}).text
        == text(language="en", prompt="w5").text
    )
    found = text(languages=["en", "de"])
    assert [one.code for one in found.languages] == [language_of(whisper[1], samples)]
    assert text(languages=["de"]).text == text(language="de").text
    strategy = {"type": "server_vad", "threshold": 0.4, "silence_duration_ms": 200}
    assert text(language="de", chunking_strategy=strategy).text == text(language="de").text


def test_text_is_sampled_as_vllms_clients_say(ear: Served, ear_client: openai.OpenAI) -> None:
    file = ("a.wav", wav(tone(0.8)))

    def text(**more: Any) -> str:
        own = {**LIKELIEST["extra_body"], **more}
        create = ear_client.audio.transcriptions.create
        return create(model="ear", file=file, language="de", temperature=0.2, extra_body=own).text

    whole = text()
    short = text(max_completion_tokens=2)  # a time, which is not written, and a word
    assert whole.startswith(short) and 0 < len(short) < len(whole)
    assert text(top_k=0, seed=3) == text(top_k=0, seed=3) != whole
    fields = {"model": "ear", "language": "de", "vllm_stream": "1", "stream_include_usage": "true"}
    fields |= {"temperature": "0.2", "top_k": "1"}
    answer = httpx.post(
        ear.url + "/v1/audio/transcriptions",
        files={"file": file},
        data=fields,
        verify=NO_TLS,
        timeout=300,
    )
    *chunks, end, _ = answer.text.split("\n\n")
    told = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    assert end == "data: [DONE]" and {one["object"] for one in told} == {"transcription.chunk"}
    assert "".join(one["choices"][0]["delta"]["content"] for one in told) == whole
    assert told[-1]["choices"][0]["finish_reason"] == "stop" and told[-1]["usage"]["seconds"] == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"file": ("a.wav", b"RIFF....WAVE")}, "file: the sound cannot be decoded"),
        ({"file": ("a.txt", b"text")}, "file: the sound is none of"),
        ({"language": "fr"}, "language: 'fr' given; known: de, en"),
        ({"response_format": "yaml"}, "response_format: 'yaml' given"),
        ({"response_format": "diarized_json"}, "this model tells no speakers; allowed: json"),
        ({"temperature": 3.0}, "temperature: '3.0' given"),
        (
            {"response_format": "verbose_json", "timestamp_granularities": ["phoneme"]},
            "timestamp_granularities: 'phoneme' given; allowed: segment, word",
        ),
        ({"timestamp_granularities": ["word"]}, "needs response_format verbose_json"),
        ({"stream": True, "response_format": "srt"}, "stream: does not go with"),
        ({"extra_body": {"noise": "1"}}, "noise: is not known here"),
        ({"include": ["words"]}, "include: 'words' given; allowed: logprobs"),
        ({"include": ["logprobs"], "stream": True}, "include: logprobs are told with"),
        ({"languages": ["en", "fr"]}, "language: 'fr' given; known: de, en"),
        ({"chunking_strategy": {"type": "words"}}, "'words' given; allowed: auto, server_vad"),
        ({"extra_body": {"top_p": "2"}}, "top_p"),
        ({"extra_body": {"seed": "one"}}, "seed: 'one' given; a number is wanted"),
        ({"extra_body": {"max_completion_tokens": "0"}}, "max_completion_tokens: 0 given"),
        ({"extra_body": {"to_language": "de"}}, "to_language: 'de' given"),
    ],
)
def test_what_cannot_be_heard_is_refused(
    ear_client: openai.OpenAI, more: dict[str, Any], message: str
) -> None:
    fields: dict[str, Any] = {"model": "ear", "file": ("a.wav", wav(tone(0.2))), **more}
    with pytest.raises(openai.BadRequestError, match=message):
        ear_client.audio.transcriptions.create(**fields)


def test_text_is_refused_with_the_way_to_ask(ear: Served, ear_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="/v1/audio/transcriptions"):
        ear_client.completions.create(model="ear", prompt="w1", max_tokens=2)
    url = ear.url + "/v1/audio/transcriptions"
    answer = httpx.post(
        url, content=b"x", headers={"content-type": "text/plain"}, verify=NO_TLS, timeout=300
    )
    assert answer.status_code == 415
    answer = httpx.post(url, files={"other": ("a", b"x")}, verify=NO_TLS, timeout=300)
    assert answer.status_code == 400 and "file: this field is required" in answer.text


def test_segments_and_subtitles_are_those_of_the_times() -> None:
    ids = [100, 1, 2, 125, 125, 3, 150, 4]
    segments = segments_of(
        ids, lambda ids: " ".join(map(str, ids)), first_time=100, begin_s=10.0, end_s=10.9
    )
    assert segments == [
        SpeechSegment(start=10.0, end=10.5, text="1 2", tokens=[1, 2]),
        SpeechSegment(start=10.5, end=10.9, text="3", tokens=[3]),
        SpeechSegment(start=10.9, end=10.9, text="4", tokens=[4]),
    ]
    assert subrip(segments[:1]) == "1\n00:00:10,000 --> 00:00:10,500\n1 2\n"
    assert webvtt(segments[:1]) == "WEBVTT\n\n00:00:10.000 --> 00:00:10.500\n1 2\n"


def word_times(oracle: Any, samples: np.ndarray, ids: list[int]) -> list[float]:
    """When the words of a window begin, and the last ends, by the reference's own filter and path."""
    begins = [ID[word] for word in ("<|startoftranscript|>", "<|de|>", "<|transcribe|>")]
    whole = [*begins, ID["<|notimestamps|>"], *ids, ID["<|endoftext|>"]]
    features = torch.from_numpy(LogMel(BANDS, FRAMES).features(samples))[None]
    with torch.inference_mode():
        told = oracle(
            input_features=features,
            decoder_input_ids=torch.tensor([whole]),
            output_attentions=True,
        ).cross_attentions
    weights = told[1][0, :, :, : round(len(samples) / 320)]  # the upper half of two layers
    weights = weights / weights.sum(-1, keepdim=True)
    spread, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    matrix = _median_filter(((weights - mean) / spread)[None], 7)[0].mean(0)[len(begins) : -1]
    text, time = _dynamic_time_warping(-matrix.double().numpy())
    jumps = np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)
    return [round(at * 0.02, 3) for at in time[jumps].tolist()]


@pytest.mark.parametrize("seconds", [0.98, 0.4])
def test_words_have_the_times_of_the_reference(
    whisper: tuple[Path, Any], ear_client: openai.OpenAI, seconds: float
) -> None:
    samples = tone(seconds, 500.0)
    told = ear_client.audio.transcriptions.create(
        model="ear",
        file=("a.wav", wav(samples)),
        language="de",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    ids = [token for segment in told.segments or [] for token in segment.tokens]
    assert ids and told.words
    times = word_times(whisper[1], samples, ids)
    # What is no word of the text (w0 .. w59) is not shown.
    shown = [place for place, one in enumerate(ids) if VOCABULARY[one] in WORDS]
    assert [one.word for one in told.words] == [VOCABULARY[ids[place]] for place in shown]
    assert [one.start for one in told.words] == [min(times[place], seconds) for place in shown]
    assert [one.end for one in told.words] == [min(times[place + 1], seconds) for place in shown]


def test_words_alone_leave_segments_out(ear_client: openai.OpenAI) -> None:
    samples = np.concatenate([tone(0.9), tone(0.8, 900.0)])
    told = ear_client.audio.transcriptions.create(
        model="ear",
        file=("a.wav", wav(samples)),
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    assert told.segments is None and told.words
    starts = [one.start for one in told.words]
    assert starts == sorted(starts) and all(one.start <= one.end <= 1.7 for one in told.words)


def test_marks_belong_to_the_words_beside_them() -> None:
    pieces = [" He", "llo", ",", " (", "big", ")", " world", "!"]

    def decode(ids: list[int]) -> str:
        return "".join(pieces[one] for one in ids)

    begins = [0, 5, 9, 10, 12, 20, 30, 40, 50]
    words = timed_words(range(8), begins, decode, language="en", begin_s=1.0, end_s=1.7)
    assert [(one.word, one.start, one.end) for one in words] == [
        (" Hello,", 1.0, 1.2),
        (" (big)", 1.2, 1.6),
        (" world!", 1.6, 1.7),
    ]
    pieces = ["\u4f60", "\u597d", "\u3002"]
    words = timed_words(range(3), [0, 1, 2, 3], decode, language="zh", begin_s=0.0, end_s=9.0)
    assert [one.word for one in words] == ["\u4f60", "\u597d\u3002"]

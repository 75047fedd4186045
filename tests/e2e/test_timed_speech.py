"""Voxtral Realtime, served with Mistral's own tokenizer file: the text and the times that the reference's model gives,
a token for each 80 ms (API-01)."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from transformers.models.voxtral_realtime.feature_extraction_voxtral_realtime import (
    VoxtralRealtimeFeatureExtractor,
)

from headrace.front.media.log_mel import RATE
from headrace.front.text.tokenizer_files import load_tokenizer
from tests.api.clients import openai_client
from tests.api.serving import Served, _started
from tests.api.speech import wav
from tests.api.test_realtime import encoded, opened, send, told, until
from tests.front.media.test_log_mel import sound
from tests.models.media import save_media_oracle
from tests.models.test_hearing import BANDS, TEXT
from tests.models.test_voxtral_realtime import config

SPECIAL = ["<unk>", "<s>", "</s>", "[STREAMING_PAD]", "[STREAMING_WORD]"]
NUM_SPECIAL, PAD, LEAD, DELAY = 8, 3, 32, 3
WORDS = [b"th", b"the", b" the", b"he", b" a", b" fox", b"qu", b" sea"]
VOCABULARY = NUM_SPECIAL + 256 + len(WORDS)
PIECE = RATE * 8 // 100


def write_tekken(folder: Path) -> None:
    tokens = [bytes([i]) for i in range(256)] + WORDS
    document = {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
            "default_vocab_size": VOCABULARY,
            "default_num_special_tokens": NUM_SPECIAL,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate([*tokens, b"beyond"])
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True}
            for rank, token in enumerate(SPECIAL)
        ],
        "audio": {"streaming_n_left_pad_tokens": LEAD, "transcription_delay_ms": 80 * DELAY},
    }
    (folder / "tekken.json").write_text(json.dumps(document))


def test_mistrals_tokenizer_file(tmp_path: Path) -> None:
    """Control tokens first; tokens beyond the vocabulary's size are left out."""
    write_tekken(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer.encode_plain("the fox[STREAMING_PAD]")
    first = NUM_SPECIAL + 256
    assert ids[:2] == [first + WORDS.index(b"the"), first + WORDS.index(b" fox")]
    assert tokenizer.decode(ids) == "the fox[STREAMING_PAD]" and PAD not in ids
    assert tokenizer.token_id("[STREAMING_PAD]") == PAD and tokenizer.num_ids == VOCABULARY
    assert tokenizer.token_id("<SPECIAL_7>") == 7 and tokenizer.special_ids == set(range(8))


class Timed:
    """The reference's model, and the client of ours."""

    def __init__(self, folder: Path) -> None:
        write_tekken(folder)
        made = config()
        made.text_config.vocab_size = VOCABULARY
        made.text_config.max_position_embeddings = 1024
        made.text_config.eos_token_id = 2
        cls = transformers.VoxtralRealtimeForConditionalGeneration
        self.oracle = save_media_oracle(cls, made, folder)
        assert made.text_config.bos_token_id == TEXT["bos_token_id"]

    def tokens(self, samples: np.ndarray) -> list[int]:
        """Greedy; silence as in mistral-common (AudioEncoder.pad, offline)."""
        behind = -len(samples) % PIECE + (DELAY + 1 + 10) * PIECE
        padded = np.pad(samples / np.float32(32768.0), (LEAD * PIECE, behind))
        extractor = VoxtralRealtimeFeatureExtractor(feature_size=BANDS)
        frames = extractor(padded, sampling_rate=RATE, return_tensors="pt")["input_features"]
        ids = [1, *[PAD] * (LEAD + DELAY)]
        begins = len(ids)
        with torch.inference_mode():
            heard = self.oracle.get_audio_features(input_features=frames).pooler_output
            embed = self.oracle.get_input_embeddings()
            while len(ids) < heard.shape[1]:
                text = embed(torch.tensor([ids])) + heard[:, : len(ids)]
                waves = self.oracle.model.time_embedding(torch.full((1,), float(DELAY)))[None]
                hidden = self.oracle.model.language_model(inputs_embeds=text, t_cond=waves)
                last = self.oracle.lm_head(hidden.last_hidden_state[0, -1])
                ids.append(int(last.argmax()))
                if ids[-1] == 2:
                    break
        return ids[begins:]


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Timed, openai.OpenAI, Served]]:
    folder = tmp_path_factory.mktemp("ear")
    timed = Timed(folder)
    options = ("--served-model-name", "ear", "--dtype", "float32", "--device", "cpu")
    server = _started("--model", str(folder), *options)
    try:
        server.wait_ready()
        with openai_client(server.url) as client:
            yield timed, client, server
    finally:
        server.close()


@pytest.mark.slow
def test_text_and_segments(served: tuple[Timed, openai.OpenAI, Served]) -> None:
    timed, client, _ = served

    def create(samples: np.ndarray, **more: Any) -> Any:
        return client.audio.transcriptions.create(
            model="ear", file=("sound.wav", wav(samples)), **more
        )

    samples = sound(1.93)
    tokens = timed.tokens(samples)
    written = [one for one in tokens if one >= NUM_SPECIAL]
    pieces = [
        bytes([one - NUM_SPECIAL]) if one < NUM_SPECIAL + 256 else WORDS[one - NUM_SPECIAL - 256]
        for one in written
    ]
    text = b"".join(pieces).decode(errors="replace")
    answer = create(samples, response_format="verbose_json")
    assert answer.text == text.strip() and written
    assert [token for one in answer.segments for token in one.tokens] == written
    first = next(place for place, one in enumerate(tokens) if one >= NUM_SPECIAL)
    assert answer.segments[0].start == pytest.approx(min(0.08 * first, 1.93), abs=2e-3)
    with create(samples, stream=True) as events:
        said = "".join(event.delta for event in events if event.type == "transcript.text.delta")
    assert said == text.strip()
    for more in ({"language": "en"}, {"prompt": "names"}):
        with pytest.raises(openai.BadRequestError, match="takes none"):
            create(samples, **more)


@pytest.mark.slow
def test_sound_is_heard_while_it_comes(served: tuple[Timed, openai.OpenAI, Served]) -> None:
    """Text comes before the sound has ended, and is in the end that of a file of the same samples (API-01, API-02)."""
    timed, client, server = served
    samples = sound(4.3)
    file = ("sound.wav", wav(samples))
    whole = client.audio.transcriptions.create(model="ear", file=file).text
    assert len(timed.tokens(samples)) > 60, "the model went on to the end"
    with opened(server) as socket:
        send(socket, "session.update", model="ear")
        send(socket, "input_audio_buffer.commit", final=False)
        for at in range(0, len(samples), 1280):
            send(socket, "input_audio_buffer.append", audio=encoded(samples[at : at + 1280]))
        early = [told(socket) for _ in range(2)]
        assert {event["type"] for event in early} == {"transcription.delta"}
        send(socket, "input_audio_buffer.commit", final=True)
        events = [*early, *until(socket, "transcription.done")]
    assert events[-1]["text"] == whole
    assert "".join(event["delta"] for event in events[:-1]) == whole


@pytest.mark.slow
def test_many_connections_at_the_pace_of_speech(
    served: tuple[Timed, openai.OpenAI, Served],
) -> None:
    """20 of them, a piece of 80 ms every 80 ms: each text is that of a file of the same samples, and what was computed
    of its beginning is found again (API-01)."""
    _, client, server = served
    sounds = [sound(3.2 + 0.08 * number) for number in range(20)]

    def speak(samples: np.ndarray) -> tuple[str, str]:
        with opened(server) as socket:
            send(socket, "session.update", model="ear")
            send(socket, "input_audio_buffer.commit", final=False)
            began = time.monotonic()
            for number, at in enumerate(range(0, len(samples), 1280), 1):
                send(socket, "input_audio_buffer.append", audio=encoded(samples[at : at + 1280]))
                time.sleep(max(0.0, began + 0.08 * number - time.monotonic()))
            send(socket, "input_audio_buffer.commit", final=True)
            events = until(socket, "transcription.done")
        return events[-1]["text"], "".join(event["delta"] for event in events[:-1])

    before = counted(server)
    with ThreadPoolExecutor(len(sounds)) as pool:
        said = list(pool.map(speak, sounds))
    hits = counted(server) - before
    create = client.audio.transcriptions.create
    whole = [create(model="ear", file=("sound.wav", wav(one))).text for one in sounds]
    assert said == [(text, text) for text in whole] and all(whole)
    assert hits > 20 * 32, "what was heard before is not heard again"


def counted(server: Served) -> float:
    """Tokens of prompts that were found in the prefix cache."""
    text = httpx.get(f"{server.url}/metrics", timeout=300).text
    lines = [
        one for one in text.splitlines() if one.startswith("headrace_cached_prompt_tokens_total")
    ]
    return sum(float(one.rsplit(" ", 1)[1]) for one in lines)

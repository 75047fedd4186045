"""Sound that arrives in pieces: how it is decoded, where somebody speaks in it, where it is cut."""

from __future__ import annotations

import io
import struct

import av
import numpy as np
import pytest

from headrace.base.errors import InvalidRequest
from headrace.front.media.job import DecodingLimits
from headrace.front.media.log_mel import RATE
from headrace.front.media.pcm import PcmStream
from headrace.front.media.sound import sound
from headrace.front.media.voice import FRAME, Turn, VoiceDetector, VoiceSettings

CODECS = {"audio/pcm": "pcm_s16le", "audio/pcmu": "pcm_mulaw", "audio/pcma": "pcm_alaw"}


def noise(num: int, size: float = 3000.0) -> np.ndarray:
    return (np.random.default_rng(7).normal(size=num) * size).astype(np.int16)


def pieces(data: bytes, *, seed: int = 3) -> list[bytes]:
    cuts = sorted(np.random.default_rng(seed).integers(0, len(data), 40).tolist())
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.parametrize(
    ("encoding", "rate"),
    [("audio/pcm", 16_000), ("audio/pcm", 24_000), ("audio/pcmu", 8000), ("audio/pcma", 8000)],
)
def test_a_stream_gives_the_samples_of_a_file(encoding: str, rate: int) -> None:
    samples, file = noise(rate), io.BytesIO()
    with av.open(file, "w", format="wav") as container:
        stream = container.add_stream(CODECS[encoding], rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.rate = rate
        packets = [*stream.encode(frame), *stream.encode(None)]
        container.mux(packets)
        data = b"".join(bytes(packet) for packet in packets)
    wanted = sound(file.getvalue(), DecodingLimits()).inputs[0].rows.reshape(-1).view("<i2")
    reader = PcmStream(encoding, rate)
    heard = [*(reader.feed(piece) for piece in pieces(data)), reader.finish()]
    np.testing.assert_array_equal(np.concatenate(heard), wanted)
    assert len(wanted) == RATE


@pytest.mark.parametrize("rate", [1, 999, 768_001, 2**31 - 1])
def test_rates_that_no_sound_has_are_refused_at_once(rate: int) -> None:
    header = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate % 2**32, 2, 16)
    chunks = b"fmt " + struct.pack("<I", 16) + header + b"data" + struct.pack("<I", 8) + bytes(8)
    file = b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
    with pytest.raises(InvalidRequest, match=f"sound of {rate} samples a second given; allowed"):
        sound(file, DecodingLimits())


def test_titles_in_another_encoding_are_no_fault() -> None:
    samples = noise(1600).astype("<i2").tobytes()
    title = "Größe".encode("latin-1") + b"\0"
    info = b"INFOINAM" + struct.pack("<I", len(title)) + title
    chunks = b"".join(
        name + struct.pack("<I", len(body)) + body
        for name, body in (
            (b"fmt ", struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)),
            (b"LIST", info),
            (b"data", samples),
        )
    )
    file = b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
    heard = sound(file, DecodingLimits())
    assert heard.inputs[0].rows.tobytes() == samples


def test_half_a_sample_is_told() -> None:
    reader = PcmStream("audio/pcm", RATE)
    assert reader.feed(b"\x01\x02\x03").tolist() == [0x0201]
    with pytest.raises(InvalidRequest, match="audio: ends within a sample"):
        reader.finish()


def spoken(parts: list[tuple[float, float]]) -> np.ndarray:
    """Noise in parts of (seconds, amplitude)."""
    return np.concatenate([noise(int(seconds * RATE), size) for seconds, size in parts])


def test_turns_are_found_above_the_background_whatever_the_pieces() -> None:
    background = 30.0
    first = [(1.0, background), (0.8, 2000), (0.3, background), (0.5, 2000), (1.2, background)]
    samples = spoken([*first, (0.4, 900), (1.0, background)])
    settings = VoiceSettings(prefix_ms=200, silence_ms=400)
    whole = VoiceDetector(settings).feed(samples)
    # A pause of 0.3 s is none that ends a turn.
    assert [(turn.begins, round(turn.at / RATE, 2)) for turn in whole] == [
        (True, 0.8),
        (False, 3.0),
        (True, 3.6),
        (False, 4.6),
    ]
    for one in (1, FRAME - 1, 5000):
        detector, found = VoiceDetector(settings), list[Turn]()
        for at in range(0, 3 * RATE if one == 1 else len(samples), one):
            found += detector.feed(samples[at : at + one])
        assert found == whole[: len(found)] and len(found) >= 2


def test_steady_noise_becomes_the_background() -> None:
    loud = spoken([(8.0, 300.0)])
    turns = VoiceDetector(VoiceSettings()).feed(loud)
    assert [turn.begins for turn in turns] == [True, False] and turns[1].at < 4 * RATE
    assert VoiceDetector(VoiceSettings()).feed(np.zeros(5 * RATE, np.int16)) == []
    strict = VoiceDetector(VoiceSettings(threshold=0.99))
    assert strict.feed(spoken([(3.1, 30), (1.0, 150), (1.0, 30)])) == []

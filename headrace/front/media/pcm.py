"""Sound as it arrives from a microphone, chunk by chunk: raw PCM or G.711 to int16 samples at RATE.

Chunks may end anywhere: what comes out does not depend on where they were cut, and equals what
`sound.py` makes of the same samples in a file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.errors import InvalidRequest
from headrace.base.optional import require
from headrace.front.media.log_mel import RATE

Samples = npt.NDArray[np.int16]
ENCODINGS = ("audio/pcm", "audio/pcmu", "audio/pcma")
"""int16 little-endian, G.711 mu-law, G.711 A-law; one channel."""
NONE = np.zeros(0, np.int16)


class PcmStream:
    """The bytes of one channel in `encoding`, at `rate` samples a second."""

    def __init__(self, encoding: str, rate: int) -> None:
        self._table = _TABLES.get(encoding)
        self._rate = rate
        self._resampler: Any = None
        self._odd = b""

    def feed(self, data: bytes) -> Samples:
        """The samples that are known with these bytes."""
        if self._table is not None:
            return self._resampled(self._table[np.frombuffer(data, np.uint8)])
        data = self._odd + data
        whole = len(data) & ~1
        self._odd = data[whole:]
        return self._resampled(np.frombuffer(data[:whole], "<i2").astype(np.int16, copy=False))

    def finish(self) -> Samples:
        """What the resampler still holds; the next chunk begins anew. InvalidRequest where half a
        sample is left."""
        odd, self._odd = self._odd, b""
        resampler, self._resampler = self._resampler, None
        if odd:
            raise InvalidRequest("audio: ends within a sample of 2 bytes", field="audio")
        return NONE if resampler is None else _joined(resampler.resample(None))

    def _resampled(self, samples: Samples) -> Samples:
        if self._rate == RATE or not samples.size:
            return samples
        av = require("av", extra="media", purpose=f"sound of {self._rate} Hz")
        if self._resampler is None:
            self._resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = self._rate
        return _joined(self._resampler.resample(frame))


def _joined(frames: Any) -> Samples:
    pieces = [frame.to_ndarray().reshape(-1) for frame in frames]
    return np.concatenate(pieces) if pieces else NONE


def _mu_law() -> Samples:
    """ITU-T G.711, table 2: sign, 3 bits of exponent, 4 of mantissa, all inverted."""
    code = ~np.arange(256, dtype=np.uint8)
    exponent, mantissa = (code >> 4 & 7).astype(np.int32), (code & 15).astype(np.int32)
    size = (((mantissa << 3) + 132) << exponent) - 132
    return np.where(code & 128, -size, size).astype(np.int16)


def _a_law() -> Samples:
    """ITU-T G.711, table 1: every other bit inverted."""
    code = np.arange(256, dtype=np.uint8) ^ 0x55
    exponent, mantissa = (code >> 4 & 7).astype(np.int32), (code & 15).astype(np.int32)
    size = (mantissa << 4) + 8
    size = np.where(exponent > 0, (size + 256) << np.maximum(exponent - 1, 0), size)
    return np.where(code & 128, size, -size).astype(np.int16)


_TABLES = {"audio/pcmu": _mu_law(), "audio/pcma": _a_law()}

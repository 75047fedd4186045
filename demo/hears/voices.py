"""espeak-ng's voices: a text as samples, by its library.

The library and its data come from the wheel `espeakng-loader`, or from a folder that holds `libespeak-ng.so` and
`espeak-ng-data` (HEADRACE_ESPEAK).
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

RATE = 16_000
_OWN_RATE = 22_050
_SYNCHRONOUS, _QUIET_ERRORS, _UTF8 = 2, 1 << 15, 1
_SPEED, _PITCH, _RANGE, _GAP = 1, 3, 4, 7
Samples = npt.NDArray[np.float32]

ACCENTS = {"en": ("en-us", "en-us", "en-gb-x-rp", "en-gb-scotland"), "de": ("de",)}
TRAINED = (
    "", "m1", "m2", "m3", "m5", "m6", "m7", "f1", "f2", "f4", "f5", "Alex", "Alicia", "Andrea", "Andy", "Denis",
    "Diogo", "Gene", "Jacky", "Lee", "Marco", "Mario", "Mike", "Nguyen", "Reed", "Henrique", "Hugo", "klatt", "klatt2",
    "klatt3", "max", "steph", "steph2", "steph3", "edward", "ed", "john", "grandma", "grandpa", "robosoft", "robosoft3",
    "kaukovalta", "linda", "norbert", "pablo", "paul", "quincy", "rob", "travis", "zac", "benjamin", "caleb", "david",
)  # fmt: skip
"""Variants of a language's voice that training uses, of which those are taken that are there."""
HELD_OUT = (
    "m4",
    "f3",
    "m8",
    "Annie",
    "Michael",
    "Gene2",
    "adam",
    "antonio",
    "shelby",
    "victor",
    "anika",
    "belinda",
)
"""Variants that it never uses."""


@dataclass(frozen=True, kw_only=True)
class Voice:
    """Who speaks, and how: words a minute, pitch and its range in 0..100."""

    name: str
    speed: int = 175
    pitch: int = 50
    range: int = 50
    gap: int = 0


def any_voice(rng: Random, language: str, variants: tuple[str, ...]) -> Voice:
    """One of the variants at a speed and pitch of its own."""
    variant = rng.choice(variants)
    accent = rng.choice(ACCENTS[language])
    return Voice(
        name=f"{accent}+{variant}" if variant else accent,
        speed=rng.randint(120, 220),
        pitch=min(99, max(0, round(rng.gauss(50, 15)))),
        range=rng.randint(30, 70),
        gap=rng.choice((0, 0, 0, 1, 3)),
    )


class Speaker:
    """The library, of which a process can have one."""

    def __init__(self) -> None:
        folder = _folder()
        self._library = ctypes.CDLL(str(next(folder.glob("libespeak-ng.so*"))))
        self._library.espeak_Initialize.argtypes = [
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_int,
        ]
        rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, str(folder).encode(), _QUIET_ERRORS)
        assert rate == _OWN_RATE, rate
        self._parts: list[bytes] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        self._callback = kind(self._heard)
        self._library.espeak_SetSynthCallback(self._callback)
        known = {path.name for path in (folder / "espeak-ng-data/voices/!v").iterdir()}
        self.trained = tuple(one for one in TRAINED if not one or one in known)
        self.held_out = tuple(one for one in HELD_OUT if one in known)

    def say(self, text: str, voice: Voice) -> Samples:
        """Samples at RATE, the greatest about 1, without the silence around them; empty if nothing was said."""
        library = self._library
        if library.espeak_SetVoiceByName(voice.name.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {voice.name!r}")
        for number, value in (
            (_SPEED, voice.speed),
            (_PITCH, voice.pitch),
            (_RANGE, voice.range),
            (_GAP, voice.gap),
        ):
            library.espeak_SetParameter(number, value, 0)
        self._parts.clear()
        data = text.encode()
        library.espeak_Synth(data, ctypes.c_size_t(len(data) + 1), 0, 0, 0, _UTF8, None, None)
        wave = np.frombuffer(b"".join(self._parts), np.int16).astype(np.float32)
        return trimmed(resampled(wave))

    def _heard(self, samples: int | None, count: int, events: int | None) -> int:
        if samples and count > 0:
            self._parts.append(ctypes.string_at(samples, 2 * count))
        return 0


def _folder() -> Path:
    named = os.environ.get("HEADRACE_ESPEAK")
    if named:
        return Path(named)
    import espeakng_loader

    return Path(espeakng_loader.get_library_path()).parent


def resampled(wave: Samples) -> Samples:
    """From espeak's rate to ours, by the spectrum: 441 samples become 320."""
    blocks = -(-max(len(wave), 1) // 441)
    blocks = next(n for n in range(blocks, 2 * blocks + 2) if _smooth(n))
    spectrum = np.fft.rfft(wave, 441 * blocks)
    short = np.fft.irfft(spectrum[: 160 * blocks + 1], 320 * blocks) * (320 / 441)
    return short[: len(wave) * 320 // 441].astype(np.float32)


def _smooth(number: int) -> bool:
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            number //= prime
    return number == 1


def trimmed(wave: Samples) -> Samples:
    """Without what is quieter than a hundredth of the loudest at both ends."""
    top = np.abs(wave).max(initial=0.0)
    if top < 1.0:
        return np.zeros(0, np.float32)
    loud = np.flatnonzero(np.abs(wave) > 0.01 * top)
    return wave[loud[0] : loud[-1] + 1] / top

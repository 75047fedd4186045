"""Windows of ten seconds with a few phrases in them, over noise or none, and what is to be heard there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo.hears.phrases import Phrase, phrase
from demo.hears.tokens import ID, SECONDS, time_token
from demo.hears.voices import RATE, Samples, Speaker, any_voice

TOKENS = 96
LETTERS = 160
ROW = np.dtype(
    [
        ("wave", np.int16, RATE * SECONDS), ("tokens", np.int16, TOKENS), ("targets", np.int16, TOKENS),
        ("letters", np.uint8, LETTERS), ("num_letters", np.int32),
    ]
)  # fmt: skip
_POOL = 160
"""Utterances that a worker keeps; each is used a few times, at other places and in other noise."""
_BANK = 60 * RATE
"""Samples of each kind of noise that a worker makes once."""
_FRESH = 0.4
"""Share of uses that say something new."""


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """A phrase as it was said."""

    phrase: Phrase
    wave: Samples


@dataclass(frozen=True, kw_only=True)
class Window:
    """Samples of a window, and its utterances with their beginnings in seconds."""

    language: str
    wave: npt.NDArray[np.int16]
    said: tuple[tuple[float, Utterance], ...]


@dataclass(frozen=True, kw_only=True)
class NoiseShare:
    """How much of what is learnt has noise, and how far below the voice it lies (power, in dB)."""

    share: float = 0.6
    snr_db: tuple[float, float] = (5.0, 30.0)


class Studio:
    """Utterances by many voices."""

    def __init__(
        self, seed: str, *, held_out: bool = False, noisy: NoiseShare | None = None
    ) -> None:
        self.rng = Random(seed)
        self._noisy = noisy or NoiseShare()
        self.noise = np.random.default_rng(self.rng.getrandbits(63))
        self._speaker = Speaker()
        self._held_out = held_out
        self._noises = [_noise(_BANK, tilt, self.noise) for tilt in (0.0, 1.0, 2.0)]
        self._pool: dict[str, list[Utterance]] = {"en": [], "de": []}

    def utterance(self, language: str, kind: str = "") -> Utterance:
        """A new one."""
        variants = self._speaker.held_out if self._held_out else self._speaker.trained
        while True:
            one = phrase(self.rng, language, held_out=self._held_out, kind=kind)
            wave = self._speaker.say(one.spoken, any_voice(self.rng, language, variants))
            if len(wave) > RATE // 8:
                return Utterance(phrase=one, wave=wave)

    def pooled(self, language: str) -> Utterance:
        """A new one, or one of those that were said before."""
        pool = self._pool[language]
        if len(pool) < _POOL or self.rng.random() < _FRESH:
            one = self.utterance(language)
            if len(pool) >= _POOL:
                pool[self.rng.randrange(_POOL)] = one
            else:
                pool.append(one)
            return one
        return self.rng.choice(pool)

    def window(self, language: str, count: int, *, noisy: bool | None = None) -> Window:
        """So many phrases, or as many as fit; `noisy`: with noise, without, or either."""
        rng, said = self.rng, list[tuple[float, Utterance]]()
        wave = np.zeros(RATE * SECONDS, np.float32)
        at = rng.uniform(0.0, 1.2) if rng.random() < 0.7 else rng.uniform(0.0, 5.0)
        for number in range(count):
            one = self.pooled(language)
            room = SECONDS - at - 0.1
            if len(one.wave) / RATE > room:
                if number or len(one.wave) / RATE > SECONDS - 0.3:
                    break
                at = rng.uniform(0.0, SECONDS - 0.2 - len(one.wave) / RATE)
            begin = round(at * RATE)
            wave[begin : begin + len(one.wave)] += one.wave * rng.uniform(0.5, 1.0)
            said.append((at, one))
            at += len(one.wave) / RATE + rng.choice((rng.uniform(0.15, 0.5), rng.uniform(0.4, 2.0)))
        heard = self._in_a_room(wave, noisy)
        return Window(language=language, wave=heard, said=tuple(said))

    def _some_noise(self, count: int) -> Samples:
        """From any place of any of the noises."""
        bank = self.rng.choice(self._noises)
        at = self.rng.randrange(len(bank) - count)
        return bank[at : at + count]

    def _in_a_room(self, wave: Samples, noisy: bool | None) -> npt.NDArray[np.int16]:
        """Echo, a narrow line, noise and a level, each or none."""
        rng = self.rng
        rich = noisy is None
        if rich and rng.random() < 0.2:
            wave = _echoed(wave, rng, rng.uniform(0.05, 0.25), rng.uniform(0.05, 0.25))
        if rich and rng.random() < 0.1:
            wave = _narrow(wave, rng.uniform(80, 300), rng.uniform(3000, 5000))
        if rng.random() < self._noisy.share if noisy is None else noisy:
            power = (
                float(np.mean(wave[np.abs(wave) > 0.02] ** 2))
                if np.any(np.abs(wave) > 0.02)
                else 0.02
            )
            snr_db = rng.uniform(*self._noisy.snr_db) if rich else rng.uniform(10.0, 20.0)
            noise = self._some_noise(len(wave))
            if rich and rng.random() < 0.15:
                noise = noise + _hum(len(wave), rng.choice((50.0, 60.0)), rng.uniform(0.3, 1.0))
            wave = wave + noise * np.float32(np.sqrt(power / 10 ** (snr_db / 10)))
        level = 10 ** rng.uniform(-1.3, -0.05)
        loudest = max(float(np.abs(wave).max()), 1e-3)
        return np.clip(wave * (level * 32767 / loudest), -32768, 32767).astype(np.int16)


def _noise(count: int, tilt: float, source: np.random.Generator) -> Samples:
    """White (0), pink (1) or brown (2) noise of power 1."""
    white = source.standard_normal(count, np.float32)
    if tilt == 0.0:
        return white
    spectrum = np.fft.rfft(white)
    spectrum *= np.maximum(np.arange(len(spectrum)), 20.0) ** (-tilt / 2)
    made = np.fft.irfft(spectrum, count).astype(np.float32)
    return made / max(float(made.std()), 1e-9)


def _hum(count: int, hertz: float, level: float) -> Samples:
    at = np.arange(count, dtype=np.float32) / RATE
    return np.float32(level) * (
        np.sin(2 * np.pi * hertz * at) + 0.5 * np.sin(4 * np.pi * hertz * at)
    ).astype(np.float32)


def _echoed(wave: Samples, rng: Random, seconds: float, share: float) -> Samples:
    """With a dozen echoes, the later the weaker."""
    found = wave.copy()
    for _ in range(12):
        part = rng.random()
        late = max(1, round(part * seconds * RATE))
        found[late:] += np.float32(share * rng.choice((-1, 1)) * np.exp(-3.0 * part)) * wave[:-late]
    return found


def _narrow(wave: Samples, low: float, high: float) -> Samples:
    spectrum = np.fft.rfft(wave)
    hertz = np.arange(len(spectrum)) * RATE / len(wave)
    spectrum *= (hertz > low) & (hertz < high)
    return np.fft.irfft(spectrum, len(wave)).astype(np.float32)


def text_of(window: Window) -> str:
    """What is said in it."""
    return " ".join(one.phrase.written for _, one in window.said)


def answer(window: Window, tokenizer: Tokenizer, *, times: bool) -> list[int]:
    """The tokens behind the task."""
    found: list[int] = []
    for at, one in window.said:
        ids = tokenizer.encode(f" {one.phrase.written}", add_special_tokens=False).ids
        if times:
            ids = [time_token(at), *ids, time_token(at + len(one.wave) / RATE)]
        found += ids
    return [*found, ID["<|endoftext|>"]]


def row_of(window: Window, tokenizer: Tokenizer, rng: Random, times: bool) -> np.ndarray | None:
    """A window to learn; None if it says too much."""
    start, language, task = (
        ID["<|startoftranscript|>"],
        ID[f"<|{window.language}|>"],
        ID["<|transcribe|>"],
    )
    begins = [start, language, task, *([] if times else [ID["<|notimestamps|>"]])]
    said = answer(window, tokenizer, times=times)
    if not window.said and rng.random() < 0.5:
        begins, said = [start], [ID["<|nospeech|>"], ID["<|endoftext|>"]]
    ids = np.array([*begins, *said])
    letters = text_of(window).encode()
    if len(ids) > TOKENS or len(letters) > LETTERS:
        return None
    row = np.zeros((), ROW)
    row["wave"] = window.wave
    row["tokens"], row["targets"] = ID["<|endoftext|>"], -100
    row["tokens"][: len(ids)] = ids
    learnt = np.arange(1, len(ids)) >= len(begins)
    learnt[0] |= bool(window.said)  # the language, or that nothing is said
    row["targets"][: len(ids) - 1] = np.where(learnt, ids[1:], -100)
    row["letters"][: len(letters)] = np.frombuffer(letters, np.uint8)
    row["num_letters"] = len(letters)
    return row


def rows(seed: str, tokenizer_file: str, noisy: NoiseShare | None = None) -> Iterator[np.ndarray]:
    """Endless windows to learn."""
    studio, tokenizer = Studio(seed, noisy=noisy), Tokenizer.from_file(tokenizer_file)
    rng = studio.rng
    while True:
        count = rng.choice((0, 1, 1, 1, 2, 2, 3, 4, 5)) if rng.random() < 0.8 else 1
        row = row_of(
            studio.window(rng.choice(("en", "de")), count), tokenizer, rng, rng.random() < 0.5
        )
        if row is not None:
            yield row

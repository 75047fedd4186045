"""Sound for towers that read mel frames: Whisper's spectrogram, or another one, over as much of it
as the family's reference does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.base.config.media import (
    ProcessorSettings,
    SoundClock,
    SoundSettings,
    SpeechInTime,
    Waveform,
)
from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import SoundSteps
from headrace.front.media.log_mel import HOP, RATE, LogMel
from headrace.front.media.normalized_mel import normalized_mel
from headrace.front.media.paired_mel import paired_log_mel, windowed_log_mel
from headrace.front.media.power_mel import power_mel
from headrace.front.media.processing import Layout, ProcessedMedia, TowerInput
from headrace.front.media.stacked_mel import stacked_log_mel
from headrace.front.media.usm_mel import log_magnitudes

Samples = npt.NDArray[np.int16]
LEAST_VARIANCE = 1e-7


def spectrogram(samples: Samples, settings: ProcessorSettings) -> ProcessedMedia:
    """Rows of float32, one for each frame; InvalidRequest for a sound that the model cannot
    take."""
    sound = settings.sound
    assert sound is not None, "the model does not hear"
    size = sound.part * HOP or max(1, len(samples))
    parts = [samples[at : at + size] for at in range(0, max(1, len(samples)), size)]
    inputs = [one for part in parts if (one := _input(part, sound)) is not None]
    if not inputs:
        raise InvalidRequest(f"sound of {len(samples) / RATE:.3f} s is too short")
    layout: list[str | int] = []
    before, behind = sound.around
    for number in range(len(inputs)):
        layout += [part for part in (before, number, behind) if part != ""]
    if sound.clock is not None:
        return ProcessedMedia(inputs=tuple(inputs), layout=clocked(inputs[0], sound.clock))
    if not sound.row:
        return ProcessedMedia(inputs=tuple(inputs), layout=tuple(layout))
    row = (sound.row, sound.breaks)
    return ProcessedMedia(
        inputs=tuple(inputs), layout=tuple(layout), row_break=behind + before, row=row
    )


def clocked(one: TowerInput, clock: SoundClock) -> Layout:
    """Its tokens, and every so many of them the second that has come."""
    layout: list[str | int | tuple[int, int, int]] = []
    each, at = int(clock.per_s * clock.every_s), 0
    for second in range(clock.every_s, int(one.num_tokens / clock.per_s) + 1, clock.every_s):
        layout += [(0, at, each), str(second)]
        at += each
    rest = one.num_tokens - at
    return (*layout, (0, at, rest)) if rest > 0 else tuple(layout)


def _input(samples: Samples, sound: SoundSettings) -> TowerInput | None:
    """A part of a sound; None where it is too short for a token."""
    frames = _frames(samples, sound)
    count = steps_of(sound).tokens(len(frames))
    if count < 1:
        return None
    if sound.seeing is not None:
        flags = np.full((len(frames), 1), sound.seeing, np.float32)
        frames = np.ascontiguousarray(np.concatenate([frames, flags], axis=1))
    rows = frames.view(np.uint8).reshape(len(frames), -1)
    if sound.row:
        count += sound.breaks * (-(-count // sound.row) - 1)
    return TowerInput(kind="audio", grid=(1, 1, len(rows)), rows=rows, num_tokens=count)


def steps_of(sound: SoundSettings) -> SoundSteps:
    """How its frames become tokens."""
    names = SoundSteps.__struct_fields__
    return SoundSteps(**{name: getattr(sound, name) for name in names})


def _frames(samples: Samples, sound: SoundSettings) -> npt.NDArray[np.float32]:
    """float32 [N, bands]."""
    if sound.most and len(samples) > sound.most * HOP:
        raise InvalidRequest(
            f"sound of {len(samples) / RATE:.1f} s given; this model hears "
            f"{sound.most * HOP / RATE:g} s at most"
        )
    if sound.magnitudes is not None:
        return log_magnitudes(samples, sound.bands, sound.magnitudes)
    if sound.waveform is not None:
        return waveform(samples, sound.waveform)
    if sound.power is not None:
        stack = sound.stack or 1
        frames = power_mel(samples, sound.bands // stack, sound.power)
        rows = len(frames) // stack
        return np.ascontiguousarray(frames[: rows * stack].reshape(rows, sound.bands))
    if sound.normalized is not None:
        return normalized_mel(samples, sound.bands, sound.normalized)
    if sound.stack:
        return stacked_log_mel(samples, sound.bands, sound.stack, changes=sound.changes)
    if sound.windowed:
        log_mel = paired_log_mel if sound.windowed == "paired" else windowed_log_mel
        return np.ascontiguousarray(log_mel(samples, sound.bands))
    if sound.in_time is not None:
        samples = with_silence(samples, sound.in_time)
    if sound.most:
        return _within_window(samples, sound)
    if sound.window:
        size = sound.window * HOP
        samples = np.pad(samples, (0, -len(samples) % size if len(samples) else size))
    samples = np.pad(samples, (0, max(0, sound.least * HOP - len(samples))))
    mel = LogMel(sound.bands, loudest=sound.loudest)
    return np.ascontiguousarray(mel.features(samples).T)


def waveform(samples: Samples, settings: Waveform) -> npt.NDArray[np.float32]:
    """float32 [N, 1]."""
    wave = samples / 32768.0
    if settings.normal and len(wave):
        wave = (wave - wave.mean()) / np.sqrt(wave.var() + LEAST_VARIANCE)
    return np.ascontiguousarray(wave[:, None], dtype=np.float32)


def with_silence(samples: Samples, settings: SpeechInTime) -> Samples:
    """The sound in whole pieces, with those of silence around it."""
    piece = settings.piece * HOP
    behind = -len(samples) % piece + settings.tail * piece
    return np.pad(samples, (settings.lead * piece, behind))


def frame_s(sound: SoundSettings) -> float:
    """Seconds from one token to the next, of sounds whose tokens are what convolutions leave."""
    samples = 1 if sound.waveform is not None else HOP * (sound.stack or 1)
    for _, step, _ in sound.strides:
        samples *= step
    return samples * sound.pool / RATE


def _within_window(samples: Samples, sound: SoundSettings) -> npt.NDArray[np.float32]:
    """The frames that have samples, and `margin` of the silence behind them; behind the end of the
    window there is not even that."""
    count = -(-len(samples) // HOP)
    # A frame sees half a window of samples around its place: two frames more than are kept.
    whole = min(count + sound.margin + 2, sound.most)
    frames = LogMel(sound.bands, whole).features(samples).T[: count + sound.margin]
    missing = count + sound.margin - len(frames)
    return np.ascontiguousarray(np.pad(frames, ((0, missing), (0, 0))))

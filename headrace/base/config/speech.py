"""Encoders of speech that read sounds of any length: the values of a frame, the most frames, and
three numbers for each of the convolutions along time (base/wire/media.py: encoder_outputs). Without
torch, so that launch can ask."""

from __future__ import annotations

from headrace.base.config.media import SoundSettings

MOONSHINE = (1, 30 * 16_000, 127, 64, 0, 7, 3, 0, 3, 2, 0)
MOONSHINE_STREAMING = (1, 30 * 16_000, 80, 80, 0, 5, 2, 2, 5, 2, 2)
"""Samples; half a minute of them. Two of the five taps of a convolution lie as far before the first
frame as four do without any behind the last."""


def sound_shape(sound: SoundSettings) -> tuple[int, ...]:
    """Of an encoder that reads such frames, `most` of them."""
    return sound.bands, sound.most, *(number for each in sound.strides for number in each)

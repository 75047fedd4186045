"""Spectrograms equal those of transformers' extractor; long sound is cut where it is quiet."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import transformers

from headrace.front.media.log_mel import RATE, LogMel
from headrace.front.media.quiet import PLACE, windows


def sound(seconds: float, seed: int = 1) -> np.ndarray:
    generator = np.random.default_rng(seed)
    at = np.arange(int(seconds * RATE)) / RATE
    wave = sum(np.sin(2 * np.pi * hertz * at) for hertz in (110.0, 440.0, 3000.0))
    wave = wave + generator.normal(0, 0.3, len(at))
    return (wave / np.abs(wave).max() * 20_000).astype(np.int16)


@pytest.mark.parametrize("bands", [80, 128])
@pytest.mark.parametrize("seconds", [0.01, 1.7, 30.0, 33.3])
def test_features_equal_those_of_the_extractor(bands: int, seconds: float) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=bands)
    samples = sound(seconds)
    wave = np.zeros(30 * RATE)
    wave[: len(samples)] = samples[: len(wave)] / 32768.0
    # By NumPy in float64: the other way it has, by torch in float32, is 2e-5 away from this one.
    theirs = extractor._np_extract_fbank_features(wave[None], "cpu")[0]
    ours = LogMel(bands, 3000).features(samples)
    assert ours.shape == theirs.shape == (bands, 3000) and ours.dtype == np.float32
    assert np.abs(ours - theirs).max() < 1e-5


def test_silence_is_finite() -> None:
    features = LogMel(80, 100).features(np.zeros(0, np.int16))
    assert np.isfinite(features).all() and (features == features[0, 0]).all()


def test_long_sound_is_cut_in_its_pauses() -> None:
    samples = np.concatenate([sound(8), np.zeros(RATE // 4, np.int16), sound(9, 2), sound(0.5, 3)])
    most = 10 * RATE
    cuts = windows(samples, most)
    assert cuts[0][0] == 0 and cuts[-1][1] == len(samples)
    assert all(one[1] == other[0] for one, other in pairwise(cuts))
    assert all(0 < end - begin <= most for begin, end in cuts)
    assert 8 * RATE <= cuts[0][1] <= 8 * RATE + RATE // 4
    assert windows(samples[: most - 1], most) == [(0, most - 1)]
    assert windows(samples[:0], most) == [(0, 0)]
    assert all(end - begin > PLACE for begin, end in windows(sound(31), RATE))


def test_ten_minutes_are_cut_in_their_gaps_and_lose_no_sample() -> None:
    """MUL-06: each window begins where the one before ends, to the sample, so that times do not drift."""
    noise = np.random.default_rng(4).normal(size=600 * RATE) * 3000
    samples = noise.astype(np.int16)
    gaps = [int((29.5 + 29.4 * i) * RATE) for i in range(20)]
    for gap in gaps:
        samples[gap : gap + RATE // 4] = 0
    cuts = windows(samples, 30 * RATE)
    ends = [end for _, end in cuts]
    assert [begin for begin, _ in cuts] == [0, *ends[:-1]] and ends[-1] == len(samples)
    assert len(cuts) == 21
    for gap, end in zip(gaps, ends, strict=False):
        assert gap < end < gap + RATE // 4
    assert np.array_equal(np.concatenate([samples[a:b] for a, b in cuts]), samples)

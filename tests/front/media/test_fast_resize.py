"""Pictures are resized to the bit as Pillow does it, and those it would begin elsewhere are left to it."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from headrace.front.media import fast_resize
from headrace.front.media.picture import channels_at
from headrace.front.media.resize_library import library_path

BICUBIC, BILINEAR = Image.Resampling.BICUBIC, Image.Resampling.BILINEAR


def picture(height: int, width: int) -> Image.Image:
    """Noise beside black and white, beyond which a cubic filter reaches."""
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    pixels[: height // 2, width // 3 :] = 255 * (pixels[: height // 2, width // 3 :] > 127)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("resample", [BICUBIC, BILINEAR])
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((270, 480), (280, 504)),
        ((37, 53), (64, 28)),
        ((90, 160), (90, 64)),
        ((33, 65), (112, 65)),
        ((200, 300), (150, 220)),
        ((216, 384), (108, 196)),
        ((5, 7), (90, 3)),
        ((1, 1), (28, 28)),
        ((16, 17), (48, 49)),
    ],
)
def test_values_are_pillows(
    given: tuple[int, int], wanted: tuple[int, int], resample: Image.Resampling
) -> None:
    if not library_path().exists():
        pytest.skip("the library is not built")
    one, (height, width) = picture(*given), wanted
    made = fast_resize.channels(one, height=height, width=width, resample=resample)
    assert made is not None
    expected = np.asarray(one.resize((width, height), resample)).transpose(2, 0, 1)
    np.testing.assert_array_equal(made, expected)


def test_the_rest_is_left_to_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    one = picture(60, 80)
    size = {"height": 20, "width": 64}
    assert fast_resize.channels(one, **size, resample=BICUBIC) is None  # columns go first
    lanczos = Image.Resampling.LANCZOS
    assert fast_resize.channels(one, height=64, width=64, resample=lanczos) is None
    expected = np.asarray(one.resize((64, 20), BICUBIC)).transpose(2, 0, 1)
    np.testing.assert_array_equal(channels_at(one, **size), expected)
    monkeypatch.setattr(fast_resize, "_library", lambda: None)
    assert fast_resize.channels(one, height=64, width=64, resample=BICUBIC) is None
    assert channels_at(one, height=64, width=64).shape == (3, 64, 64)

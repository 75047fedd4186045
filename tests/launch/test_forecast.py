"""The roofline against figures computed by hand."""

from __future__ import annotations

import pytest

from headrace.base.errors import ConfigError
from headrace.launch.forecast import (
    GIB,
    DeviceModel,
    ModelCost,
    forecast,
    known_device,
    predict_step,
)

DEVICE = DeviceModel(name="toy", memory_bytes=10 * GIB, bandwidth=1e9, rate=1e12, source="test")
COST = ModelCost(
    weight_bytes=2 * GIB,
    read_bytes=10**9,
    multiplied=5 * 10**8,
    kv_layers=((1000, None), (1000, 100)),
)


def test_a_small_batch_is_bound_by_memory() -> None:
    one = predict_step(COST, DEVICE, batch=1, context=1000)
    assert one.bound == "memory"
    assert one.decode_step_ms == pytest.approx((10**9 + 1000 * 1000 + 1000 * 100) / 1e9 * 1e3)


def test_a_large_batch_is_bound_by_arithmetic() -> None:
    many = predict_step(COST, DEVICE, batch=4000, context=1)
    assert many.bound == "arithmetic" and many.decode_step_ms == pytest.approx(4000.0)


def test_windows_bound_the_kv_of_a_layer() -> None:
    assert COST.kv_bytes(50) == 100_000
    assert COST.kv_bytes(1000) == 1_100_000


def test_what_does_not_fit_is_said() -> None:
    small = DeviceModel(name="s", memory_bytes=1 * GIB, bandwidth=1e9, rate=1e12, source="test")
    assert forecast(COST, DEVICE, kv_memory_bytes=None, max_model_len=4096).fits
    assert not forecast(COST, small, kv_memory_bytes=None, max_model_len=4096).fits
    assert not forecast(COST, DEVICE, kv_memory_bytes=9 * GIB, max_model_len=4096).fits


def test_the_h200_floor_of_an_8b_decoder_at_batch_one() -> None:
    """16.4 GB of weights less the embedding table: about 3.5 ms (figures measured with the device)."""
    cost = ModelCost(
        weight_bytes=16_381_470_720, read_bytes=15_136_811_008, multiplied=7_568_405_504,
        kv_layers=((4096, None),) * 36,
    )  # fmt: skip
    assert predict_step(
        cost, known_device("h200"), batch=1, context=256
    ).decode_step_ms == pytest.approx(3.49, abs=0.02)


def test_an_unknown_device_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="h200"):
        known_device("tpu9")

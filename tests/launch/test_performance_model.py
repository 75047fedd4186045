"""The roofline against figures computed by hand."""

from __future__ import annotations

import msgspec
import pytest

from headrace.base.errors import ConfigError
from headrace.launch.performance_model import (
    GIB,
    DeviceModel,
    ModelCost,
    SampleTiming,
    estimate_performance,
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


LAYERS_2 = SampleTiming(
    cost=ModelCost(weight_bytes=300, read_bytes=300, head_bytes=100, multiplied=150, kv_layers=((1, None),) * 2),
    context=10,
    steps=((1, 0.030), (8, 0.037), (32, 0.061)),
    prompts=((100, 0.030), (300, 0.070)),
)  # fmt: skip
ALL_8 = ModelCost(
    weight_bytes=900, read_bytes=900, head_bytes=100, multiplied=450, kv_layers=((1, None),) * 8
)


def test_a_sample_that_is_the_whole_model_foretells_its_own_steps() -> None:
    for rows, seconds in LAYERS_2.steps:
        said = predict_step(LAYERS_2.cost, DEVICE, batch=rows, context=10, sample=LAYERS_2)
        assert said.decode_tok_s == pytest.approx(rows / seconds)
    assert LAYERS_2.prefill_tok_s(LAYERS_2.cost) == pytest.approx(512 / (0.010 + 512 * 0.0002))


def test_the_whole_models_step_is_the_samples_by_what_both_read() -> None:
    """300 bytes and 20 of KV per row, against 900 and 80."""
    assert LAYERS_2.decode_s(ALL_8, 1) == pytest.approx(0.030 * (900 + 80) / (300 + 20))
    assert LAYERS_2.decode_s(ALL_8, 32) == pytest.approx(0.061 * (900 + 32 * 80) / (300 + 32 * 20))


@pytest.mark.parametrize(
    ("rows", "milliseconds"), [(1, 30), (2, 31), (8, 37), (20, 49), (32, 61), (128, 157)]
)
def test_rows_in_between_and_beyond_lie_on_straight_lines(rows: int, milliseconds: int) -> None:
    assert 1e3 * LAYERS_2.step_s(rows) == pytest.approx(milliseconds)


def test_a_longer_context_costs_the_reading_of_its_kv() -> None:
    slow = DeviceModel(name="slow", memory_bytes=1 << 30, bandwidth=1e6, rate=1e9, source="test")
    short, long = (
        predict_step(ALL_8, slow, batch=4, context=context, sample=LAYERS_2).decode_step_ms
        for context in (10, 1010)
    )
    assert long - short == pytest.approx(4 * 8 * 1000 / 1e6 * 1e3)


def test_a_prompt_pays_once_for_the_head_and_the_host_and_for_all_layers_but_the_last() -> None:
    """10 ms once; 0.2 ms a token for two layers, of which the second does a tenth of its work."""
    token_s = 0.0002 * 7.1 / 1.1
    assert LAYERS_2.prefill_tok_s(ALL_8) == pytest.approx(512 / (0.010 + 512 * token_s))


def test_a_short_prompt_that_was_disturbed_does_not_make_tokens_free() -> None:
    disturbed = msgspec.structs.replace(LAYERS_2, prompts=((100, 0.080), (300, 0.070)))
    assert disturbed.prefill_tok_s(ALL_8) < 3 * LAYERS_2.prefill_tok_s(ALL_8)


def test_what_does_not_fit_is_said() -> None:
    small = DeviceModel(name="s", memory_bytes=1 * GIB, bandwidth=1e9, rate=1e12, source="test")
    assert estimate_performance(COST, DEVICE, kv_memory_bytes=None, max_model_len=4096).fits
    assert not estimate_performance(COST, small, kv_memory_bytes=None, max_model_len=4096).fits
    assert not estimate_performance(COST, DEVICE, kv_memory_bytes=9 * GIB, max_model_len=4096).fits


def test_a_load_that_the_kv_cache_does_not_hold_is_marked() -> None:
    """1000 tokens of context take 1,100,000 bytes of KV."""
    estimate = estimate_performance(
        COST, DEVICE, kv_memory_bytes=8_800_000, max_model_len=4096, context=1000
    )
    assert [p.bound for p in estimate.decode] == ["memory"] * 2 + ["KV cache holds 8"] * 2
    encoder = msgspec.structs.replace(COST, kv_layers=())
    estimate = estimate_performance(encoder, DEVICE, kv_memory_bytes=0, max_model_len=512)
    assert estimate.fits and all(p.bound == "memory" for p in estimate.decode)


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


def test_a_step_reads_the_experts_that_its_rows_are_sent_to() -> None:
    """Of 8 experts one row reads 2, two rows 3.5 on average, many all."""
    cost = ModelCost(
        weight_bytes=1000, read_bytes=900, multiplied=1, kv_layers=(), routed=((800, 8, 2),)
    )
    assert cost.read_by(1) == 100 + 200
    assert cost.read_by(2) == 100 + 800 * (1 - 0.75**2)
    assert cost.read_by(1000) == pytest.approx(900)

"""Grouping of layers, sizes of blocks, and the views that layers share."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.back.attention.kv_layer import KVLayer
from headrace.back.attention.plan import Batch
from headrace.back.kernels.upload import to_device
from headrace.back.runner.memory import (
    GRAPH_BYTES,
    MAX_GROUPS,
    KVMemory,
    Profile,
    count_blocks,
    fit_kv,
    group_layers,
    lay_out,
)
from headrace.back.runner.runner import Runner
from headrace.back.sampling import drawn_rows
from headrace.back.sampling.sampler import Sampler
from headrace.base.config.resolved import KVSpec
from headrace.base.errors import ConfigError
from headrace.base.wire.params import RowSampling
from tests.back.driver import Driver, greedy_reference
from tests.back.tiny_model import TinyModel, tiny_spec

GIB = 1 << 30


def layers_of(windows: list[int | None], *, kv_heads: int = 2, head_dim: int = 4) -> list[KVLayer]:
    return [
        KVLayer(layer=i, kv_heads=kv_heads, head_dim=head_dim, window=window)
        for i, window in enumerate(windows)
    ]


def test_a_model_of_one_kind_is_one_group() -> None:
    (group,) = group_layers(layers_of([None] * 28))
    assert group.kind == "full" and group.window is None and group.layers == tuple(range(28))


def test_alternating_layers_make_two_groups_without_waste() -> None:
    full, window = group_layers(layers_of([512, None] * 13))
    assert full.layers == tuple(range(1, 26, 2)) and full.kind == "full"
    assert window.layers == tuple(range(0, 26, 2)) and window.window == 512


def test_five_windows_to_one_full_layer_share_tensors_of_the_smaller_kind() -> None:
    """48 layers, 40 with a window: six groups of eight, nothing padded."""
    groups = group_layers(layers_of(([1024] * 5 + [None]) * 8))
    assert [len(group.layers) for group in groups] == [8] * 6


@given(st.lists(st.sampled_from([None, 64, 128, 4096]), min_size=1, max_size=70))
def test_groups_hold_every_layer_once_and_are_few_and_of_one_kind(
    windows: list[int | None],
) -> None:
    groups = group_layers(layers_of(windows))
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    assert len(groups) <= MAX_GROUPS


@given(
    st.lists(st.sampled_from([None, 64, 128]), min_size=1, max_size=24),
    st.sampled_from([8, 16]),
)
def test_no_two_layers_of_one_block_overlap_unless_their_groups_differ(
    windows: list[int | None], block_tokens: int
) -> None:
    """Blocks are given to groups, so layers of one group must never share memory; other groups own other blocks."""
    layers = layers_of(windows)
    layout = lay_out(layers, block_tokens=block_tokens, dtype=torch.float32)
    memory = KVMemory(layers, layout, num_blocks=3, device=torch.device("cpu"))
    for group in layout.groups:
        for tensor in memory.tensors:
            tensor.zero_()
        for layer in group.layers:
            memory.layers[layer][1].add_(1.0)
        for layer in group.layers:
            assert memory.layers[layer].shape == (3, 2, 2, block_tokens, 4)
            assert bool((memory.layers[layer][1] == 1).all())
            assert not memory.layers[layer][[0, 2]].any()


def test_layers_of_different_shapes_share_tensors_as_wide_as_the_widest() -> None:
    layers = [
        KVLayer(layer=0, kv_heads=1, head_dim=4, window=8),
        KVLayer(layer=1, kv_heads=2, head_dim=8),
    ]
    layout = lay_out(layers, block_tokens=8, dtype=torch.bfloat16)
    assert layout.elements == (2 * 2 * 8 * 8,) and layout.block_bytes == 512
    memory = KVMemory(layers, layout, num_blocks=2, device=torch.device("cpu"))
    assert memory.layers[0].shape == (2, 2, 1, 8, 4)
    assert memory.num_bytes == 1024


def test_bytes_become_blocks_and_too_few_are_refused_with_both_numbers() -> None:
    layout = lay_out(layers_of([None, None]), block_tokens=16, dtype=torch.float32)
    spec = KVSpec(block_tokens=16, prefix_caching=True, memory_bytes=10 * layout.block_bytes + 5)
    assert count_blocks(spec, layout) == 10
    small = KVSpec(block_tokens=16, prefix_caching=True, memory_bytes=layout.block_bytes)
    with pytest.raises(ConfigError, match=f"{2 * layout.block_bytes} bytes"):
        count_blocks(small, layout)


def test_scrubbing_keeps_finite_values_and_other_blocks() -> None:
    layers = layers_of([None])
    layout = lay_out(layers, block_tokens=8, dtype=torch.float32)
    memory = KVMemory(layers, layout, num_blocks=3, device=torch.device("cpu"))
    (tensor,) = memory.tensors
    tensor.fill_(3.0)
    tensor[1, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 7.0])
    tensor[2, 0] = torch.nan
    memory.scrub(torch.tensor([1]))
    assert tensor[1, :5].tolist() == [0.0, 0.0, 0.0, 7.0, 3.0]
    assert bool(torch.isnan(tensor[2, 0]))


def test_the_kv_cache_takes_what_the_largest_step_leaves() -> None:
    """The step's memory counts twice: once launched, once in the graphs' pool."""
    profile = Profile(held=20 * GIB, step=3 * GIB, free=110 * GIB)
    left = 100 * GIB - 20 * GIB - 6 * GIB - GRAPH_BYTES
    assert fit_kv(profile, budget=100 * GIB, wanted=500 * GIB, least=1) == left
    assert fit_kv(profile, budget=100 * GIB, wanted=5 * GIB, least=1) == 5 * GIB
    crowded = Profile(held=20 * GIB, step=3 * GIB, free=30 * GIB)
    assert fit_kv(crowded, budget=100 * GIB, wanted=500 * GIB, least=1) == 24 * GIB - GRAPH_BYTES


def test_a_device_that_is_too_small_is_told_by_how_much_and_what_would_help() -> None:
    profile = Profile(held=20 * GIB, step=2 * GIB, free=8 * GIB)
    with pytest.raises(ConfigError, match=r"2\.0 GiB more are needed") as refused:
        fit_kv(profile, budget=24 * GIB, wanted=GIB, least=GIB)
    for option in ("--max-step-tokens", "--gpu-memory", "--tensor-parallel"):
        assert option in refused.value.message


def test_a_step_without_memory_is_tried_again_and_then_fails_alone() -> None:
    """Out of memory ends the requests of that step, not the engine."""
    model, failures = TinyModel(), [1]
    runner = Runner(tiny_spec(), model, device=torch.device("cpu"))
    driver = Driver(runner.facts)
    forward = model.forward

    def full(batch: Batch) -> torch.Tensor:
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("made up")
        return forward(batch)

    model.forward = full
    once, never, after = (driver.add([5, 6, 7]) for _ in range(3))
    driver.read(runner.execute(driver.plan([(once, 3)])))
    failures += [1, 1]
    driver.read(runner.execute(driver.plan([(never, 3)])))
    driver.read(runner.execute(driver.plan([(after, 3), (once, 1)])))
    assert never.error == "EngineError"
    assert after.outputs == greedy_reference(TinyModel(), [5, 6, 7], 1)
    assert once.outputs == greedy_reference(TinyModel(), [5, 6, 7], 2)


def test_numbers_of_random_rows_for_which_there_was_no_memory_are_written_at_the_next_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: the first thing that a step may find no memory for."""
    monkeypatch.setattr("headrace.back.runner.runner.Sampler", partial(Sampler, on_device=True))
    failures: list[int] = []

    def full(array: np.ndarray, device: torch.device) -> torch.Tensor:
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("made up")
        return to_device(array, device)

    monkeypatch.setattr(drawn_rows, "to_device", full)
    found = []
    for times in (0, 1):
        runner = Runner(tiny_spec(), TinyModel(), device=torch.device("cpu"))
        driver = Driver(runner.facts)
        row = driver.add([5, 6, 7], RowSampling(temperature=1.0, seed=3))
        failures += [1] * times
        driver.read(runner.execute(driver.plan([(row, 3)])))
        driver.read(runner.execute(driver.plan([(row, 1)])))
        assert row.error is None and not failures
        found.append(row.outputs)
    assert found[0] == found[1] != greedy_reference(TinyModel(), [5, 6, 7], 2)

"""Grouping of layers, sizes of blocks, and the views that layers share."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.back.attention.forms import CacheForm, GroupForm, HeadsForm, LatentForm, StateForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.upload import to_device
from headrace.back.runner.batch import GrowingTable
from headrace.back.runner.fit import GRAPH_BYTES, Profile, fit_kv
from headrace.back.runner.kv_layout import (
    ALIGNMENT,
    MAX_GROUPS,
    MAX_WASTE,
    KVLayout,
    lay_out,
    slab_of,
)
from headrace.back.runner.memory import KVMemory, count_kv, least_blocks
from headrace.back.runner.start import start_runner
from headrace.back.sampling import in_step, penalties
from headrace.back.sampling.sampler import Sampler
from headrace.base.config.resolved import KVSpec
from headrace.base.errors import ConfigError
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import KVGroup
from tests.back.driver import Driver, greedy_reference
from tests.back.tiny_model import TinyModel, tiny_spec

GIB = 1 << 30


def forms_of(windows: list[int | None], *, kv_heads: int = 2, head_dim: int = 4) -> list[CacheForm]:
    return [
        HeadsForm(
            cache=i,
            kind="window" if window else "full",
            span=window,
            kv_heads=kv_heads,
            head_dim=head_dim,
        )
        for i, window in enumerate(windows)
    ]


def groups_of(windows: list[int | None]) -> tuple[KVGroup, ...]:
    return lay_out(forms_of(windows), block_tokens=16, dtype=torch.float32).groups


def memory_of(layout: KVLayout, num_blocks: int) -> KVMemory:
    spec = KVSpec(block_tokens=layout.block_tokens, prefix_caching=True, num_blocks=num_blocks)
    return KVMemory(layout, count_kv(spec, layout, max_rows=2), device=torch.device("cpu"))


def test_a_model_of_one_kind_is_one_group() -> None:
    (group,) = groups_of([None] * 28)
    assert group.kind == "full" and group.span is None and group.caches == tuple(range(28))


def test_alternating_layers_make_two_groups_without_waste() -> None:
    full, window = groups_of([512, None] * 13)
    assert full.caches == tuple(range(1, 26, 2)) and full.kind == "full"
    assert window.caches == tuple(range(0, 26, 2)) and window.span == 512


def test_five_windows_to_one_full_layer_share_tensors_of_the_smaller_kind() -> None:
    """48 layers, 40 with a window: six groups of eight, nothing padded."""
    groups = groups_of(([1024] * 5 + [None]) * 8)
    assert [len(group.caches) for group in groups] == [8] * 6


@pytest.mark.parametrize(("windows", "fulls"), [(52, 10), (22, 4), (29, 5)])
def test_groups_that_do_not_divide_the_layers_waste_nothing_beyond_two_percent(
    windows: int, fulls: int
) -> None:
    """62 layers, 52 with a window: groups of ten would leave eight of the last one unused."""
    layout = lay_out(
        forms_of([1024] * windows + [None] * fulls), block_tokens=16, dtype=torch.bfloat16
    )
    full, window = layout.groups
    assert len(full.caches) == fulls and len(window.caches) == windows
    for group in layout.groups:
        used = group.blocks_per_slab * group.block_bytes
        assert used >= (1 - MAX_WASTE) * layout.slab_bytes


@given(st.lists(st.sampled_from([None, 64, 128, 4096]), min_size=1, max_size=70))
def test_groups_hold_every_layer_once_and_are_few_and_of_one_kind(
    windows: list[int | None],
) -> None:
    groups = groups_of(windows)
    assert sorted(cache for group in groups for cache in group.caches) == list(range(len(windows)))
    assert all(windows[cache] == group.span for group in groups for cache in group.caches)
    assert len(groups) <= MAX_GROUPS


def test_a_dense_model_has_a_contiguous_tensor_for_each_layer() -> None:
    layout = lay_out(forms_of([None] * 3), block_tokens=8, dtype=torch.bfloat16)
    memory = memory_of(layout, 5)
    assert len(memory.tensors) == 3 and layout.slab_bytes == 3 * 2 * 2 * 8 * 4 * 2
    for cache in memory.caches:
        assert cache.shape == (5, 2, 2, 8, 4) and cache.is_contiguous()


def form(cache: int, kind: str, width: int) -> CacheForm:
    """A cache of this kind, by the number of its elements a token."""
    if kind == "state":
        return StateForm(cache=cache, shape=(width, 3), dtype=torch.float32)
    if kind == "latent":
        return LatentForm(cache=cache, width=width)
    if kind == "entries":
        return GroupForm(cache=cache, width=width // 8 * 8, group=64)
    span = {"full": None, "window": 40, "chunked": 32, "cross": 20}[kind]
    return HeadsForm(cache=cache, kind=kind, span=span, kv_heads=1, head_dim=width)


FORMS = st.lists(
    st.tuples(
        st.sampled_from(["full", "latent", "entries", "window", "chunked", "cross", "state"]),
        st.sampled_from([8, 24, 64, 132, 576]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(FORMS, st.sampled_from([torch.bfloat16, torch.float32]), st.sampled_from([8, 16]))
def test_caches_of_any_forms_share_the_memory_and_never_overlap(
    kinds: list[tuple[str, int]], dtype: torch.dtype, block_tokens: int
) -> None:
    """What belongs to different owners lies apart: two blocks of a group, two caches of a block,
    and blocks of two groups in different slabs. Aligned for TMA, and at most 2 % unused."""
    forms = [form(i, kind, width) for i, (kind, width) in enumerate(kinds)]
    layout = lay_out(forms, block_tokens=block_tokens, dtype=dtype)
    memory = memory_of(layout, least_blocks(layout) + 1)
    for group in memory.groups:
        ranges = []
        for cache in group.caches:
            view = memory.caches[cache]
            assert view.stride(0) * view.itemsize % ALIGNMENT == 0
            base = view.untyped_storage().data_ptr()
            for block in {0, 1, group.blocks_per_slab, view.shape[0] - 1} & set(
                range(view.shape[0])
            ):
                start = view[block].data_ptr() - base
                assert start % ALIGNMENT == 0 and view[block].is_contiguous()
                ranges.append((base, start, start + view[block].nbytes))
                if group.kind != "state":
                    tensor = layout.places[cache].tensor
                    size = layout.tensor_bytes[tensor]
                    slab = block // group.blocks_per_slab
                    assert slab * size <= start and ranges[-1][2] <= (slab + 1) * size
        ranges.sort()
        for (base, _, end), (other, start, _) in itertools.pairwise(ranges):
            assert base != other or end <= start
        if group.kind != "state":
            used = group.blocks_per_slab * sum(
                forms[c].block_bytes(block_tokens, dtype) for c in group.caches
            )
            assert used >= (1 - MAX_WASTE) * layout.slab_bytes, (group, layout.tensor_bytes)


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=4))
def test_a_slab_is_cut_evenly_and_wastes_little(sixteenths: list[int]) -> None:
    sizes = [16 * size for size in sixteenths]
    slab, per_slab = slab_of(sizes)
    for size, count in zip(sizes, per_slab, strict=True):
        assert slab % (16 * count) == 0 and count * size <= slab


def test_unequal_blocks_meet_in_a_slab_of_three_and_sixteen() -> None:
    assert slab_of([64 << 10, 12 << 10]) == (192 << 10, (3, 16))


def test_latents_and_the_keys_of_their_indexer_are_one_group() -> None:
    """Every layer has latents of 576, every fourth one keys of 128: two kinds of tensors, nothing
    unused, one block table."""
    forms = [LatentForm(cache=i, width=576) for i in range(8)]
    forms += [LatentForm(cache=8 + i, width=128) for i in range(2)]
    layout = lay_out(forms, block_tokens=16, dtype=torch.bfloat16)
    (group,) = layout.groups
    assert layout.slab_bytes == group.block_bytes == 2 * 16 * (8 * 576 + 2 * 128)
    memory = memory_of(layout, 3)
    assert memory.caches[8].shape == (3, 16, 128) and memory.caches[8].is_contiguous()


def test_entries_of_groups_larger_than_a_block_waste_nothing() -> None:
    """One entry for 128 positions has a block of 128: in blocks of 16 it would lie there eight times."""
    forms = [LatentForm(cache=0, width=64, kind="window", span=128)]
    forms += [GroupForm(cache=1, width=64, group=128)]
    layout = lay_out(forms, block_tokens=16, dtype=torch.bfloat16)
    entries, window = layout.groups
    assert (entries.block_ratio, entries.block_bytes) == (8, 128)
    assert (window.block_ratio, window.block_bytes) == (1, 16 * 128)
    assert [group.tokens for group in layout.group_blocks] == [128, 16]
    for group in layout.groups:
        assert group.blocks_per_slab * group.block_bytes >= (1 - MAX_WASTE) * layout.slab_bytes


def test_state_lies_by_row_and_snapshots_take_a_small_part() -> None:
    forms = [HeadsForm(cache=0, kv_heads=1, head_dim=8), StateForm(cache=1, shape=(5, 3))]
    layout = lay_out(forms, block_tokens=8, dtype=torch.float32)
    assert layout.state_bytes == 64
    spec = KVSpec(block_tokens=8, prefix_caching=True, memory_bytes=64 * 512)
    counts = count_kv(spec, layout, max_rows=6)
    assert counts.state_rows == 7 and counts.snapshot_slots == 2 + 24
    assert counts.num_blocks == (64 * 512 - 64 * (7 + 26)) // 512
    memory = KVMemory(layout, counts, device=torch.device("cpu"))
    assert memory.caches[1].shape == (7, 5, 3)
    assert memory.groups[1].num_slots == 26 and memory.num_bytes <= 64 * 512
    bare = count_kv(
        KVSpec(block_tokens=8, prefix_caching=False, memory_bytes=1 << 20), layout, max_rows=6
    )
    assert bare.snapshot_slots == 2


def test_state_that_leaves_no_room_is_refused_with_what_would_help() -> None:
    layout = lay_out([StateForm(cache=0, shape=(1 << 10,))], block_tokens=8, dtype=torch.float32)
    spec = KVSpec(block_tokens=8, prefix_caching=False, memory_bytes=1 << 16)
    with pytest.raises(ConfigError, match="--max-running") as refused:
        count_kv(spec, layout, max_rows=64)
    assert str(4096 * 67) in refused.value.message


def test_bytes_become_blocks_and_too_few_are_refused_with_both_numbers() -> None:
    layout = lay_out(forms_of([None, None]), block_tokens=16, dtype=torch.float32)
    size = layout.slab_bytes
    spec = KVSpec(block_tokens=16, prefix_caching=True, memory_bytes=10 * size + 5)
    assert count_kv(spec, layout, max_rows=4).num_blocks == 10
    small = KVSpec(block_tokens=16, prefix_caching=True, memory_bytes=size)
    with pytest.raises(ConfigError, match=f"{2 * size} bytes"):
        count_kv(small, layout, max_rows=4)


def test_scrubbing_keeps_finite_values_and_other_blocks() -> None:
    """REG-075: so that it may follow what has been copied into a block that was given away meanwhile."""
    layout = lay_out(forms_of([None]), block_tokens=8, dtype=torch.float32)
    memory = memory_of(layout, 3)
    tensor = memory.caches[0].view(3, -1)
    tensor.fill_(3.0)
    tensor[1, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 7.0])
    tensor[2, 0] = torch.nan
    memory.scrub(0, torch.tensor([1]))
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
    runner = start_runner(tiny_spec(), model, device=torch.device("cpu")).runner
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


@pytest.mark.parametrize(
    "grows", [(penalties.Penalties, "_take_slot"), (GrowingTable, "reserve")], ids=["slots", "rows"]
)
def test_a_table_that_finds_no_memory_to_grow_fails_its_step_alone(
    grows: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is prepared before a step's first kernel is tried again as the step is; nothing is taken
    twice by that, and the engine goes on."""
    owner, name = grows
    runner = start_runner(tiny_spec(), TinyModel(), device=torch.device("cpu")).runner
    driver, failures, real = Driver(runner.facts), [1], getattr(owner, name)

    def full(*arguments: Any) -> Any:
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("made up")
        return real(*arguments)

    penalised = RowSampling(temperature=0.0, presence_penalty=0.5)
    expected = driver.add([5, 6, 7], penalised)
    driver.read(runner.execute(driver.plan([(expected, 3)])))
    monkeypatch.setattr(owner, name, full)
    once, never, after = (driver.add([5, 6, 7], penalised) for _ in range(3))
    driver.read(runner.execute(driver.plan([(once, 3)])))
    assert once.error is None and not failures
    failures += [1, 1]
    driver.read(runner.execute(driver.plan([(never, 3)])))
    assert never.error == "EngineError"
    driver.release(never)
    driver.read(runner.execute(driver.plan([(after, 3), (once, 1), (expected, 1)])))
    assert after.outputs == once.outputs[:1] == expected.outputs[:1]
    assert once.outputs == expected.outputs
    slots = runner._sampler._penalties
    assert len(slots._free) == slots.num_slots - 1 - 3


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

    monkeypatch.setattr(in_step, "to_device", full)
    found = []
    for times in (0, 1):
        runner = start_runner(tiny_spec(), TinyModel(), device=torch.device("cpu")).runner
        driver = Driver(runner.facts)
        row = driver.add([5, 6, 7], RowSampling(temperature=1.0, seed=3))
        failures += [1] * times
        driver.read(runner.execute(driver.plan([(row, 3)])))
        driver.read(runner.execute(driver.plan([(row, 1)])))
        assert row.error is None and not failures
        found.append(row.outputs)
    assert found[0] == found[1] != greedy_reference(TinyModel(), [5, 6, 7], 2)

"""Blocks to files and back between caches that lie differently in memory (KVT-01, KVT-02)."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.back.attention.forms import CacheForm, HeadsForm, LatentForm, StateForm
from headrace.back.runner.kv_layout import KVLayout, lay_out
from headrace.back.runner.memory import KVCounts, KVMemory
from headrace.back.transfer.kv_files import KVFiles
from headrace.back.transfer.lanes import MAX_LANES, Lanes
from headrace.base.wire.slots import KVOrder

NUM_BLOCKS = 10
CPU = torch.device("cpu")


def heads(cache: int, kind: str = "full", **more: Any) -> HeadsForm:
    span = 40 if kind == "window" else None
    return HeadsForm(cache=cache, kind=kind, span=span, kv_heads=2, head_dim=8, **more)


MODELS: dict[str, tuple[CacheForm, ...]] = {
    "full": tuple(heads(i) for i in range(4)),
    "two kinds": tuple(heads(i, ("window", "full")[i % 2]) for i in range(4)),
    "three groups": tuple(heads(i, "window" if i < 8 else "full") for i in range(12)),
    "unequal bytes": (heads(0), heads(1, quantized="int8"), heads(2)),
    "slabs": (heads(0), LatentForm(cache=1, width=132), heads(2)),
    "recurrent": (heads(0), StateForm(cache=1, shape=(5, 3)), heads(2)),
}


def memory(forms: tuple[CacheForm, ...], order: str) -> tuple[KVLayout, KVMemory]:
    layout = lay_out(forms, block_tokens=8, dtype=torch.float32, order=order)
    states = {"state_rows": 3, "snapshot_slots": NUM_BLOCKS} if layout.state_bytes else {}
    return layout, KVMemory(layout, KVCounts(num_blocks=NUM_BLOCKS, **states), device=CPU)


def fill(one: KVMemory, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for tensor in one._all():
        tensor.copy_(torch.randint(0, 100, tensor.shape, generator=source, dtype=torch.uint8))


@pytest.fixture(autouse=True)
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which weights there are is not what is asked here, and there are none."""
    monkeypatch.setattr("headrace.back.transfer.kv_files.fingerprint", lambda origin: "weights")


def content(one: KVMemory, group: int, block: int) -> list[torch.Tensor]:
    kind = one.groups[group]
    if kind.kind == "state":
        assert one.snapshots is not None
        return [one.snapshots[block]]
    return [one.caches[cache][block] for cache in kind.caches]


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "slabs"])
@pytest.mark.parametrize("order", ["layers", "blocks"])
def test_blocks_come_back_in_whatever_layout(tmp_path: Path, kind: str, order: str) -> None:
    """Bytes are those that were saved, in other blocks, and nothing else has changed."""
    forms = MODELS[kind]
    _, first = memory(forms, order)
    fill(first, 1)
    count = len(first.groups)
    taken = tuple((2 + 3 * group, 3 + 3 * group, 1 + 3 * group) for group in range(count))
    given = tuple((9 - 3 * group, 7 - 3 * group, 8 - 3 * group) for group in range(count))
    path = str(tmp_path / "kv")
    saved = KVFiles(None, CPU, 0).carry_out(
        KVOrder(action="save", path=path, blocks=taken, header=b"head"), first, None
    )
    assert saved.error is None
    for other in ("layers", "blocks"):
        _, second = memory(forms, other)
        fill(second, 2)
        before = [tensor.clone() for tensor in second._all()]
        loaded = KVFiles(None, CPU, 0).carry_out(
            KVOrder(action="load", path=path, blocks=given), second, None
        )
        assert loaded.error is None and loaded.num_bytes == saved.num_bytes
        for group in range(count):
            for here, there in zip(given[group], taken[group], strict=True):
                for a, b in zip(
                    content(second, group, here), content(first, group, there), strict=True
                ):
                    assert torch.equal(a, b)
        if count == 1:
            rest = [block for block in range(NUM_BLOCKS) if block not in given[0]]
            for new, old in zip(second._all(), before, strict=True):
                assert torch.equal(new[rest], old[rest])


def saved_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[KVMemory, KVFiles]:
    """All blocks of a memory in a file, a block a piece: more pieces than there are lanes."""
    monkeypatch.setattr("headrace.back.transfer.kv_files.PIECE_BYTES", 1)
    _, first = memory(MODELS["full"], "layers")
    fill(first, 1)
    files = KVFiles(None, CPU, 0)
    order = KVOrder(action="save", path=str(path), blocks=(tuple(range(NUM_BLOCKS)),))
    assert files.carry_out(order, first, None).error is None
    return first, files


def test_pieces_stand_in_order_whoever_ends_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, files = saved_in_pieces(tmp_path / "kv", monkeypatch)
    _, second = memory(MODELS["full"], "blocks")
    order = KVOrder(
        action="load", path=str(tmp_path / "kv"), blocks=(tuple(reversed(range(NUM_BLOCKS))),)
    )
    assert files.carry_out(order, second, None).error is None
    for block in range(NUM_BLOCKS):
        for old, new in zip(
            content(first, 0, block), content(second, 0, NUM_BLOCKS - 1 - block), strict=True
        ):
            assert torch.equal(old, new)


@pytest.mark.parametrize("place", [-5, -2000], ids=["last piece", "a piece before"])
def test_a_changed_byte_is_seen_in_any_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    path = tmp_path / "kv"
    first, files = saved_in_pieces(path, monkeypatch)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    order = KVOrder(action="load", path=str(path), blocks=(tuple(range(NUM_BLOCKS)),))
    reply = files.carry_out(order, first, None)
    assert reply.error is not None and "checksum" in reply.error.message


def test_lanes_are_the_cores_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit counts, and files are whole with a single lane."""
    monkeypatch.setattr("headrace.back.transfer.lanes.usable_cores", lambda: 1)
    assert Lanes(CPU)._free.qsize() == 1
    monkeypatch.setattr("headrace.back.transfer.lanes.usable_cores", lambda: 64)
    assert Lanes(CPU)._free.qsize() == MAX_LANES


def test_a_disk_that_fills_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of one piece is told once no piece is written any more."""
    real, writes = os.pwrite, []

    def pwrite(number: int, data: memoryview, offset: int) -> int:
        writes.append(offset)
        if len(writes) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(number, data[:100], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr("headrace.back.transfer.kv_files.PIECE_BYTES", 1)
    _, first = memory(MODELS["full"], "layers")
    order = KVOrder(action="save", path=str(tmp_path / "kv"), blocks=(tuple(range(NUM_BLOCKS)),))
    reply = KVFiles(None, CPU, 0).carry_out(order, first, None)
    assert reply.error is not None and "No space left" in reply.error.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("forms", "layers", "blocks"),
    [
        ("full", 4, 1),
        ("two kinds", 4, 2),
        ("three groups", 12, 3),
        ("unequal bytes", 3, 1),
        ("slabs", 2, 2),
    ],
)
def test_a_block_of_all_layers_is_one_range(forms: str, layers: int, blocks: int) -> None:
    """Ranges of bytes that one block of each group takes: of each layer one, or of each group."""
    for order, wanted in (("layers", layers), ("blocks", blocks)):
        layout, one = memory(MODELS[forms], order)
        ranges = [one.ranges(group) for group in range(len(one.groups))]
        assert sum(map(len, ranges)) == wanted
        for group, own in zip(one.groups, ranges, strict=True):
            assert sum(each.shape[1] for each in own) == group.block_bytes
        if order == "blocks":
            starts = {cache.untyped_storage().data_ptr() for cache in one.caches}
            assert len(starts) == 1 and len(layout.tensor_bytes) == 1


def test_recurrent_state_stays_by_row_beside_blocks_of_all_layers() -> None:
    """KVT-02, REG-081: what has no blocks falls back to a layout of its own, and groups of unequal caches have
    a range each (above)."""
    (plain, first), (joined, second) = (
        memory(MODELS["recurrent"], o) for o in ("layers", "blocks")
    )
    state = next(i for i, group in enumerate(joined.groups) if group.kind == "state")
    (cache,) = joined.groups[state].caches
    assert joined.places[cache] == plain.places[cache]
    assert joined.state_bytes == plain.state_bytes and len(joined.tensor_bytes) == 1
    assert first.snapshots is not None and second.snapshots is not None
    assert second.snapshots.shape == first.snapshots.shape
    kept = second.snapshots.untyped_storage().data_ptr()
    starts = {second.caches[i].untyped_storage().data_ptr() for i in range(3) if i != cache}
    assert len(starts) == 1 and kept not in starts

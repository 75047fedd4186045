"""Memory of weights: pieces of shared regions that do not overlap and go back to the system when
they are let go."""

import gc
import re
import resource
from pathlib import Path

import torch

from headrace.back.platforms import huge_pages

MB = 1 << 20


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_pieces_are_zero_aligned_and_apart():
    pieces = [huge_pages.kept((size,), torch.uint8) for size in (1, 63, 64, 5 * MB, 3 * MB + 1)]
    assert all(not piece.any() and piece.data_ptr() % 64 == 0 for piece in pieces)
    for number, piece in enumerate(pieces, 1):
        piece.fill_(number)
    assert all((piece == number).all() for number, piece in enumerate(pieces, 1))


def test_shape_and_dtype_are_as_asked_and_nothing_takes_nothing():
    assert huge_pages.kept((3, 5), torch.bfloat16).shape == (3, 5)
    assert huge_pages.kept((2, 4), torch.float32).dtype is torch.float32
    assert huge_pages.kept((0, 4), torch.uint8).shape == (0, 4)


def test_a_piece_larger_than_a_region_has_its_own():
    piece = huge_pages.kept((100 * MB,), torch.uint8)
    piece[-1] = 1
    assert piece.sum() == 1


def test_a_piece_let_go_gives_its_memory_back_and_a_view_keeps_it():
    beside, piece = (huge_pages.kept((24 * MB,), torch.uint8).fill_(7) for _ in range(2))
    view = piece[MB : 2 * MB]
    del piece
    gc.collect()
    assert (view == 7).all()
    before = resident_bytes()
    del view
    gc.collect()
    assert before - resident_bytes() > 20 * MB
    assert (beside == 7).all()


def test_large_pages_are_asked_for_where_the_system_grants_them():
    if "never" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().split("[")[1][:5]:
        return
    place = huge_pages.kept((MB,), torch.uint8).data_ptr()
    flags, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= place < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert " hg" in flags, "asked for; whether there is one to be had is the system's affair"


def test_what_is_expected_is_there_before_it_is_asked_for_and_the_rest_goes_back():
    before = resident_bytes()
    huge_pages.expect(200 * MB)
    huge_pages._regions._thread.join()
    ready = resident_bytes() - before
    piece = huge_pages.kept((40 * MB,), torch.uint8)
    huge_pages.settle()
    assert ready > 190 * MB or ready < 10 * MB, "made ready, or not at all where the system cannot"
    assert resident_bytes() - before < 50 * MB
    assert not piece.any()
    piece.fill_(3)
    after = huge_pages.kept((30 * MB,), torch.uint8)
    assert not after.any() and (piece == 3).all()


def test_more_may_be_asked_for_than_was_expected_and_nothing_may_be_settled_twice():
    huge_pages.expect(100 * MB)
    pieces = [huge_pages.kept((45 * MB,), torch.uint8).fill_(number) for number in range(5)]
    huge_pages.settle()
    huge_pages.settle()
    assert all((piece == number).all() for number, piece in enumerate(pieces))

"""The bandwidth probe reads every byte it says it reads."""

import ctypes

import torch

from headrace.back.kernels.native.library import INT64, POINTER
from headrace.back.kernels.probe.native import read_gb_per_s


def test_the_probe_reads_the_whole_buffer(library):
    kernel = library.bind("probe", POINTER, INT64, POINTER)
    data = torch.zeros(300 * 1024, dtype=torch.int32)  # whole vectors of every instruction set
    total = ctypes.c_uint32()
    for place in (0, 12_345, len(data) - 1):
        data[place] ^= 1 << place % 31
    kernel(data.data_ptr(), 4 * len(data), ctypes.addressof(total))
    assert total.value == (1 << 0) ^ (1 << 12_345 % 31) ^ (1 << (len(data) - 1) % 31)


def test_the_probe_gives_a_rate(newest):
    assert 0.1 < read_gb_per_s(newest, read_bytes=1 << 20, rounds=2) < 10_000

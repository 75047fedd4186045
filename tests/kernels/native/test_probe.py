"""The bandwidth probe reads every byte it says it reads."""

import torch

from headrace.back.kernels.probe.native import read_gb_per_s, reader


def test_the_probe_reads_the_whole_buffer(library):
    data = torch.zeros(300 * 1024, dtype=torch.int32)  # whole vectors of every instruction set
    for place in (0, 12_345, len(data) - 1):
        data[place] ^= 1 << place % 31
    assert reader(library, data)() == (1 << 0) ^ (1 << 12_345 % 31) ^ (1 << (len(data) - 1) % 31)


def test_the_probe_gives_a_rate(newest):
    assert 0.1 < read_gb_per_s(newest, read_bytes=1 << 20, rounds=2) < 10_000

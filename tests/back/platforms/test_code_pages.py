"""Code that is let go takes no memory, and runs again when it is needed."""

import re
from pathlib import Path

import torch

from headrace.back.platforms import code_pages

MAPS = """\
7f0000000000-7f0000001000 r--p 00000000 fe:00 1 /lib/python3/torch/lib/libtorch_cpu.so
7f0000001000-7f0000005000 r-xp 00001000 fe:00 1 /lib/python3/torch/lib/libtorch_cpu.so
7f0000005000-7f0000006000 rw-p 00005000 fe:00 1 /lib/python3/torch/lib/libtorch_cpu.so
7f0000010000-7f0000011000 r-xp 00000000 fe:00 2 /lib/with a space/libtorch_python.so
7f0000020000-7f0000021000 r-xp 00000000 fe:00 3 /lib/libtorchvision.txt/libother.so
7f0000030000-7f0000031000 rwxp 00000000 00:00 0
7f0000040000-7f0000041000 r-xp 00000000 00:00 0 [vdso]
"""


def resident_kb():
    """Of libtorch_cpu's code."""
    kb, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = " r-xp " in line and line.endswith("libtorch_cpu.so")
        elif inside and line.startswith("Rss:"):
            kb += int(line.split()[1])
    return kb


def test_only_unwritable_code_of_the_named_libraries_is_found():
    assert code_pages._code(MAPS, "libtorch_") == [
        (0x7F0000001000, 0x7F0000005000),
        (0x7F0000010000, 0x7F0000011000),
    ]


def test_the_memory_goes_and_the_code_still_runs():
    left = torch.arange(12.0).view(3, 4)
    expected = torch.linalg.svdvals(left)
    before = resident_kb()
    assert code_pages.let_go("libtorch_cpu") > before << 10
    assert resident_kb() < before / 2
    assert torch.equal(torch.linalg.svdvals(left), expected)


def test_a_system_that_tells_no_map_lets_nothing_go(monkeypatch, tmp_path):
    monkeypatch.setattr(code_pages, "MAPS", tmp_path / "none")
    assert code_pages.let_go("libtorch") == 0

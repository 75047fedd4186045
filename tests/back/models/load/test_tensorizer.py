"""Files of tensorizer are read as the package wrote them (golden_tensorizer.py), without anything that
could run code; broken ones are refused by name. QNT-19."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from headrace.back.models.load.safetensors import SafetensorsSource
from headrace.base.config.tensorizer_header import read_tensorizer_header, read_weights_header
from headrace.base.errors import CheckpointError
from tests.back.models.load.golden_tensorizer import FILE, tensors

COUNT = 57
"""Where the number of tensors stands; behind it the index's length, then the index."""


def written(folder: Path, change: dict[int, bytes] | None = None, end: int | None = None) -> Path:
    data = bytearray(gzip.decompress(FILE.read_bytes()))
    for place, part in (change or {}).items():
        data[place : place + len(part)] = part
    path = folder / "model.tensors"
    path.write_bytes(data[:end])
    return path


def test_tensors_are_those_that_were_written(tmp_path: Path) -> None:
    written(tmp_path)
    source, expected = SafetensorsSource(tmp_path), tensors()
    assert list(source.entries) == list(expected)
    for name, tensor in expected.items():
        assert source.entries[name].shape == tuple(tensor.shape)
        target = torch.zeros_like(tensor)
        source.copy(name, tuple(tensor.shape), (slice(None),) * tensor.dim(), target)
        assert torch.equal(target.float(), tensor.float()), name
    rows = torch.empty(2, 3)
    source.copy("model.layers.0.weight", (4, 6), (slice(1, 3), slice(2, 5)), rows)
    assert torch.equal(rows, expected["model.layers.0.weight"][1:3, 2:5])
    source.close()


def test_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    index = gzip.decompress(FILE.read_bytes())[COUNT + 16 :]
    first = COUNT + 16 + 2 + len("model.embed_tokens.weight") + 1  # its type
    places = first + 1 + index[first - COUNT - 16] + 1 + 2 * 4
    cases: dict[str, tuple[dict[int, bytes], int | None]] = {
        "truncated": ({}, 40),
        "the index needs": ({}, COUNT + 30),
        "'scalar' ends at byte .* the file has": ({}, -10),
        "no tensorizer file": ({0: b"PK"}, None),
        "is encrypted": ({9: b"\1"}, None),
        "version 9 with flags 0": ({5: struct.pack("<I", 9)}, None),
        "at most": ({COUNT + 8: struct.pack("<Q", 1 << 40)}, None),
        "ends within an entry": ({COUNT + 8: struct.pack("<Q", 60)}, None),
        "'': type '' is not": ({COUNT: struct.pack("<Q", 1 << 40)}, None),
        "takes 30 bytes, the index says 7": ({places + 16: struct.pack("<Q", 7)}, None),
        "overlaps": ({places + 8: struct.pack("<Q", 100)}, None),
        r"type .* is not one of": ({first + 5: b"?"}, None),
    }
    for message, (change, end) in cases.items():
        path = written(tmp_path, change, end)
        with pytest.raises(CheckpointError, match=message) as seen:
            read_tensorizer_header(path)
        assert "model.tensors" in str(seen.value)


@pytest.mark.slow
def test_no_byte_of_the_head_ends_in_another_error(tmp_path: Path) -> None:
    data = gzip.decompress(FILE.read_bytes())
    length = struct.unpack_from("<Q", data, COUNT + 8)[0]
    for place in range(COUNT + 16 + min(length, 600)):
        path = written(tmp_path, {place: bytes([data[place] ^ 0x5A])})
        try:
            read_weights_header(path)
        except CheckpointError as error:
            assert "model.tensors" in str(error)

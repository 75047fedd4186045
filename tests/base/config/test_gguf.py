"""GGUF headers: what the `gguf` library writes is read back; whatever is damaged is refused, never followed."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.base.config.gguf import read_gguf
from headrace.base.config.gguf_config import gguf_config
from headrace.base.errors import CheckpointError


def write(path: Path, *, tensors: int = 2, **texts: str) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.whole", 7)
    writer.add_float32("a.number", 2.5)
    writer.add_bool("a.flag", True)
    writer.add_array("a.texts", ["x", "yé", ""])
    writer.add_array("a.numbers", [1, 2, 3])
    for key, text in texts.items():
        writer.add_string(key, text)
    for number in range(tensors):
        writer.add_tensor(f"t{number}", np.arange(64, dtype=np.float32).reshape(2, 32) + number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Raw:
    """Writes a GGUF file value by value, wrong ones too."""

    def __init__(self, *, version: int = 3, tensors: int = 0, values: int = 0) -> None:
        self.data = b"GGUF" + struct.pack("<IQQ", version, tensors, values)

    def text(self, text: bytes) -> Raw:
        self.data += struct.pack("<Q", len(text)) + text
        return self

    def pack(self, layout: str, *values: Any) -> Raw:
        self.data += struct.pack("<" + layout, *values)
        return self

    def tensor(self, name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> Raw:
        return self.text(name).pack(f"I{len(dims)}QIQ", len(dims), *dims, kind, offset)

    def save(self, folder: Path, pad: int = 256) -> Path:
        path = folder / "raw.gguf"
        path.write_bytes(self.data + bytes(pad))
        return path


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    assert str(path.parent) in caught.value.message
    return caught.value.message


def test_metadata_and_tensors_of_the_library_are_read_back(tmp_path: Path) -> None:
    file = read_gguf(write(tmp_path / "m.gguf"))
    assert file.text("general.architecture") == "llama"
    assert (file.whole("a.whole"), file.number("a.number"), file.flag("a.flag")) == (7, 2.5, True)
    assert file.texts("a.texts") == ["x", "yé", ""]
    numbers = file.numbers("a.numbers")
    assert numbers is not None and numbers.tolist() == [1, 2, 3]
    assert file.tensors["t1"].shape == (2, 32)
    assert file.floats("t1") == [float(value) for value in range(1, 65)]
    assert file.whole("absent") is None and file.whole("absent", 3) == 3


def test_a_value_of_another_type_is_refused_by_key(tmp_path: Path) -> None:
    file = read_gguf(write(tmp_path / "m.gguf"))
    for ask in (file.whole, file.flag, file.texts, file.numbers, file.number):
        with pytest.raises(CheckpointError, match=r"general\.architecture is 'llama'; it must be"):
            ask("general.architecture")


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(version: int, tmp_path: Path) -> None:
    file = read_gguf(Raw(version=version, tensors=1).tensor(b"t", (4,), 0, 0).save(tmp_path))
    assert file.tensors["t"].shape == (4,)


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_other_versions_and_byte_orders_are_refused(version: int, tmp_path: Path) -> None:
    assert "supported: 2, 3" in refused(Raw(version=version).save(tmp_path))


def test_no_gguf_file_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "b.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "c.gguf").mkdir()
    assert "too short" in refused(tmp_path / "a.gguf")
    assert "not a GGUF file" in refused(tmp_path / "b.gguf")
    assert "not a file" in refused(tmp_path / "c.gguf")


BIG = (1 << 64) - 1
FLAWS = {
    "counts": Raw(tensors=BIG, values=BIG),
    "long key": Raw(values=1).pack("Q", BIG),
    "long text": Raw(values=1).text(b"k").pack("IQ", 8, 1 << 40),
    "long list": Raw(values=1).text(b"k").pack("IIQ", 9, 4, BIG),
    "long list of texts": Raw(values=1).text(b"k").pack("IIQ", 9, 8, 1 << 60),
    "text list runs out": Raw(values=1).text(b"k").pack("IIQQ", 9, 8, 2, 1 << 50),
    "nested lists": Raw(values=1).text(b"k").pack("I", 9).pack("IQ" * 8, *(9, 1) * 8),
    "unknown value": Raw(values=1).text(b"k").pack("I", 99),
    "unknown item": Raw(values=1).text(b"k").pack("IIQ", 9, 99, 1),
    "not UTF-8": Raw(values=1).text(b"\xff\xfe").pack("II", 4, 1),
    "same key": Raw(values=2).text(b"k").pack("II", 4, 1).text(b"k").pack("II", 4, 1),
    "alignment 0": Raw(values=1).text(b"general.alignment").pack("II", 4, 0),
    "alignment text": Raw(values=1).text(b"general.alignment").pack("I", 8).text(b"x"),
    "no dimensions": Raw(tensors=1).tensor(b"t", (), 0, 0),
    "five dimensions": Raw(tensors=1).tensor(b"t", (1,) * 5, 0, 0),
    "size 0": Raw(tensors=1).tensor(b"t", (4, 0), 0, 0),
    "product wraps to 0": Raw(tensors=1).tensor(b"t", (1 << 32, 1 << 32), 0, 0),
    "bytes wrap": Raw(tensors=1).tensor(b"t", ((1 << 62) + 1,), 0, 0),
    "unknown type": Raw(tensors=1).tensor(b"t", (4,), 77, 0),
    "removed type": Raw(tensors=1).tensor(b"t", (32,), 4, 0),
    "ragged rows": Raw(tensors=1).tensor(b"t", (33,), 8, 0),
    "offset unaligned": Raw(tensors=1).tensor(b"t", (4,), 0, 5),
    "offset beyond": Raw(tensors=1).tensor(b"t", (4,), 0, 1 << 40),
    "offset wraps": Raw(tensors=1).tensor(b"t", (4,), 0, BIG - 31),
    "overlap": Raw(tensors=2).tensor(b"t", (16,), 0, 0).tensor(b"u", (4,), 0, 32),
    "same tensor": Raw(tensors=2).tensor(b"t", (4,), 0, 0).tensor(b"t", (4,), 0, 32),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_every_flaw_is_refused(flaw: str, tmp_path: Path) -> None:
    refused(FLAWS[flaw].save(tmp_path))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf").read_bytes()
    for end in [*range(0, len(whole) - 256, 7), len(whole) - 40]:
        (tmp_path / "cut.gguf").write_bytes(whole[:end])
        refused(tmp_path / "cut.gguf")


def split(folder: Path, number: int, count: int, *, tensors: int) -> Path:
    path = folder / f"m-{number + 1:05d}-of-{count:05d}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", tensors)
    writer.add_tensor(f"t{number}", np.zeros((2, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_split_model_is_read_whole_and_a_missing_part_is_named(tmp_path: Path) -> None:
    paths = [split(tmp_path, number, 3, tensors=3) for number in range(3)]
    for path in paths:
        file = read_gguf(path)
        assert list(file.tensors) == ["t0", "t1", "t2"] and file.paths == tuple(paths)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"missing: m-00002-of-00003\.gguf"):
        read_gguf(paths[0])
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"split\.no or split\.count is not"):
        read_gguf(paths[2])


def mutated(whole: bytes, rng: random.Random) -> bytes:
    """One to eight changes: flipped bytes, wild numbers, cut ends, moved and doubled stretches."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(len(data))
        kind = rng.randrange(5)
        if kind == 0:
            data[place] = rng.randrange(256)
        elif kind == 1:
            wild = rng.choice([0, 1, 255, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, (1 << 64) - 1])
            data[place : place + 8] = struct.pack("<Q", wild)
        elif kind == 2:
            del data[max(24, place) :]
        elif kind == 3:
            del data[place : place + rng.randint(1, 16)]
        else:
            start = rng.randrange(len(data))
            data[place:place] = data[start : start + rng.randint(1, 32)]
        if len(data) < 2:
            break
    return bytes(data)


@pytest.mark.parametrize("num_files", [1000, pytest.param(5000, marks=pytest.mark.slow)])
def test_damaged_files_are_read_or_refused(tmp_path: Path, num_files: int) -> None:
    """No other exception, and every tensor that is accepted lies inside the file."""
    whole = write(tmp_path / "m.gguf", tensors=4, **{"tokenizer.ggml.model": "gpt2"}).read_bytes()
    path, rng, num_refused = tmp_path / "damaged.gguf", random.Random(20), 0
    for _ in range(num_files):
        data = mutated(whole, rng)
        path.write_bytes(data)
        try:
            file = read_gguf(path)
            for tensor in file.tensors.values():
                assert tensor.offset >= 0 and tensor.offset + tensor.num_bytes <= len(data)
            gguf_config(file)
        except CheckpointError as error:
            assert str(tmp_path) in error.message
            num_refused += 1
    assert num_refused > num_files // 2

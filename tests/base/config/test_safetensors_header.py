"""Safetensors headers: every offset and length is checked against the file before it is used."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.base.config.safetensors_header import read_safetensors_header
from headrace.base.errors import CheckpointError


def write(path: Path, header: Any, num_bytes: int = 0, *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(
        struct.pack("<Q", len(text) if length is None else length) + text + bytes(num_bytes)
    )
    return path


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_are_found_where_they_lie(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("BF16", [2, 3], 8, 20),
        "a": entry("F32", [2], 0, 8),
        "empty": entry("F32", [0, 4], 20, 20),
        "scalar": entry("I64", [], 20, 28),
    }
    path = write(tmp_path / "m.safetensors", header, 28)
    found = read_safetensors_header(path)
    start = path.stat().st_size - 28
    assert found["a"].offset == start and found["b"].offset == start + 8
    assert found["b"].shape == (2, 3) and found["scalar"].shape == ()
    assert set(found) == {"a", "b", "empty", "scalar"}


A = entry("F32", [2], 0, 8)
FLAWS: dict[str, tuple[Any, int]] = {
    "truncated": ({"a": A}, 7),
    "trailing bytes": ({"a": A}, 9),
    "gap": ({"a": A, "b": entry("F32", [1], 12, 16)}, 16),
    "first gap": ({"a": entry("F32", [1], 4, 8)}, 8),
    "overlap": ({"a": A, "b": entry("F32", [2], 4, 12)}, 12),
    "offsets fall": ({"a": entry("F32", [2], 8, 0)}, 8),
    "offset negative": ({"a": entry("F32", [2], -8, 0)}, 8),
    "offset huge": ({"a": entry("F32", [2], 1 << 62, (1 << 62) + 8)}, 8),
    "offset a text": ({"a": entry("F32", [2], "0", 8)}, 8),
    "offset a float": ({"a": entry("F32", [2], 0.5, 8)}, 8),
    "shape and size differ": ({"a": entry("F32", [3], 0, 8)}, 8),
    "shape negative": ({"a": entry("F32", [-2, -1], 0, 8)}, 8),
    "shape wraps": ({"a": entry("F32", [1 << 32, 1 << 32], 0, 0)}, 0),
    "too many dimensions": ({"a": entry("F32", [1] * 17 + [2], 0, 8)}, 8),
    "unknown dtype": ({"a": entry("F33", [2], 0, 8)}, 8),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8),
    "three offsets": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, 8),
    "entry a list": ({"a": [1]}, 0),
    "duplicate": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":1}', 8),
    "not json": (b"{nope", 0),
    "a list": (b"[]", 0),
    "deep": (b'{"a":' + b"[" * 100_000, 0),
    "not utf-8": (b'{"\xff":1}', 0),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_every_flaw_is_refused_with_the_file_named(flaw: str, tmp_path: Path) -> None:
    header, num_bytes = FLAWS[flaw]
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        read_safetensors_header(write(tmp_path / "m.safetensors", header, num_bytes))


@pytest.mark.parametrize("length", [100, 1 << 40, (1 << 64) - 1])
def test_a_header_longer_than_the_file_is_not_read(length: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="truncated"):
        read_safetensors_header(write(tmp_path / "m.safetensors", {}, length=length))


def test_a_header_over_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100 << 20))
        file.truncate(200 << 20)
    with pytest.raises(CheckpointError, match="at most 67108864 are read"):
        read_safetensors_header(path)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    try:
        read_safetensors_header(path)
    except CheckpointError as error:
        assert "m.safetensors" in error.message

"""Packed weights are unpacked once, by whoever is first, and again when they have changed."""

from __future__ import annotations

import lzma
import os
from pathlib import Path

import pytest

from headrace.base.errors import StartError
from headrace.launch.locate import BUNDLED, bundled_model
from headrace.launch.packed_weights import unpack_weights

WEIGHTS = bytes(range(256)) * 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of the bundled model."""
    monkeypatch.setitem(BUNDLED, "text", ("bundled", "not-installed", str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.xz").write_bytes(lzma.compress(WEIGHTS))
    return tmp_path


def test_weights_lie_unpacked_beside_the_packed_ones(folder: Path) -> None:
    assert bundled_model() == folder
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    names = {"config.json", "model.safetensors", "model.safetensors.xz"}
    assert {path.name for path in folder.iterdir()} == names


def test_weights_are_unpacked_again_only_where_the_packed_ones_are_newer(folder: Path) -> None:
    assert unpack_weights(folder) == [folder / "model.safetensors.xz"]
    (folder / "model.safetensors").write_bytes(b"as it was")
    unpack_weights(folder)
    assert (folder / "model.safetensors").read_bytes() == b"as it was"
    os.utime(folder / "model.safetensors", (0, 0))
    unpack_weights(folder)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_folder_that_cannot_be_written_is_named(folder: Path) -> None:
    (folder / f"model.safetensors.{os.getpid()}.part").mkdir()
    with pytest.raises(StartError, match=f"cannot be unpacked into {folder}"):
        bundled_model()

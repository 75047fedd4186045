"""A bit flipped in the weights is found by a manifest of SHA-256 digests (REL 1.13)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.back.models.load import load_model
from headrace.back.models.load.manifest import verify_manifest
from headrace.back.parallel.mesh import Mesh
from headrace.base.errors import CheckpointError
from tests.back.models.load.checkpoints import save, spec_of_folder, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(1000))
    (folder / "config.json").write_text("{}")
    return folder


def manifest_of(folder: Path, names: list[str]) -> Path:
    lines = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}" for n in names]
    path = folder / "SHA256SUMS"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_sound_files_pass(folder: Path) -> None:
    names = ["model.safetensors", "config.json"]
    assert verify_manifest(manifest_of(folder, names), folder) == 2


def test_a_flipped_bit_is_found_and_the_file_named(folder: Path) -> None:
    manifest = manifest_of(folder, ["model.safetensors", "config.json"])
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[500] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"differs: model\.safetensors$"):
        verify_manifest(manifest, folder)


def test_missing_and_unlisted_files_are_named(folder: Path) -> None:
    manifest = manifest_of(folder, ["model.safetensors", "config.json"])
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"missing: config\.json"):
        verify_manifest(manifest, folder)
    (folder / "model-2.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"not listed: model-2\.safetensors"):
        verify_manifest(manifest, folder)


@pytest.mark.parametrize("text", ["", "x  model.safetensors", "0" * 64 + "  ../x", "\xff"])
def test_a_damaged_manifest_is_refused(text: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "SHA256SUMS").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError):
        verify_manifest(folder / "SHA256SUMS", folder)


def test_loading_checks_the_manifest_first(tmp_path: Path) -> None:
    folder = save(tiny_model("llama"), tmp_path)
    manifest = manifest_of(folder, ["model.safetensors"])

    def load() -> None:
        device = torch.device("cpu")
        spec = msgspec.structs.replace(spec_of_folder(folder), manifest=str(manifest))
        _, report = load_model(spec, mesh=Mesh(), device=device, block_tokens=16)
        assert report.decisions[0].chosen == "verified"

    load()
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="SHA-256"):
        load()

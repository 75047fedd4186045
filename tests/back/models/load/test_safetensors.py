"""Thirty damaged checkpoints are refused before any weight is allocated, each with file and tensor
(REL 1.13)."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.back.models import load as loading
from headrace.back.models.load import LoadOptions, load_model
from headrace.back.models.load.fill import scan
from headrace.back.models.load.safetensors import SafetensorsSource
from headrace.back.models.registry import build_model
from headrace.back.parallel.mesh import Mesh
from headrace.base.errors import CheckpointError
from tests.back.models.load.checkpoints import save, spec_of_folder, tiny_model

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint in three or more shards with an index."""
    folder = save(tiny_model("llama"), tmp_path_factory.mktemp("sound"), max_shard_size="80KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    for path in pristine.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def load(folder: Path, **options: Any) -> Any:
    return load_model(
        spec_of_folder(folder),
        mesh=Mesh(),
        device=CPU,
        block_tokens=16,
        options=LoadOptions(**options),
    )


def shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrites the shard of DOWN through `change`."""
    path = shard_of(folder, DOWN)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def change_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites the JSON header of the shard of DOWN through `change`."""
    path = shard_of(folder, DOWN)
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def change_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def change_bytes(folder: Path, change: Callable[[bytearray], None]) -> None:
    path = shard_of(folder, DOWN)
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def set_entry(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[DOWN].update({key: value})


def replaced(value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({DOWN: value})


def duplicated(folder: Path) -> None:
    """The same tensor in two shards."""
    other = next(p for p in sorted(folder.glob("*.safetensors")) if p != shard_of(folder, DOWN))
    tensors = load_file(other)
    save_file({**tensors, DOWN: torch.zeros(64, 96)}, other)


def overlapping(folder: Path) -> None:
    """Moves a tensor to where another of its shard begins."""

    def change(header: dict[str, Any]) -> None:
        names = [name for name in header if name not in (DOWN, "__metadata__")]
        begin = header[names[0]]["data_offsets"][0]
        header[DOWN]["data_offsets"] = [begin, begin + 64 * 96 * 4]

    change_header(folder, change)


def in_another_shard(folder: Path) -> None:
    def change(names: dict[str, str]) -> None:
        names[DOWN] = next(file for file in names.values() if file != names[DOWN])

    change_index(folder, change)


def removed_everywhere(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(DOWN))
    change_index(folder, lambda names: names.pop(DOWN))


def added_everywhere(folder: Path) -> None:
    shard = shard_of(folder, DOWN).name
    change_tensors(folder, lambda tensors: tensors.update({"model.odd.weight": torch.zeros(2)}))
    change_index(folder, lambda names: names.update({"model.odd.weight": shard}))


def pickles_only(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")


def as_folder(folder: Path) -> None:
    path = shard_of(folder, DOWN)
    path.unlink()
    path.mkdir()


def linked_out(folder: Path) -> None:
    path = shard_of(folder, DOWN)
    path.rename(folder.parent / "outside.safetensors")
    path.symlink_to(folder.parent / "outside.safetensors")


# name -> (what is done to a sound checkpoint, what the message must hold)
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shard missing": (lambda f: shard_of(f, DOWN).unlink(), r"files are missing: model-0"),
    "shard empty": (lambda f: shard_of(f, DOWN).write_bytes(b""), r"model-0.*truncated"),
    "shard cut in its header": (
        lambda f: change_bytes(f, lambda d: d.__delitem__(slice(60, None))),
        r"model-0.*truncated",
    ),
    "shard cut by one byte": (
        lambda f: change_bytes(f, lambda d: d.pop()),
        r"model-0.*ends at byte",
    ),
    "shard cut in half": (
        lambda f: change_bytes(f, lambda d: d.__delitem__(slice(len(d) // 2, None))),
        r"model-0.*truncated",
    ),
    "bytes appended": (
        lambda f: change_bytes(f, lambda d: d.extend(b"xx")),
        r"model-0.*belong to no tensor",
    ),
    "header length wild": (
        lambda f: change_bytes(f, lambda d: d.__setitem__(slice(0, 8), b"\xff" * 8)),
        r"model-0",
    ),
    "header not JSON": (
        lambda f: change_bytes(f, lambda d: d.__setitem__(slice(8, 10), b"xx")),
        r"model-0.*JSON",
    ),
    "shard is a folder": (as_folder, r"files are missing: model-0"),
    "shard links out": (linked_out, r"leads out of the model's folder"),
    "offset beyond the file": (
        lambda f: change_header(f, set_entry("data_offsets", [1 << 40, (1 << 40) + 24576])),
        DOWN,
    ),
    "offset negative": (lambda f: change_header(f, set_entry("data_offsets", [-8, 24568])), DOWN),
    "offsets overlap": (overlapping, DOWN),
    "shape against bytes": (lambda f: change_header(f, set_entry("shape", [64, 97])), DOWN),
    "shape negative": (lambda f: change_header(f, set_entry("shape", [-64, -96])), DOWN),
    "shape transposed": (
        lambda f: change_header(f, set_entry("shape", [96, 64])),
        rf"{DOWN} in .*model-0.*\[96, 64\], not \[64, 96\]",
    ),
    "dtype unknown": (lambda f: change_header(f, set_entry("dtype", "F5")), DOWN),
    "dtype of another size": (lambda f: change_header(f, set_entry("dtype", "F16")), DOWN),
    "dtype integer": (
        lambda f: change_header(f, set_entry("dtype", "I32")),
        rf"{DOWN} in .*dtype I32, not",
    ),
    "entry without offsets": (
        lambda f: change_header(f, lambda h: h[DOWN].pop("data_offsets")),
        DOWN,
    ),
    "tensor missing from its shard": (lambda f: change_tensors(f, lambda t: t.pop(DOWN)), DOWN),
    "tensor missing everywhere": (removed_everywhere, rf"1 tensor is missing: {DOWN} \[64, 96\]"),
    "tensor of a wrong shape": (
        lambda f: change_tensors(f, replaced(torch.zeros(64, 95))),
        rf"{DOWN} in .*\[64, 95\]",
    ),
    "tensor in 8-bit floats": (
        lambda f: change_tensors(f, replaced(torch.zeros(64, 96).to(torch.float8_e4m3fn))),
        rf"{DOWN} in .*F8_E4M3",
    ),
    "tensor extra everywhere": (
        added_everywhere,
        r"1 tensor is unknown to the model: model\.odd\.weight in .*model-0",
    ),
    "tensor not in the index": (
        lambda f: change_index(f, lambda m: m.pop(DOWN)),
        rf"{DOWN}' is not in the index",
    ),
    "tensor in another shard": (in_another_shard, DOWN),
    "tensor twice": (duplicated, rf"{DOWN}' is in .* too|'{DOWN}'"),
    "index leads out": (
        lambda f: change_index(f, lambda m: m.update({DOWN: "../x.safetensors"})),
        r"not a plain file name",
    ),
    "index stale": (
        lambda f: change_index(f, lambda m: m.update({DOWN: "model-9.safetensors"})),
        r"missing: model-9",
    ),
    "index names a pickle": (
        lambda f: change_index(f, lambda m: m.update({DOWN: "pytorch_model.bin"})),
        r"not a safetensors file",
    ),
    "index not JSON": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        r"index\.json.*JSON",
    ),
    "only pickles": (pickles_only, r"pickled weights \(pytorch_model\.bin\)"),
}


def test_there_are_thirty_damages() -> None:
    assert len(DAMAGES) >= 30


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_before_any_allocation(
    damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, message = DAMAGES[damage]
    spec = spec_of_folder(folder)
    change(folder)
    devices: list[str] = []

    def watched(*arguments: Any, **keywords: Any) -> Any:
        devices.append(keywords["device"].type)
        return build_model(*arguments, **keywords)

    monkeypatch.setattr(loading, "build_model", watched)
    with pytest.raises(CheckpointError, match=message):
        load_model(spec, mesh=Mesh(), device=CPU, block_tokens=16)
    assert set(devices) <= {"meta"}


def test_the_sound_checkpoint_loads(folder: Path) -> None:
    model, report = load(folder)
    stored = sum(p.numel() * 4 for p in tiny_model("llama").parameters())
    assert report.weight_bytes == stored
    assert model.logits_width == 96


def test_every_value_arrives_also_from_an_unaligned_file(tmp_path: Path) -> None:
    values = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    text = b'{"w":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}'
    text += b" " * (-(8 + len(text)) % 4 + 1)
    data = struct.pack("<Q", len(text)) + text + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    source = SafetensorsSource(tmp_path)
    target = torch.full((2, 2), float("nan"), dtype=torch.bfloat16)
    source.copy("w", (3, 4), (slice(1, 3), slice(2, 4)), target)
    torch.testing.assert_close(target, values[1:, 2:].bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "cut", [(), (slice(0, 3),), (slice(1, 3), slice(0, 4)), (slice(2, 3), slice(None))]
)
def test_whole_rows_are_read_and_other_rectangles_mapped(
    cut: tuple[slice, ...], tmp_path: Path
) -> None:
    values = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    save_file({"before": torch.ones(5), "w": values}, tmp_path / "model.safetensors")
    with closing(SafetensorsSource(tmp_path)) as source:
        target = torch.full_like(values[cut], float("nan"))
        source.copy("w", (3, 4), cut, target)
        assert torch.equal(target, values[cut])
        assert not source._maps
        columns = torch.full((3, 2), float("nan"))
        source.copy("w", (3, 4), (slice(0, 3), slice(1, 3)), columns)
        assert torch.equal(columns, values[:, 1:3])
        assert source._maps


def test_a_file_that_has_become_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(100, 100)}, path)
    with closing(SafetensorsSource(tmp_path)) as source:
        os.truncate(path, path.stat().st_size - 4)
        where = (
            r"model\.safetensors: tensor 'w', which begins at byte \d+: the file ends 4 bytes early"
        )
        with pytest.raises(CheckpointError, match=where):
            source.copy("w", (100, 100), (slice(0, 100),), torch.empty(100, 100))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (3, 5), (63, 95)])
def test_a_value_that_is_not_finite_is_found(
    value: float, place: tuple[int, int], folder: Path
) -> None:
    change_tensors(folder, lambda tensors: tensors[DOWN].__setitem__(place, value))
    with pytest.raises(CheckpointError, match=rf"{DOWN}' holds NaN or Inf"):
        load(folder)
    load(folder, scan_finite=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_nan_among_thousands_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    source = SimpleNamespace(entries={"w": SimpleNamespace(where="f")})
    values = torch.zeros(4099, dtype=dtype)
    for place in (0, 1, 31, 4096, 4098):
        values.zero_()[place] = float("nan")
        with pytest.raises(CheckpointError, match="NaN"):
            scan("w", cast(Any, source), values)

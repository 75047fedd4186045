"""Which files hold the weights, and which layout a folder has (MOD-10, QNT-12, QNT-14, P23)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from headrace.base.config.weight_files import (
    confined,
    find_weight_files,
    folder_format,
    natural_key,
)
from headrace.base.errors import CheckpointError

FILES = (
    "config.json",
    "params.json",
    "tekken.json",
    "model.safetensors",
    "consolidated.safetensors",
)
COMBINATIONS = [
    chosen for count in range(len(FILES) + 1) for chosen in itertools.combinations(FILES, count)
]


def expected_format(names: tuple[str, ...]) -> str:
    """hf wherever config.json is, unless the only weights are Mistral's and its params.json is there too."""
    has = {name.split(".")[0] for name in names}
    mistral = {"params", "consolidated"} <= has
    if "config" in has:
        return "mistral" if mistral and "model" not in has else "hf"
    return "mistral" if mistral else "none"


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_layout_of_every_combination_of_files(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert folder_format(tmp_path) == expected_format(names)


def test_mistral_parameters_without_its_weights_are_an_hf_model(tmp_path: Path) -> None:
    """MOD-10, REG-048."""
    for name in ("config.json", "params.json", "tekken.json", "model-00001-of-00001.safetensors"):
        (tmp_path / name).touch()
    assert folder_format(tmp_path) == "hf"


def test_shards_come_in_natural_order_without_an_index(tmp_path: Path) -> None:
    """QNT-14, REG-062."""
    for number in (10, 2, 1, 3, 4, 5, 6, 7, 8, 9):
        (tmp_path / f"model-{number}-of-10.safetensors").touch()
    found = [path.name for path in find_weight_files(tmp_path).files]
    assert found == [f"model-{number}-of-10.safetensors" for number in range(1, 11)]


def test_natural_order_does_not_depend_on_the_order_of_the_listing() -> None:
    names = ["a-2", "a-10", "a-1", "b", "a", "10", "a-02"]
    orders = {tuple(sorted(order, key=natural_key)) for order in itertools.permutations(names[:6])}
    assert orders == {("10", "a", "a-1", "a-2", "a-10", "b")}


def test_a_missing_shard_is_named_without_an_index(tmp_path: Path) -> None:
    for number in (1, 3):
        (tmp_path / f"model-{number:05d}-of-00003.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"1 of 3 files are missing: model-00002-of-00003"):
        find_weight_files(tmp_path)


def index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_the_index_chooses_the_files_and_a_stale_one_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").touch()
    (tmp_path / "other.safetensors").touch()
    index(tmp_path, {"x": "a.safetensors"})
    assert [path.name for path in find_weight_files(tmp_path).files] == ["a.safetensors"]
    index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"1 of 2 files are missing: b\.safetensors"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../evil.safetensors",
        "/etc/evil.safetensors",
        "sub/evil.safetensors",
        "sub\\evil.safetensors",
        "C:evil.safetensors",
        "a\x00.safetensors",
    ],
)
def test_an_index_that_leaves_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path.parent / "evil.safetensors").touch()
    index(tmp_path, {"x": name})
    with pytest.raises(CheckpointError, match="not a plain file name"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"x": 3}, {"x": "model.bin"}])
def test_a_damaged_index_is_refused(weight_map: object, tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        find_weight_files(tmp_path)


def test_a_link_out_of_the_folder_is_refused_and_one_within_is_not(tmp_path: Path) -> None:
    folder, outside = tmp_path / "m", tmp_path / "secret.safetensors"
    folder.mkdir()
    outside.touch()
    (folder / "model.safetensors").symlink_to(outside)
    with pytest.raises(CheckpointError, match="leads out of the model's folder"):
        find_weight_files(folder)
    (folder / "model.safetensors").unlink()
    (folder / "real").touch()
    (folder / "model.safetensors").symlink_to("real")
    assert len(find_weight_files(folder).files) == 1


def test_links_of_a_hub_cache_into_its_blobs_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/abc", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "123").touch()
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    assert len(find_weight_files(snapshot).files) == 1
    (snapshot / "model.safetensors").unlink()
    (tmp_path / "other").touch()
    (snapshot / "model.safetensors").symlink_to("../../../other")
    with pytest.raises(CheckpointError, match="leads out"):
        find_weight_files(snapshot)


def test_a_link_that_circles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError):
        find_weight_files(tmp_path)


def test_pickles_only_nothing_at_all_and_folders_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the weights are missing"):
        find_weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pickled weights \(pytorch_model\.bin\)"):
        find_weight_files(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a file"):
        find_weight_files(tmp_path)


def test_dots_are_no_file_names(tmp_path: Path) -> None:
    for name in ("", ".", ".."):
        with pytest.raises(CheckpointError):
            confined(tmp_path, name)

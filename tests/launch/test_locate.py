"""A model is found on disk or in the cache; the network is used only when asked, for data files of one commit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.base.config.tree import ModelOptions
from headrace.base.errors import CheckpointError, ConfigError
from headrace.launch.hub import hub_cache
from headrace.launch.locate import BUNDLED, LocatedModel, locate
from tests.hub import COMMIT, FILES, hub, hub_environment

__all__ = ["hub"]
OTHER_COMMIT = "b" * 40


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 50)
    return folder


def find(model: object = "", **options: Any) -> LocatedModel:
    return locate(ModelOptions(model=str(model), **options))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


def test_a_folder_is_named_after_itself(tmp_path: Path) -> None:
    found = find(make_model(tmp_path / "tiny"))
    assert (found.name, found.format, found.commit) == ("tiny", "safetensors", None)
    assert find(tmp_path / "tiny", load_format="dummy").format == "dummy"


@pytest.mark.parametrize("demo", BUNDLED)
def test_each_bundled_model_is_found_by_its_name(demo: str) -> None:
    found = find(demo=demo)
    assert found.name == BUNDLED[demo][0] and (found.path / "model.safetensors").is_file()


@pytest.mark.parametrize("demo", BUNDLED)
def test_a_bundled_model_may_be_named_as_it_is_listed(demo: str) -> None:
    """`headrace list` shows these names."""
    assert find(BUNDLED[demo][0]) == find(demo=demo)


def test_a_bundled_model_and_another_are_not_named_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--demo vision: goes without --model") as caught:
        find(make_model(tmp_path / "tiny"), demo="vision")
    assert caught.value.field == "demo"


def test_dummy_needs_no_weights_and_nothing_else_does_without(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    assert find(folder, load_format="dummy").format == "dummy"
    with pytest.raises(CheckpointError, match="the weights are missing"):
        find(folder)


def test_a_gguf_file_alone_or_in_a_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "a-Q8_0.gguf").touch()
    found = find(tmp_path / "a-Q8_0.gguf")
    assert (found.format, found.name) == ("gguf", "a-Q8_0")
    assert find(tmp_path).path == tmp_path / "a-Q8_0.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigError, match=r"several GGUF files; name one of a-Q8_0\.gguf, b\.gguf"):
        find(tmp_path)


def test_of_a_split_gguf_model_the_first_file_is_taken(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"m-{number:05d}-of-00003.gguf").touch()
    assert find(tmp_path).path.name == "m-00001-of-00003.gguf"


def test_a_format_that_contradicts_the_files_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="--load-format gguf"):
        find(folder, load_format="gguf")
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ConfigError, match="--load-format safetensors"):
        find(tmp_path / "m.gguf", load_format="safetensors")
    with pytest.raises(ConfigError, match=r"must be a \.gguf"):
        find(folder / "config.json")


def test_mistrals_own_layout_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """REG-048."""
    for name in ("params.json", "consolidated.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match="use the transformers layout"):
        find(tmp_path)


@pytest.mark.parametrize(
    "given", ["./nothing", "/nowhere/x", "a/b/c", "~/none", "x.gguf", "a..b", "a--b/c", "-x/y"]
)
def test_what_is_neither_a_path_nor_a_hub_id_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="no such folder or file"):
        find(given)


@pytest.mark.parametrize("revision", ["", "../x", "-x", "a b", "a..b", "x\n", "/x"])
def test_a_revision_that_is_no_name_is_refused(revision: str) -> None:
    with pytest.raises(ConfigError, match="not a branch, tag or commit"):
        find("org/name", revision=revision)


def cached_model(revision: str = "main") -> Path:
    folder = hub_cache() / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / revision).write_text(COMMIT)
    return make_model(folder / "snapshots" / COMMIT)


def test_a_hub_id_is_taken_from_the_cache_by_branch_or_commit() -> None:
    snapshot = cached_model()
    for revision in ("main", COMMIT):
        found = find("org/name", revision=revision)
        assert (found.path, found.name, found.commit) == (snapshot, "org/name", COMMIT)
    assert find("org/name").decisions[0].why == "found in the local cache"


def test_a_hub_id_that_is_not_cached_is_refused_without_permission() -> None:
    cached_model()
    with pytest.raises(ConfigError, match="--allow-download fetches it"):
        find("org/other")
    with pytest.raises(ConfigError, match="revision 'v2' is not in the cache"):
        find("org/name", revision="v2")
    assert "huggingface_hub" not in _imported_by_locating()


def _imported_by_locating() -> str:
    """Modules a fresh interpreter holds after a hub id was found in the cache."""
    script = (
        "import sys\nfrom headrace.launch.locate import locate\n"
        "from headrace.base.config.tree import ModelOptions\n"
        "locate(ModelOptions(model='org/name'))\nprint(sorted(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return run.stdout


def test_an_incomplete_cached_copy_says_so() -> None:
    (cached_model() / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="incomplete; --allow-download completes it"):
        find("org/name")


def download(hub: Any, *, revision: str = "main") -> dict[str, str]:
    """Runs locate with permission in a process whose hub is `hub`; returns path, commit and decision, or the error."""
    script = (
        "import json, sys\nfrom headrace.launch.locate import locate\n"
        "from headrace.base.config.tree import ModelOptions\n"
        "from headrace.base.errors import HeadraceError\n"
        "options = ModelOptions(model='org/name', allow_download=True, revision=sys.argv[1])\n"
        "try:\n    found = locate(options)\n"
        "    print(json.dumps({'path': str(found.path), 'commit': found.commit, 'why': found.decisions[-1].why}))\n"
        "except HeadraceError as error:\n    print(json.dumps({'error': error.message}))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, revision],
        capture_output=True,
        text=True,
        env=hub_environment(hub),
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_a_download_brings_data_files_of_one_commit_and_is_then_cached(hub: Any) -> None:
    found = download(hub)
    assert (found["commit"], found["why"]) == (COMMIT, "downloaded")
    names = {path.name for path in Path(found["path"]).iterdir()}
    assert names == {
        *("config.json", "model.safetensors", "tokenizer.json"),
        *("modules.json", "config_sentence_transformers.json", "1_Pooling", "2_Dense"),
    }
    modules = {str(path.relative_to(found["path"])) for path in Path(found["path"]).glob("*/*")}
    assert modules == {
        *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
    }
    assert (Path(found["path"]) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    fetched = {path for method, path, _ in hub.log if "/resolve/" in path}
    assert all(path.startswith(f"/org/name/resolve/{COMMIT}/") for path in fetched)
    assert not any("evil" in path or ".bin" in path for path in fetched)
    hub.log.clear()
    assert download(hub, revision=COMMIT)["why"] == "found in the local cache"
    assert hub.log == []


def test_a_cached_copy_without_a_listed_module_is_completed(hub: Any) -> None:
    """An older cache: pooling would silently be another without the folder."""
    folder = Path(download(hub)["path"])
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"1_Pooling/config.json is missing.*incomplete"):
        locate(ModelOptions(model="org/name", revision=COMMIT))
    assert download(hub)["why"] == "downloaded"
    assert (folder / "1_Pooling" / "config.json").is_file()


def test_a_download_that_was_cut_off_goes_on_where_it_stopped(hub: Any) -> None:
    """The library keeps whole chunks of 10 MB, so the cut comes after one and a half of 23 MB."""
    hub.cut = 15_000_000
    found = download(hub)
    if "error" in found:
        found = download(hub)
    data = (Path(found["path"]) / "model.safetensors").read_bytes()
    assert data == FILES["model.safetensors"]
    ranges = [value for method, path, value in hub.log if method == "GET" and value]
    assert ranges == [f"bytes={10 << 20}-"]


def test_a_hub_that_cannot_be_reached_is_an_error_that_names_the_revision(hub: Any) -> None:
    hub.shutdown()
    hub.server_close()
    assert "downloading revision 'main' failed" in download(hub)["error"]


def test_files_of_tensorizer_are_found_where_there_are_no_others(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    with pytest.raises(ConfigError, match=r"tensorizer: .* which is read instead"):
        find(folder, load_format="tensorizer")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "model.tensors").touch()
    for load_format in ("auto", "tensorizer"):
        assert find(folder, load_format=load_format).format == "safetensors"
    with pytest.raises(ConfigError, match=r"fastsafetensors: .* has tensorizer's files alone"):
        find(folder, load_format="fastsafetensors")

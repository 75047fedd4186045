"""Every reader gives identical parameters; what is cut off or refused on the way is an error that
names file and tensor. QNT-14 QNT-19."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

import headrace.back.models.load.readers as readers
from headrace.back.models.load import load_model
from headrace.back.models.load.readers import (
    BufferedReader,
    DirectReader,
    ObjectReader,
    Reader,
)
from headrace.back.models.load.safetensors import SafetensorsSource
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.tree import ModelOptions
from headrace.base.errors import CheckpointError, ConfigError
from headrace.launch.locate import locate
from headrace.launch.model_facts import read_model_facts
from tests.models.oracle import BLOCK_TOKENS, model_spec, save_oracle
from tests.models.paged import teacher_forced
from tests.models.test_parity import tiny_config


class Store(ThreadingHTTPServer):
    """A bucket that answers ranges. `failing`: answers of 503 to come; `whole`: it knows no
    ranges."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Objects)
        self.folder, self.failing, self.whole = folder, 0, False
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/bucket"


class Objects(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def do_GET(self) -> None:
        self.server.asked.append(self.headers.get("Range", ""))
        file = self.server.folder / self.path.removeprefix("/bucket/")
        if self.server.failing > 0:
            self.server.failing -= 1
            return self._answer(503, b"")
        if not file.is_file():
            return self._answer(404, b"no such key")
        data = file.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None or self.server.whole:
            return self._answer(200, data)
        first, last = int(wanted[1]), int(wanted[2])
        part = data[first : last + 1]
        if not part:
            return self._answer(416, b"")
        end = first + len(part) - 1
        self._answer(206, part, f"bytes {first}-{end}/{len(data)}")

    def _answer(self, status: int, body: bytes, content_range: str = "") -> None:
        self.send_response(status)
        if content_range:
            self.send_header("Content-Range", content_range)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Nothing."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(readers, "PART_BYTES", 8000)
    monkeypatch.setattr(readers.time, "sleep", lambda seconds: None)
    (tmp_path / "bucket").mkdir()
    with Store(tmp_path / "bucket") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def reader(kind: str, store: Store) -> Reader:
    if kind == "object":
        return ObjectReader(store.url)
    return DirectReader() if kind == "direct" else BufferedReader()


KINDS = pytest.mark.parametrize("kind", ["buffered", "direct", "object"])


@KINDS
@pytest.mark.parametrize("rows", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_any_rectangle_in_any_type_is_the_same(
    rows: int, kind: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.back.models.load.safetensors.ROWS_BYTES", 500)
    monkeypatch.setattr(readers, "STAGE_BYTES", 8192)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "odd": torch.randn(7, generator=generator)[:5].clone(),
        "matrix": torch.randn(rows, 41, generator=generator),
        "experts": torch.randn(3, 20, 10, generator=generator).bfloat16(),
        "scalar": torch.tensor(4.5),
        "none": torch.zeros(0, 3),
    }
    save_file(tensors, store.folder / "model.safetensors")
    cuts = {
        "odd": ((slice(0, 5),), (slice(2, 4),)),
        "matrix": ((slice(0, rows), slice(0, 41)), (slice(7, rows - 20), slice(0, 41)), (slice(3, 9), slice(5, 40))),
        "experts": ((slice(1, 3), slice(4, 20), slice(0, 9)),),
        "scalar": ((),),
        "none": ((slice(0, 0), slice(0, 3)),),
    }  # fmt: skip
    with closing(SafetensorsSource(store.folder, reader(kind, store))) as source:
        assert source.content("scalar") == tensors["scalar"].numpy().tobytes()
        for name, rectangles in cuts.items():
            for cut in rectangles:
                for dtype in (torch.float32, torch.float64, torch.bfloat16):
                    wanted = tensors[name][cut].to(dtype)
                    target = torch.full_like(wanted, torch.nan)
                    source.copy(name, tuple(tensors[name].shape), cut, target)
                    assert torch.equal(target, wanted), (name, cut, dtype)


@KINDS
def test_a_file_that_has_become_shorter_is_named_with_tensor_and_byte(
    kind: str, store: Store
) -> None:
    path = store.folder / "model.safetensors"
    save_file({"first": torch.ones(2000), "last": torch.ones(3000)}, path)
    with closing(SafetensorsSource(store.folder, reader(kind, store))) as source:
        path.write_bytes(path.read_bytes()[:-4000])
        target = torch.empty(2000)
        source.copy("first", (2000,), (slice(0, 2000),), target)
        with pytest.raises(
            CheckpointError,
            match=r"model\.safetensors: tensor 'last', which begins at byte 8\d\d\d",
        ):
            source.copy("last", (3000,), (slice(0, 3000),), torch.empty(3000))


@KINDS
def test_a_truncated_file_is_refused_when_it_is_opened(kind: str, store: Store) -> None:
    path = store.folder / "model.safetensors"
    save_file({"one": torch.ones(2000)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        SafetensorsSource(store.folder, reader(kind, store))


@pytest.mark.slow
def test_a_model_is_the_same_by_every_reader(store: Store, tmp_path: Path) -> None:
    """Shards -1, -2 and -10, in their order; the object store has the weights alone."""
    folder = tmp_path / "model"
    oracle = save_oracle(tiny_config("qwen3"), folder)
    (folder / "model.safetensors").unlink()
    oracle.save_pretrained(folder, max_shard_size="12KB")
    assert len(list(folder.glob("*.safetensors"))) > 10
    spec = model_spec(folder)

    def answers(**changes: str) -> torch.Tensor:
        cpu = torch.device("cpu")
        model, _ = load_model(
            replace(spec, **changes), mesh=Mesh(), device=cpu, block_tokens=BLOCK_TOKENS
        )
        rows = [list(range(3, 30))]
        return teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)[0]

    plain, direct = answers(), answers(reader="direct")
    for file in folder.glob("model*.safetensors*"):
        file.rename(store.folder / file.name)
    remote = answers(weights_url=store.url)
    assert torch.equal(direct, plain) and torch.equal(remote, plain)
    facts = read_model_facts(locate(ModelOptions(model=str(folder), weights_url=store.url)))
    assert facts.num_params > 0


def test_requests_that_fail_are_repeated_and_then_named(store: Store) -> None:
    save_file({"one": torch.arange(900.0)}, store.folder / "model.safetensors")
    with closing(SafetensorsSource(store.folder, ObjectReader(store.url))) as source:
        store.failing = 3
        target = torch.empty(900)
        source.copy("one", (900,), (slice(0, 900),), target)
        assert torch.equal(target, torch.arange(900.0))
        store.failing = 1000
        with pytest.raises(CheckpointError, match=r"tensor 'one'.*/bucket/model.*status 503"):
            source.copy("one", (900,), (slice(0, 900),), target)
        store.failing, store.whole = 0, True
        with pytest.raises(CheckpointError, match="status 200, not 206"):
            source.copy("one", (900,), (slice(0, 900),), target)


def test_what_is_not_there_is_named(store: Store) -> None:
    with pytest.raises(CheckpointError, match=r"/bucket/model\.safetensors.*status 404"):
        SafetensorsSource(store.folder, ObjectReader(store.url))
    index = store.folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"one": "../secret.safetensors"}}')
    with pytest.raises(CheckpointError, match="not a plain file name"):
        SafetensorsSource(store.folder, ObjectReader(store.url))


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"load_format": "runai_streamer"}, "load_format", "--weights-url"),
        ({"load_format": "gguf", "weights_url": "http://h/b"}, "load_format", "gguf"),
        ({"load_format": "dummy", "weights_url": "http://h/b"}, "weights_url", "dummy"),
        ({"weights_url": "s3://bucket/model"}, "weights_url", "http"),
        ({"weights_url": "http://h/b?key=1"}, "weights_url", "without a query"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, str], field: str, message: str, tmp_path: Path
) -> None:
    save_oracle(tiny_config("qwen3"), tmp_path)
    with pytest.raises(ConfigError, match=message) as seen:
        locate(ModelOptions(model=str(tmp_path), **options))
    assert seen.value.field == field

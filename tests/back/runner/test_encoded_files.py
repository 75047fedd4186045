"""Outputs of encoders that servers of one model share (MUL-01, KVT-11): the same rows, from files, and answers as if
each had encoded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.back.executor.inline import InlineExecutor
from headrace.back.runner.states.encoded_files import EncodedFiles
from headrace.back.runner.states.encoder_cache import EncoderCache
from headrace.base.config.kv_options import EncoderFilesSpec
from headrace.base.config.resolved import ModelSpec
from headrace.base.wire.media import MediaContent
from tests.models.media import Prompt, SeeingEngine, engine_spec
from tests.models.test_qwen_vl import CASES, Seen, save_case

WIDTH = 8


def until(holds: Callable[[], bool]) -> None:
    """However long a busy machine takes."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def content(key: bytes, columns: int = 2) -> MediaContent:
    return MediaContent(key=key * 32, kind="image", grid=(1, 2, columns), rows=b"")


def files(root: Path, most: int = 1 << 20, dtype: torch.dtype = torch.float32) -> EncodedFiles:
    """Of a model whose weights lie in a folder beside."""
    weights, folder = root / "weights", root / "files"
    for one in (weights, folder):
        one.mkdir(exist_ok=True)
    if not (weights / "model.safetensors").exists():
        (weights / "model.safetensors").write_bytes(bytes(100))
    model = ModelSpec(
        path=str(weights),
        name="m",
        format="safetensors",
        family="f",
        dtype="float32",
        max_model_len=8,
        logits_width=8,
        eos_ids=(),
        config={},
    )
    return EncodedFiles(EncoderFilesSpec(path=str(folder), max_bytes=most), model, WIDTH, dtype)


def stored(one: EncodedFiles, key: bytes, rows: torch.Tensor) -> None:
    one.save(content(key), rows)
    until(lambda: one.is_idle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_bit_by_bit_to_another_server(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = torch.randn(5, WIDTH).to(dtype)
    rows[0, 0] = torch.nan
    stored(files(tmp_path, dtype=dtype), b"a", rows)
    other = files(tmp_path, dtype=dtype)
    found = other.load(content(b"a"), 5)
    assert found is not None and found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))
    assert other.load(content(b"b"), 5) is None and other.load(content(b"a", 4), 5) is None
    (path,) = (tmp_path / "files").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_damaged_or_of_other_weights_is_not_taken(tmp_path: Path) -> None:
    rows = torch.randn(5, WIDTH)
    one = files(tmp_path)
    stored(one, b"a", rows)
    (path,) = (tmp_path / "files").iterdir()
    for damaged in (path.read_bytes()[:-1], b"", b"\1" + path.read_bytes()[1:]):
        whole = path.read_bytes()
        path.write_bytes(damaged)
        assert one.load(content(b"a"), 5) is None and not path.exists()
        path.write_bytes(whole)
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"other" + bytes(95))
    assert files(tmp_path).load(content(b"a"), 5) is None
    one.end()  # its weights are changed while it runs
    assert one.load(content(b"a"), 5) is None
    stored(one, b"b", rows)
    assert list((tmp_path / "files").iterdir()) == [path]


def test_the_one_that_was_not_used_longest_makes_room(tmp_path: Path) -> None:
    rows = torch.randn(5, WIDTH)
    size = rows.nbytes + 4
    one = files(tmp_path, most=2 * size)
    for key in (b"a", b"b"):
        stored(one, key, rows)
    older = one._path(content(b"a"))
    assert older is not None
    os.utime(older, (1, 1))
    os.utime(str(one._path(content(b"b"))), (2, 2))
    assert one.load(content(b"a"), 5) is not None  # it is the newer one now
    stored(one, b"c", rows)
    assert [one.load(content(key), 5) is not None for key in (b"a", b"b", b"c")] == [
        True,
        False,
        True,
    ]
    stored(one, b"d", torch.randn(50, WIDTH))
    assert one.load(content(b"d"), 50) is None


def seeing(folder: Path, kept: Path) -> SeeingEngine:
    spec = engine_spec(folder, longest=512)
    files = EncoderFilesSpec(path=str(kept), max_bytes=1 << 20)
    kv = msgspec.structs.replace(spec.kv, encoder_files=files)
    return SeeingEngine(folder, InlineExecutor(msgspec.structs.replace(spec, kv=kv)))


def cache_of(engine: SeeingEngine) -> EncoderCache:
    cache: EncoderCache = engine.executor._resident.runner._state.cache
    return cache


@pytest.mark.slow
def test_a_server_answers_about_what_another_has_encoded(tmp_path: Path) -> None:
    folder, kept = tmp_path / "model", tmp_path / "kept"
    folder.mkdir()
    kept.mkdir()
    case = CASES["qwen3-vl"]
    oracle = save_case(case, folder)
    first, second = seeing(folder, kept), seeing(folder, kept)
    assert not list(kept.iterdir())  # a warm-up leaves nothing, and takes nothing
    seen = Seen(case=case, folder=folder, oracle=oracle, engine=first)
    try:
        prompt = Prompt().text(5, 6, 102).put(seen.pixels(60, (1, 6, 4))).text(103, 8, 102)
        prompt = prompt.put(seen.pixels(61, (1, 2, 2))).text(103, 9)
        (answer,) = first.run(prompt)
        assert answer.tokens == seen.expected(prompt).tokens
        cache = cache_of(first)
        assert cache.files is not None
        until(lambda: cache.files is not None and cache.files.is_idle)
        before = cache_of(second).num_encoded
        (other,) = second.run(prompt)
        assert other.tokens == answer.tokens
        assert cache_of(second).num_encoded == before
        stored = cache_of(second).files
        assert stored is not None and stored.num_loaded == 2
    finally:
        first.close()
        second.close()

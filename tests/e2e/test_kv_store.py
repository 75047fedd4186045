"""KV of prompts that is kept in a folder (KVT-08, KVT-11): what comes once is not written, what comes again is read
where that pays, by engines that start later too; tokens are those of prompts that are computed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.config.tree import (
    DeviceOptions,
    KVOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
)
from headrace.base.errors import ConfigError
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.core.kv_store import CHUNK_TOKENS, KVStore, check_store
from headrace.launch.facts import resolve_options
from tests.e2e.test_slots import MODEL, Slots, at_rest
from tests.e2e.test_speculation import Engine

pytestmark = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
PROMPT = [(7 * i) % 3000 + 5 for i in range(2 * CHUNK_TOKENS + 40)]
OTHER = [(11 * i) % 3000 + 5 for i in range(CHUNK_TOKENS + 40)]


class Stores:
    """Cores over one engine, each as one that has just started, and one folder."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder, self._next = engine, folder, 0

    def core(self, **kv: Any) -> KVStore:
        """Another core."""
        spec = resolve_options(options_of(MODEL, kv_store_path=str(self.folder), **kv)).engine
        store = spec.kv.store
        assert store is not None
        hook = KVStore(store, 1, lambda: self.engine.core)
        self.engine.core = EngineCore(spec, self.engine.executor, hooks=[hook])
        check_store(self.engine.core.kv)
        return hook

    def say(self, prompt: list[int] = PROMPT, tenant: str = "") -> tuple[list[int], int]:
        """Two tokens, and how many of the prompt's were cached; nothing is under way behind it."""
        core, tokens = self.engine.core, list[int]()
        self._next += 1
        core.add(
            EngineRequest(
                id=self._next,
                prompt=np.asarray(prompt, "<i4").tobytes(),
                stop=StopRules(max_tokens=2),
                sampling=RowSampling(temperature=0.0),
                tenant=tenant,
            )
        )
        ends: list[int] = []
        while not ends or core.weights.keeps_executor:
            batch = core.step(wait=True).tokens
            if batch is not None:
                tokens += batch.tokens.tolist()
                for finished in batch.finished:
                    assert finished.error is None, finished.error
                    ends.append(finished.num_cached)
        assert at_rest(self.engine) and core.hooks.num_held == 0
        return tokens, ends[0]

    @property
    def files(self) -> list[Path]:
        """Those of chunks."""
        return sorted(self.folder.glob("*.hrchunk"))


def options_of(model: Path, max_model_len: int = 1024, **kv: Any) -> Options:
    return Options(
        device=DeviceOptions(device="cpu"),
        model=ModelOptions(model=str(model), max_model_len=max_model_len, dtype="float32"),
        kv=KVOptions(**{"kv_memory": "64MiB", **kv}),
        scheduler=SchedulerOptions(max_running=2, max_step_tokens=512),
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(resolve_options(options_of(MODEL)).engine)
    yield made
    made.executor.close()


@pytest.fixture
def stores(engine: Engine, tmp_path: Path) -> Stores:
    return Stores(engine, tmp_path)


def test_prompts_that_come_again_are_kept_and_found_by_later_engines(stores: Stores) -> None:
    stores.core()
    wanted, _ = stores.say(OTHER)
    assert stores.files == []  # it has come once
    assert stores.say(OTHER)[0] == wanted and len(stores.files) == 1
    assert {file.stat().st_mode & 0o777 for file in stores.folder.iterdir()} == {0o600}
    stores.core()
    assert stores.say(OTHER) == (wanted, CHUNK_TOKENS)


@pytest.mark.slow
def test_chunks_are_found_one_behind_another_by_their_own_key_and_where_it_pays(
    stores: Stores,
) -> None:
    stores.core(kv_store_after=1)
    wanted, _ = stores.say()
    later = stores.core()
    assert stores.say(tenant="you") == (wanted, 0)
    assert stores.say(PROMPT[: CHUNK_TOKENS + 10])[1] == CHUNK_TOKENS
    assert stores.say() == (wanted, 2 * CHUNK_TOKENS)
    counts = stores.engine.core.counters.transfers
    assert counts.restored_tokens == 2 * CHUNK_TOKENS and counts.stored_tokens == 0
    assert later.num_bytes == sum(file.stat().st_size for file in stores.files)
    # it is read only where that takes less time than to compute it
    slow = stores.core()
    stores.say(OTHER)  # from now on the time of a token is known
    slow._rate = 1e-3
    assert stores.say() == (wanted, 0)


@pytest.mark.slow
def test_what_is_damaged_or_older_makes_room(stores: Stores) -> None:
    stores.core(kv_store_after=1)
    wanted, _ = stores.say()
    for damage in (lambda data: data[:-1000] + bytes(100) + data[-900:], lambda data: data[:100]):
        for file in stores.files:
            file.write_bytes(damage(file.read_bytes()))
        stores.core(kv_store_after=1)
        assert stores.say() == (wanted, 0)
        assert len(stores.files) == 2  # removed, and written again
    stores.core(kv_store_after=1)
    assert stores.say() == (wanted, CHUNK_TOKENS)  # the second was not looked at before
    first, second = stores.files
    os.utime(first, (1, 1))
    size = second.stat().st_size
    small = stores.core(kv_store_after=1, kv_store_bytes=f"{5 * size // 2}B")
    stores.say(OTHER)
    assert first not in stores.files and second in stores.files and len(stores.files) == 2
    assert small.num_bytes <= 5 * size // 2
    stores.core(kv_store_after=1, kv_store_bytes="1KiB")
    assert stores.say()[0] == wanted and len(stores.files) <= 2


@pytest.mark.slow
def test_a_model_whose_prefixes_need_more_than_blocks_is_refused(tmp_path: Path) -> None:
    models = Slots(tmp_path)
    for kind in ("window", "hybrid"):
        engine = Engine(resolve_options(options_of(models.model(kind), 256)).engine)
        with pytest.raises(ConfigError, match=r"--kv-store-path: .*windows, recurrent state"):
            check_store(engine.core.kv)
        engine.executor.close()

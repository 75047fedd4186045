"""KV of prompts that passes between engines of one folder (KVT-03, KVT-04, KVT-06, KVT-11): the answer is that of one
engine alone, out of the blocks that came; what is late, gone, damaged or of others costs a recomputation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.back.executor.processes import ProcessExecutor
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import (
    DeviceOptions,
    KVOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
    SpeculationOptions,
)
from headrace.base.errors import ConfigError
from headrace.base.wire.request import EngineRequest, Finished, RowSampling, StopRules
from headrace.base.wire.transfer import TRANSFER_HOOK, KVTransfer, pack_transfer
from headrace.core.core import EngineCore
from headrace.core.kv_transfers import KVTransfers
from headrace.front.text.tokenizer_files import load_tokenizer
from headrace.launch.facts import resolve_options
from tests.e2e.test_slots import CONFIGS, MODEL, PROMPT, Slots, at_rest
from tests.e2e.test_speculation import Engine

pytestmark = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
NAME = "chatcmpl-0123456789"


class Pair:
    """Engines that look into one folder. `bundled`: those over the bundled model, used again by the next test."""

    def __init__(self, root: Path, bundled: list[Engine]) -> None:
        self.models = Slots(root)
        self.folder = root / "passing"
        self.folder.mkdir()
        self._bundled, self._free = bundled, list(bundled)
        self._made: list[Engine] = []
        self._next = 0

    def engine(
        self,
        model: Path = MODEL,
        ranks: int = 1,
        stages: int = 1,
        speculation: SpeculationOptions | None = None,
        **kv: Any,
    ) -> tuple[Engine, KVTransfers]:
        """One, with nothing cached."""
        device = kv.pop("device", "cpu")
        tree = Options(
            device=DeviceOptions(device=device),
            model=ModelOptions(model=str(model), max_model_len=256, dtype="float32"),
            kv=KVOptions(kv_transfer_path=str(self.folder), **{"kv_memory": "64MiB", **kv}),
            scheduler=SchedulerOptions(
                max_running=2, max_step_tokens=32, speculative_config=speculation
            ),
        )
        spec = resolve_options(tree).engine
        spec = msgspec.structs.replace(
            spec, scheduler=msgspec.structs.replace(spec.scheduler, stages=stages)
        )
        engine = self._over(spec, model, ranks, stages)
        transfer = spec.kv.transfer
        assert transfer is not None
        hook = KVTransfers(transfer, ranks * stages, lambda: engine.core)
        engine.core = EngineCore(spec, engine.executor, hooks=[hook])
        return engine, hook

    def _over(self, spec: EngineSpec, model: Path, ranks: int, stages: int) -> Engine:
        if ranks * stages > 1:
            engine = Engine(spec)
            device = msgspec.structs.replace(
                spec.device, tensor_parallel=ranks, pipeline_parallel=stages, threads=1
            )
            engine.executor.close()
            engine.executor = ProcessExecutor(msgspec.structs.replace(spec, device=device))
            self._made.append(engine)
        elif model != MODEL or spec != self._plain(spec):
            engine = Engine(spec)
            self._made.append(engine)
        elif self._free:
            engine = self._free.pop()
        else:
            engine = Engine(spec)
            self._bundled.append(engine)
        return engine

    def _plain(self, spec: EngineSpec) -> EngineSpec:
        """As the bundled engines were made: they differ in what their cores are told."""
        device = msgspec.structs.replace(spec.device, device="cpu")
        kv = msgspec.structs.replace(spec.kv, layout="layers")
        return msgspec.structs.replace(spec, device=device, kv=kv, speculation=None)

    def add(
        self, engine: Engine, transfer: KVTransfer | None = None, count: int = 1, **fields: Any
    ) -> int:
        self._next += 1
        prompt = fields.pop("prompt", PROMPT)
        payloads = {} if transfer is None else {TRANSFER_HOOK: pack_transfer(transfer)}
        engine.core.add(
            EngineRequest(
                id=self._next,
                prompt=np.asarray(prompt, "<i4").tobytes(),
                stop=StopRules(max_tokens=count),
                sampling=RowSampling(temperature=0.0),
                hook_payloads=payloads,
                **fields,
            )
        )
        return self._next

    def end(self, engine: Engine, request: int) -> tuple[list[int], Finished]:
        """The tokens of a request, and its end."""
        tokens: list[int] = []
        while True:
            batch = engine.core.step(wait=True).tokens
            if batch is None:
                continue
            mine = batch.ids == request
            tokens += batch.tokens[mine].tolist()
            for finished in batch.finished:
                if finished.id == request:
                    return tokens, finished

    def say(
        self, engine: Engine, transfer: KVTransfer | None = None, count: int = 24, **fields: Any
    ) -> tuple[list[int], int]:
        """Greedy tokens, and how many of the prompt's were cached."""
        tokens, finished = self.end(engine, self.add(engine, transfer, count, **fields))
        assert finished.error is None, finished.error
        return tokens, finished.num_cached

    def send(self, engine: Engine, name: str = NAME, **fields: Any) -> list[int]:
        """Computes a prompt, and lets its KV go out; the first token."""
        tokens, _ = self.say(engine, KVTransfer(sends=name), 1, **fields)
        self.settle(engine)
        return tokens

    def settle(self, engine: Engine) -> None:
        while engine.core.weights.keeps_executor:
            engine.core.step(wait=False)

    def close(self) -> None:
        for engine in self._made:
            engine.executor.close()


@pytest.fixture(scope="module")
def bundled() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.executor.close()


@pytest.fixture
def pair(tmp_path: Path, bundled: list[Engine]) -> Iterator[Pair]:
    made = Pair(tmp_path, bundled)
    yield made
    made.close()


def took(name: str = NAME, *, is_sent: bool = True) -> KVTransfer:
    return KVTransfer(receives=name, is_sent=is_sent)


KINDS = ("bundled", *(pytest.param(kind, marks=pytest.mark.slow) for kind in CONFIGS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_computed_by_one_and_answered_by_another(pair: Pair, kind: str) -> None:
    """REG-072: the names of transfers are no engine's; whichever comes first waits."""
    model = MODEL if kind == "bundled" else pair.models.model(kind)
    layout = {} if kind == "bundled" else {"kv_layout": "blocks"}
    (first, sender), (second, receiver) = pair.engine(model, **layout), pair.engine(model)
    wanted, _ = pair.say(second)
    second.core.kv.reset_cache(())
    assert pair.send(first) == wanted[:1] and len(list(pair.folder.iterdir())) == 1
    assert pair.say(second, took()) == (wanted, 64)
    assert (sender.counts.sent, sender.counts.sent_tokens) == (1, 64)
    assert (receiver.counts.received, receiver.counts.received_tokens) == (1, 64)
    assert list(pair.folder.iterdir()) == []
    assert at_rest(first) and at_rest(second) and receiver.num_held == sender.num_held == 0
    # the two ask at once, and the one that answers comes first
    other = [token + 1 for token in PROMPT]
    wanted, _ = pair.say(first, prompt=other)
    answer = pair.add(second, took("router-17", is_sent=False), 24, prompt=other)
    second.core.step(wait=True)
    assert second.core.scheduler.num_running == 0
    pair.send(first, "router-17", prompt=other)
    tokens, finished = pair.end(second, answer)
    assert (tokens, finished.num_cached) == (wanted, 64)


@pytest.mark.slow
def test_servers_of_unlike_layouts_pass_kv(pair: Pair) -> None:
    """REG-071: one that keeps all layers of a block together sends to one that does not, and has from it."""
    (first, _), (second, receiver) = pair.engine(kv_layout="blocks"), pair.engine()
    assert (
        first.executor._resident.runner.memory.caches[0].stride()
        != second.executor._resident.runner.memory.caches[0].stride()
    )
    for number, (one, other) in enumerate(((first, second), (second, first))):
        prompt = [token + number for token in PROMPT]
        wanted, _ = pair.say(one, prompt=prompt)
        pair.send(one, prompt=prompt)
        assert pair.say(other, took(), prompt=prompt) == (wanted, 64)
    assert receiver.counts.received == 1 and at_rest(first) and at_rest(second)


@pytest.mark.slow
def test_a_drafters_keys_pass_with_those_of_the_model(pair: Pair) -> None:
    """KVT-07: an EAGLE-3 head's caches are in the same blocks, so that its drafts stand as often as where the prompt
    was computed; without them (here: cleared) they stand less often, and change no token."""
    head = Path(__file__).parents[2] / "demo" / "drafters" / "eagle3"
    speculation = SpeculationOptions(
        method="eagle3", model=str(head), num_speculative_tokens=3, adaptive=False
    )
    prompt = [
        *load_tokenizer(str(MODEL)).encode("The quick brown fox jumps over the lazy dog. " * 12)
    ][:200]
    (first, _), (second, receiver) = (pair.engine(speculation=speculation) for _ in range(2))

    def accepted(engine: Engine) -> int:
        return engine.core.scheduler.speculation.stats.num_accepted_tokens

    wanted, _ = pair.say(first, prompt=prompt)
    alone = accepted(first)
    first.core.kv.reset_cache(())
    pair.send(first, prompt=prompt)
    tokens, cached = pair.say(second, took(), prompt=prompt)
    assert (tokens, cached) == (
        wanted,
        len(prompt) // 16 * 16 - (16 if len(prompt) % 16 == 0 else 0),
    )
    assert receiver.counts.received == 1 and accepted(second) >= alone > 3
    memory = second.executor._resident.runner.memory
    memory.caches[-1].zero_()
    before = accepted(second)
    tokens, _ = pair.say(second, prompt=prompt)
    assert tokens == wanted and accepted(second) - before < alone


def test_what_does_not_come_is_computed_again(pair: Pair) -> None:
    """REG-073: nor is anything of others ever served."""
    first, sender = pair.engine()
    second, receiver = pair.engine()
    wanted, _ = pair.say(first, count=4)
    for number, (what, there, want) in enumerate(
        (
            ("nothing", {}, {}),
            ("of another key", {"tenant": "you"}, {"tenant": "me"}),
            ("of another prompt", {"prompt": [token + 2 for token in PROMPT]}, {}),
            ("damaged", {}, {}),
        ),
        start=1,
    ):
        if what != "nothing":
            pair.send(first, NAME, **there)
        if what == "damaged":
            (file,) = (one for one in pair.folder.iterdir())
            data = file.read_bytes()
            file.write_bytes(data[:-1000] + bytes(100) + data[-900:])
        assert pair.say(second, took(), len(wanted), **want) == (wanted, 0), what
        assert receiver.counts.failed == number, what
        second.core.kv.reset_cache(())
        for file in pair.folder.iterdir():
            file.unlink()
    assert receiver.counts.received == 0 and sender.counts.failed == 0
    assert at_rest(first) and at_rest(second)


@pytest.mark.slow
def test_files_are_bounded_and_older_ones_go(pair: Pair) -> None:
    engine, hook = pair.engine(kv_transfer_bytes="1KiB")
    wanted, _ = pair.say(engine)
    assert pair.send(engine) == wanted[:1]
    assert (hook.counts.failed, list(pair.folder.iterdir())) == (1, []) and at_rest(engine)
    roomy, hook = pair.engine()
    for name in ("transfer-1", "transfer-2", "transfer-2"):
        pair.send(roomy, name)
    assert (hook.counts.sent, hook.counts.failed) == (2, 1)  # names are not given twice
    for file in pair.folder.iterdir():
        os.utime(file, (1, 1))
    (pair.folder / "notes.txt").write_text("not ours")
    os.utime(pair.folder / "notes.txt", (1, 1))
    pair.send(roomy, "transfer-3")
    assert len(list(pair.folder.iterdir())) == 2 and at_rest(roomy)


def test_a_request_may_end_instead_and_one_that_is_dropped_leaves_nothing(pair: Pair) -> None:
    """REG-074: an end that is told once more does not raise."""
    first, _ = pair.engine()
    second, receiver = pair.engine(kv_load_failure="fail")
    _, finished = pair.end(second, pair.add(second, took()))
    assert finished.error is not None and "did not come" in finished.error.message
    assert "nothing of that name" in finished.error.message and finished.error.kind == "Conflict"
    dropped = pair.add(second, took(is_sent=False))
    second.core.step(wait=True)
    second.core.abort([dropped])
    receiver.finish(dropped)
    assert receiver.num_held == 0 and at_rest(second)
    _, finished = pair.end(first, pair.add(first, took(), adapter="x"))
    assert finished.error is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("kind", CONFIGS)
def test_blocks_of_a_gpu_pass_to_another_engine(pair: Pair, kind: str) -> None:
    """Copied on a stream of their own, behind the steps before."""
    model = pair.models.model(kind)
    (first, _), (second, receiver) = (pair.engine(model, device="cuda") for _ in range(2))
    wanted, _ = pair.say(second)
    second.core.kv.reset_cache(())
    pair.send(first)
    assert pair.say(second, took()) == (wanted, 64) and receiver.counts.received == 1


@pytest.mark.parametrize(
    ("device", "times"),
    [
        pytest.param("cpu", 40, marks=pytest.mark.slow),
        pytest.param(
            "cuda",
            500,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
            ],
        ),
    ],
)
def test_a_prompt_that_passes_again_and_again_has_one_answer(
    pair: Pair, device: str, times: int
) -> None:
    """KVT-05, REG-076: into blocks that others have written meanwhile, while another prompt is answered."""
    (first, _), (second, receiver) = (pair.engine(device=device) for _ in range(2))
    wanted, _ = pair.say(second)
    other = [token + 1 for token in PROMPT]
    beside, _ = pair.say(second, prompt=other)
    for time in range(times):
        second.core.kv.reset_cache(())
        pair.send(first, f"again-{time}")
        pair.add(second, count=24, prompt=other)
        assert pair.say(second, took(f"again-{time}")) == (wanted, 64), time
        while second.core.scheduler.num_running:
            second.core.step(wait=True)
        assert pair.say(second, prompt=other)[0] == beside, time
    assert receiver.counts.received == times and receiver.counts.failed == 0
    assert list(pair.folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("shares", [{"ranks": 2}, {"stages": 2}], ids=["ranks", "stages"])
def test_ranks_and_stages_have_files_of_their_own(pair: Pair, shares: dict[str, int]) -> None:
    """KVT-06: each moves the layers and heads that it has."""
    first, _ = pair.engine(**shares)
    second, receiver = pair.engine(**shares)
    wanted, _ = pair.say(first)
    pair.send(first)
    assert len(list(pair.folder.iterdir())) == 2
    assert pair.say(second, took()) == (wanted, 64)
    assert receiver.counts.received == 1 and list(pair.folder.iterdir()) == []


def test_a_folder_that_is_none_and_a_cache_that_is_off_are_refused_at_start(tmp_path: Path) -> None:
    def resolved(**kv: Any) -> None:
        resolve_options(Options(model=ModelOptions(model=str(MODEL)), kv=KVOptions(**kv)))

    with pytest.raises(ConfigError, match=r"--kv-transfer-path: .* is no folder"):
        resolved(kv_transfer_path=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"--kv-transfer-path: .*--prefix-caching"):
        resolved(kv_transfer_path=str(tmp_path), prefix_caching=False)
    tmp_path.chmod(0o777)
    for field in ("kv_transfer_path", "kv_store_path"):
        with pytest.raises(ConfigError, match=r"--kv-.*-path: everybody may write to"):
            resolved(**{field: str(tmp_path)})

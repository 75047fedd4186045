"""Adapters in a running engine: greedy tokens are those of transformers with merged weights, for rows of several
adapters and none together, in recorded steps, from cached prefixes, behind preemptions, with speculation, on two
ranks, with fewer slots than adapters (ENG-18, ENG-20, BEY-20)."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.back.executor.choose import make_executor
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.lora.store import AdapterStore
from headrace.base.config.resolved import (
    AdapterSpec,
    DeviceSpec,
    EngineSpec,
    KVSpec,
    SchedulerSpec,
    SpeculationSpec,
)
from headrace.base.errors import InvalidRequest
from headrace.base.wire.control import Call, Reply
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.base.wire.weights import WeightOrder
from headrace.core.adapter_choice import adapted
from headrace.core.adapters import Adapters
from headrace.core.core import EngineCore
from tests.back.lora.adapters import (
    merge,
    merge_kinds,
    module_sizes,
    write_adapter,
    write_kinds,
)
from tests.back.lora.test_applied import KINDS, spec_of
from tests.models.oracle import load_ours, model_spec, save_oracle
from tests.models.test_mixture import greedy
from tests.models.test_parity import tiny_config

NAMES = ("one", "two", "three")
NUM_TOKENS = 6


class Tiny:
    """A tiny base, three adapters of it beside each other, and transformers' models of each."""

    def __init__(self, folder: Path, case: str = "qwen2") -> None:
        self.folder = folder
        oracle = save_oracle(tiny_config(case), folder)
        sizes = module_sizes(load_ours(spec_of(folder)))
        self.oracles = {"": oracle}
        for number, name in enumerate(NAMES):
            adapter = write_adapter(folder / name, sizes, rank=2 + 2 * number, seed=number)
            self.oracles[name] = copy.deepcopy(oracle)
            merge(self.oracles[name], adapter)

    def expected(self, prompt: list[int], adapter: str) -> list[int]:
        return greedy(self.oracles[adapter], prompt)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


class Engine:
    """A core with adapters over an executor of its own."""

    def __init__(
        self,
        tiny: Tiny,
        *,
        slots: int = 3,
        tensor_parallel: int = 1,
        stages: int = 1,
        known: tuple[str, ...] = NAMES,
        num_blocks: int = 64,
        kinds: tuple[str, ...] = (),
        device: str = "cpu",
        scheduler: SchedulerSpec = SchedulerSpec(max_step_tokens=16, max_running=4),
        **changes: Any,
    ) -> None:
        roots = (str(tiny.folder),)
        adapters = AdapterSpec(slots=slots, max_rank=8, kept=8, roots=roots, kinds=kinds)
        spec = EngineSpec(
            model=msgspec.structs.replace(model_spec(tiny.folder), adapters=adapters),
            kv=KVSpec(block_tokens=16, prefix_caching=True, num_blocks=num_blocks),
            scheduler=msgspec.structs.replace(scheduler, stages=stages),
            device=DeviceSpec(
                device=device,
                executor="inline" if tensor_parallel * stages == 1 else "processes",
                tensor_parallel=tensor_parallel,
                pipeline_parallel=stages,
            ),
            **changes,
        )
        self.executor = make_executor(spec)
        self.adapters = Adapters(adapters, self.executor.adapt)
        self.core = EngineCore(spec, self.executor, hooks=[self.adapters], adapters=self.adapters)
        for name in known:
            self.adapters.load_now(name, str(tiny.folder / name), trusted=True)
        self.errors: dict[int, str] = {}
        self.replies: list[Reply] = []
        self.cached: dict[int, int] = {}

    def add(self, id: int, prompt: list[int], adapter: str) -> None:
        self.core.add(
            EngineRequest(
                id=id,
                prompt=np.asarray(prompt, "<i4").tobytes(),
                stop=StopRules(max_tokens=NUM_TOKENS),
                sampling=RowSampling(temperature=0.0),
                adapter=adapter,
            )
        )

    def run(self, requests: dict[int, tuple[list[int], str]]) -> dict[int, list[int]]:
        for id, (prompt, adapter) in requests.items():
            self.add(id, prompt, adapter)
        return self.finish()

    def finish(self) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        while True:
            if not self.core.has_work:
                if self.core.idle_s is None:
                    return tokens
                time.sleep(self.core.idle_s)
                continue
            output = self.core.step(wait=True)
            self.replies += output.replies
            if output.tokens is None:
                continue
            batch = output.tokens
            for id, token in zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True):
                tokens.setdefault(id, []).append(token)
            for end in batch.finished:
                self.cached[end.id] = end.num_cached
                if end.error is not None:
                    self.errors[end.id] = end.error.message

    def call(self, operation: str, **arguments: Any) -> Reply:
        reply = self.core.call(Call(number=1, operation=operation, arguments=arguments))
        if reply is None:
            self.finish()
            reply = self.replies.pop()
        return reply


@pytest.fixture
def engine(tiny: Tiny) -> Iterator[Any]:
    made: list[Engine] = []

    def make(**changes: Any) -> Engine:
        made.append(Engine(changes.pop("tiny", tiny), **changes))
        return made[-1]

    yield make
    for one in made:
        one.executor.close()


def mixed(
    count: int, lengths: tuple[int, ...] = (9, 21, 5, 14)
) -> dict[int, tuple[list[int], str]]:
    generator = torch.Generator().manual_seed(7)
    adapters = ("", *NAMES)
    return {
        id: (
            torch.randint(0, 97, (lengths[id % len(lengths)],), generator=generator).tolist(),
            adapters[id % len(adapters)],
        )
        for id in range(1, count + 1)
    }


def expected(tiny: Tiny, requests: dict[int, tuple[list[int], str]]) -> dict[int, list[int]]:
    return {id: tiny.expected(prompt, adapter) for id, (prompt, adapter) in requests.items()}


def test_rows_of_all_adapters_and_none_give_the_tokens_of_merged_weights(
    tiny: Tiny, engine: Any
) -> None:
    requests, one = mixed(8), engine()
    wanted = expected(tiny, requests)
    assert len({tuple(tokens) for tokens in wanted.values()}) == len(wanted)
    assert one.run(requests) == wanted
    assert one.adapters.num_held == 0


@pytest.mark.skipif(not isinstance(load(), NativeLibrary), reason="native kernels are not built")
def test_steps_with_adapters_are_recorded_beside_those_without(tiny: Tiny, engine: Any) -> None:
    one = engine()
    requests = mixed(4, lengths=(9,))
    for _ in range(2):
        one.core.kv.reset_cache([])
        assert one.run(requests) == expected(tiny, requests)
    plain = {id: (prompt, "") for id, (prompt, _) in requests.items()}
    assert one.run(plain) == expected(tiny, plain)
    replay = one.executor._resident.runner._steps._replay
    assert replay.foreign == ()
    assert {bucket.adapted for bucket in replay._graphs} == {False, True}


def of_all_kinds(folder: Path, case: str = "qwen2", kinds: tuple[str, ...] = tuple(KINDS)) -> Tiny:
    """A base with adapters of everything beside linear layers."""
    tiny = Tiny(folder, case)
    ours = load_ours(spec_of(tiny.folder, kinds=kinds))
    for number, name in enumerate(NAMES):
        write_kinds(tiny.folder / name, ours, seed=number, rank=2 + number)
        tiny.oracles[name] = copy.deepcopy(tiny.oracles[""])
        merge_kinds(tiny.oracles[name], tiny.folder / name)
    return tiny


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return of_all_kinds(tmp_path_factory.mktemp("kinds"))


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
            ],
        ),
    ],
)
def test_experts_of_adapters_give_the_tokens_of_merged_weights(
    device: str, tmp_path: Path, engine: Any
) -> None:
    """Beside magnitudes, tables and heads; from recorded steps."""
    tiny, requests = of_all_kinds(tmp_path, "qwen2-moe"), mixed(8)
    one = engine(tiny=tiny, kinds=KINDS, device=device)
    for _ in range(2):
        one.core.kv.reset_cache([])
        assert one.run(requests) == expected(tiny, requests)
    replay = one.executor._resident.runner._steps._replay
    if device == "cpu" and isinstance(load(), NativeLibrary):
        assert replay.foreign == () and any(bucket.adapted for bucket in replay._graphs)


@pytest.mark.parametrize("drafts", [False, True])
def test_magnitudes_tables_and_heads_go_through_recorded_steps_and_drafts(
    drafts: bool, all_kinds: Tiny, engine: Any
) -> None:
    more = {"speculation": SpeculationSpec(method="ngram", num_tokens=3, max_rows=4)}
    one = engine(tiny=all_kinds, kinds=KINDS, **(more if drafts else {}))
    requests = {id: ((p * 3)[:30], name) for id, (p, name) in mixed(8, (4,)).items()}
    for _ in range(2):
        one.core.kv.reset_cache([])
        assert one.run(requests) == expected(all_kinds, requests)
    replay = one.executor._resident.runner._steps._replay
    if isinstance(load(), NativeLibrary):
        assert replay.foreign == () and any(bucket.adapted for bucket in replay._graphs)


@pytest.mark.slow
def test_whole_pushes_take_magnitudes_anew(tmp_path: Path, engine: Any) -> None:
    """The first through a second model, the next straight to the weights (ENG-19)."""
    tiny = of_all_kinds(tmp_path, kinds=("magnitudes", "experts"))
    one, requests = engine(tiny=tiny, kinds=("magnitudes", "experts")), mixed(3)
    assert one.run(requests) == expected(tiny, requests)
    tensors = load_file(tiny.folder / "model.safetensors")
    for turn in range(1, 3):
        oracle = copy.deepcopy(tiny.oracles[""])
        with torch.no_grad():
            for name, weight in oracle.named_parameters():
                weight.copy_(tensors[name] * (1 + 2 * turn) if "proj.weight" in name else weight)
        folder = tmp_path / str(turn)
        folder.mkdir()
        weights = {name: value.contiguous() for name, value in oracle.state_dict().items()}
        new = {name: weights[name] for name in tensors}
        save_file(new, folder / "model.safetensors")
        order = WeightOrder(action="push", path=str(folder), last=True)
        assert one.executor.weigh(order).result().error is None
        merged = {"": oracle, **{name: copy.deepcopy(oracle) for name in NAMES}}
        for name in NAMES:
            merge_kinds(merged[name], tiny.folder / name)
        one.core.kv.reset_cache([])
        wanted = {id: greedy(merged[name], prompt) for id, (prompt, name) in requests.items()}
        assert one.run(requests) == wanted


def test_more_adapters_than_slots_take_turns(tiny: Tiny, engine: Any) -> None:
    requests = mixed(9)
    one = engine(slots=1)
    assert one.run(requests) == expected(tiny, requests)


def test_an_adapter_that_is_busy_makes_room_for_one_that_waits(tiny: Tiny, engine: Any) -> None:
    one = engine(slots=1)
    clock = iter(range(10_000))
    one.adapters._clock = lambda: 0.3 * next(clock)
    prompt = mixed(1)[1][0]
    requests = {id: ([*prompt, id], "one") for id in range(1, 9)}
    requests[3] = (prompt, "two")
    order: list[int] = []
    add = one.core.output_buffer.add_finished
    one.core.output_buffer.add_finished = lambda end: (order.append(end.id), add(end))[1]
    assert one.run(requests) == expected(tiny, requests)
    assert order.index(3) < len(order) - 1, "it waited until no other was left"


def test_cached_prefixes_are_apart_by_adapter(tiny: Tiny, engine: Any) -> None:
    one, prompt = engine(), mixed(2, lengths=(41,))[2][0]
    for id, (adapter, cached) in enumerate(
        [("", 0), ("one", 0), ("two", 0), ("one", 32), ("", 32)], start=1
    ):
        assert one.run({id: (prompt, adapter)})[id] == tiny.expected(prompt, adapter)
        assert one.cached[id] == cached
    assert one.call("load_adapter", name="one", folder=str(tiny.folder / "two"), replaces=True)
    assert one.run({9: (prompt, "one")})[9] == tiny.expected(prompt, "two")
    assert one.cached[9] == 0


def test_a_preempted_request_goes_on_with_its_adapter(tiny: Tiny, engine: Any) -> None:
    one, requests = engine(num_blocks=4), mixed(8, lengths=(14, 13, 15, 12))
    assert one.run(requests) == expected(tiny, requests)
    assert one.core.scheduler.num_preemptions > 0


def test_drafts_are_verified_with_the_adapter(tiny: Tiny, engine: Any) -> None:
    speculation = SpeculationSpec(method="ngram", num_tokens=3, max_rows=4)
    one = engine(speculation=speculation)
    requests = {
        id: ((prompt * 3)[:30], adapter) for id, (prompt, adapter) in mixed(8, (4,)).items()
    }
    assert one.run(requests) == expected(tiny, requests)
    assert one.core.scheduler.speculation.stats.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_ranks_give_the_tokens_of_merged_weights(tiny: Tiny, engine: Any) -> None:
    requests, one = mixed(6), engine(tensor_parallel=2, slots=2)
    assert one.run(requests) == expected(tiny, requests)
    reply = one.call("load_adapter", name="four", folder=str(tiny.folder / "absent"))
    assert reply.error is not None and "no folder" in reply.error.message


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_stages_give_the_tokens_of_merged_weights(tiny: Tiny, engine: Any) -> None:
    """PAR-05: each stage has the matrices of its layers."""
    requests, one = mixed(6), engine(stages=2, slots=2)
    assert one.run(requests) == expected(tiny, requests)
    reply = one.call("load_adapter", name="four", folder=str(tiny.folder / "absent"))
    assert reply.error is not None and "no folder" in reply.error.message


def test_adapters_are_loaded_and_unloaded_beside_running_requests(tiny: Tiny, engine: Any) -> None:
    one = engine(known=("one",))
    requests = {1: (mixed(1)[1][0], "one"), 2: (mixed(2)[2][0], "")}
    for id, (prompt, adapter) in requests.items():
        one.add(id, prompt, adapter)
    assert one.core.call(
        Call(number=7, operation="load_adapter", arguments={"name": "two", "folder": str(tiny.folder / "two")})
    ) is None  # fmt: skip
    assert one.finish() == expected(tiny, requests)
    assert one.replies.pop().error is None and one.core.hello().adapters == ("one", "two")
    assert one.run({3: (requests[1][0], "two")})[3] == tiny.expected(requests[1][0], "two")
    one.add(4, requests[1][0], "one")
    assert one.call("unload_adapter", name="one").error is None
    assert one.finish()[4] == tiny.expected(requests[1][0], "one"), "what runs goes on"
    one.run({5: (requests[1][0], "one")})
    assert "adapter 'one' is not loaded; loaded are: two" in one.errors[5]
    described = msgspec.msgpack.decode(one.call("adapters").result)["adapters"]
    assert [(each["name"], each["rank"], each["requests"]) for each in described] == [("two", 4, 0)]


@pytest.mark.parametrize("policy", ["fair-adapters", "fcfs"])
def test_adapters_share_the_tokens_of_steps(policy: str, tiny: Tiny, engine: Any) -> None:
    """Until the adapter with few requests has its last token the crowd of the other has about as many."""
    fair = SchedulerSpec(max_step_tokens=16, max_running=2, policy=policy)
    one, prompt = engine(scheduler=fair), mixed(1)[1][0]
    for id in range(1, 15):
        one.add(id, [*prompt, id], "two" if id > 12 else "one")
    counts, left = {"one": 0, "two": 0}, {13, 14}
    while left:
        batch = one.core.step(wait=True).tokens
        for id in [] if batch is None else batch.ids.tolist():
            counts["two" if id > 12 else "one"] += 1
        left -= set() if batch is None else {end.id for end in batch.finished}
    shared = counts["one"] <= counts["two"] + 2 * NUM_TOKENS
    assert shared == (policy == "fair-adapters"), counts
    one.finish()


def test_no_step_waits_for_an_adapter_that_is_read(
    tiny: Tiny, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, goes_on = engine(known=("one",)), threading.Event()
    read = AdapterStore.read

    def slowly(store: AdapterStore, name: str, folder: str) -> Any:
        assert goes_on.wait(300), "nobody got tokens meanwhile"
        return read(store, name, folder)

    monkeypatch.setattr(AdapterStore, "read", slowly)
    arguments = {"name": "two", "folder": str(tiny.folder / "two")}
    requests = {1: (mixed(1)[1][0], "one"), 2: (mixed(2)[2][0], "")}
    # The first one's adapter has been read when the second one comes, which would end before it otherwise.
    for id, (prompt, adapter) in requests.items():
        one.add(id, prompt, adapter)
        while one.core.scheduler.num_running < id:
            one.core.step(wait=True)
    one.core.call(Call(number=7, operation="load_adapter", arguments=arguments))
    done: set[int] = set()
    while len(done) < 2:
        batch = one.core.step(wait=True).tokens
        done |= set() if batch is None else {end.id for end in batch.finished}
    assert not one.replies
    goes_on.set()
    one.finish()
    assert [reply.error for reply in one.replies] == [None]


def test_what_cannot_be_loaded_is_told_and_leaves_what_runs(tiny: Tiny, engine: Any) -> None:
    one = engine(known=("one",))
    broken = tiny.folder / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{}")
    (tiny.folder / "link").symlink_to("/etc")
    for name, folder, words in (
        ("../x y", tiny.folder / "two", "letters, digits"),
        ("one", tiny.folder / "two", "is loaded already"),
        ("two", "/etc", "below a folder"),
        ("two", tiny.folder / ".." / "two", "below a folder"),
        ("two", tiny.folder / "link", "below a folder"),
        ("two", "two", "below a folder"),
        ("two", tiny.folder / "absent", "no folder"),
        ("two", broken, "peft_type"),
    ):
        reply = one.call("load_adapter", name=name, folder=str(folder))
        assert reply.error is not None and words in reply.error.message, (folder, reply)
    prompt = mixed(1)[1][0]
    assert one.run({1: (prompt, "one")})[1] == tiny.expected(prompt, "one")


def test_what_is_called_without_adapters_is_refused(tiny: Tiny) -> None:
    request = EngineRequest(
        id=1, prompt=b"", stop=StopRules(max_tokens=1), sampling=RowSampling(), adapter="one"
    )
    with pytest.raises(InvalidRequest.__mro__[1], match="--enable-lora"):
        adapted(None, request)

"""Weights replaced under a running engine core: what runs is neither lost nor stuck, whichever the pause, and a core
whose update has failed in the middle runs nothing until it is whole again (ENG-19)."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.back.executor.choose import make_executor
from headrace.base.config.resolved import EngineSpec, ExpertBalanceSpec
from headrace.base.errors import from_wire
from headrace.base.wire.control import Call, Reply
from headrace.base.wire.request import Finished
from headrace.base.wire.weights import WeightOrder
from headrace.core.core import EngineCore
from headrace.core.weights import Weights
from tests.back.tiny_model import tiny_spec
from tests.core.harness import make_request
from tests.models.oracle import model_spec, save_oracle
from tests.models.test_parity import tiny_config

PROMPT = [5, 9, 4, 17, 8, 33, 2, 61, 90]


class Core:
    """An engine core over a real model; what comes out of it by request."""

    def __init__(self, spec: EngineSpec) -> None:
        self.executor = make_executor(spec)
        executor: Any = self.executor
        weights = Weights(executor.weigh, version="old")
        self.core = EngineCore(spec, self.executor, weights=weights)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, Finished] = {}
        self.replies: dict[int, Reply] = {}
        self._calls = 0

    def add(self, id: int, count: int) -> None:
        self.core.add(make_request(id, PROMPT, max_tokens=count))

    def step(self) -> None:
        output = self.core.step(wait=True)
        for reply in output.replies:
            self.replies[reply.number] = reply
        if output.tokens is not None:
            for id, token in zip(
                output.tokens.ids.tolist(), output.tokens.tokens.tolist(), strict=True
            ):
                self.tokens[id].append(token)
            self.finished |= {end.id: end for end in output.tokens.finished}

    def until(self, check: Callable[[], bool]) -> None:
        """The test's own time limit ends a wait for what never comes: how many steps pass meanwhile is chance."""
        while not check():
            self.step()
            time.sleep(0)  # other threads work on it

    def begin(self, operation: str, **arguments: Any) -> int:
        self._calls += 1
        reply = self.core.call(Call(number=self._calls, operation=operation, arguments=arguments))
        if reply is not None:
            self.replies[self._calls] = reply
        return self._calls

    def call(self, operation: str, **arguments: Any) -> Any:
        number = self.begin(operation, **arguments)
        self.until(lambda: number in self.replies)
        reply = self.replies[number]
        if reply.error is not None:
            raise from_wire(reply.error)
        return msgspec.msgpack.decode(reply.result)

    def weigh(self, version: str = "", **order: Any) -> Any:
        text = msgspec.json.encode(WeightOrder(**order)).decode()
        return self.call("weights", order=text, version=version)

    def answer(self, id: int, count: int = 6) -> list[int]:
        self.add(id, count)
        self.until(lambda: id in self.finished)
        return self.tokens[id]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("weights")
    for seed, name in enumerate(("old", "new")):
        save_oracle(tiny_config("qwen3"), root / name, seed=11 + seed)
    return root / "old", root / "new"


def spec_of(folder: Path, *, tensor_parallel: int = 1, max_running: int = 8) -> EngineSpec:
    executor = "inline" if tensor_parallel == 1 else "processes"
    spec = tiny_spec(executor=executor, tensor_parallel=tensor_parallel, max_running=max_running)
    return msgspec.structs.replace(spec, model=model_spec(folder))


@pytest.fixture
def core(folders: tuple[Path, Path]) -> Iterator[Core]:
    core = Core(spec_of(folders[0]))
    yield core
    core.core.close()


def alone(folder: Path) -> list[int]:
    core = Core(spec_of(folder))
    tokens = core.answer(1)
    core.core.close()
    return tokens


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> tuple[list[int], list[int]]:
    old, new = alone(folders[0]), alone(folders[1])
    assert old != new
    return old, new


def test_what_is_frozen_goes_on_with_the_new_weights(
    core: Core, folders: tuple[Path, Path], expected: tuple[list[int], list[int]]
) -> None:
    for id in range(4):
        core.add(id, 30)
    core.until(lambda: all(len(core.tokens[id]) >= 6 for id in range(4)))
    core.call("pause", mode="keep")
    told = core.weigh(action="push", path=str(folders[1]), last=True, version="new")
    assert told["version"] == "new" and not told["mixed"] and told["num_bytes"] > 0
    core.call("resume")
    core.until(lambda: len(core.finished) == 4)
    for id in range(4):
        assert (core.finished[id].reason, core.finished[id].weights_version) == (
            "length",
            "old,new",
        )
        assert len(core.tokens[id]) == 30 and core.tokens[id][:6] == expected[0]
    assert core.answer(9) == expected[1], "no block of the rows from before is found"
    assert core.finished[9].weights_version == "new"


def test_a_pause_that_waits_ends_what_runs_with_the_old_weights_and_begins_the_rest_with_the_new(
    folders: tuple[Path, Path], expected: tuple[list[int], list[int]]
) -> None:
    core = Core(spec_of(folders[0], max_running=1))
    for id in (1, 2):
        core.add(id, 6)
    core.until(lambda: len(core.tokens[1]) >= 2)
    core.call("pause", mode="wait")
    core.weigh(action="push", path=str(folders[1]), last=True, version="new")
    assert list(core.finished) == [1]
    core.call("resume")
    core.until(lambda: 2 in core.finished)
    assert (core.tokens[1], core.finished[1].weights_version) == (expected[0], "old")
    assert (core.tokens[2], core.finished[2].weights_version) == (expected[1], "new")
    core.core.close()


def test_without_a_pause_nothing_is_replaced(core: Core, folders: tuple[Path, Path]) -> None:
    with pytest.raises(Exception, match="pause the engine first"):
        core.weigh(action="push", path=str(folders[1]), last=True)


def test_files_that_end_early_leave_what_was_there_or_a_mixture_that_runs_nothing(
    core: Core,
    folders: tuple[Path, Path],
    expected: tuple[list[int], list[int]],
    tmp_path: Path,
) -> None:
    """Until all of them have come."""
    tensors = load_file(folders[1] / "model.safetensors")
    names = list(tensors)
    core.call("pause", mode="keep")
    core.weigh(action="begin")
    save_file({name: tensors[name] for name in names[::2]}, tmp_path / "model.safetensors")
    assert core.weigh(action="push", path=str(tmp_path))["mixed"]
    save_file({names[1]: tensors[names[1]] * torch.nan}, tmp_path / "model.safetensors")
    with pytest.raises(Exception, match="NaN or Inf"):
        core.weigh(action="push", path=str(tmp_path))
    with pytest.raises(Exception, match="mixture of two versions"):
        core.call("resume")
    core.weigh(action="drop")
    with pytest.raises(Exception, match="mixture of two versions"):
        core.call("resume")
    assert core.weigh(action="push", path=str(folders[1]), last=True)["version"] == "1"
    core.call("resume")
    assert core.answer(1) == expected[1]


def test_a_part_of_the_weights_is_enough_where_they_lie_as_they_came(
    core: Core, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Keys without queries and values, which lie in one matrix; a model of those answers alike."""
    old, new = (load_file(folder / "model.safetensors") for folder in folders)
    changed = {name: tensor for name, tensor in new.items() if name.endswith("k_proj.weight")}
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "config.json").write_text((folders[0] / "config.json").read_text())
    save_file({**old, **changed}, mixed / "model.safetensors")
    save_file(changed, tmp_path / "model.safetensors")
    core.call("pause", mode="wait")
    core.weigh(action="push", path=str(tmp_path), last=True)
    core.call("resume")
    assert core.answer(1) == alone(mixed)


@pytest.mark.slow
def test_the_ranks_of_a_split_model_take_their_shares(
    folders: tuple[Path, Path], expected: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        assert config["num_key_value_heads"] % 2 == 0
    core = Core(spec_of(folders[0], tensor_parallel=2))
    assert core.answer(1) == expected[0]
    core.call("pause", mode="keep")
    core.weigh(action="push", path=str(folders[1]), last=True)
    with pytest.raises(Exception, match="no tensor"):
        core.weigh(action="read", layout={"names": ["nothing"]}, count=1)
    core.call("resume")
    assert core.answer(2) == expected[1]
    core.core.close()


@pytest.mark.slow
def test_experts_that_have_moved_take_new_weights(tmp_path: Path) -> None:
    """PAR-12: they go back to where the loader puts them first, and move again behind it."""
    for seed, name in enumerate(("old", "new")):
        save_oracle(tiny_config("qwen3-moe"), tmp_path / name, seed=11 + seed)
    expected = [alone(tmp_path / name) for name in ("old", "new")]
    assert expected[0] != expected[1]
    spec = spec_of(tmp_path / "old", tensor_parallel=2)
    balance = ExpertBalanceSpec(redundant=1, steps=2)
    device = msgspec.structs.replace(spec.device, expert_parallel=True, expert_balance=balance)
    core = Core(msgspec.structs.replace(spec, device=device))
    assert [core.answer(id) for id in (1, 2)] == [expected[0]] * 2
    core.call("pause", mode="keep")
    core.weigh(action="push", path=str(tmp_path / "new"), last=True)
    core.call("resume")
    assert [core.answer(id) for id in (3, 4)] == [expected[1]] * 2
    core.core.close()

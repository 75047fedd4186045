"""PAR-10, PAR-11: engine cores with attention and requests of their own, whose experts are shared out to all of them,
over gloo: they answer as one worker, whatever each has to do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.back.executor.processes import ProcessExecutor
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import (
    DeviceOptions,
    KVOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
    SpeculationOptions,
)
from headrace.base.errors import EngineDead, EngineError
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.launch.expert_group import in_group
from headrace.launch.facts import resolve_options
from tests.e2e.test_speculation import SAMPLINGS, Answer, assert_equal, requests_of, run
from tests.models.oracle import model_spec, save_oracle
from tests.models.test_parity import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DEMO = Path(__file__).parents[2] / "demo"
NGRAM = SpeculationOptions(method="ngram", num_speculative_tokens=4, adaptive=False)
MODEL = SpeculationOptions(
    method="draft_model", model=str(DEMO / "model"), num_speculative_tokens=2, adaptive=False
)
COUNT = len(SAMPLINGS)


def resolved(speculation: SpeculationOptions | None = None, **device: Any) -> EngineSpec:
    """In float32, as sums are taken in other orders."""
    tree = Options(
        device=DeviceOptions(device="cpu", threads=1, **device),
        model=ModelOptions(max_model_len=256, demo="mixture", dtype="float32"),
        kv=KVOptions(kv_blocks=60),
        scheduler=SchedulerOptions(
            speculative_config=speculation, max_step_tokens=64, max_running=8
        ),
    )
    return resolve_options(tree).engine


@dataclass(frozen=True)
class Group:
    """Running engine cores."""

    cores: Sequence[EngineCore]
    executors: Sequence[ProcessExecutor]

    def at_once(self, work: Sequence[Callable[[EngineCore], Any]]) -> list[Any]:
        """What each core's work gives."""
        return at_once([partial(one, core) for one, core in zip(work, self.cores, strict=False)])


def at_once(work: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each gives, all at the same time."""
    with ThreadPoolExecutor(len(work)) as pool:
        return [one.result() for one in [pool.submit(one) for one in work]]


@contextmanager
def group_of(spec: EngineSpec, folder: Path, count: int = 2) -> Iterator[Group]:
    """So many cores of this spec."""
    folder.mkdir()
    executors: list[Any] = [None] * count

    def start(core: int) -> None:
        executors[core] = ProcessExecutor(in_group(spec, folder=str(folder), core=core))

    starting = [threading.Thread(target=start, args=(core,)) for core in range(count)]
    with ExitStack() as closing:
        for one in starting:
            one.start()
        for one in starting:
            one.join()
        for executor in executors:
            if executor is not None:
                closing.callback(executor.close)
        yield Group([EngineCore(spec, executor) for executor in executors], executors)


def answers(core: EngineCore, ids: Sequence[int]) -> dict[int, Answer]:
    requests = requests_of(resolved(), COUNT)
    return run(core, [requests[id] for id in ids], at_once=6)


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[int, Answer]]:
    spec = resolved(executor="processes")
    core = EngineCore(spec, ProcessExecutor(spec))
    yield answers(core, range(COUNT))
    core.close()


@pytest.mark.parametrize(
    ("speculation", "device"),
    [
        (None, {}),
        (NGRAM, {"all2all_backend": "ragged"}),
        (MODEL, {"all2all_backend": "padded"}),
        (None, {"tensor_parallel": 2, "num_redundant_experts": 2, "expert_rebalance_steps": 4}),
    ],
    ids=["gathered", "ragged-drafts", "padded-drafter", "moving-tensor-parallel"],
)
def test_cores_that_share_out_experts_answer_as_one_worker(
    alone: dict[int, Answer],
    speculation: SpeculationOptions | None,
    device: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Both at once with different requests; then one alone, beside one that has nothing to do."""
    spec = resolved(speculation, data_parallel=2, enable_expert_parallel=True, **device)
    with group_of(spec, tmp_path / "group") as group:
        halves = [range(0, COUNT, 2), range(1, COUNT, 2)]
        each = [lambda core, ids=ids: answers(core, ids) for ids in halves]
        first, second = group.at_once(each)
        assert_equal(alone, {**first, **second})
        for core in group.cores:
            assert_equal({id: alone[id] for id in range(3)}, answers(core, range(3)))
        accepted = [core.scheduler.speculation.stats.num_accepted_tokens for core in group.cores]
    assert (sum(accepted) > 20) is (speculation is not None), accepted


def greedy(id: int, width: int, tokens: int) -> EngineRequest:
    prompt = np.random.default_rng(id).integers(1, width, 7 + 5 * id).astype("<i4")
    return EngineRequest(
        id=id,
        prompt=prompt.tobytes(),
        stop=StopRules(max_tokens=tokens, min_tokens=tokens),
        sampling=RowSampling(temperature=0.0),
    )


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_families_of_experts_write_what_one_rank_writes(family: str, tmp_path: Path) -> None:
    """Softmax over the chosen ones, all of them renormalized, and groups beside shared experts."""
    oracle = save_oracle(tiny_config(family), tmp_path / "model")
    routed = sum(one.nbytes for name, one in oracle.named_parameters() if ".experts." in name)
    base = resolved(data_parallel=2, enable_expert_parallel=True)
    model = replace(model_spec(tmp_path / "model"), max_model_len=base.model.max_model_len)
    spec = replace(base, model=model, grammar=None)
    requests = [greedy(id, model.logits_width, 12) for id in range(6)]
    alone = resolved(executor="processes")
    single = replace(spec, device=alone.device)
    core = EngineCore(single, ProcessExecutor(single))
    expected, whole = run(core, requests), core.executor.facts.weight_bytes
    core.close()
    with group_of(spec, tmp_path / "group") as group:
        found = group.at_once([lambda core, n=n: run(core, requests[n::2]) for n in (0, 1)])
        assert_equal(expected, {**found[0], **found[1]})
        assert_equal(expected, run(group.cores[1], requests))
        shares = [one.facts.weight_bytes for one in group.executors]
    assert sum(shares) == 2 * whole - routed, "each routed expert lies on one of them"
    assert max(shares) < whole


@pytest.mark.parametrize(("ranks", "counts"), [(1, (3, 2, 4)), (2, (3, 2))])
def test_cores_come_and_go(
    ranks: int, counts: tuple[int, ...], alone: dict[int, Answer], tmp_path: Path
) -> None:
    """PAR-06, PAR-07: 2, 3, 2, 4 cores; each time all of them write what one worker writes."""
    spec = resolved(
        data_parallel=2, enable_expert_parallel=True, max_replicas=4, tensor_parallel=ranks
    )
    with group_of(spec, tmp_path / "group") as group, ExitStack() as closing:
        executors, cores = list(group.executors), list(group.cores)
        for number, count in enumerate(counts):
            while len(executors) < count:
                told = in_group(spec, folder="", core=len(executors))
                executors.append(ProcessExecutor(told))
                closing.callback(executors[-1].close)
                cores.append(EngineCore(spec, executors[-1]))
            folder = tmp_path / f"group {number}"
            folder.mkdir()
            at_once([partial(one.share_experts, count, str(folder)) for one in executors])
            for gone in executors[count:]:
                gone.close()
            del executors[count:], cores[count:]
            found = at_once(
                [partial(answers, core, range(i, 9, count)) for i, core in enumerate(cores)]
            )
            assert_equal(
                {id: alone[id] for id in range(9)}, {k: v for one in found for k, v in one.items()}
            )
            for core in (cores[0], cores[-1]):
                assert_equal({id: alone[id] for id in range(2)}, answers(core, range(2)))


def test_aborted_requests_leave_the_others_as_they_are(
    alone: dict[int, Answer], tmp_path: Path
) -> None:
    spec = resolved(data_parallel=2, enable_expert_parallel=True)

    def aborting(core: EngineCore) -> None:
        for id in range(100, 103):
            core.add(greedy(id, 400, 100))
        for _ in range(5):
            core.step(wait=True)
        core.abort(range(100, 103))
        while core.has_work:
            core.step(wait=True)

    with group_of(spec, tmp_path / "group") as group:
        found = group.at_once([aborting, lambda core: answers(core, range(6))])[1]
        assert_equal({id: alone[id] for id in range(6)}, found)


def test_a_rank_that_dies_ends_the_steps_of_the_others(tmp_path: Path) -> None:
    spec = resolved(data_parallel=2, enable_expert_parallel=True)
    with group_of(spec, tmp_path / "group") as group:
        group.executors[1]._workers[0].process.kill()
        group.executors[1]._ended.wait()
        gone = (
            "worker 0 failed between steps: one of the 2 ranks that share out the experts is gone"
        )
        with pytest.raises(EngineError, match=gone):
            answers(group.cores[0], range(3))
        with pytest.raises(EngineDead, match="worker 0 was killed by signal 9"):
            group.executors[1].check()

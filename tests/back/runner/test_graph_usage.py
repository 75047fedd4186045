"""Which sizes of steps traffic takes, and their graphs recorded while the engine is idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.runner import graph_usage
from headrace.back.runner.buckets import BucketSteps
from headrace.back.runner.devices import bucket_steps
from headrace.back.runner.graph_usage import MOST_KEPT, GraphUsage
from headrace.back.runner.replay import DeferredSampling
from headrace.back.runner.results import StepTensors
from headrace.back.runner.sizes import Bucket, Buckets
from headrace.back.runner.start import start_runner
from headrace.back.runner.steps import StepResources, Steps
from headrace.back.sampling.in_step import InStepSampling
from headrace.base.config.resolved import EngineSpec
from headrace.base.wire.request import RowSampling
from headrace.bench.offline import OfflineEngine
from tests.back.driver import Driver, greedy_reference
from tests.back.runner.test_cpu_graphs import answers, engine, replay_of
from tests.back.runner.test_runner import Calls
from tests.back.tiny_model import TinyModel, tiny_spec

SIZES = Buckets(max_rows=32, max_tokens=256, groups=1)


def decode(rows: int, **form: object) -> Bucket:
    return replace(SIZES.decode(rows), **form)


def saved(path: Path, counts: dict[Bucket, int]) -> GraphUsage:
    usage = GraphUsage(path)
    usage.counts.update(counts)
    usage.save()
    return usage


def test_the_sizes_used_most_are_kept_and_weigh_half_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "graphs" / "model.json"
    sampled = decode(8, sampler_input=InStepSampling(alternatives=3))
    mixed = SIZES.of(tokens=100, rows=3)
    saved(path, {decode(1): 10, sampled: 40, mixed: 7, decode(4): 1})
    assert path.parent.stat().st_mode & 0o077 == 0
    again = GraphUsage(path)
    assert again.counts == Counter({sampled: 20, decode(1): 5, mixed: 3})
    assert again.by_use(SIZES) == [sampled, decode(1), mixed]
    assert again.decision is not None and again.decision.chosen == "4 sizes"


def test_the_file_is_bounded_and_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    counts = {
        decode(rows, updates=updates): updates for rows in (1, 2, 4, 8) for updates in range(2, 80)
    }
    saved(path, counts)
    kept = GraphUsage(path).counts
    assert len(kept) == MOST_KEPT and min(kept.values()) >= 23
    assert [one.name for one in tmp_path.iterdir()] == ["model.json"]


@pytest.mark.parametrize("data", [b"", b"{}", b'[[{"tokens": 1}, 2]]', b"[[1, 2]", b"\xff" * 99])
def test_a_broken_file_is_ignored_and_said_so(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(data)
    usage = GraphUsage(path)
    assert not usage.counts and usage.decision is not None
    assert usage.decision.chosen == "ignored" and str(path) in usage.decision.why


def test_a_folder_that_cannot_be_written_ends_the_keeping_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    usage = saved(tmp_path / "file" / "model.json", {decode(1): 2})
    assert usage.counts[decode(1)] == 2 and usage.decision is None


@pytest.mark.parametrize(
    "bucket",
    [
        replace(decode(1), rows=33, tokens=33),
        decode(3),
        decode(4, updates=999),
        decode(4, sampler_input=InStepSampling(penalties=8)),
        replace(SIZES.largest, tokens=257),
        replace(decode(4), rows=0),
    ],
)
def test_sizes_that_this_engine_does_not_take_are_not_recorded(bucket: Bucket) -> None:
    usage = GraphUsage()
    usage.counts.update({bucket: 9, decode(2): 1})
    assert usage.by_use(SIZES) == [decode(2)]


def steps_of(running: OfflineEngine) -> BucketSteps:
    steps = running.executor._resident.runner._steps
    assert isinstance(steps, BucketSteps)
    return steps


LENGTHS = [(3 + 7 * i % 40, 5 + 11 * i % 30, 0.0 if i % 3 else 0.8) for i in range(8)]


class Padded(Calls):
    """Records as a GPU's replay does, which pads: by calling the step."""

    def __init__(self) -> None:
        self.recorded: list[Bucket] = []

    @property
    def num_graphs(self) -> int:
        return len(self.recorded)

    def wants(self, bucket: Bucket) -> bool:
        return bucket not in self.recorded

    def record(
        self,
        bucket: Bucket,
        step: Callable[[Bucket], StepTensors],
        rest: DeferredSampling | None = None,
    ) -> None:
        self.run(bucket, step, rest)
        self.recorded.append(bucket)


def test_a_step_of_padding_alone_leaves_rows_and_cache_as_they_are() -> None:
    """Between the steps of requests that hold rows: prompts, decodes and random rows."""
    replay, model = Padded(), TinyModel()

    def steps(resources: StepResources, spec: EngineSpec, *, num_groups: int) -> Steps:
        return bucket_steps(resources, spec, replay, num_groups=num_groups)

    runner = start_runner(tiny_spec(), model, device=torch.device("cpu"), steps=steps).runner
    driver = Driver(runner.facts)
    greedy, seeded = (
        driver.add([5, 6, 7]),
        driver.add([8] * 20, RowSampling(temperature=1.0, seed=3)),
    )
    driver.read(runner.execute(driver.plan([(greedy, 3), (seeded, 20)])))
    driver.read(runner.execute(driver.plan([(greedy, 1)])))
    cache = runner._kv.tensors[0][1:].clone()
    while runner.record_next().more:
        pass
    assert len(replay.recorded) == 2 and torch.equal(runner._kv.tensors[0][1:], cache)
    driver.read(runner.execute(driver.plan([(greedy, 1), (seeded, 1)])))
    assert greedy.outputs == greedy_reference(model, [5, 6, 7], 3)
    other = start_runner(tiny_spec(), model, device=torch.device("cpu"), steps=steps).runner
    driver = Driver(other.facts)
    alone = driver.add([8] * 20, RowSampling(temperature=1.0, seed=3))
    for count in (20, 1):
        driver.read(other.execute(driver.plan([(alone, count)])))
    assert alone.outputs == seeded.outputs


needs_native = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)


@needs_native
def test_idle_moments_record_what_traffic_takes_and_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph at a time, until nothing is left; what is kept is recorded by the next engine
    before its first request, which then records nothing on its way."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(graph_usage, "SAVE_EVERY_S", 0.0)
    first = engine()
    tokens = answers(first, LENGTHS)
    while first.executor.record_graph().more:
        pass
    assert answers(first, LENGTHS) == tokens
    first.executor.record_graph()
    often = {b for b, count in steps_of(first)._usage.counts.items() if b.decode and count > 1}
    first.close()

    second = engine()
    assert ("graphs.history", "auto") in [tuple(d[:2]) for d in second.executor.facts.decisions]
    recorded = [second.executor.facts.graphs]
    while recorded[-1].more:
        recorded.append(second.executor.record_graph())
    counts = [one.count for one in recorded]
    assert counts == list(range(counts[-1] + 1)) and counts[-1] > 3
    assert recorded[-1].num_bytes > recorded[0].num_bytes
    replay = replay_of(second)
    assert often == replay._graphs.keys() and len(often) == counts[-1]
    seen = set(replay._seen)
    assert answers(second, LENGTHS) == tokens
    assert not often & (replay._seen - seen)
    second.close()


@needs_native
def test_a_recording_that_fails_is_not_tried_again_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = engine()
    tokens = answers(running, LENGTHS)
    steps = steps_of(running)
    steps._usage.counts[steps.buckets.of(tokens=17, rows=17)] = 99

    def full(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(steps._replay, "record", full)
    assert not running.executor.record_graph().more
    monkeypatch.undo()
    count = running.executor.record_graph().count
    assert running.executor.record_graph().count == count
    assert answers(running, LENGTHS) == tokens
    running.close()

"""WorkerProcess processes: the same tokens as inline, and one end for all when one of them ends."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.back.executor.channel import TO_WORKER, StartWorker
from headrace.back.executor.processes import ProcessExecutor, WorkerProcess
from headrace.base.errors import CheckpointError, EngineDead, StartError
from headrace.launch import prestart
from tests.back.driver import Driver, greedy_reference
from tests.back.tiny_model import TinyModel, tiny_spec
from tests.stopwatch import Stopwatch

LOADER = "tests.back.tiny_model:load_tiny"


def two_ranks() -> ProcessExecutor:
    return ProcessExecutor(
        tiny_spec(executor="processes", tensor_parallel=2, config={"explode": 60, "hang": 61}),
        loader="tests.back.tiny_model:load_tiny_parallel",
    )


@pytest.fixture
def pair() -> Iterator[ProcessExecutor]:
    executor = two_ranks()
    yield executor
    executor.close()


def is_alive(executor: ProcessExecutor) -> list[bool]:
    return [worker.process.poll() is None for worker in executor._workers]


def test_two_ranks_give_the_tokens_of_one_and_parked_they_go_on_with_the_same_weights(
    pair: ProcessExecutor,
) -> None:
    assert pair.facts.weight_bytes == 8
    driver = Driver(pair.facts)
    sequences = [driver.add([5, 6, 7]), driver.add([9])]
    pending = [pair.submit(driver.plan([(s, s.length) for s in sequences]))]
    pending += [pair.submit(driver.plan([(s, 1) for s in sequences])) for _ in range(4)]
    for step in pending:
        driver.read(step.result(300))
    for sequence in sequences:
        prompt = sequence.tokens[: sequence.num_prompt]
        assert sequence.outputs == greedy_reference(TinyModel(), prompt, 5)
        driver.release(sequence)
    pair.submit(driver.plan([])).result(300)
    _park_and_go_on(pair)


def _park_and_go_on(pair: ProcessExecutor) -> None:
    """ENG-18, level 1; a rank that dies parked ends the other, and whoever waits for it is told."""
    pair.park()
    pair.unpark()
    assert pair.facts.weight_bytes == 8
    driver = Driver(pair.facts)
    sequence = driver.add([5, 6, 7])
    driver.read(pair.submit(driver.plan([(sequence, 3)])).result(300))
    assert sequence.outputs == greedy_reference(TinyModel(), [5, 6, 7], 1)
    driver.release(sequence)
    pair.submit(driver.plan([])).result(300)
    pair.park()
    os.kill(pair._workers[1].process.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="worker 1 was killed by signal 9"):
        pair.unpark()


@pytest.mark.slow
def test_an_exception_on_rank_1_ends_both_with_its_traceback_in_the_log(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """ENG-14, REG-017: rank 0 waits in a collective for rank 1 and must not wait for ever. It fails too, when rank 1
    is gone: whose failure is read first is chance, and the log has both."""
    pair = two_ranks()
    driver = Driver(pair.facts)
    good, bad = driver.add([1]), driver.add([60])
    driver.read(pair.submit(driver.plan([(good, 1)])).result(300))
    failing = pair.submit(driver.plan([(bad, 1)]))
    for _ in range(2):  # a step behind the failing one, unless that has failed by now; then refused
        with pytest.raises(EngineDead, match=r"worker [01] failed in step 1"):
            pair.submit(driver.plan([(good, 1)])).result(300)
    with pytest.raises(EngineDead, match=r"worker [01] failed in step 1"):
        failing.result(300)
    pair.close()
    assert is_alive(pair) == [False, False]
    log = capfd.readouterr().err
    assert "RuntimeError: the tiny model exploded" in log and "in forward" in log


@pytest.mark.slow  # in `make test` one is killed that is parked
@pytest.mark.serial
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_noticed_within_a_second(pair: ProcessExecutor, rank: int) -> None:
    driver = Driver(pair.facts)
    pending = pair.submit(driver.plan([(driver.add([61]), 1)]))
    with pytest.raises(TimeoutError):  # it hangs
        pending.result(0.05)
    assert not pending.done()
    watch = Stopwatch()
    os.kill(pair._workers[rank].process.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match=f"worker {rank} was killed by signal 9"):
        pending.result(300)
    assert watch.undisturbed_s < 1.0
    with pytest.raises(EngineDead):
        pair.check()
    pair.close()
    assert is_alive(pair) == [False, False]


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_worker_is_noticed_within_a_second(pair: ProcessExecutor, rank: int) -> None:
    driver = Driver(pair.facts)
    pending = pair.submit(driver.plan([(driver.add([61]), 1)]))
    watch = Stopwatch()
    os.kill(pair._workers[rank].process.pid, signal.SIGSTOP)
    with pytest.raises(EngineDead, match=f"worker {rank} was stopped by a signal"):
        pending.result(300)
    assert watch.undisturbed_s < 1.0
    pair.close()
    assert is_alive(pair) == [False, False]


@pytest.mark.slow
def test_a_step_that_hangs_times_out_and_close_ends_the_workers(pair: ProcessExecutor) -> None:
    """Reliability 1.6."""
    driver = Driver(pair.facts)
    pending = pair.submit(driver.plan([(driver.add([61]), 1)]))
    with pytest.raises(TimeoutError):
        pending.result(0.05)
    assert not pending.done()
    pair.close()
    with pytest.raises(EngineDead, match="closed"):
        pending.result(0)
    assert is_alive(pair) == [False, False]


@pytest.mark.slow
def test_ranks_never_use_the_links_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    """KRN-27, REG-046: a fault in it may put the GPUs of a shared host out of service. What the user says holds."""
    for given, wanted in ((None, "0"), ("1", "1")):
        if given is None:
            monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
        else:
            monkeypatch.setenv("NCCL_NVLS_ENABLE", given)
        executor = two_ranks()
        try:
            for worker in executor._workers:
                seen = Path(f"/proc/{worker.process.pid}/environ").read_bytes().split(b"\0")
                assert f"NCCL_NVLS_ENABLE={wanted}".encode() in seen
        finally:
            executor.close()


def test_a_variable_of_a_library_reaches_cores_and_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """KVT-09, REG-080: as that which lets UCX export memory over a fabric; one that headrace does not know."""
    monkeypatch.setenv("UCX_CUDA_IPC_ENABLE_MNNVL", "y")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        core = prestart.start(prestart.CORE_MODULE, status=theirs)
        worker = WorkerProcess(0)
        for process in (core, worker.process):
            seen = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            process.kill()
            process.wait()
            assert b"UCX_CUDA_IPC_ENABLE_MNNVL=y" in seen
        worker.channel.close()


@pytest.mark.slow
def test_errors_at_start_come_through_as_what_they_are() -> None:
    spec = tiny_spec(executor="processes", config={"damaged": True})
    with pytest.raises(CheckpointError, match="not finite"):
        ProcessExecutor(spec, loader=LOADER)
    with pytest.raises(StartError, match="no_such_loader"):
        ProcessExecutor(spec, loader="tests.back.tiny_model:no_such_loader")


@pytest.mark.slow
def test_a_worker_whose_parent_is_gone_ends_by_itself() -> None:
    """No orphans: the end of the parent's stream is the worker's end."""
    worker = WorkerProcess(0)
    spec = tiny_spec(executor="processes")
    begin = StartWorker(rank=0, world_size=1, spec=spec, rendezvous="", loader=LOADER)
    worker.channel.send(TO_WORKER.frame(begin))
    assert worker.ready().num_blocks == 64
    worker.channel.close()
    assert worker.process.wait(timeout=300) == 0

"""A process that starts is waited for as long as it works, however little of the machine it gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.base import pipe_process
from headrace.base.pipe_process import PipeProcess
from headrace.base.process_age import processor_s

ECHO = "import sys; sys.stdout.write(sys.stdin.readline())"


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[PipeProcess]:
    """It answers when it is told what, and is looked at a hundred times a second."""
    monkeypatch.setattr(pipe_process, "START_S", 0.01)
    child = PipeProcess("-c", ECHO)
    yield child
    child.close()


def test_a_process_that_works_is_waited_for(
    child: PipeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def used(pid: int) -> float:
        looks.append(0.001 * len(looks))
        if len(looks) == 5:  # far behind START_S of the clock
            child.write(b"ready\n")
            monkeypatch.setattr(pipe_process, "START_S", 60.0)
        return looks[-1]

    monkeypatch.setattr(pipe_process, "processor_s", used)
    assert child.read_first(6) == b"ready\n" and len(looks) == 5


@pytest.mark.parametrize("steps", [(0.001, 0.001), (0.001, 0.5)], ids=["idle", "endless"])
def test_a_process_that_does_not_start_is_late(
    child: PipeProcess, steps: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(steps)
    monkeypatch.setattr(pipe_process, "processor_s", lambda pid: next(looks))
    with pytest.raises(TimeoutError):
        child.read_first(1)
    assert next(looks, None) is None


def test_a_process_that_ends_is_no_longer_waited_for() -> None:
    child = PipeProcess("-c", "")
    with pytest.raises(EOFError):
        child.read_first(1)
    child.close()


def test_processor_time_is_that_of_the_child() -> None:
    child = PipeProcess(
        "-c", "import time\nwhile time.process_time() < 0.2: pass\nprint()\ninput()"
    )
    child.read_first(1)
    pid = child._process.pid
    assert processor_s(pid) >= 0.18
    child.close()

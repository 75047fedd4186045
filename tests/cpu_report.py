"""Where a run's processor time goes: per directory, and the tests that took most.

Processor seconds, not wall time: they are the same beside other load, and they count what a test's child processes
take (servers, compilers), also those that still run. A fixture shared by several tests is charged to the test that
sets it up, a living server's work to the test during which it is done; importing and collecting are charged to none.
`--cpu-to=FILE` appends one line per test: seconds, a tab, the test's id.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections import Counter
from pathlib import Path

import pytest

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SLOWEST = 15
_LOOK_AGAIN_S = 0.1


def tree_cpu_s() -> float:
    """Processor seconds of this process, its ended children and its living descendants."""
    return time.process_time() + _ended_cpu_s() + _descendants_cpu_s()


class TreeClock:
    """The same for who asks often: 2 ms a time where servers live, twice for each of eleven thousand tests. What lives
    is looked at again 0.1 s later, or once a child has ended."""

    def __init__(self) -> None:
        self._ended_s = -1.0
        self._living_s = 0.0
        self._looked_s = 0.0
        self._last_s = 0.0

    def now_s(self) -> float:
        """Never less than before: the system's list of children leaves some out at times, and what a server took in
        all would be charged to the test during which it is listed again."""
        ended_s, clock_s = _ended_cpu_s(), time.monotonic()
        if ended_s != self._ended_s or clock_s > self._looked_s + _LOOK_AGAIN_S:
            self._ended_s, self._looked_s = ended_s, clock_s
            self._living_s = _descendants_cpu_s()
        self._last_s = max(time.process_time() + ended_s + self._living_s, self._last_s)
        return self._last_s


def _ended_cpu_s() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def _descendants_cpu_s() -> float:
    return sum(_living_cpu_s(child) for child in _children("self"))


def _living_cpu_s(pid: str) -> float:
    """0 where it has ended meanwhile."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) * _TICK_S + sum(map(_living_cpu_s, _children(pid)))


def _children(pid: str) -> list[str]:
    """None where there is no /proc."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            # A thread that ends meanwhile leaves its children to another.
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += file.read().split()
    return found


class CpuReport:
    """Measures in the process that runs a test; adds up and prints in the one that shows the results."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._clock = TreeClock()
        self._last_s: float | None = None
        self._by_test: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """What ran before the first test belongs to none."""
        if self._last_s is None:
            self._last_s = self._clock.now_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> pytest.TestReport:
        """The last phase of a test carries the seconds of all to the process that shows it."""
        report = yield
        if report.when == "teardown":
            now_s = self._clock.now_s()
            report.user_properties = [("cpu_s", now_s - (self._last_s or 0.0))]
            self._last_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds up."""
        for name, value in report.user_properties:
            if name == "cpu_s":
                self._by_test[report.nodeid] += value

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Per directory, then the tests that took most."""
        if hasattr(self._config, "workerinput") or not self._by_test:
            return
        if path := self._config.getoption("cpu_to"):
            with Path(path).open("a") as file:
                file.writelines(f"{s:.3f}\t{test}\n" for test, s in self._by_test.most_common())
        folders: Counter[str] = Counter()
        for test, seconds in self._by_test.items():
            folders[test.split("::")[0].rpartition("/")[0]] += seconds
        in_tests_s, all_s = self._by_test.total(), tree_cpu_s()
        terminalreporter.section(
            f"processor seconds: {all_s:.0f}, {in_tests_s:.0f} of them in tests"
        )
        for folder, seconds in [*folders.most_common(), ("in no test", all_s - in_tests_s)]:
            terminalreporter.write_line(f"{seconds:8.1f}  {folder}")
        terminalreporter.section(f"the {_SLOWEST} tests that took most")
        for test, seconds in self._by_test.most_common(_SLOWEST):
            terminalreporter.write_line(f"{seconds:8.1f}  {test}")

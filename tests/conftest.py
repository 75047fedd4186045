"""The order of the tests, the examples that properties are held against, and what the end of a run tells: skips by
their reason, then, last, what failed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter

import pytest

from headrace.launch.packed_weights import unpack_weights
from tests.covering import mark_rest_slow, one_of_skipped
from tests.cpu_report import CpuReport
from tests.forked import Forked
from tests.frozen import Frozen
from tests.parts import Part
from tests.scopes import comes_first

# Before anything imports torch. Its threads wait for each other by spinning: where tests run beside each other, an
# operation of 0.1 ms then takes as long as the system leaves the other thread without a core.
_THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")

LEAST_EXAMPLES = 5

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # `make test-gpu` does without it
    settings = None
else:
    # What a test finds depends on the code alone: its examples are the same in every run, and a slow machine may take
    # its time over one. `--hypothesis-profile=other` draws others each time, and three times as many.
    settings.register_profile("other", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("same", settings.get_profile("other"), derandomize=True)
    settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What the Makefile and who measures ask for."""
    parser.addoption("--part", metavar="K/N", help="of the chosen tests every Nth from the Kth on")
    parser.addoption(
        "--forks", type=int, default=0, help="tests at a time, as tests/forked.py does"
    )
    parser.addoption("--cpu-to", metavar="FILE", help="append each test's processor seconds")


def pytest_configure(config: pytest.Config) -> None:
    """Every run says where its time went; some run in parts."""
    if _draws_the_same(config):
        _draw_no_constants()
    if forks := config.getoption("forks"):
        os.environ["TESTS_BESIDE_OTHERS"] = "1"
        config.pluginmanager.register(Forked(config, forks))
    config.pluginmanager.register(CpuReport(config))
    config.pluginmanager.register(Frozen())
    if not hasattr(config, "workerinput"):
        unpack_weights(config.rootpath / "demo" / "model")
        config.pluginmanager.register(FailureNames(config))
    if part := config.getoption("part"):
        config.pluginmanager.register(Part(part))


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str, obj: object
) -> list[pytest.Item] | None:
    """Where slow tests are left out, their cases are not made first."""
    if not name.startswith("test") or collector.config.getoption("markexpr") != "not slow":
        return None
    marks = getattr(obj, "pytestmark", ())  # a mark alone: of a module that another one imports
    is_slow = isinstance(marks, list) and any(mark.name == "slow" for mark in marks)
    return [] if is_slow else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of what cannot run here one case says so; of large products of parameters the cases that cover pairs stay. What
    takes long comes first: beside each other, workers then end at about the same time."""
    kept = one_of_skipped(items)
    config.hook.pytest_deselected(items=[*{*items} - {*kept}])
    items[:] = kept
    mark_rest_slow(items)
    if _draws_the_same(config):
        for item in items:
            _draw_fewer(item)
    items.sort(key=lambda item: not comes_first(item))


def _draws_the_same(config: pytest.Config) -> bool:
    return settings is not None and config.getoption("--hypothesis-profile", None) in (None, "same")


def _draw_no_constants() -> None:
    """Hypothesis would also draw the constants of those of our files that are imported by then, which the tests before
    decide; reading them takes a worker 3 s."""
    with contextlib.suppress(ImportError):  # the oldest version that we take draws none
        from hypothesis.internal.conjecture import providers

        providers.is_local_module_file = lambda file: False


def _draw_fewer(item: pytest.Item) -> None:
    """A fifth of a property's examples: they are the same every time, and `make slow` draws new ones."""
    test = getattr(item, "obj", None)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is not None and not hasattr(test, "_draws_fewer"):
        fewer = settings(own, max_examples=max(LEAST_EXAMPLES, own.max_examples // 5))
        test._hypothesis_internal_use_settings, test._draws_fewer = fewer, True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws without a generator of its own does not depend on which tests ran before it in its worker."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        torch.manual_seed(0)
    if numpy is not None:
        numpy.random.seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """What a test told torch about threads ends with it; the next thousands would spin (see above)."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != (threads := int(_THREADS)):
        torch.set_num_threads(threads)


class FailureNames:
    """Writes what failed at once: a run that is cut off has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\nfails: {report.nodeid}")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """pytest itself writes what failed behind this: in a log that is cut it is still there."""
    if hasattr(config, "workerinput"):
        return  # one of several workers: the process that shows their results tells them
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", ()))
    if reasons:
        terminalreporter.section("skipped, by reason")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5} {reason}")


def _reason(report: pytest.TestReport) -> str:
    """Without the file: the same reason stands in many."""
    skip = report.longrepr
    return str(skip[2] if isinstance(skip, tuple) else skip).removeprefix("Skipped: ")

"""The order of the tests, the examples that properties are held against, and what the end of a run tells: skips by
their reason, then, last, what failed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # `make test-gpu` does without it
    pass
else:
    # What a test finds depends on the code alone: its examples are the same in every run, and a slow machine may take
    # its time over one. `--hypothesis-profile=other` draws others each time.
    settings.register_profile("other", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("same", settings.get_profile("other"), derandomize=True)
    settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make unit` needs to name the failures of both its legs."""
    parser.addoption("--failed-to", metavar="FILE", help="append what failed to this file")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: beside each other, workers then end at about the same time."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """pytest itself writes what failed behind this: in a log that is cut it is still there."""
    if hasattr(config, "workerinput"):
        return  # one of several workers: the process that shows their results tells them
    stats = terminalreporter.stats
    reasons = Counter(_reason(report) for report in stats.get("skipped", ()))
    if reasons:
        terminalreporter.section("skipped, by reason")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5} {reason}")
    if path := config.getoption("failed_to"):
        with Path(path).open("a") as file:
            for outcome in ("failed", "error"):
                file.writelines(f"{report.nodeid}\n" for report in stats.get(outcome, ()))


def _reason(report: pytest.TestReport) -> str:
    """Without the file: the same reason stands in many."""
    skip = report.longrepr
    return str(skip[2] if isinstance(skip, tuple) else skip).removeprefix("Skipped: ")

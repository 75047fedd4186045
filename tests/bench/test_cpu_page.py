"""benchmarks/cpu/engines.md and engines-vectors.md: made of the stored results; a reason stands beside its run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.cpu.page import page, tables
from benchmarks.cpu.reasons import PAGE, STORED, with_reason


@pytest.fixture
def stored() -> dict[str, Any]:
    return dict(json.loads(STORED.read_text()))


def test_the_pages_are_what_the_stored_results_say(stored: dict[str, Any]) -> None:
    assert PAGE.read_text() == page(stored)
    results, shown = tables(())
    assert results.exists() == shown.exists() and results != STORED
    if results.exists():
        assert shown.read_text() == page(json.loads(results.read_text()))


def test_a_reason_goes_with_the_run_it_was_found_for(stored: dict[str, Any]) -> None:
    stored = with_reason(stored, "bundled", "prefill int8 512", "short GEMMs")
    assert "missed: short GEMMs" in page(stored)
    section = stored["bundled"]["prefill"]
    measured_anew = {key: value for key, value in section.items() if key != "reasons"}
    stored["bundled"]["prefill"] = measured_anew
    assert "missed: short GEMMs" not in page(stored)
    assert "missed: reason not found yet" in page(stored)


def test_an_empty_reason_is_taken_out(stored: dict[str, Any]) -> None:
    stored = with_reason(stored, "bundled", "prefill int8 512", "short GEMMs")
    stored = with_reason(stored, "bundled", "prefill int8 512", "")
    assert "short GEMMs" not in page(stored)

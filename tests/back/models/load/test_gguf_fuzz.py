"""A small run of the GGUF fuzzer: every damaged file is refused or loads, nothing else
(security.md: readers)."""

from __future__ import annotations

from benchmarks.robustness.gguf_fuzz import run


def test_damaged_files_are_refused_or_load() -> None:
    summary = run(60, seed=7)
    assert summary["findings"] == []
    outcomes = summary["outcomes"]
    assert isinstance(outcomes, dict) and sum(outcomes.values()) == 60
    assert outcomes["CheckpointError"] > 30

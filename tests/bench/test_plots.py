"""The headline figures are what the tables say, and the committed pictures are small."""

from __future__ import annotations

import json

from benchmarks.plots import FIGURES, PLOTS, figures


def test_the_figures_are_those_of_the_tables() -> None:
    assert json.loads(FIGURES.read_text()) == figures()


def test_a_figure_names_its_source_and_a_ratio_above_one_means_ahead() -> None:
    rows = [row for group in figures().values() for row in group]
    assert len(rows) > 40
    for row in rows:
        assert row["source"].startswith("benchmarks/")
        ahead = (
            row["headrace"] < row["theirs"]
            if row["lower_is_better"]
            else (row["headrace"] > row["theirs"])
        )
        assert ahead == (row["ratio"] > 1) or abs(row["ratio"] - 1) < 1e-3


def test_the_committed_pictures_are_small() -> None:
    pictures = sorted(PLOTS.glob("*.svg"))
    assert len(pictures) == 4
    assert all(0 < picture.stat().st_size < 40_000 for picture in pictures)

"""The loop of demo/reinforce.py: weights are pushed each step, and the engine's log-probabilities are the trainer's
(ENG-19)."""

from __future__ import annotations

from typing import Any

import pytest

from demo.reinforce import train


@pytest.mark.slow
def test_each_step_answers_with_the_weights_of_the_step_before() -> None:
    records: list[dict[str, Any]] = list(
        train(
            steps=3,
            problems=4,
            answers=4,
            learning_rate=3e-5,
            seed=1,
            dtype="float32",
            device="cpu",
            noise=0.35,
        )
    )
    assert [record["weights"] for record in records] == ["weakened", "step-1", "step-2"]
    assert all(0 <= record["score"] <= 1 for record in records)
    assert max(record["logprob_error"] for record in records) < 1e-4

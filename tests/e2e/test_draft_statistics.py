"""Answers with drafts are drawn from the distribution of those without (SPC-02, SPC-06): a chi-square test under other
seeds, and equal tokens under the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.draft_statistics import (
    OTHER_SEEDS,
    PROMPT,
    TOKENS,
    WAYS,
    chi_square,
    drafters,
    least_p,
    measured,
)
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.front.text.tokenizer_files import load_tokenizer
from tests.e2e.test_speculation import NGRAM, Engine, options, run

pytestmark = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
SAMPLES = 120


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made = [Engine(options(how)) for how in (None, NGRAM)]
    yield made
    for engine in made:
        engine.executor.close()


def answers(engine: Engine, first_seed: int) -> list[list[int]]:
    assert engine.spec.grammar is not None
    tokenizer = load_tokenizer(engine.spec.grammar.tokenizer_path)
    prompt = np.asarray(tokenizer.encode_plain(PROMPT), "<i4").tobytes()
    requests = [
        EngineRequest(
            id=first_seed + i,
            prompt=prompt,
            stop=StopRules(max_tokens=TOKENS),
            sampling=RowSampling(temperature=0.8, seed=first_seed + i),
        )
        for i in range(SAMPLES)
    ]
    found = run(engine.core, requests, at_once=8)
    return [found[request.id].tokens for request in requests]


@pytest.mark.slow
def test_drafts_change_no_distribution(engines: list[Engine]) -> None:
    plain, drafted = engines
    expected = answers(plain, 0)
    assert answers(drafted, 0) == expected
    assert least_p(expected, answers(drafted, OTHER_SEEDS)) > 0.01
    assert drafted.core.scheduler.speculation.stats.num_accepted_tokens > 20


def test_the_test_tells_distributions_apart() -> None:
    """400 throws of a coin, and 400 of one that is bent to 0.7: 33.3 by hand, p = erfc(sqrt(33.3 / 2))."""
    fair, bent = [0] * 200 + [1] * 200, [0] * 280 + [1] * 120
    assert chi_square(fair, fair) == pytest.approx(1.0)
    value = 2 * (40**2 / 240 + 40**2 / 160)
    assert value == pytest.approx(33.333, abs=1e-3)
    assert chi_square(fair, bent) == pytest.approx(math.erfc(math.sqrt(value / 2)), rel=1e-6)
    assert chi_square([5] * 9, [5] * 11) == 1.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_drafter_with_every_way_to_sample(tmp_path: Path) -> None:
    lines = measured(None, 40, tmp_path)
    assert len(lines) == len(WAYS) * len(drafters(tmp_path / "again"))
    assert [line for line in lines if line["differences"] or line["p"] <= 0.01] == []

"""Families of hearing_cases.py hear as transformers does: whole and in chunks that cut sounds; and slowly behind a
prefix hit, beside text, as text alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models.hearing_cases import CASES
from tests.models.media import Prompt, compare_answers
from tests.models.test_hearing import Heard, opened, two_sounds


@pytest.fixture(scope="module", params=CASES)
def heard(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Heard]:
    with opened(CASES[request.param], tmp_path_factory.mktemp("model")) as heard:
        yield heard


def test_sounds_whole_and_in_chunks(heard: Heard) -> None:
    prompt = two_sounds(heard)
    expected = heard.expected(prompt)
    compare_answers(heard.engine.run(prompt)[0], expected)
    engine = heard.engine.with_steps(heard.folder, max_step_tokens=5)
    compare_answers(engine.run(prompt)[0], expected)


@pytest.mark.slow
def test_text_alone(heard: Heard) -> None:
    prompt = Prompt().text(*range(3, 40))
    compare_answers(heard.engine.run(prompt)[0], heard.expected(prompt))


@pytest.mark.slow
def test_a_prefix_hit_and_company(heard: Heard) -> None:
    engine = heard.engine.with_steps(heard.folder, max_step_tokens=64)
    prompts = [two_sounds(heard), Prompt().text(*range(3, 30)), two_sounds(heard).text(14)]
    answers = engine.run(*prompts, max_tokens=12, scored=False)
    expected = [heard.expected(one, 12).tokens for one in prompts]
    assert [answer.tokens for answer in answers] == expected
    (answer,) = engine.run(prompts[0], max_tokens=12, scored=False)
    assert (answer.tokens, answer.num_cached) == (expected[0], (len(prompts[0].ids) - 1) // 8 * 8)
    other = two_sounds(heard)
    other.inputs[1] = heard.sound(9, 1)
    (answer,) = engine.run(other, max_tokens=6, scored=False)
    assert answer.tokens == heard.expected(other, 6).tokens

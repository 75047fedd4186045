"""Families of vision_cases.py see as transformers does: whole and in chunks that cut images or stop before them; and
slowly behind a prefix hit, beside text, as text alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models.media import Prompt, compare_answers
from tests.models.test_towers import Seen, opened, two_images
from tests.models.vision_cases import CASES


@pytest.fixture(scope="module", params=CASES)
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seen]:
    with opened(CASES[request.param], tmp_path_factory.mktemp("model")) as seen:
        yield seen


def test_images_whole_and_in_chunks(seen: Seen) -> None:
    prompt = two_images(seen)
    expected = seen.expected(prompt)
    compare_answers(seen.engine.run(prompt)[0], expected)
    for step_tokens in seen.case.step_tokens[:1]:
        engine = seen.engine.with_steps(seen.folder, max_step_tokens=step_tokens)
        compare_answers(engine.run(prompt)[0], expected)


@pytest.mark.slow
def test_in_other_chunks(seen: Seen) -> None:
    prompt = two_images(seen)
    expected = seen.expected(prompt)
    for step_tokens in seen.case.step_tokens[1:]:
        engine = seen.engine.with_steps(seen.folder, max_step_tokens=step_tokens)
        compare_answers(engine.run(prompt)[0], expected)


@pytest.mark.slow
def test_text_alone(seen: Seen) -> None:
    prompt = Prompt().text(*range(3, 40))
    compare_answers(seen.engine.run(prompt)[0], seen.expected(prompt))


@pytest.mark.slow
def test_the_same_again_and_other_pixels(seen: Seen) -> None:
    engine = seen.engine.with_steps(seen.folder)
    prompt, expected = two_images(seen), seen.expected(two_images(seen), 6)
    for _ in range(2):
        (answer,) = engine.run(prompt, max_tokens=6, scored=False)
        assert answer.tokens == expected.tokens
    whole = any(form.mutual == "prompt" for form in engine.executor.facts.media)
    recurrent = "layer_types" in seen.case.text and "conv" in seen.case.text["layer_types"]
    assert answer.num_cached == (0 if whole else (len(prompt.ids) - 1) // 8 * 8) or recurrent
    other = two_images(seen)
    other.inputs[1] = seen.pixels(9, 1)
    (answer,) = engine.run(other, max_tokens=6, scored=False)
    assert answer.tokens == seen.expected(other, 6).tokens


@pytest.mark.slow
def test_beside_text_and_each_other_with_recorded_decodes(seen: Seen) -> None:
    engine = seen.engine.with_steps(seen.folder, max_step_tokens=64)
    prompts = [two_images(seen), Prompt().text(*range(3, 30)), two_images(seen)]
    prompts[2].text(13, 14)
    answers = engine.run(*prompts, max_tokens=12, scored=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == seen.expected(prompt, 12).tokens

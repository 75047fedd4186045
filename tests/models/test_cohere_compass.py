"""North Micro Vision sees as transformers does: layers with windows that rotate in three axes, and layers that do not
rotate; images, video, chunks, behind a prefix hit, beside text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models.media import Prompt, SeeingEngine, compare_answers
from tests.models.test_qwen_vl import (
    HALF,
    QWEN3_TOWER,
    Case,
    Seen,
    save_case,
    text,
    two_images,
    with_video,
)

CASE = Case(
    name="CohereCompass",
    vision={**QWEN3_TOWER, "deepstack_visual_indexes": [1]},
    text={
        **{
            key: value for key, value in text(4, 2, 2, head_dim=16).items() if key != "rms_norm_eps"
        },
        **{"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "sliding_window": 9,
        "rope_parameters": {
            "sliding_attention": {
                **{"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 2, 2]},
            },
            "full_attention": None,
        },
        "logit_scale": 0.3,
    },
    norm=HALF,
    apart=True,
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("model")
    oracle = save_case(CASE, folder)
    engine = SeeingEngine(folder)
    yield Seen(case=CASE, folder=folder, oracle=oracle, engine=engine)
    engine.close()


@pytest.mark.parametrize("step_tokens", [256, 9])
def test_images_and_video_whole_and_in_chunks(seen: Seen, step_tokens: int) -> None:
    engine = seen.engine.with_steps(seen.folder, max_step_tokens=step_tokens)
    for prompt in (two_images(seen), with_video(seen)):
        compare_answers(engine.run(prompt)[0], seen.expected(prompt))


@pytest.mark.slow
def test_again_and_beside_text(seen: Seen) -> None:
    engine = seen.engine.with_steps(seen.folder, max_step_tokens=64)
    prompt, plain = two_images(seen), Prompt().text(*range(3, 30))
    for _ in range(2):
        answers = engine.run(prompt, plain, max_tokens=8, scored=False)
        wanted = [seen.expected(one, 8).tokens for one in (prompt, plain)]
        assert [one.tokens for one in answers] == wanted

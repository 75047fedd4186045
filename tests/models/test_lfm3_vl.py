"""LFM3-VL sees as transformers does: convolutions over odd grids and attention, images, video, chunks, beside text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.models.media import Prompt, SeeingEngine, compare_answers
from tests.models.test_qwen_vl import (
    HALF,
    QWEN3_TOWER,
    TEXT,
    Case,
    Seen,
    save_case,
    two_images,
    with_video,
)

UNKNOWN = ("rms_norm_eps", "num_position_embeddings", "depth", "num_heads", "out_hidden_size")
CASE = Case(
    name="Lfm3Vl",
    vision={
        **{key: value for key, value in QWEN3_TOWER.items() if key not in UNKNOWN},
        **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"]},
    },
    text={
        **{key: value for key, value in TEXT.items() if key not in UNKNOWN},
        **{"model_type": "lfm3", "layer_types": ["conv", "full_attention", "sliding_attention"]},
        **{"sliding_window": 9, "conv_L_cache": 3, "pad_token_id": 0},
    },
    norm=HALF,
    apart=True,
)


class Untyped(Seen):
    """The reference is not told which tokens are images'."""

    def inputs(self, prompt: Prompt) -> dict[str, Any]:
        inputs = super().inputs(prompt)
        del inputs["mm_token_type_ids"]
        return inputs


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("model")
    oracle = save_case(CASE, folder)
    engine = SeeingEngine(folder)
    yield Untyped(case=CASE, folder=folder, oracle=oracle, engine=engine)
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

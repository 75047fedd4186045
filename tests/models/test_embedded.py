"""Vectors in place of an image: those that the encoder gives for it have its answer; what does not fit is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.base.errors import InvalidRequest
from headrace.base.wire.media import MediaInput
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.media_checks import check_media
from tests.models import test_qwen_vl as qwen
from tests.models import test_towers as towers
from tests.models.media import Pixels, Prompt, SeeingEngine, compare_answers, image

MERGES = {"qwen3-vl": 2, "llava": 1}


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """What stands for an input, at its place in a prompt."""

    of: Pixels
    rows_MW: np.ndarray

    def at(self, offset: int) -> MediaInput:
        rows = self.rows_MW.astype("<f4").tobytes()
        one = self.of.at(offset)
        key = hashlib.sha256(b"vectors" + rows).digest()
        return msgspec.structs.replace(one, key=key, rows=rows, embedded=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)


@pytest.fixture(scope="module", params=["qwen3-vl", pytest.param("llava", marks=pytest.mark.slow)])
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SeeingEngine, Pixels, Path]]:
    folder: Path = tmp_path_factory.mktemp("model")
    module = qwen if request.param in qwen.CASES else towers
    module.save_case(module.CASES[request.param], folder)
    engine = SeeingEngine(folder)
    grid = (1, 4, 4) if request.param == "llava" else (1, 6, 4)
    yield engine, image(3, grid, patch=4, merge=MERGES[request.param]), folder
    engine.close()


def vectors(engine: SeeingEngine, pixels: Pixels) -> Vectors:
    """By the engine's own encoder."""
    cache = engine.executor._resident.runner._state.cache
    rows = torch.from_numpy(pixels.rows.copy())
    return Vectors(of=pixels, rows_MW=cache._encoder.encode("image", rows, [pixels.grid]).numpy())


def test_they_answer_as_their_image_whole_and_in_chunks(
    seeing: tuple[SeeingEngine, Pixels, Path],
) -> None:
    engine, pixels, folder = seeing
    expected = engine.run(Prompt().text(5, 6, 7).put(pixels).text(8, 9))[0]
    encoded = engine.executor._resident.runner._state.cache.num_encoded
    prompt = Prompt().text(5, 6, 7).put(vectors(engine, pixels)).text(8, 9)
    compare_answers(engine.run(prompt)[0], expected, bound=1e-6)
    cut = engine.with_steps(folder, max_step_tokens=4)
    compare_answers(cut.run(prompt)[0], expected, bound=1e-5)
    assert engine.executor._resident.runner._state.cache.num_encoded == encoded


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": b"\0" * 64}, "rows.*vectors of .* those of this model have"),
        ({"grid": (1, 2, 2)}, "num_tokens .* a grid of"),
        ({"grid": (1, 0, 2)}, "grid.* at least 1"),
        ({"key": b"1"}, "key.* 1 bytes"),
        ({"step_s": 1.0}, "num_tokens"),
    ],
)
def test_what_does_not_fit_is_refused(
    seeing: tuple[SeeingEngine, Pixels, Path], change: dict[str, Any], message: str
) -> None:
    engine, pixels, _ = seeing
    one = msgspec.structs.replace(vectors(engine, pixels).at(1), **change)
    prompt = np.array([5, *[100] * pixels.num_tokens], "<i4")
    request = EngineRequest(
        id=1,
        prompt=prompt.tobytes(),
        stop=StopRules(max_tokens=1),
        sampling=RowSampling(),
        media=(one,),
    )
    with pytest.raises(InvalidRequest, match=message):
        check_media(request, engine.executor.facts)

"""Passes of encoders that rest between layers, so that others decode meanwhile: the rows are those of a pass in one go,
and what is ended in the middle leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.back.layers.vision.encoder import resting, run_through
from headrace.back.runner.runner import Runner
from headrace.back.runner.states.encoder_cache import EncoderCache
from headrace.back.runner.warmup_media import grid_of
from headrace.base.wire.media import MediaWork
from tests.back.runner.test_encoder_graphs import NAMES, encoder_of, rows_of
from tests.models.media import Prompt, SeeingEngine
from tests.models.test_qwen_vl import CASES, Seen, save_case

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen3-vl", *(
    pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "qwen3-vl"
)])  # fmt: skip
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seen]:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("model")
    oracle = save_case(case, folder)
    engine = SeeingEngine(folder, media_rows={"image": 8})
    yield Seen(case=case, folder=folder, oracle=oracle, engine=engine)
    engine.close()


def runner_of(engine: SeeingEngine) -> Runner:
    return engine.executor._resident.runner


def pictured(seen: Seen, seed: int) -> Prompt:
    """A picture of 24 patches, which take three steps beside others, and one of 4."""
    prompt = Prompt().text(5, 6, 102).put(seen.pixels(seed, (1, 6, 4))).text(103, 8, 102)
    return prompt.put(seen.pixels(seed + 1, (1, 2, 2))).text(103, 9)


def test_others_decode_while_a_pass_is_under_way(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step gives the text another token and takes the pass a part further (ENG-23, KRN-25)."""
    engine, cache = seen.engine, runner_of(seen.engine)._state.cache
    text, picture = Prompt().text(*range(3, 30)), pictured(seen, 60)
    tokens, rested = dict[int, list[int]](), list[list[int]]()
    advance = EncoderCache.advance

    def noted(self: EncoderCache, work: Sequence[MediaWork]) -> None:
        advance(self, work)
        rested.append([one.rested for one in self._entries.values() if one.passes is not None])

    monkeypatch.setattr(EncoderCache, "advance", noted)
    engine.add(text, 12)
    while not tokens:
        engine.step(tokens)
    engine.add(picture, 5)
    while engine.core.has_work:
        engine.step(tokens)
    layers = resting(runner_of(engine)._state._encoder, "image").rests("image") + 1
    assert rested[:2] == [[layers // 3], [layers * 2 // 3]] and not any(rested[2:])
    first, second = tokens.values()
    assert first == seen.expected(text, 12).tokens and second == seen.expected(picture).tokens
    assert all(entry.passes is None for entry in cache._entries.values())


def test_a_request_that_ends_in_the_middle_leaves_nothing(seen: Seen) -> None:
    engine, cache = seen.engine, runner_of(seen.engine)._state.cache
    before, free = set(cache._entries), cache._free.size
    tokens = dict[int, list[int]]()
    engine.add(Prompt().text(*range(4, 30)), 12)
    while not tokens:
        engine.step(tokens)
    number = engine.add(pictured(seen, 80), 5)
    while not any(entry.passes is not None for entry in cache._entries.values()):
        engine.step(tokens)
    engine.core.abort([number])
    while engine.core.has_work:
        engine.step(tokens)
    assert set(cache._entries) == before and cache._free.size == free
    assert number not in tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_with_rests_is_a_pass(name: str, tmp_path: Path) -> None:
    encoder = encoder_of(name, tmp_path, CPU)
    for form in encoder.forms:
        once = resting(encoder, form.kind)
        if once is None:
            continue
        grids = [grid_of(form, 24)] * 2
        rows = rows_of(form, 2 * int(np.prod(grids[0])), 5)
        with torch.inference_mode():
            expected = encoder.encode(form.kind, rows, grids)
            assert torch.equal(run_through(once.passes(form.kind, rows, grids)), expected)
            passes = once.passes(form.kind, rows, grids)
            for _ in range(once.rests(form.kind)):
                next(passes)
            with pytest.raises(StopIteration) as end:
                next(passes)
        assert torch.equal(end.value.value, expected)

"""Drafts that are sampled (`draft_sample_method` probabilistic): more of them stand, and no token changes (SPC-06)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from benchmarks.drafters import prompts_of
from headrace.back.runner import devices, runner
from headrace.back.runner.sizes import Buckets
from headrace.back.sampling import sampler
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from tests.back.runner.test_runner import Calls
from tests.e2e.test_drafters import KINDS, ONE_GPU, accepted, folders, pair, pytestmark
from tests.e2e.test_speculation import SAMPLINGS, assert_equal, requests_of, run

__all__ = ["folders", "pair", "pytestmark"]
HOT = {"temperature": 1.0, "top_p": 0.95}
TOKENS = 40


def hot_requests(count: int) -> list[EngineRequest]:
    """Conversations as the drafters were trained on."""
    return [
        EngineRequest(
            id=id,
            prompt=prompt.astype("<i4").tobytes(),
            stop=StopRules(max_tokens=TOKENS),
            sampling=RowSampling(seed=id, **HOT),
        )
        for id, prompt in enumerate(prompts_of("story", count))
    ]


def test_a_model_that_drafts_for_itself_samples_what_it_will_say(pair: Any) -> None:
    """Every draft has the noise of its place: all stand, where the likeliest tokens mostly fall."""
    plain, drafted = pair("draft_model+sampled")
    requests = hot_requests(3)
    assert_equal(run(plain.core, requests), run(drafted.core, requests))
    stats = drafted.core.scheduler.speculation.stats
    assert accepted(drafted) >= 0.97 * (stats.num_draft_tokens - 4 * len(requests))
    assert stats.num_drafts <= len(requests) * (TOKENS / 5 + 2)
    assert drafted.replay.foreign == ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft_model", "eagle3", "mtp", "dflash", "pard-trained"])
def test_more_drafts_stand_than_of_the_likeliest_tokens(pair: Any, kind: str) -> None:
    stood = []
    for how in ("", "+sampled"):
        plain, drafted = pair(kind + how)
        requests = hot_requests(9)
        assert_equal(run(plain.core, requests), run(drafted.core, requests))
        stats = drafted.core.scheduler.speculation.stats
        stood.append(accepted(drafted) / stats.num_drafts)
    assert stood[1] > 1.05 * stood[0], stood


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_sample_gives_the_tokens_of_plain_decoding(pair: Any, kind: str) -> None:
    plain, drafted = pair(f"{kind}+sampled")
    requests = requests_of(plain.spec, 2 * len(SAMPLINGS))
    assert_equal(run(plain.core, requests), run(drafted.core, requests))
    assert drafted.replay.foreign == ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_within_a_step_the_device_samples_drafts(
    pair: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    monkeypatch.setattr(devices, "CpuGraphs", lambda library: Calls())
    monkeypatch.setattr(devices, "ExactSizes", Buckets)
    monkeypatch.setattr(runner, "Sampler", partial(sampler.Sampler, on_device=True))
    plain, drafted = pair(f"{kind}+sampled", prefix_caching=False)
    requests = [*requests_of(plain.spec, len(SAMPLINGS)), *hot_requests(3)]
    requests = [replaced(one, id) for id, one in enumerate(requests)]
    assert_equal(run(plain.core, requests, 4), run(drafted.core, requests, 4))


def replaced(request: EngineRequest, id: int) -> EngineRequest:
    return EngineRequest(id=id, prompt=request.prompt, stop=request.stop, sampling=request.sampling)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=ONE_GPU) for kind in KINDS])
def test_graphs_sample_drafts(pair: Any, kind: str) -> None:
    plain, drafted = pair(f"{kind}+sampled", device="cuda", prefix_caching=False)
    for _ in range(3):  # launched, recorded, replayed
        for requests in (requests_of(plain.spec, len(SAMPLINGS)), hot_requests(6)):
            assert_equal(run(plain.core, requests, 4), run(drafted.core, requests, 4))

"""Rows with masks and biases beside prompts, and prompts' last tokens that have them: sampled within the step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.runner import devices, runner
from headrace.back.runner.sizes import Buckets
from headrace.back.sampling import sampler
from headrace.back.sampling.in_step import HeadOutput
from headrace.base.wire.request import RowSampling
from tests.back.runner.test_runner import Calls
from tests.e2e.test_speculation import Answer, Engine, assert_equal, options, requests_of, run

pytestmark = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
MASKED = [
    RowSampling(temperature=0.0, logit_bias={300: 4.0, 301: -9.0}),
    RowSampling(temperature=0.0, bad_words=((300,), (12, 13))),
    RowSampling(temperature=0.0, allowed_ids=tuple(range(20, 60))),
]


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.executor.close()


def answers(engine: Engine, kinds: list[RowSampling]) -> dict[int, Answer]:
    """Prompts in chunks of a few tokens beside rows that decode."""
    requests = [
        replace(request, sampling=kinds[i % len(kinds)])
        for i, request in enumerate(requests_of(engine.spec, 9, lengths=(20,)))
    ]
    return run(engine.core, requests, 6)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "as on a GPU"])
def test_masked_rows_beside_prompts_are_sampled_in_their_step(
    device: str, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = list(MASKED)
    if device != "cpu":
        monkeypatch.setattr(devices, "CpuGraphs", lambda library: Calls())
        monkeypatch.setattr(devices, "ExactSizes", Buckets)
        monkeypatch.setattr(runner, "Sampler", partial(sampler.Sampler, on_device=True))
        kinds += [
            RowSampling(temperature=0.8, seed=3, logit_bias={300: 4.0}),
            RowSampling(temperature=0.6, seed=5, repetition_penalty=1.2, frequency_penalty=0.1),
            RowSampling(temperature=0.0, logprobs=3, presence_penalty=0.4),
        ]
    spec = options(None, max_step_tokens=16, max_running=12, prefix_caching=False)
    engines.append(Engine(spec))
    calls: list[np.ndarray] = []
    by_host = sampler.Sampler.sample

    def sample(self, *arguments, **asked):
        calls.append(asked["rows"])
        return by_host(self, *arguments, **asked)

    monkeypatch.setattr(sampler.Sampler, "sample", sample)
    in_step = answers(engines[0], kinds)
    assert calls == []
    monkeypatch.setattr(
        sampler.Sampler, "needs", lambda self, rows, *, grammar=False: HeadOutput.LOGITS
    )
    engines.append(Engine(spec))
    expected = answers(engines[1], kinds)
    assert calls != []
    assert_equal(expected, in_step)

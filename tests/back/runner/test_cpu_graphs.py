"""Recorded decodes give the tokens of steps that are run as they are, for any mix of requests (ENG-21, P17)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.back.kernels.upload import to_host
from headrace.back.layers import logits, norm
from headrace.back.runner import devices
from headrace.back.runner.buckets import BucketSteps
from headrace.back.runner.cpu_graphs import CpuGraphs
from headrace.back.sampling import sampler
from headrace.base.config.options import CommandLine
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.bench.offline import OfflineEngine
from headrace.launch.facts import resolve_options

BUNDLED = Path(__file__).parents[3] / "demo" / "model"

pytestmark = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)


def engine(*extra: str) -> OfflineEngine:
    line = CommandLine("test", "", groups=("model", "kv", "scheduler", "device"))
    words = ["--model", str(BUNDLED), "--max-model-len", "256", "--no-prefix-caching"]
    _, options = line.parse([*words, *extra])
    return OfflineEngine(resolve_options(options))


def answers(running: OfflineEngine, lengths: list[tuple[int, int, Any]]) -> list[list[int]]:
    """Tokens of requests of (prompt, output, temperature or sampling) that enter in twos while others run."""
    rng, found = np.random.default_rng(5), {}
    waiting = []
    for at, (prompt, output, temperature) in enumerate(lengths):
        ids = rng.integers(0, running.spec.model.logits_width, prompt, dtype=np.int32)
        more = {"temperature": temperature} if isinstance(temperature, float) else temperature
        sampling = RowSampling(**more, seed=at)
        stop = StopRules(max_tokens=output)
        waiting.append(EngineRequest(id=at + 1, prompt=ids.tobytes(), stop=stop, sampling=sampling))
        found[at + 1] = []
    left = len(waiting)
    while left:
        for request in waiting[:2]:
            running.core.add(request)
        del waiting[:2]
        tokens = running.core.step(wait=True).tokens
        if tokens is None:
            continue
        for request_id, token in zip(tokens.ids.tolist(), tokens.tokens.tolist(), strict=True):
            found[request_id].append(token)
        left -= len(tokens.finished)
    return list(found.values())


def replay_of(running: OfflineEngine) -> CpuGraphs:
    steps = running.executor._resident.runner._steps
    assert isinstance(steps, BucketSteps) and isinstance(steps._replay, CpuGraphs), steps
    return steps._replay


def test_steps_that_are_only_called_say_the_same() -> None:
    """KRN-26: --enforce-eager."""
    lengths = [(3 + 7 * i % 40, 5 + 11 * i % 12, 0.0 if i % 3 else 0.8) for i in range(5)]
    said = []
    for more in ((), ("--enforce-eager",)):
        running = engine("--deterministic", *more)
        said += [answers(running, lengths), answers(running, lengths)]
        steps = running.executor._resident.runner._steps
        assert isinstance(steps, BucketSteps)
        assert (steps._replay.num_graphs == 0) is bool(more)
        running.close()
    assert said[0] == said[1] == said[2] == said[3]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("--quantization", "int8"),
        pytest.param(("--dtype", "float32"), marks=pytest.mark.slow),
        pytest.param(("--quantization", "fp8"), marks=pytest.mark.slow),
    ],
)
def test_replayed_decodes_give_the_tokens_of_steps_run_as_they_are(options, monkeypatch):
    lengths = [(3 + 7 * i % 40, 5 + 11 * i % 30, 0.0 if i % 3 else 0.8) for i in range(14)]
    recorded = engine(*options)
    first, again = answers(recorded, lengths), answers(recorded, lengths)
    replay = replay_of(recorded)
    assert replay.num_graphs >= 3 and replay.foreign == ()
    recorded.close()
    monkeypatch.setattr(devices, "why_exact", lambda resources: "for the test")
    exact = engine(*options)
    assert answers(exact, lengths) == first == again
    exact.close()


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--quantization", "int4"), marks=pytest.mark.slow),
        pytest.param(("--quantization", "int8"), marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_the_same_where_no_whole_rows_of_logits_are_written(options, monkeypatch):
    """Recorded too; at last with a request that is drawn, whose steps write them again."""
    lengths = [(3 + 7 * i % 40, 12 + 11 * i % 30, 0.0) for i in range(9)]
    by_argmax = engine(*options)
    assert by_argmax.executor._resident.runner._model.argmax is not None
    found = answers(by_argmax, lengths), answers(by_argmax, [*lengths, (5, 30, 0.8)])
    replay = replay_of(by_argmax)
    assert replay.foreign == () and {b.sampler_input for b in replay._graphs} == {
        "argmax",
        "logits",
    }
    assert {bucket.rows for bucket in replay._graphs if bucket.sampler_input == "argmax"} >= {1, 4}
    for bucket, kept in replay._graphs.items():
        assert (kept.outputs.logits_RV is None) == (bucket.sampler_input == "argmax")
    by_argmax.close()
    monkeypatch.setattr(logits.LogitsHead, "_bind_argmax", lambda self, weight, shared: None)
    written = engine(*options)
    assert written.executor._resident.runner._model.argmax is None
    assert found == (answers(written, lengths), answers(written, [*lengths, (5, 30, 0.8)]))
    written.close()


SOME = (
    0.0,
    {"top_k": 5},
    {"top_k": 20, "top_p": 0.9, "temperature": 3.0},
    {"top_k": 23, "min_p": 0.02, "temperature": 2.0},
)


@pytest.mark.parametrize("doubted", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--quantization", "int8"), marks=pytest.mark.slow),
        pytest.param(("--dtype", "float32"), marks=pytest.mark.slow),
        pytest.param(("--quantization", "int4"), marks=pytest.mark.slow),
    ],
)
def test_rows_with_top_k_get_the_same_tokens_from_the_best_as_from_all(
    options, doubted, monkeypatch
):
    """Beside greedy rows, recorded too. `doubted`: at odd positions the last of the best is as good as the first,
    and proves nothing; the row's logits are computed after all."""
    lengths = [(3 + 7 * i % 40, 12 + 11 * i % 30, SOME[i % 4]) for i in range(12)]
    fell_back = []
    sample_candidates = sampler.sample_candidates

    def wrapped(top_candidates, numbers, feature_rows):
        value_NC = top_candidates[1].clone()
        if doubted:
            value_NC[feature_rows.positions % 2 == 1, -1] = value_NC[
                feature_rows.positions % 2 == 1, 0
            ]
        found = sample_candidates((top_candidates[0], value_NC), numbers, feature_rows)
        fell_back.extend(found[2].tolist())
        return found

    monkeypatch.setattr(sampler, "sample_candidates", wrapped)
    topped = engine(*options)
    found = answers(topped, lengths), answers(topped, lengths[1::4] + lengths[::4])
    replay = replay_of(topped)
    assert replay.foreign == () and {b.sampler_input for b in replay._graphs} >= {"top_candidates"}
    assert {
        bucket.rows for bucket in replay._graphs if bucket.sampler_input == "top_candidates"
    } >= {2, 4}
    for bucket, kept in replay._graphs.items():
        assert bucket.sampler_input != "logits" and kept.outputs.logits_RV is None
        assert (kept.outputs.top_candidates is not None) == (
            bucket.sampler_input == "top_candidates"
        )
    assert (len(fell_back) > 50) == doubted, len(fell_back)
    topped.close()
    bind = logits.LogitsHead._bind_top_candidates
    monkeypatch.setattr(
        logits.LogitsHead,
        "_bind_top_candidates",
        lambda self, weight, count, shared: bind(self, weight, count, shared=shared) if count == 1 else None,
    )  # fmt: skip
    written = engine(*options)
    assert written.executor._resident.runner._model.top_candidates is None
    assert found == (answers(written, lengths), answers(written, lengths[1::4] + lengths[::4]))
    assert {bucket.sampler_input for bucket in replay_of(written)._graphs} <= {"argmax", "logits"}
    written.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--quantization", "int8"),
        pytest.param(("--quantization", "int4"), marks=pytest.mark.slow),
    ],
)
def test_tokens_are_the_same_where_norms_quantize_for_the_gemms(options, monkeypatch):
    lengths = [(3 + 17 * i % 90, 12 + 11 * i % 30, 0.0 if i % 3 else 0.8) for i in range(9)]
    coded = engine(*options)
    names = {name for kept in _graphs_after(coded, lengths) for name in kept.graph.names}
    product = "linear_quant" if options[1] == "int8" else "linear_blocks"
    assert {"rms_norm_quantized", f"{product}_int8_rows", f"{product}_top"} <= names
    found = answers(coded, lengths)
    coded.close()
    monkeypatch.setattr(norm.RMSNorm, "quantize_output", lambda self, group, **kinds: False)
    plain = engine(*options)
    assert answers(plain, lengths) == found
    names = {name for kept in _graphs_after(plain, lengths) for name in kept.graph.names}
    assert "rms_norm" in names and "rms_norm_quantized" not in names
    plain.close()


def test_fp8_products_read_plain_rows():
    running = engine("--quantization", "fp8")
    names = {n for kept in _graphs_after(running, [(9, 12, 0.0)]) for n in kept.graph.names}
    assert {"rms_norm", "linear_fp8", "linear_fp8_top", "embedding_fp8"} <= names
    assert not names & {"rms_norm_quantized", "gated_act"}
    running.close()


def test_a_plain_gate_is_part_of_the_product():
    running = engine()
    names = {n for kept in _graphs_after(running, [(9, 12, 0.0)]) for n in kept.graph.names}
    assert "linear_gated" in names and "gated_act" not in names
    running.close()


def _graphs_after(running: OfflineEngine, lengths: list[tuple[int, int, float]]):
    answers(running, lengths)
    replay = replay_of(running)
    assert replay.foreign == ()
    return list(replay._graphs.values())


def test_what_is_read_is_not_what_the_next_step_overwrites():
    """A step's result is read after the next one was launched, which replays into the same memory."""
    left = torch.ones(3)
    read = to_host(left)
    left.fill_(torch.nan)
    assert read.tolist() == [1.0, 1.0, 1.0]

"""The bundled model through the real executor: CUDA against the CPU, teacher-forced (`make test-gpu`).

The same comparison runs with the CPU on both sides, in other chunks: so it is known to work where there is no GPU.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.back.executor.inline import InlineExecutor
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, ModelSpec, SchedulerSpec
from headrace.base.wire.params import RowSampling
from tests.back.driver import Driver, Sequence

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
NUM_OUTPUT = 24
RANDOM = RowSampling(temperature=0.8, top_p=0.9, top_k=40, seed=5, logprobs=0)
GREEDY = RowSampling(temperature=0.0, logprobs=0)
FORCED = RowSampling(temperature=0.0, prompt_logprobs=1)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def bundled(device: str, dtype: str) -> InlineExecutor:
    config = json.loads((MODEL / "config.json").read_text())
    model = ModelSpec(
        path=str(MODEL),
        name="bundled",
        format="safetensors",
        family="qwen3",
        dtype=dtype,
        max_model_len=config["max_position_embeddings"],
        logits_width=config["vocab_size"],
        eos_ids=(config["eos_token_id"],),
        config=config,
    )
    spec = EngineSpec(
        model=model,
        kv=KVSpec(block_tokens=16, prefix_caching=False, num_blocks=128),
        scheduler=SchedulerSpec(max_step_tokens=256, max_running=8),
        device=DeviceSpec(device=device, executor="inline"),
    )
    return InlineExecutor(spec)


@pytest.fixture(scope="module")
def reference() -> Iterator[InlineExecutor]:
    made = bundled("cpu", "float32")
    yield made
    made.close()


@pytest.fixture(scope="module", params=DEVICES)
def tested(request: pytest.FixtureRequest) -> Iterator[InlineExecutor]:
    made = bundled(request.param, "float32")
    yield made
    made.close()


def prompts() -> list[list[int]]:
    """Lengths around block borders; ids from the vocabulary's middle, no special tokens."""
    rng = random.Random(3)
    return [[rng.randrange(300, 4000) for _ in range(size)] for size in (1, 15, 16, 17, 70)]


def generate(executor: InlineExecutor, sampling: RowSampling, *, chunk: int) -> list[Sequence]:
    """All prompts together: chunks mixed with decodes, until each has its tokens."""
    driver = Driver(executor.facts)
    rows = [driver.add(prompt, sampling, request=i) for i, prompt in enumerate(prompts())]
    while left := [row for row in rows if len(row.outputs) < NUM_OUTPUT]:
        runs = [(row, min(chunk, row.length - row.num_computed)) for row in left]
        driver.read(executor.submit(driver.plan(runs)).result(60))
    end(executor, driver, rows)
    return rows


def forced(executor: InlineExecutor, sequences: list[Sequence]) -> list[tuple[np.ndarray, ...]]:
    """Per sequence: log-probabilities of its tokens 1 .., and of the best token at each place."""
    driver = Driver(executor.facts)
    rows = [driver.add(sequence.tokens, FORCED) for sequence in sequences]
    driver.read(executor.submit(driver.plan([(row, row.length) for row in rows])).result(60))
    end(executor, driver, rows)
    values = [np.concatenate([part.values for part in row.prompt_logprobs]) for row in rows]
    return [(value[:, 0], value[:, 1]) for value in values]


def end(executor: InlineExecutor, driver: Driver, rows: list[Sequence]) -> None:
    for row in rows:
        driver.release(row)
    executor.submit(driver.plan([])).result(60)


def test_greedy_tokens_are_the_best_of_the_reference_and_their_scores_agree(
    tested: InlineExecutor, reference: InlineExecutor
) -> None:
    rows = generate(tested, GREEDY, chunk=6)
    for row, (given, best) in zip(rows, forced(reference, rows), strict=True):
        ours = np.array([scores.values[0] for scores in row.logprobs])
        np.testing.assert_allclose(ours, given[-NUM_OUTPUT:], atol=1e-3)
        assert (best - given)[-NUM_OUTPUT:].max() < 1e-3, "not the argmax, nor a tie"


def test_scores_of_forced_tokens_agree(tested: InlineExecutor, reference: InlineExecutor) -> None:
    rows = generate(reference, GREEDY, chunk=256)
    for ours, theirs in zip(forced(tested, rows), forced(reference, rows), strict=True):
        np.testing.assert_allclose(ours[0], theirs[0], atol=1e-3)


def test_seeded_draws_are_the_same_tokens(
    tested: InlineExecutor, reference: InlineExecutor
) -> None:
    """The noise is a function of seed, position and id: devices differ only where two tokens nearly tie."""
    ours, theirs = (generate(executor, RANDOM, chunk=64) for executor in (tested, reference))
    same = [one.outputs == other.outputs for one, other in zip(ours, theirs, strict=True)]
    assert sum(same) >= len(same) - 1, same


@pytest.mark.gpu
@needs_gpu
def test_bfloat16_on_cuda_stays_near_float32(reference: InlineExecutor) -> None:
    executor = bundled("cuda", "bfloat16")
    rows = generate(reference, GREEDY, chunk=256)
    for ours, theirs in zip(forced(executor, rows), forced(reference, rows), strict=True):
        assert np.abs(ours[0] - theirs[0]).mean() < 0.1
    executor.close()

"""Deterministic mode through the real core and executor: a request's tokens and log-probabilities are the same bits
whatever runs beside it, however its prompt is cut, cached, or computed again after a preemption (ENG-05, ENG-17)."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from headrace.back.executor.choose import make_executor
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.attention.op import AttentionProblem
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, ModelSpec, SchedulerSpec
from headrace.base.errors import ConfigError
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from headrace.core.ports import Executor

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
pytestmark = pytest.mark.long
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 48,
    "layer_types": ["full_attention", "sliding_attention"] * 4,
}
SAMPLINGS = (
    RowSampling(temperature=0.0, logprobs=3),
    RowSampling(temperature=0.0, logprobs=0, repetition_penalty=1.2, logprobs_mode="processed"),
    RowSampling(temperature=0.9, seed=11, logprobs=1),
    RowSampling(temperature=0.8, seed=12, top_p=0.9, top_k=40, logprobs=2),
)
SHORT = 150
"""Prompts of fewer tokens get long answers: in a small pool some must be preempted."""
Answer = tuple[list[int], list[bytes]]


def spec_of(device: str, dtype: str, **more: object) -> EngineSpec:
    """The bundled model. `more`: num_blocks, max_running, max_step_tokens, prefix_caching, overlap, ranks, config."""
    config = {**json.loads((MODEL / "config.json").read_text()), **more.get("config", {})}
    model = ModelSpec(
        path=str(MODEL),
        name="bundled",
        format="safetensors",
        family="qwen3",
        dtype=dtype,
        max_model_len=2048,
        logits_width=config["vocab_size"],
        eos_ids=(config["eos_token_id"],),
        config=config,
        deterministic=True,
    )
    return EngineSpec(
        model=model,
        kv=KVSpec(
            block_tokens=16,
            prefix_caching=bool(more.get("prefix_caching", False)),
            num_blocks=more.get("num_blocks", 1024),
        ),
        scheduler=SchedulerSpec(
            max_step_tokens=more.get("max_step_tokens", 2048),
            max_running=more.get("max_running", 12),
            overlap=bool(more.get("overlap", False)),
        ),
        device=DeviceSpec(
            device=device,
            executor="inline" if more.get("ranks", 1) == 1 else "processes",
            tensor_parallel=more.get("ranks", 1),
        ),
    )


def requests(seed: int) -> list[EngineRequest]:
    """Prompts that begin alike, some longer than the parts attention is cut into, and every kind of sampler."""
    rng = random.Random(seed)
    shared = [[rng.randrange(300, 4000) for _ in range(1200)] for _ in range(2)]
    made = []
    for id in range(1, 15):
        own = [rng.randrange(300, 4000) for _ in range(rng.choice([1, 5, 16, 40]))]
        prompt = rng.choice(shared)[: rng.choice([0, 15, 16, 100, 640, 1030])] + own
        count = 48 if len(prompt) < SHORT else rng.choice([2, 8, 24])
        made.append(
            EngineRequest(
                id=id,
                prompt=np.asarray(prompt, "<i4").tobytes(),
                stop=StopRules(max_tokens=count, min_tokens=count),
                sampling=SAMPLINGS[id % len(SAMPLINGS)],
            )
        )
    return made


def answers(
    executor: Executor, spec: EngineSpec, made: list[EngineRequest], rng: random.Random | None
) -> tuple[dict[int, Answer], dict[str, int]]:
    """What each request got, and how often prompts were cached and requests preempted. Without `rng` one request at a
    time."""
    core = EngineCore(spec, executor)
    tokens: dict[int, list[int]] = defaultdict(list)
    scores: dict[int, list[bytes]] = defaultdict(list)
    seen = {"cached": 0, "preempted": 0}
    waiting = list(made)
    while waiting or core.has_work:
        if rng is None:
            arrive = 0 if core.has_work else 1
        else:
            arrive = rng.choice([0, 0, 1, 3]) if core.has_work else 1
        for _ in range(min(arrive, len(waiting))):
            core.add(waiting.pop(0))
        batch = core.step(wait=True).tokens
        if batch is None:
            continue
        for i, (id, token) in enumerate(
            zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True)
        ):
            tokens[id].append(token)
            told = batch.logprobs[i]
            assert told is not None
            scores[id].append(told.ids.tobytes() + told.values.tobytes())
        for finished in batch.finished:
            assert finished.error is None, finished
            seen["cached"] += finished.num_cached > 0
            seen["preempted"] += finished.num_preemptions
    return {request.id: (tokens[request.id], scores[request.id]) for request in made}, seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        pytest.param("float32", {}, marks=pytest.mark.slow),
        pytest.param("float32", WINDOWS, marks=pytest.mark.slow),
        pytest.param("bfloat16", {}, marks=pytest.mark.slow),
        ("bfloat16", WINDOWS),
    ],
    ids=["float32-full", "float32-windows", "bfloat16-full", "bfloat16-windows"],
)
@pytest.mark.parametrize("device", DEVICES)
def test_every_answer_is_that_of_the_request_alone(device: str, dtype: str, config: dict) -> None:
    """Batches, chunks, prefix hits and preemptions by chance, against each request in an engine of its own."""
    made = requests(5)
    alone_spec = spec_of(device, dtype, config=config)
    executor = make_executor(alone_spec)
    alone, _ = answers(executor, alone_spec, made, None)
    executor.close()
    total = {"cached": 0, "preempted": 0}
    short = [request for request in made if len(request.prompt_ids()) < SHORT]
    for seed, some, num_blocks, step in [
        (1, made, 1024, 2048),
        (2, made, 110, 97),
        (3, short, 24, 64),
    ]:
        spec = spec_of(
            device, dtype, config=config, num_blocks=num_blocks, max_step_tokens=step,
            prefix_caching=True, overlap=seed != 2,
        )  # fmt: skip
        executor = make_executor(spec)
        order = random.Random(seed)
        mixed, seen = answers(executor, spec, order.sample(some, len(some)), order)
        executor.close()
        for id, answer in mixed.items():
            assert answer == alone[id], (seed, id)
        total = {key: total[key] + seen[key] for key in total}
    assert total["cached"] > 3 and total["preempted"] > 0, total


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sums_over_four_ranks_do_not_depend_on_the_batch() -> None:
    """A library cuts a message by its size and sums the pieces in different orders."""
    made = [one for one in requests(6) if len(one.prompt_ids()) < SHORT][:6]
    few = StopRules(max_tokens=16, min_tokens=16)  # steps of four ranks take long on few cores
    made = [msgspec.structs.replace(one, stop=few) for one in made]
    spec = spec_of("cpu", "float32", ranks=4, num_blocks=64, max_step_tokens=61, overlap=True)
    executor = make_executor(spec)
    alone, _ = answers(executor, spec, made, None)
    order = random.Random(1)
    mixed, _ = answers(executor, spec, order.sample(made, len(made)), order)
    executor.close()
    assert mixed == alone


def test_what_has_no_kernel_of_one_order_is_refused_by_name() -> None:
    """Codes in the KV cache on a GPU: no kernel, and torch's operations depend on the batch."""
    problem = AttentionProblem(
        device="meta",
        dtype=torch.float32,
        heads=2,
        kv_heads=1,
        head_dim=16,
        block_tokens=16,
        scale=1.0,
    )
    with pytest.raises(ConfigError, match="--deterministic: no kernel of attention"):
        ATTENTION.choose(problem, invariant=True)

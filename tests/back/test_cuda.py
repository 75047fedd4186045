"""The bundled model through the real executor: CUDA against the CPU, teacher-forced (`make test-gpu`).

The same comparison runs with the CPU on both sides, in other chunks: so it is known to work where there is no GPU.
"""

from __future__ import annotations

import contextlib
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file

from headrace.back.executor.inline import InlineExecutor
from headrace.back.executor.processes import ProcessExecutor
from headrace.back.sampling.in_step import InStepSampling
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, ModelSpec, SchedulerSpec
from headrace.base.wire.grammar import GRAMMAR_HOOK, pack_masks
from headrace.base.wire.request import RowSampling
from headrace.core.ports import Executor
from tests.back.driver import Driver, Sequence

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
NUM_OUTPUT = 24
RANDOM = RowSampling(temperature=0.8, top_p=0.9, top_k=40, seed=5, logprobs=0)
GREEDY = RowSampling(temperature=0.0, logprobs=0)
FORCED = RowSampling(temperature=0.0, prompt_logprobs=1)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def bundled(device: str, dtype: str) -> InlineExecutor:
    return InlineExecutor(bundled_spec(device, dtype))


def bundled_spec(device: str, dtype: str, *, tensor_parallel: int = 1) -> EngineSpec:
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
    executor = "inline" if tensor_parallel == 1 else "processes"
    return EngineSpec(
        model=model,
        kv=KVSpec(block_tokens=16, prefix_caching=False, num_blocks=128),
        scheduler=SchedulerSpec(max_step_tokens=256, max_running=10),
        device=DeviceSpec(device=device, executor=executor, tensor_parallel=tensor_parallel),
    )


def stored_beside_plain(
    folder: Path,
    config: dict[str, object],
    stored: dict[str, torch.Tensor],
    plain: dict[str, torch.Tensor],
) -> tuple[Path, Path]:
    """Two checkpoints in the folder: of `config`, and the same without what it says of quantization."""
    floats = {name: value for name, value in config.items() if name != "quantization_config"}
    for name, tensors, facts in (("stored", stored, config), ("plain", plain, floats)):
        (folder / name).mkdir()
        whole = {key: value.contiguous() for key, value in tensors.items()}
        save_file(whole, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(facts))
    return folder / "stored", folder / "plain"


def spec_of(folder: Path, device: str, dtype: str, quantization: str | None = None) -> EngineSpec:
    """`bundled_spec` of a checkpoint in a folder."""
    spec = bundled_spec(device, dtype)
    config = json.loads((folder / "config.json").read_text())
    changed = {"path": str(folder), "config": config, "quantization": quantization}
    return structs.replace(spec, model=structs.replace(spec.model, **changed))


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


def generate(executor: Executor, sampling: RowSampling, *, chunk: int) -> list[Sequence]:
    """All prompts together: chunks mixed with decodes, until each has its tokens."""
    driver = Driver(executor.facts)
    rows = [driver.add(prompt, sampling, request=i) for i, prompt in enumerate(prompts())]
    while left := [row for row in rows if len(row.outputs) < NUM_OUTPUT]:
        runs = [(row, min(chunk, row.length - row.num_computed)) for row in left]
        driver.read(executor.submit(driver.plan(runs)).result(300))
    end(executor, driver, rows)
    return rows


def forced(executor: InlineExecutor, sequences: list[Sequence]) -> list[tuple[np.ndarray, ...]]:
    """Per sequence: log-probabilities of its tokens 1 .., and of the best token at each place."""
    driver = Driver(executor.facts)
    rows = [driver.add(sequence.tokens, FORCED) for sequence in sequences]
    driver.read(executor.submit(driver.plan([(row, row.length) for row in rows])).result(300))
    end(executor, driver, rows)
    values = [np.concatenate([part.values for part in row.prompt_logprobs]) for row in rows]
    return [(value[:, 0], value[:, 1]) for value in values]


def end(executor: Executor, driver: Driver, rows: list[Sequence]) -> None:
    for row in rows:
        driver.release(row)
    executor.submit(driver.plan([])).result(300)


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


def allocated() -> int:
    """Bytes on whichever device an executor has chosen."""
    return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))


@pytest.mark.gpu
@needs_gpu
def test_parked_weights_leave_the_device_and_come_back_the_same() -> None:
    """ENG-18, level 1: graphs are recorded anew over the new addresses."""
    before = allocated()
    executor = bundled("cuda", "float32")
    held = allocated() - before
    rows = generate(executor, GREEDY, chunk=256)
    for _ in range(2):
        executor.park()
        left = allocated() - before
        assert left < held / 20, (left, held)
        executor.unpark()
        again = generate(executor, GREEDY, chunk=256)
        assert [row.outputs for row in again] == [row.outputs for row in rows]
    executor.park()
    executor.close()
    assert allocated() - before < held / 20


@pytest.mark.gpu
@needs_gpu
def test_bfloat16_on_cuda_stays_near_float32(reference: InlineExecutor) -> None:
    executor = bundled("cuda", "bfloat16")
    rows = generate(reference, GREEDY, chunk=256)
    for ours, theirs in zip(forced(executor, rows), forced(reference, rows), strict=True):
        assert np.abs(ours[0] - theirs[0]).mean() < 0.1
    executor.close()


EVERYTHING = (
    GREEDY,
    RANDOM,
    RowSampling(seed=1, temperature=1.1, repetition_penalty=1.2, frequency_penalty=0.3),
    RowSampling(seed=2, typical_p=0.9, min_p=0.01, logit_bias={5: 2.0, 400: -3.0}, logprobs=3),
    RowSampling(seed=3, xtc_probability=0.5, dry_multiplier=0.8, dry_breaker_ids=(7,)),
    RowSampling(seed=4, bad_words=((400,), (1, 2)), min_tokens=9, suppressed_ids=(0, 1)),
    RowSampling(seed=5, allowed_ids=tuple(range(300, 900)), presence_penalty=0.5),
    RowSampling(seed=6, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01),
    RowSampling(seed=7, temperature=1.2),
    RowSampling(temperature=0.0, prompt_logprobs=2, logprobs=2, logprobs_mode="processed"),
)
LOGPROBS = (
    RowSampling(temperature=0.0, logprobs=5),
    RowSampling(temperature=0.8, seed=3, repetition_penalty=1.2, frequency_penalty=0.3),
    RowSampling(temperature=0.9, seed=4, top_k=40, presence_penalty=0.5, logprobs=2),
    RowSampling(temperature=0.0),
    RowSampling(temperature=0.0, repetition_penalty=1.3, logprobs=20),
)
"""What decodes do themselves, one for each of the prompts."""


MASKS = (
    RowSampling(temperature=0.0, logit_bias={5: 2.0, 400: -3.0}),
    RowSampling(seed=4, bad_words=((400,), (1, 2)), min_tokens=9, suppressed_ids=(0, 1)),
    RowSampling(seed=5, allowed_ids=tuple(range(300, 900)), presence_penalty=0.5),
    *LOGPROBS,
)
"""The same with masks, of grammars too."""


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "wishes", [EVERYTHING, LOGPROBS, MASKS], ids=["behind steps", "within", "masked"]
)
def test_no_step_waits_for_the_device(wishes: tuple[RowSampling, ...]) -> None:
    """Decision 5 of the plan: whatever is sampled, launching a step asks the device for nothing."""
    deferred = () if wishes is LOGPROBS else (GRAMMAR_HOOK,)
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    executor = bundled("cuda", "bfloat16")
    driver = Driver(executor.facts)
    runner = executor._resident.runner
    rows = [driver.add(prompts()[4], sampling, request=i) for i, sampling in enumerate(wishes)]
    launched = []
    words = -(-executor.facts.logits_width // 32)

    def masked(step: int) -> dict[str, memoryview]:
        """A grammar's masks for two rows, one greedy and one random: the ids below half the vocabulary."""
        masks = np.zeros((2, words), np.int32)
        masks[:, : words // 2] = -1
        return {GRAMMAR_HOOK: pack_masks(np.array([rows[0].row, rows[7].row], np.int32), masks)}

    def run() -> None:
        runs = [(row, min(24, row.length - row.num_computed)) for row in rows]
        plan = structs.replace(driver.plan(runs), deferred=deferred)
        launched.append(runner.launch(plan, masked))

    for _ in range(4):  # compiles, allocates and records
        run()
        driver.read(launched.pop(0).result())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(12):
            run()
            if len(launched) > 1:
                driver.read(launched.pop(0).result())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    driver.read(launched.pop(0).result())
    assert all(row.error is None and len(row.outputs) >= 12 for row in rows)
    assert not deferred or max(rows[0].outputs + rows[7].outputs) < words // 2 * 32
    executor.close()


@pytest.mark.gpu
@needs_gpu
def test_replayed_steps_give_the_tokens_of_launched_ones() -> None:
    """Decodes and chunks, each size several times: at first launched, then replayed (ENG-21, KRN-26)."""
    executor = bundled("cuda", "float32")
    first, second, third = (generate(executor, GREEDY, chunk=6) for _ in range(3))
    replay = executor._resident.runner._steps._replay
    assert replay.num_graphs > 3
    for one, two, three in zip(first, second, third, strict=True):
        assert one.outputs == two.outputs == three.outputs
    executor.close()


def everything_left() -> list[torch.Tensor]:
    """All that the allocator still gives out on this stream, down to its smallest piece."""
    taken = []
    for size in (1 << bits for bits in range(26, 8, -1)):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return taken


@pytest.mark.gpu
@needs_gpu
def test_a_step_for_which_the_device_has_no_memory_fails_alone() -> None:
    """The device's allocator itself refuses: a chunk of a new size cannot be run, decodes in flight go on."""
    executor = bundled("cuda", "bfloat16")
    driver = Driver(executor.facts)
    running, refused, later = (driver.add(prompts()[4] * 3, GREEDY, request=i) for i in range(3))

    def step(*rows: Sequence) -> None:
        runs = [(row, row.length - row.num_computed) for row in rows]
        driver.read(executor.submit(driver.plan(runs)).result(300))

    for _ in range(4):
        step(running)
    torch.cuda.empty_cache()
    device = executor._resident._device
    total = torch.cuda.get_device_properties(device).total_memory
    held = torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction(held / total, device)
    with executor._resident.runner._steps.scope():
        taken = everything_left()
    try:
        step(refused)
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert refused.error == "EngineError" and not refused.outputs
    driver.release(refused)
    step(running, later)
    assert len(running.outputs) == 5 and len(later.outputs) == 1
    executor.close()


@pytest.mark.gpu
@needs_gpu
def test_a_runner_starts_in_memory_that_holds_anything() -> None:
    """What nobody has written is NaN here, on every stream: what padding computes from it must reach no row."""
    for _ in range(32):  # as many streams as torch has
        with torch.cuda.stream(torch.cuda.Stream()):
            sizes = [1 << bits for bits in range(10, 25) for _ in range(4)]
            poison = [torch.full((size,), torch.nan, device="cuda") for size in sizes]
            del poison
    for tokens in (64, 97):
        spec = bundled_spec("cuda", "bfloat16")
        scheduler = structs.replace(spec.scheduler, max_step_tokens=tokens, max_running=12)
        executor = InlineExecutor(structs.replace(spec, scheduler=scheduler))
        rows = generate(executor, GREEDY, chunk=5)
        assert not any(row.error for row in rows)
        executor.close()
    torch.cuda.empty_cache()


SAMPLED_BY_OP = RowSampling(temperature=0.8, top_p=0.9, top_k=40, min_p=0.001, seed=5)


@pytest.mark.gpu
@needs_gpu
def test_random_rows_are_drawn_by_replayed_steps(reference: InlineExecutor) -> None:
    """The whole draw is part of the graph: no step goes through the sampler, and the tokens are the CPU's (KRN-02)."""
    executor = bundled("cuda", "float32")
    sampler = executor._resident.runner._sampler

    def never(*arguments: object, **more: object) -> None:
        raise AssertionError("a step went through the sampler")

    sampler.sample = never
    runs = [generate(executor, SAMPLED_BY_OP, chunk=6) for _ in range(3)]
    theirs = generate(reference, SAMPLED_BY_OP, chunk=6)
    for ours in runs:
        same = [one.outputs == other.outputs for one, other in zip(ours, theirs, strict=True)]
        assert sum(same) >= len(same) - 1, same
    replay = executor._resident.runner._steps._replay
    assert any(bucket.sampler_input == InStepSampling() for bucket in replay._graphs)
    executor.close()


@pytest.mark.gpu
@needs_gpu
def test_penalised_and_scored_decodes_are_replayed_whole(reference: InlineExecutor) -> None:
    """ENG-26: once prompts are in, no step goes through the sampler, and rows are told what a CPU tells them."""
    executor = bundled("cuda", "float32")
    sampler = executor._resident.runner._sampler
    through = sampler.sample

    def never(*arguments: object, **more: object) -> None:
        raise AssertionError("a decode went through the sampler")

    def run(on: InlineExecutor) -> list[Sequence]:
        driver = Driver(on.facts)
        rows = [driver.add(prompt, LOGPROBS[i], request=i) for i, prompt in enumerate(prompts())]
        sampler.sample = through
        driver.read(on.submit(driver.plan([(row, row.length) for row in rows])).result(300))
        sampler.sample = never if on is executor else through
        unread = []
        for _ in range(NUM_OUTPUT):
            unread.append(on.submit(driver.plan([(row, 1) for row in rows])))
            if len(unread) > 1:
                driver.read(unread.pop(0).result(300))
        driver.read(unread.pop().result(300))
        end(on, driver, rows)
        return rows

    theirs = run(reference)
    for ours in (run(executor), run(executor)):
        same = [one.outputs == other.outputs for one, other in zip(ours, theirs, strict=True)]
        assert sum(same) >= len(same) - 1, same
        for one, other, equal in zip(ours, theirs, same, strict=True):
            assert len(one.logprobs) == len(other.logprobs) and not one.error
            for mine, wanted in zip(one.logprobs, other.logprobs, strict=True) if equal else ():
                assert len(mine.ids) == len(wanted.ids) and mine.ids[0] == wanted.ids[0]
                np.testing.assert_allclose(mine.values, wanted.values, atol=2e-3)
    replay = executor._resident.runner._steps._replay
    assert any(
        isinstance(b.sampler_input, InStepSampling) and b.sampler_input.words
        for b in replay._graphs
    )
    executor.close()


def random_trace(executor: InlineExecutor, seed: int) -> list[Sequence]:
    """Arrivals, chunks of any size, preemptions and aborts, one step ahead of the results; the same for any device."""
    rng = random.Random(seed)
    driver = Driver(executor.facts)
    waiting = [
        driver.add(
            [rng.randrange(300, 4000) for _ in range(rng.randrange(1, 60))],
            EVERYTHING[rng.randrange(len(EVERYTHING) - 1)],
            request=i,
        )
        for i in range(16)
    ]
    every, active, unread = list(waiting), [], []
    while waiting or active:
        while waiting and len(active) < 6:
            active.append(waiting.pop())
        runs = []
        for row in active:
            left = row.length - row.num_computed
            if left and rng.random() < 0.8:
                runs.append((row, rng.randint(1, left)))
        if runs:
            unread.append(executor.submit(driver.plan(runs)))
        while len(unread) > 1 or (unread and not runs):
            driver.read(unread.pop(0).result(300))
        for row in list(active):
            if row.unknown:
                continue
            if len(row.outputs) >= 12:
                active.remove(row)
                driver.release(row)
            elif row.started and rng.random() < 0.05:
                driver.release(row)
    executor.submit(driver.plan([])).result(300)
    return every


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_a_random_trace_gives_the_same_tokens_on_both_devices(
    tested: InlineExecutor, reference: InlineExecutor, seed: int
) -> None:
    """ENG-21, ENG-26, REG-021: penalties, seeds, truncation, log-probabilities, preemptions; rounding may turn one near
    tie."""
    ours, theirs = (random_trace(executor, seed) for executor in (tested, reference))
    same = [one.outputs == other.outputs for one, other in zip(ours, theirs, strict=True)]
    assert sum(same) >= len(same) - 1, same
    assert not any(row.error for row in ours)
    for one, other, equal in zip(ours, theirs, same, strict=True):
        for mine, other_scores in zip(one.logprobs, other.logprobs, strict=True) if equal else ():
            np.testing.assert_allclose(mine.values, other_scores.values, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [2, 4])
def test_several_devices_give_the_tokens_of_one(reference: InlineExecutor, devices: int) -> None:
    """Chunks beside decodes, launched and then replayed with the sums over the devices in the graphs. (The model has
    two KV heads: four devices hold each of them twice.)"""
    if torch.cuda.device_count() < devices:
        pytest.skip(f"fewer than {devices} CUDA devices here")
    executor = ProcessExecutor(bundled_spec("cuda", "float32", tensor_parallel=devices))
    try:
        theirs = generate(reference, GREEDY, chunk=6)
        for _ in range(3):
            ours = generate(executor, GREEDY, chunk=6)
            same = [one.outputs == two.outputs for one, two in zip(ours, theirs, strict=True)]
            assert sum(same) >= len(same) - 1, same
    finally:
        executor.close()

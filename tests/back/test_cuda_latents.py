"""A model with latent attention of DeepSeek's sizes through the real executor, in bfloat16: CUDA against the CPU in
float32, teacher-forced (`make test-gpu`). The same comparison runs with the CPU on both sides.

Prompts are attended expanded, on Hopper and in bfloat16 on CPUs; on Hopper steps that only decode go by the kernel that
streams latents.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from headrace.back.executor.inline import InlineExecutor
from headrace.back.layers.scope import Ledger
from headrace.back.runner import exact_steps
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, SchedulerSpec
from tests.back.driver import Driver, Sequence
from tests.back.test_cuda import DEVICES, GREEDY, end, forced
from tests.models.oracle import model_spec, save_oracle

NUM_OUTPUT = 12
LENGTHS = (1, 17, 300, 150)
BOUND = 0.15
"""Of a log-probability, whose spread is 1.2: bfloat16's error through two layers is 0.05 at most on the CPU."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import DeepseekV3Config

    folder = tmp_path_factory.mktemp("latents")
    config = DeepseekV3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=2,  # a near tie of a router would decide
        max_position_embeddings=1024,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    save_oracle(config, folder)
    return folder


def started(checkpoint: Path, device: str, dtype: str) -> InlineExecutor:
    return InlineExecutor(
        EngineSpec(
            model=model_spec(checkpoint, dtype=dtype, max_model_len=512),
            kv=KVSpec(block_tokens=16, prefix_caching=False, num_blocks=128),
            scheduler=SchedulerSpec(max_step_tokens=1024, max_running=8),
            device=DeviceSpec(device=device, executor="inline"),
        )
    )


def generated(executor: InlineExecutor, chunk: int) -> list[Sequence]:
    """Prompts in chunks beside those that decode already, then decodes alone."""
    rng = random.Random(3)
    driver = Driver(executor.facts)
    prompts = [[rng.randrange(512) for _ in range(length)] for length in LENGTHS]
    rows = [driver.add(prompt, GREEDY, request=i) for i, prompt in enumerate(prompts)]
    while left := [row for row in rows if len(row.outputs) < NUM_OUTPUT]:
        runs = [(row, min(chunk, row.length - row.num_computed)) for row in left]
        driver.read(executor.submit(driver.plan(runs)).result(300))
    end(executor, driver, rows)
    return rows


@pytest.mark.parametrize("device", DEVICES[1:])
def test_whole_prompts_are_expanded_in_recorded_steps(
    checkpoint: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KRN-06: prompts beside decodes, and behind a first chunk that another step had; the third time all replayed."""
    monkeypatch.setattr(exact_steps, "LEAST_WHOLE", 24)
    tested = started(checkpoint, device, "bfloat16")
    reference = started(checkpoint, "cpu", "float32")
    try:
        for chunk in (512, 512, 512, 100, 100):
            rows = generated(tested, chunk)
            for row, (given, _) in zip(rows, forced(reference, rows), strict=True):
                ours = np.array([scores.values[0] for scores in row.logprobs])
                np.testing.assert_allclose(ours, given[-NUM_OUTPUT:], atol=BOUND)
        assert any(bucket.whole for bucket in tested._resident.runner._steps._replay._graphs)
    finally:
        tested.close()
        reference.close()


@pytest.mark.parametrize("device", DEVICES)
def test_whole_and_chunked_prompts_and_decodes_agree(
    checkpoint: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KRN-06: expanded prompts, behind a prefix too, and absorbed decodes are one attention."""
    monkeypatch.setattr(Ledger, "host_pairs", lambda ledger: 1)  # of any prompt
    tested = started(checkpoint, device, "bfloat16")
    reference = started(checkpoint, "cpu", "float32")
    try:
        for chunk in (512, 100):
            rows = generated(tested, chunk)
            for row, (given, _) in zip(rows, forced(reference, rows), strict=True):
                ours = np.array([scores.values[0] for scores in row.logprobs])
                np.testing.assert_allclose(ours, given[-NUM_OUTPUT:], atol=BOUND)
    finally:
        tested.close()
        reference.close()

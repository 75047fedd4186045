"""The choice of an executor, and a real model through it: whatever the split, the same tokens."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest

from headrace.back.executor.choose import make_executor
from headrace.base.config.resolved import EngineSpec, ModelSpec
from headrace.base.errors import ConfigError
from headrace.base.wire.request import RowSampling
from headrace.core.ports import Executor
from tests.back.driver import Driver
from tests.back.tiny_model import tiny_spec

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 6,
    "sliding_window_pattern": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 8,
    "rope_theta": 10000.0,
    "rope_local_base_freq": 1000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def dummy_spec() -> EngineSpec:
    """A random Gemma 3: window and full layers, hence two KV groups."""
    spec = tiny_spec(num_blocks=200)
    model = ModelSpec(
        path="",
        name="dummy",
        format="dummy",
        family="gemma3",
        dtype="float32",
        max_model_len=256,
        logits_width=96,
        eos_ids=(1,),
        config=GEMMA,
        seed=3,
    )
    return msgspec.structs.replace(spec, model=model)


@pytest.mark.parametrize(("cores", "policy"), [(2, "passive"), (3, None)])
def test_threads_on_every_usable_core_do_not_spin(
    monkeypatch: pytest.MonkeyPatch, cores: int, policy: str | None
) -> None:
    """Cores under a container's limit, which its affinity mask does not tell of."""
    monkeypatch.setattr("headrace.back.executor.choose.usable_cores", lambda: cores)
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # put back behind the test
    monkeypatch.delenv("OMP_WAIT_POLICY")
    spec = tiny_spec()
    device = msgspec.structs.replace(spec.device, executor="null", threads=2)
    make_executor(msgspec.structs.replace(spec, device=device)).close()
    assert os.environ.get("OMP_WAIT_POLICY") == policy


def generate(executor: Executor, *, most: int, seed: int) -> list[list[int]]:
    """Four requests to their end, in pieces of at most `most` tokens."""
    rng = np.random.default_rng(seed)
    driver = Driver(executor.facts)
    prompts = np.random.default_rng(0).integers(2, 96, (4, 21)).tolist()
    sequences = [
        driver.add(prompt, RowSampling(temperature=float(i % 2), seed=i))
        for i, prompt in enumerate(prompts)
    ]
    while any(len(s.outputs) < 8 for s in sequences):
        runs = [
            (s, min(most, s.length - s.num_computed))
            for s in sequences
            if len(s.outputs) < 8 and rng.random() < 0.7
        ]
        if runs:
            driver.read(executor.submit(driver.plan(runs)).result(300))
    for sequence in sequences:
        driver.release(sequence)
    executor.submit(driver.plan([])).result(300)
    return [s.outputs for s in sequences]


def test_a_real_model_with_windows_gives_the_same_tokens_at_every_split() -> None:
    executor = make_executor(dummy_spec())
    assert {group.kind for group in executor.facts.groups} == {"full", "window"}
    assert executor.facts.weight_bytes > 0 and executor.facts.kv_bytes > 0
    whole = generate(executor, most=64, seed=1)
    assert generate(executor, most=5, seed=2) == whole
    assert generate(executor, most=1, seed=3) == whole
    assert len({tuple(tokens) for tokens in whole}) > 1
    executor.close()


def test_several_ranks_in_one_process_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="--executor processes"):
        make_executor(tiny_spec(executor="inline", tensor_parallel=2))


def test_an_unknown_executor_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="inline, null, processes"):
        make_executor(tiny_spec(executor="inlined"))

"""Layers that read the caches of others, through the whole engine: the greedy tokens of transformers
in chunks, beside other requests, behind a cached prefix and after preemption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.back.executor.inline import InlineExecutor
from headrace.back.kernels.attention.op import OP as ATTENTION
from headrace.back.kernels.attention.op import AttentionProblem
from headrace.back.kernels.op import KernelChoice, Op
from headrace.back.runner.kv_layout import lay_out
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, SchedulerSpec
from headrace.base.errors import CheckpointError
from headrace.core.core import EngineCore
from tests.models.oracle import load_ours, model_spec, save_oracle
from tests.models.test_mixture import answers, greedy
from tests.models.test_parity import tiny_config

BLOCK = 16
FAMILIES = ("gemma4-shared", "gemma3n")
LAYER_TYPES = [*["full_attention"] * 2, *["sliding_attention"] * 2] * 2


def engine(folder: Path, **kv: Any) -> EngineCore:
    spec = EngineSpec(
        model=model_spec(folder),
        kv=KVSpec(block_tokens=BLOCK, prefix_caching=True, **kv),
        scheduler=SchedulerSpec(max_step_tokens=BLOCK, max_running=4),
        device=DeviceSpec(device="cpu", executor="inline", threads=1),
    )
    return EngineCore(spec, InlineExecutor(spec))


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 97, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers_in_chunks_and_behind_a_prefix(
    name: str, tmp_path: Path
) -> None:
    oracle = save_oracle(tiny_config(name), tmp_path)
    core = engine(tmp_path, memory_bytes=1 << 20)
    first, second = prompts_of(41, 23)
    prompts = {1: first, 2: second}
    expected = {id: greedy(oracle, prompt) for id, prompt in prompts.items()}
    assert answers(core, prompts) == (expected, 0)
    follow_up = [*first, *second[:5]]
    assert answers(core, {3: follow_up}) == ({3: greedy(oracle, follow_up)}, 32)
    core.executor.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    oracle = save_oracle(tiny_config(name), tmp_path)
    core = engine(tmp_path, num_blocks=12)
    prompts = dict(enumerate(prompts_of(14, 13, 15, 12), start=1))
    expected = {id: greedy(oracle, prompt) for id, prompt in prompts.items()}
    assert answers(core, prompts)[0] == expected
    assert core.scheduler.num_preemptions > 0
    core.executor.close()


def test_a_layer_that_reads_the_cache_of_another_takes_no_memory(tmp_path: Path) -> None:
    """Six layers, three caches: each window's last writer is read by those above."""
    save_oracle(tiny_config("gemma4-shared"), tmp_path)
    ours = load_ours(model_spec(tmp_path))
    layout = lay_out(ours.kv_forms, block_tokens=BLOCK, dtype=torch.float32)
    assert [(group.kind, group.caches) for group in layout.groups] == [
        ("full", (1,)),
        ("window", (0, 2)),
    ]
    heads, size = 2, torch.float32.itemsize
    token = [2 * heads * width * size for width in (16, 8)]
    assert [group.block_bytes for group in layout.groups] == [
        BLOCK * token[0],
        2 * BLOCK * token[1],
    ]


def test_layers_of_one_group_may_have_two_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENG-24, REG-028: one plan serves both; a group of full attention and one of windows."""
    taken: list[str] = []

    def choose(problem: AttentionProblem, *, invariant: bool = False) -> KernelChoice[Any]:
        usual = Op.choose(ATTENTION, problem, invariant=invariant)
        taken.append(usual.kernel.name if len(taken) % 2 else ATTENTION.reference.name)
        return usual if len(taken) % 2 else replace(usual, kernel=ATTENTION.reference)

    monkeypatch.setattr(ATTENTION, "choose", choose)
    config = tiny_config("gemma2")
    config.update({"num_hidden_layers": 8, "layer_types": LAYER_TYPES})
    oracle = save_oracle(config, tmp_path)
    core = engine(tmp_path, memory_bytes=1 << 20)
    assert len(set(taken)) == 2 and len(core.kv.groups) == 2
    prompts = dict(enumerate(prompts_of(41, 23), start=1))
    assert answers(core, prompts)[0] == {id: greedy(oracle, prompts[id]) for id in prompts}
    core.executor.close()


def test_sharing_that_leaves_a_kind_of_layer_without_a_cache_is_refused(tmp_path: Path) -> None:
    save_oracle(tiny_config("gemma4-shared"), tmp_path)
    with pytest.raises(CheckpointError, match=r"num_kv_shared_layers is 5 .*each kind of layer"):
        load_ours(model_spec(tmp_path, num_kv_shared_layers=5))

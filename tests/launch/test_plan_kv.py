"""What `headrace plan` foretells of the KV cache is what the engine has, of every kind of layer. BEY-09."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.back.executor.inline import InlineExecutor
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import (
    DeviceSpec,
    EngineSpec,
    KVSpec,
    SchedulerSpec,
    SpeculationSpec,
)
from headrace.launch.layer_windows import layer_windows
from headrace.launch.plan import build_without_memory, kv_of
from tests.models.oracle import model_spec, save_oracle
from tests.models.test_parity import CASES, tiny_config

BLOCK = 16
MEMORY = 1 << 22
QUICK = ("bamba", "recurrent-gemma", "glm-dsa")
DRAFTED = ("bamba", "mamba2")


def engine_spec(folder: Path, *, drafts: int = 0) -> EngineSpec:
    speculation = None
    if drafts:
        speculation = SpeculationSpec(method="ngram", num_tokens=drafts, max_rows=4)
    return EngineSpec(
        model=replace(model_spec(folder), format="dummy"),
        speculation=speculation,
        kv=KVSpec(block_tokens=BLOCK, prefix_caching=True, memory_bytes=MEMORY),
        scheduler=SchedulerSpec(max_step_tokens=BLOCK, max_running=4),
        device=DeviceSpec(device="cpu", executor="inline", threads=1),
    )


def compare(spec: EngineSpec) -> None:
    """Within 5 %, the states to the byte."""
    told = kv_of(build_without_memory(spec.model, block_tokens=BLOCK), spec, MEMORY)
    executor = InlineExecutor(spec)
    memory = executor._resident.runner._kv
    counts = memory.counts
    assert abs(told.blocks - counts.num_blocks) <= 0.05 * counts.num_blocks
    rows = counts.state_rows + counts.drafted_states
    state = 0 if memory.state is None else memory.state.shape[1]
    assert (told.state_bytes, told.snapshot_bytes) == (state * rows, state * counts.snapshot_slots)
    executor.close()


@pytest.mark.parametrize(
    "case",
    [
        *QUICK,
        *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case not in QUICK),
    ],
)
def test_blocks_and_states_are_foretold(case: str, tmp_path: Path) -> None:
    save_oracle(tiny_config(case), tmp_path)
    compare(engine_spec(tmp_path))


@pytest.mark.parametrize("case", DRAFTED)
def test_states_behind_drafts_are_foretold(case: str, tmp_path: Path) -> None:
    save_oracle(tiny_config(case), tmp_path)
    plain, drafted = (engine_spec(tmp_path, drafts=drafts) for drafts in (0, 3))
    compare(drafted)
    model = build_without_memory(plain.model, block_tokens=BLOCK)
    without, behind = (kv_of(model, spec, MEMORY).state_bytes for spec in (plain, drafted))
    assert behind == without * (5 + 4 * 3) // 5  # four rows and the padding's, three drafts of four


def test_a_window_of_all_layers_that_attend_is_known() -> None:
    raw = {"attention_window_size": 2048, "block_types": ["recurrent", "recurrent", "attention"]}
    windows = layer_windows(ConfigReader(raw, "config.json"), "recurrent_gemma", 6)
    assert windows == (0, 0, 2048, 0, 0, 2048)

"""Models with recurrent layers through the whole engine: the greedy tokens of transformers, in
chunks, beside other requests, behind a snapshot, after preemption, on recorded steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from packaging.version import Version

from headrace.back.executor.choose import make_executor
from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.config.resolved import (
    DeviceSpec,
    EngineSpec,
    KVSpec,
    SchedulerSpec,
    SpeculationSpec,
)
from headrace.base.errors import CheckpointError
from headrace.base.wire.control import Call
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_mixture import NUM_TOKENS, answers, greedy
from tests.models.test_parity import tiny_config

DELTAS = (
    *("qwen3-next", "qwen3.5", "qwen3.5-moe", "lfm2", "lfm2-moe", "olmo-hybrid", "kimi-linear"),
    *("bailing-hybrid", "minimax", "lfm3"),
)
RARE = ("zamba", "recurrent-gemma", "rwkv", "xlstm", "zaya", "inkling")
FAMILIES = (
    "mamba2",
    "mamba",
    "falcon-mamba",
    "jamba",
    "bamba",
    "zamba2",
    "falcon-h1",
    "granite-hybrid-experts",
    "nemotron-h",
    "nemotron-h-experts",
    "nemotron-h-latent-experts",
    *DELTAS,
    *RARE,
)
ALIKE = (
    *(
        "falcon-mamba",
        "jamba",
        "bamba",
        "granite-hybrid-experts",
        "nemotron-h-experts",
        "lfm2-moe",
        "lfm3",
    ),
    *("nemotron-h-latent-experts", "qwen3.5", "qwen3.5-moe", "rwkv", "zamba2", "falcon-h1"),
)
"""Their layers stand in other families of the list: with engines of their own in `make slow` alone. The logits of all
are held by test_parity.py."""
UNRECORDED = (
    *("zamba2", "falcon-h1", "granite-hybrid-experts", "nemotron-h-experts", "olmo-hybrid"),
    "nemotron-h-latent-experts",
    *(name for name in RARE if name != "rwkv"),
)
"""They use operations of PyTorch."""
RECORDED = [name for name in FAMILIES if name not in UNRECORDED]
INDEXED = ("deepseek-v3.2", "glm-dsa")
"""Sparse attention keeps no state, but its steps are recorded and repeated as of those that do."""
CHOSEN = ("hy-v4", "minimax-m3", "deepseek-v4", "qwen4", "dots3-note")
"""They attend to what indexers choose, with operations of PyTorch."""
NEWEST = ("qwen4", "dots3-note")
"""Machines with GPUs may have a transformers that does not know them."""
BLOCK = 16
FEW = (5, 17, 40)
"""Tokens of answers that repeat themselves, whatever the weights."""
GENERATOR_SEED = 5


def alike_slow(*names: str) -> list[Any]:
    """Parameters."""
    return [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in names]


def engine(
    folder: Path,
    *,
    longest: int = 128,
    deterministic: bool = False,
    speculation: SpeculationSpec | None = None,
    device: str = "cpu",
    budget: int = BLOCK,
    ranks: int = 1,
    **kv: Any,
) -> EngineCore:
    model = replace(model_spec(folder, max_model_len=longest), deterministic=deterministic)
    spec = EngineSpec(
        model=model,
        speculation=speculation,
        kv=KVSpec(block_tokens=BLOCK, prefix_caching=True, **(kv or {"memory_bytes": 1 << 22})),
        scheduler=SchedulerSpec(max_step_tokens=budget, max_running=4),
        device=DeviceSpec(
            device=device,
            executor="inline" if ranks == 1 else "processes",
            threads=1,
            tensor_parallel=ranks,
        ),
    )
    return EngineCore(spec, make_executor(spec))


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    return [torch.randint(0, 97, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("name", alike_slow(*FAMILIES, *CHOSEN))
def test_greedy_tokens_equal_transformers_in_chunks_and_behind_a_snapshot(
    name: str, tmp_path: Path
) -> None:
    """ENG-10: a prompt's chunks end with blocks, whatever the budget of a step is."""
    oracle, core = save_oracle(tiny_config(name), tmp_path), engine(tmp_path)
    first, second = prompts_of(41, 23)
    prompts = {1: first, 2: second}
    expected = {id: greedy(oracle, prompt) for id, prompt in prompts.items()}
    assert answers(core, prompts) == (expected, 0)
    follow_up = [*first, *second[:5]]
    assert answers(core, {3: follow_up}) == ({3: greedy(oracle, follow_up)}, 32)
    core.executor.close()


def test_entries_of_long_groups_have_larger_blocks_in_the_same_budget(tmp_path: Path) -> None:
    """ENG-11: an entry for 32 positions takes a block of 32, in chunks of 16 and behind a prefix."""
    config = tiny_config("deepseek-v4")
    config.compress_rates["heavily_compressed_attention"] = 2 * BLOCK
    oracle, core = save_oracle(config, tmp_path), engine(tmp_path)
    runner = core.executor._resident.runner
    assert {group.block_ratio for group in runner.facts.groups} == {1, 2}
    sizes = {group.tokens for group in runner._steps.rows.groups}
    assert sizes == {BLOCK, 2 * BLOCK}
    first, second = prompts_of(75, 39)
    prompts = {1: first, 2: second}
    expected = {id: greedy(oracle, prompt) for id, prompt in prompts.items()}
    assert answers(core, prompts) == (expected, 0)
    follow_up = [*first, *second[:5]]
    assert answers(core, {3: follow_up}) == ({3: greedy(oracle, follow_up)}, 64)
    core.executor.close()


@pytest.mark.covering(0)
@pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
@pytest.mark.parametrize("name", alike_slow(*RECORDED, *INDEXED))
def test_its_steps_are_recorded_and_replayed(name: str, tmp_path: Path) -> None:
    oracle, core = save_oracle(tiny_config(name), tmp_path), engine(tmp_path)
    prompts = dict(enumerate(prompts_of(9, 12, 5), start=1))
    expected = {id: greedy(oracle, prompt) for id, prompt in prompts.items()}
    assert answers(core, prompts)[0] == expected
    replay = core.executor._resident.runner._steps._replay
    assert replay.foreign == () and replay.num_graphs > 0
    core.executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", (*INDEXED, *CHOSEN))
def test_steps_of_what_indexers_choose_are_recorded_on_a_gpu(name: str, tmp_path: Path) -> None:
    """KRN-04: no kernel of the choice reads lengths on the host; the tokens are those of transformers."""
    if name in NEWEST and Version(transformers.__version__) < Version("5.20"):
        pytest.skip(f"transformers {transformers.__version__} has not these layers")
    oracle = save_oracle(tiny_config(name), tmp_path)
    core = engine(tmp_path, device="cuda")
    runner = core.executor._resident.runner
    assert not [kernel for kernel in runner._model.host_kernels if "select" in kernel]
    prompts = dict(enumerate(prompts_of(9, 12, 5), start=1))
    expected = {id: greedy(oracle, prompt) for id, prompt in prompts.items()}
    for _ in range(2):
        assert answers(core, prompts)[0] == expected
    assert runner._steps._replay.num_graphs > 0
    core.executor.close()


ON_GPUS = (
    *("qwen3-moe", "gpt-oss", "llama4", "gemma3n", "deepseek-v3", "mimo-v2-flash"),
    *("falcon-mamba", "granite-hybrid-experts", "zamba2", "qwen3.5-moe", "kimi-linear", "minimax"),
    *("lfm2-moe", "jamba"),
)
"""Of each kind of layer one."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", ON_GPUS)
def test_a_gpu_says_what_transformers_says(name: str, tmp_path: Path) -> None:
    """MOD-17: in chunks, beside another request, and behind a prefix."""
    oracle = save_oracle(tiny_config(name), tmp_path)
    core = engine(tmp_path, device="cuda")
    first, second = prompts_of(41, 23)
    prompts = {1: first, 2: second}
    expected = {id: greedy(oracle, prompt) for id, prompt in prompts.items()}
    assert answers(core, prompts) == (expected, 0)
    follow_up = [*first, *second[:5]]
    assert answers(core, {3: follow_up}) == ({3: greedy(oracle, follow_up)}, 32)
    core.executor.close()


HYBRIDS = (
    *("jamba", "zamba2", "falcon-h1", "nemotron-h", "granite-hybrid-experts", *DELTAS),
    *("zamba", "recurrent-gemma", "zaya", "hy-v4", "minimax-m3", "qwen4", "inkling"),
)
"""One at least for each kind of state that lies beside blocks."""
FEW_BLOCKS = {"lfm3": 7, "zaya": 10, "minimax-m3": 5, "qwen4": 10, "inkling": 7}
"""So many that one request has room and four have not; 6 of the others."""


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("bamba", {"memory_bytes": 113_800}),
        ("glm-dsa", {"num_blocks": 6}),
        *(
            pytest.param(name, {"num_blocks": FEW_BLOCKS.get(name, 6)}, marks=pytest.mark.slow)
            for name in HYBRIDS
        ),
    ],
)
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(
    name: str, kv: dict[str, int], tmp_path: Path
) -> None:
    oracle, core = save_oracle(tiny_config(name), tmp_path), engine(tmp_path, **kv)
    prompts = dict(enumerate(prompts_of(14, 13, 15, 12), start=1))
    expected = {id: greedy(oracle, prompt) for id, prompt in prompts.items()}
    assert answers(core, prompts)[0] == expected
    assert core.scheduler.num_preemptions > 0
    core.executor.close()


@pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
@pytest.mark.parametrize("name", (*DELTAS, "bamba", "jamba", *INDEXED, "hy-v4"))
def test_a_row_has_the_same_bits_alone_and_beside_others(name: str, tmp_path: Path) -> None:
    """With --deterministic, which no layer refuses."""
    save_oracle(tiny_config(name), tmp_path)
    ours = load_ours(replace(model_spec(tmp_path), deterministic=True))
    rows = random_rows(97, (37, 22, 9))
    run = {"block_tokens": BLOCK_TOKENS, "dtype": torch.float32}
    beside, alone = (teacher_forced(ours, some, **run)[0] for some in (rows, rows[:1]))
    assert torch.equal(beside, alone)


@pytest.mark.parametrize("name", ["mamba2", "bamba", "mistral-window"])
def test_a_long_conversation_computes_only_what_is_new(name: str, tmp_path: Path) -> None:
    """BEY-24, OBS-02: of each turn the last answer, what was sent, and less than a block."""
    save_oracle(tiny_config(name), tmp_path)
    core = engine(tmp_path, longest=1024)
    sent, history = prompts_of(*(5 + turn % 7 for turn in range(40))), []
    for turn, words in enumerate(sent):
        known = len(history) - NUM_TOKENS
        history += words
        tokens, cached = answers(core, {turn: history})
        assert len(history) - cached < len(words) + NUM_TOKENS + BLOCK or turn == 0, turn
        assert cached <= max(known, 0) + NUM_TOKENS
        history += tokens[turn]
    core.executor.close()


@pytest.mark.parametrize("budget", [BLOCK // 2 + 1, BLOCK + 3])
def test_long_prompts_all_progress_with_a_budget_that_is_no_multiple_of_a_block(
    budget: int, tmp_path: Path
) -> None:
    """ENG-10, REG-015: smaller than a block it is no reason to wait for ever, and what is left of it in a step goes
    to the next prompt; snapshots are made where a chunk ends with a block."""
    oracle = save_oracle(tiny_config("bamba"), tmp_path)
    core = engine(tmp_path, budget=budget)
    prompts = dict(enumerate(prompts_of(70, 55, 61), start=1))
    expected = {id: greedy(oracle, prompt) for id, prompt in prompts.items()}
    assert answers(core, prompts) == (expected, 0)
    follow_up = [*prompts[1], 3]
    assert answers(core, {4: follow_up}) == ({4: greedy(oracle, follow_up)}, 64)
    core.executor.close()


@pytest.mark.parametrize("name", ["bamba", "mistral-window"])
def test_the_hit_rate_of_hybrids_counts_what_was_skipped(name: str, tmp_path: Path) -> None:
    """OBS-02, REG-114: a request's tokens are asked for once, hits are those that no group computes again."""
    save_oracle(tiny_config(name), tmp_path)
    core = engine(tmp_path, longest=256)
    (first,) = prompts_of(50)
    asked = skipped = 0
    for id, more in enumerate(([], [1], [2, 3], []), start=1):
        _, cached = answers(core, {id: [*first, *more]})
        asked, skipped = asked + len(first) + len(more), skipped + cached
    counted = core.scheduler.kv
    assert (counted.num_queries, counted.num_hits) == (asked, skipped)
    assert 0 < skipped < asked
    core.executor.close()


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_leaks_over_requests_of_which_some_are_aborted(count: int, tmp_path: Path) -> None:
    save_oracle(tiny_config("bamba"), tmp_path)
    core, pick = engine(tmp_path), random.Random(4)
    shared = prompts_of(40)[0]
    for id in range(1, count + 1):
        prompt = [*shared[: pick.choice([0, 16, 32, 40])], *(id % 97, pick.randrange(97))]
        core.add(
            EngineRequest(
                id=id,
                prompt=np.asarray(prompt, "<i4").tobytes(),
                stop=StopRules(max_tokens=pick.choice([1, 3, 6])),
                sampling=RowSampling(temperature=0.0),
            )
        )
        for _ in range(pick.choice([0, 1, 3])):
            core.step(wait=True)
        if id % 3 == 0:
            core.abort([id - pick.choice([0, 1, 2])])
    while core.has_work:
        core.step(wait=True)
    status = core.call(Call(number=1, operation="status"))
    assert status is not None and status.error is None
    found = msgspec.msgpack.decode(status.result)
    assert found["running"] == found["waiting"] == found["refcount_sum"] == 0, found
    assert found["free_blocks"] == found["total_blocks"], found
    assert found["free_rows"] == found["total_rows"], found
    assert 0 < found["cached_snapshots"] <= found["total_snapshots"], found
    core.executor.close()


@pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3-next", "mamba2"),
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in FAMILIES
            if one not in ("qwen3-next", "mamba2")
        ),
    ],
)
def test_drafts_change_no_token(name: str, tmp_path: Path) -> None:
    """SPC-06: the state goes back to the last draft that stands; in chunks, beside others, behind snapshots, and
    after preemption."""
    save_oracle(tiny_config(name), tmp_path)
    ngram = SpeculationSpec(
        method="ngram", num_tokens=4, max_rows=4, min_match=1, max_match=3, adaptive=False
    )
    first, second, third = prompts_of(41, 23, 5)
    prompts = {1: first, 2: second, 3: third * 4, 4: [*first, *third * 3]}
    found = []
    for speculation in (None, ngram):
        core = engine(tmp_path, longest=256, deterministic=True, speculation=speculation)
        more = {5: [*first, *second]}
        found.append([answers(core, some, 60, allowed=FEW) for some in (prompts, more)])
        if speculation is not None:
            stats = core.scheduler.speculation.stats
            assert 20 < stats.num_accepted_tokens < stats.num_draft_tokens
        core.executor.close()
    assert found[0] == found[1]


def test_layers_of_an_unknown_kind_are_refused_by_key_and_number(tmp_path: Path) -> None:
    save_oracle(tiny_config("granite-hybrid"), tmp_path)
    for kinds, words in (
        (["mamba", "attention", "rwkv"], "of mamba, .*; layer 2 is 'rwkv'"),
        (["mamba", "attention"], "a list of 3 layers"),
    ):
        with pytest.raises(CheckpointError, match=f"layer_types is .*{words}"):
            load_ours(model_spec(tmp_path, layer_types=kinds))


def test_time_steps_are_bounded_by_two_numbers(tmp_path: Path) -> None:
    save_oracle(tiny_config("mamba2"), tmp_path)
    for wrong in ([1.0, 0.5], [0.0], 3, [0.0, {"__float__": "NaN"}]):
        with pytest.raises(CheckpointError, match="time_step_limit"):
            load_ours(model_spec(tmp_path, time_step_limit=wrong))


def test_groups_that_do_not_divide_the_heads_are_refused_by_key(tmp_path: Path) -> None:
    save_oracle(tiny_config("mamba2"), tmp_path)
    with pytest.raises(CheckpointError, match=r"n_groups is 4 .* a divisor of .* \(6\)"):
        load_ours(model_spec(tmp_path, n_groups=4))

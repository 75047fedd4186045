"""Two and four ranks over gloo give the logits of one: merged and separate projections, biases, replicated
KV heads, an odd vocabulary, norms over all heads, tied heads, latents, a norm for each head, branches side by side,
weights stored as [inputs, outputs], query, key and value group by group."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.back.layers.moe.exchange import EXCHANGES
from headrace.back.parallel.mesh import Axis, Mesh
from headrace.base.errors import ConfigError
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.tensor_parallel_rank import LENGTHS, WHOLE_EXPERTS
from tests.models.test_mixture import answers, greedy
from tests.models.test_parity import CASES, compare, tiny_config
from tests.models.test_recurrent import engine, prompts_of
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.long  # not the last
NAMES = (
    "llama4", "afmoe", "mimo-v2-flash",
    "llama-biased-tied", "qwen2", "phi3", "olmo2", "gemma2", "deepseek-v3", "deepseek-v3.2", "glm-dsa", "one-kv-head",
    "cohere-qk-norm", "gpt2", "falcon-grouped", "phi", "qwen2-moe", "granite-moe", "gpt-oss",
    "granite-swa", "gemma4-shared", "gemma4-experts", "gemma3n",
    "mamba2", "mamba", "jamba", "bamba", "zamba2", "falcon-h1", "granite-hybrid-experts", "nemotron-h",
    "nemotron-h-experts", "qwen3-next",
    "qwen3.5", "lfm2", "lfm2-moe", "olmo-hybrid", "kimi-linear", "bailing-hybrid", "minimax",
    "lfm3", "kolibri1", "flint", "laguna", "axk2", "longcat-flash", "nemotron-h-latent-experts",
    "bloom", "falcon-alibi",
    "opt", "codegen", "gpt-bigcode", "dbrx",
    "hy-v4", "minimax-m3", "deepseek-v4", "qwen4", "dots3-note", "jais2", "hyperclovax", "jetmoe",
    "zamba", "recurrent-gemma", "rwkv", "xlstm", "hrm-text", "modernbert-decoder",
    "openai-gpt", "ctrl", "mllama", "opt-post", "inkling", "inkling-2", "beam", "muse-spark",
)  # fmt: skip


TWO_ALONE = (
    "zamba",
    "zamba2",
    "gemma4-shared",
    "gemma4-experts",
    "laguna",
    "jetmoe",
    "dots3-note",
    "mimo-v2-flash",
    "codegen",
    "inkling",
    "inkling-2",
)
"""Heads of several sizes or numbers, or of one that follows from the width, are not halved by a key."""
QUICK = (
    "llama-biased-tied", "one-kv-head", "gpt2", "bloom", "deepseek-v3.2", "gpt-oss", "gemma3n", "nemotron-h",
    "qwen3-next", "rwkv",
)  # fmt: skip
"""One for each way to be cut: `make slow` alone cuts the others."""
BOUND = 1e-5
BOUNDS = {"zamba2": 1e-4, "zamba": 5e-5}
"""Their random configurations multiply rounding: weights changed by 1e-7 of themselves move the logits of one rank by
1e-4 and by 1.1e-5."""


HEADS = (
    ("num_attention_heads", "", ""),
    ("n_head", "", ""),
    ("n_heads", "", ""),
    ("linear_num_heads", "", ""),
    ("num_heads", "head_dim", "n_groups"),
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
    ("mamba_num_heads", "mamba_head_dim", "n_groups"),
)
"""Names of the number of heads, their size and groups, where a configuration has them."""


def configuration(name: str, count: int) -> Any:
    config = tiny_config(name if name in CASES else "olmo2")
    if name not in CASES:
        config.num_key_value_heads = 1
    if count == 4:
        if config.to_dict().get("o_groups"):
            config.o_groups = 4
        # Heads of half the size, so that they can be divided; KV heads are held twice or four times. Of a recurrence,
        # groups are the units of a norm: they are not cut.
        for heads, head_dim, groups in HEADS:
            if groups and config.to_dict().get(heads):
                setattr(config, groups, 4)
            if config.to_dict().get(heads):
                setattr(config, heads, 2 * getattr(config, heads))
            if config.to_dict().get(head_dim):
                setattr(config, head_dim, getattr(config, head_dim) // 2)
    return config


def test_inputs_that_ranks_cannot_share_are_refused_with_both_numbers(
    tmp_path: Path,
) -> None:
    save_oracle(tiny_config("deepseek-v4"), tmp_path)
    axis = Axis(size=4, group=object())
    with pytest.raises(ConfigError, match=r"tensor_parallel 4 .* 2 wo_a cannot be divided"):
        load_ours(model_spec(tmp_path), mesh=Mesh(tp=axis))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("count", "others"),
    [
        (2, set(NAMES) - set(QUICK)),
        pytest.param(2, QUICK, marks=pytest.mark.slow),
        pytest.param(4, TWO_ALONE, marks=pytest.mark.slow),
    ],
    ids=["2", "2-others", "4"],
)
def test_ranks_give_the_logits_of_one(count: int, others: Container[str], tmp_path: Path) -> None:
    """REG-057: gpt-oss has experts with biases, of which one rank alone adds those of the downs.
    REG-049, of Qwen3-Next."""
    compare_ranks([name for name in NAMES if name not in others], count, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["minimax-m3", "deepseek-v3.2", "deepseek-v4", "qwen4"])
def test_two_ranks_decode_what_transformers_does(name: str, tmp_path: Path) -> None:
    """The whole engine, at first and behind what it knows. An indexer's keys are not split as KV heads are: blocks of
    a rank's groups have other bytes than those of one rank, and a slab is cut otherwise."""
    oracle, core = save_oracle(configuration(name, 2), tmp_path), engine(tmp_path, ranks=2)
    prompts = dict(enumerate(prompts_of(41, 23, 14), start=1))
    expected = {id: greedy(oracle, prompt) for id, prompt in prompts.items()}
    assert answers(core, prompts) == (expected, 0)
    assert answers(core, prompts) == (expected, 32 + 16)
    core.close()


MIXTURES = (
    "qwen2-moe", "gpt-oss", "deepseek-v3", "glm-dsa", "llama4", "granite-moe", "granite-hybrid-experts",
    "nemotron-h-experts", "nemotron-h-latent-experts", "dbrx", "gemma4-experts", "minimax", "longcat-flash", "inkling",
    "deepseek-v4", "lfm2-moe", "afmoe", "laguna", "kimi-linear", "qwen3-next", "minimax-m3", "mimo-v2-flash",
    "muse-spark",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("exchange", "names"),
    [("allreduce", MIXTURES), *((exchange, MIXTURES[:4]) for exchange in EXCHANGES)],
)
def test_ranks_with_whole_experts_give_the_logits_of_one(
    exchange: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    """PAR-11, PAR-12: every layout of experts, shared ones, biases, idle ones, experts over a latent."""
    compare_ranks(names, 2, tmp_path, WHOLE_EXPERTS + exchange)


def compare_ranks(names: Sequence[str], count: int, tmp_path: Path, *words: str) -> None:
    folders = [tmp_path / name for name in names]
    for name, folder in zip(names, folders, strict=True):
        save_oracle(configuration(name, count), folder)
    run_ranks("tests.models.tensor_parallel_rank", count, tmp_path / "store", *words, *folders)
    for name, folder in zip(names, folders, strict=True):
        spec = model_spec(folder)
        rows = random_rows(spec.logits_width, LENGTHS)
        alone = teacher_forced(
            load_ours(spec), rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32
        )
        for rank in range(count):
            compare(torch.load(folder / f"rank{rank}.pt"), alone, BOUNDS.get(name, BOUND))

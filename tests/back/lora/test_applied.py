"""Adapters applied by rows equal their weights merged in transformers (ENG-20): merged and separate projections,
biases, weights stored as [inputs, outputs], latents, recurrent layers; rows of
several adapters and of none beside each other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.back.lora.store import AdapterStore
from headrace.base.config.resolved import AdapterSpec
from headrace.base.errors import ConfigError
from tests.back.lora.adapters import (
    merge,
    merge_kinds,
    module_sizes,
    write_adapter,
    write_kinds,
)
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, oracle_logits, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import CASES, SIZES, compare, tiny_config

CPU = torch.device("cpu")
CHOSEN = (
    *("llama", "llama-biased-tied", "qwen2", "phi3", "gpt2", "gemma2", "olmo2", "falcon-grouped", "phi"),
    *("deepseek-v3", "qwen3-next", "mamba2", "qwen2-moe"),
)  # fmt: skip
LENGTHS = (17, 9, 13)


KINDS = ("magnitudes", "tables", "experts")


def spec_of(folder: Path, *, max_rank: int = 8, kinds: tuple[str, ...] = ()) -> Any:
    adapters = AdapterSpec(slots=2, max_rank=max_rank, kept=4, kinds=kinds)
    return msgspec.structs.replace(model_spec(folder), adapters=adapters)


@pytest.mark.parametrize("case", CHOSEN)
def test_rows_of_two_adapters_and_none_equal_the_merged_weights(case: str, tmp_path: Path) -> None:
    oracle = save_oracle(tiny_config(case), tmp_path)
    ours = load_ours(spec_of(tmp_path))
    sizes = module_sizes(ours)
    names = sorted(sizes)
    adapters = [
        write_adapter(tmp_path / "one", sizes),
        write_adapter(
            tmp_path / "two",
            {name: sizes[name] for name in names[::2]},
            rank=6, alpha=5, seed=1, use_rslora=True, target_modules="all-linear",
            rank_pattern={names[0]: 3}, alpha_pattern={names[2]: 9.0},
        ),
    ]  # fmt: skip
    store = AdapterStore(ours.adapters, CPU)
    for slot, name in enumerate(("one", "two"), start=1):
        facts = store.read(name, str(tmp_path / name))
        assert facts.rank == (4, 6)[slot - 1] and facts.num_modules == len(adapters[slot - 1].pairs)
        store.place(name, slot)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    got = teacher_forced(
        ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32, slots=(1, 0, 2)
    )
    models = [copy.deepcopy(oracle) for _ in adapters]
    for model, adapter in zip(models, adapters, strict=True):
        merge(model, adapter)
    theirs = [
        oracle_logits(model, [row])[0]
        for model, row in zip((models[0], oracle, models[1]), rows, strict=True)
    ]
    compare(got, theirs, 1e-4)
    assert (theirs[0] - oracle_logits(oracle, rows[:1])[0]).abs().max() > 0.05, "it changes nothing"


@pytest.mark.parametrize("case", ["qwen2-moe", "llama-biased-tied"])
def test_magnitudes_tables_heads_and_experts_equal_the_merged_weights(
    case: str, tmp_path: Path
) -> None:
    """test_kinds.py holds the same against PEFT, where it is installed."""
    oracle = save_oracle(tiny_config(case), tmp_path)
    ours = load_ours(spec_of(tmp_path, kinds=KINDS))
    store, models = AdapterStore(ours.adapters, CPU), []
    for slot, name in enumerate(("one", "two"), start=1):
        write_kinds(tmp_path / name, ours, seed=slot, rank=2 + 2 * slot)
        store.read(name, str(tmp_path / name))
        store.place(name, slot)
        models.append(copy.deepcopy(oracle))
        merge_kinds(models[-1], tmp_path / name)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    how = {"block_tokens": BLOCK_TOKENS, "dtype": torch.float32}
    got = teacher_forced(ours, rows, slots=(1, 0, 2), **how)
    pairs = zip((models[0], oracle, models[1]), rows, strict=True)
    compare(got, [oracle_logits(model, [row])[0] for model, row in pairs], 1e-4)


def test_a_slot_that_is_filled_again_forgets_the_adapter_before(tmp_path: Path) -> None:
    oracle = save_oracle(tiny_config("qwen2"), tmp_path)
    ours = load_ours(spec_of(tmp_path))
    sizes, rows = module_sizes(ours), random_rows(SIZES["vocab_size"], (11,))
    few = {name: size for name, size in sizes.items() if name.endswith("q_proj")}
    write_adapter(tmp_path / "all", sizes, rank=8)
    adapter = write_adapter(tmp_path / "few", few, rank=2, seed=4)
    store = AdapterStore(ours.adapters, CPU)
    for name in ("all", "few"):
        store.read(name, str(tmp_path / name))
        store.place(name, 1)
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32, slots=(1,))
    merge(oracle, adapter)
    compare(got, oracle_logits(oracle, rows), 1e-4)


def test_magnitudes_are_for_the_weights_as_they_are_now(tmp_path: Path) -> None:
    oracle = save_oracle(tiny_config("qwen2"), tmp_path)
    ours = load_ours(spec_of(tmp_path, kinds=KINDS))
    write_kinds(tmp_path / "one", ours, seed=1)
    store = AdapterStore(ours.adapters, CPU)
    store.read("one", str(tmp_path / "one"))
    store.place("one", 1)
    for linear in ours.adapters.linears:  # as a push of weights leaves them
        linear._weight.mul_(1.7)
        linear._bias = linear._bias if linear._bias is None else linear._bias.mul_(1.7)
    store.renew()
    with torch.no_grad():
        for module in oracle.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight *= 1.7
                if module.bias is not None:
                    module.bias *= 1.7
    merge_kinds(oracle, tmp_path / "one")
    rows = random_rows(SIZES["vocab_size"], (11,))
    how = {"block_tokens": BLOCK_TOKENS, "dtype": torch.float32}
    got = teacher_forced(ours, rows, slots=(1,), **how)
    compare(got, oracle_logits(oracle, rows), 1e-4)


@pytest.mark.parametrize("case", ["gemma3n", "zamba2"])
def test_a_model_whose_layers_do_not_tell_the_slots_is_refused(case: str, tmp_path: Path) -> None:
    assert case in CASES
    save_oracle(tiny_config(case), tmp_path)
    with pytest.raises(ConfigError, match=f"--enable-lora.*{case}"):
        load_ours(spec_of(tmp_path))


QUANTIZED = [
    *((scheme, "qwen2") for scheme in ("int8", "int8-g32", "fp8", "int4", "int4-asym-g64")),
    *((scheme, "qwen2-moe") for scheme in ("int8", "fp8", "int4")),
    ("int4", "llama-biased-tied"),
]


@pytest.mark.parametrize(("scheme", "case"), QUANTIZED)
def test_adapters_of_a_quantized_base_are_as_near_as_the_base_is(
    scheme: str, case: str, tmp_path: Path
) -> None:
    config = tiny_config(case)
    config.hidden_size, config.intermediate_size = 64, 128
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    if case == "qwen2-moe":
        config.moe_intermediate_size = config.shared_expert_intermediate_size = 64
        config.num_experts_per_tok = config.num_experts  # a choice that flips is no error of sums
    oracle = save_oracle(config, tmp_path)
    kinds = () if case == "qwen2" else KINDS
    spec = msgspec.structs.replace(spec_of(tmp_path, kinds=kinds), quantization=scheme)
    ours = load_ours(spec)
    if kinds:
        write_kinds(tmp_path / "one", ours, seed=1)
    else:
        adapter = write_adapter(tmp_path / "one", module_sizes(ours))
    store = AdapterStore(ours.adapters, CPU)
    store.read("one", str(tmp_path / "one"))
    store.place("one", 1)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    how = {"block_tokens": BLOCK_TOKENS, "dtype": torch.float32}

    def error(slots: tuple[int, ...]) -> tuple[float, list[torch.Tensor]]:
        theirs = oracle_logits(oracle, rows)
        got = teacher_forced(ours, rows, slots=slots, **how)
        errors = [
            (one - other).norm() / other.norm() for one, other in zip(got, theirs, strict=True)
        ]
        return max(float(each) for each in errors), theirs

    base, before = error((0, 0, 0))
    if kinds:
        merge_kinds(oracle, tmp_path / "one")
    else:
        merge(oracle, adapter)
    adapted, after = error((1, 1, 1))
    changed = min(float((a - b).norm() / b.norm()) for a, b in zip(after, before, strict=True))
    assert adapted < 2 * base + 0.02 and adapted < 0.5 * changed, (adapted, base, changed)

"""`headrace merge-adapter`: the written checkpoint has the logits of the model with its adapter (ENG-20)."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.base.errors import CheckpointError, ConfigError
from headrace.cli.merge_adapter import main
from headrace.launch.merge import merge_adapter
from tests.back.lora.adapters import merge, module_sizes, write_adapter
from tests.back.lora.test_applied import spec_of
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, oracle_logits, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import compare, tiny_config


@pytest.mark.parametrize("case", ["qwen3", "phi3"])
def test_what_is_written_has_the_logits_of_the_base_with_its_adapter(
    case: str, tmp_path: Path
) -> None:
    """Of separate projections and of fused ones."""
    oracle = save_oracle(tiny_config(case), tmp_path / "base")
    sizes = module_sizes(load_ours(spec_of(tmp_path / "base")))
    adapter = write_adapter(tmp_path / "adapter", sizes, use_rslora=True)
    merged = merge_adapter(model_spec(tmp_path / "base"), tmp_path / "adapter", tmp_path / "out")
    assert merged.num_matrices == len(sizes) and merged.rank == 4
    other = copy.deepcopy(oracle)
    merge(other, adapter)
    rows = random_rows(97, (21, 9))
    ours = load_ours(model_spec(tmp_path / "out"))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(other, rows), 1e-4)


def untied() -> Any:
    config = tiny_config("qwen3")
    config.tie_word_embeddings = False
    return config


def test_magnitudes_tables_rows_and_whole_modules_are_merged(tmp_path: Path) -> None:
    """DoRA, an adapter of the table of tokens, and one more token in the output head: what PEFT 0.21.2 merges is the
    same to the bit; here by the formulas."""
    oracle = save_oracle(untied(), tmp_path / "base")
    name = "model.layers.1.mlp.down_proj"
    generator = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    width, tokens = oracle.get_input_embeddings().weight.shape[1], 97
    adapter = write_adapter(tmp_path / "adapter", {name: (width, 80)}, use_dora=True)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    magnitude, table = randn(width).abs(), (randn(4, tokens) * 0.1, randn(width, 4) * 0.1)
    head, rows = randn(tokens, width), randn(2, width)
    save_file(
        {
            **load_file(path),
            f"base_model.model.{name}.lora_magnitude_vector": magnitude,
            "base_model.model.model.embed_tokens.lora_embedding_A": table[0],
            "base_model.model.model.embed_tokens.lora_embedding_B": table[1],
            "base_model.model.model.norm.weight": randn(width),
            "base_model.model.lm_head.weight": head,
            "base_model.model.lm_head.token_adapter.trainable_tokens_delta": rows,
        },
        path,
    )
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config |= {"modules_to_save": ["lm_head", "norm"], "trainable_token_indices": [3, 90]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    merged = merge_adapter(model_spec(tmp_path / "base"), tmp_path / "adapter", tmp_path / "out")
    assert merged.num_matrices == 4
    found, base = load_file(tmp_path / "out" / "model.safetensors"), oracle.state_dict()
    a, b = adapter.pairs[name]
    whole = base[f"{name}.weight"] + adapter.scales[name] * b @ a
    for row, expected in enumerate(whole):
        expected = magnitude[row] * expected / expected.square().sum().sqrt()
        torch.testing.assert_close(found[f"{name}.weight"][row], expected)
    scaled = base["model.embed_tokens.weight"] + 4.0 * (table[1] @ table[0]).T
    torch.testing.assert_close(found["model.embed_tokens.weight"], scaled)
    head[[3, 90]] = rows
    torch.testing.assert_close(found["lm_head.weight"], head)
    same = [one for one in base if torch.equal(found[one], base[one])]
    assert len(same) == len(base) - 4


def test_more_tokens_come_with_their_number_and_their_tokenizer(tmp_path: Path) -> None:
    oracle = save_oracle(untied(), tmp_path / "base")
    width = oracle.get_input_embeddings().weight.shape[1]
    write_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.o_proj": (48, 96)})
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    grown = {
        f"base_model.model.{name}.weight": torch.randn(99, width)
        for name in ("lm_head", "model.embed_tokens")
    }
    save_file({**load_file(path), **grown}, path)
    (tmp_path / "adapter" / "tokenizer.json").write_text("{}")
    merge_adapter(model_spec(tmp_path / "base"), tmp_path / "adapter", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 99
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    ours = load_ours(model_spec(tmp_path / "out"))
    assert ours.logits_width == 99


def test_adapters_of_experts_are_merged(tmp_path: Path) -> None:
    """One parameter of all experts for PEFT, in a checkpoint that holds them one by one."""
    oracle = save_oracle(tiny_config("qwen3-moe"), tmp_path / "base")
    module, generator = "model.layers.0.mlp.experts", torch.Generator().manual_seed(6)
    sizes = {
        f"{module}.base_layer": tuple(oracle.get_submodule(module).gate_up_proj.shape),
        module: tuple(oracle.get_submodule(module).down_proj.shape),
    }
    tensors, rank = {}, 2
    for name, (experts, outputs, inputs) in sizes.items():
        a = torch.randn(rank * experts, inputs, generator=generator) * 0.2
        b = torch.randn(outputs, rank * experts, generator=generator) * 0.2
        tensors |= {
            f"base_model.model.{name}.lora_{half}.weight": one for half, one in (("A", a), ("B", b))
        }
    write_adapter(tmp_path / "adapter", {"model.layers.0.mlp.gate": (6, 48)}, rank=rank)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(tensors, path)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config |= {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    merge_adapter(model_spec(tmp_path / "base"), tmp_path / "adapter", tmp_path / "out")
    changed = copy.deepcopy(oracle)
    with torch.no_grad():
        for name, parameter in ((f"{module}.base_layer", "gate_up_proj"), (module, "down_proj")):
            a, b = (tensors[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
            experts = sizes[name][0]
            for expert in range(experts):
                mine = b[:, expert::experts] @ a[rank * expert : rank * (expert + 1)]
                getattr(changed.get_submodule(module), parameter)[expert] += 16 / rank * mine
    rows = random_rows(97, (21, 9))
    ours = load_ours(model_spec(tmp_path / "out"))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(changed, rows), 1e-4)


def test_an_adapter_of_another_base_and_a_folder_that_is_full_are_refused(tmp_path: Path) -> None:
    save_oracle(tiny_config("qwen3"), tmp_path / "base")
    write_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.q_proj": (7, 5)})
    spec = model_spec(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"is for a weight of \[7, 5\], this base has"):
        merge_adapter(spec, tmp_path / "adapter", tmp_path / "out")
    write_adapter(tmp_path / "other", {"model.layers.9.self_attn.q_proj": (48, 48)})
    with pytest.raises(CheckpointError, match=r"holds no tensor of its own for model\.layers\.9"):
        merge_adapter(spec, tmp_path / "other", tmp_path / "more")
    with pytest.raises(ConfigError, match="not an empty folder"):
        merge_adapter(spec, tmp_path / "adapter", tmp_path / "base")
    with pytest.raises(ConfigError, match="name all three"):
        main(["somewhere"])

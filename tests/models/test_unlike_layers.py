"""Decoders whose layers differ in heads and inner sizes, or lack a branch, under the names and keys of their published
checkpoints, against transformers' layers of those sizes (MOD-01)."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

from headrace.back.models.published_keys import in_common_keys
from headrace.base.config.layer_count import first_layers
from headrace.base.errors import CheckpointError
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import describe
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, randomize
from tests.models.paged import random_rows, teacher_forced
from tests.models.tensor_parallel_rank import LENGTHS as RANK_LENGTHS
from tests.models.test_parity import (
    LENGTHS,
    SIZES,
    BothModels,
    both_models,
    compare,
    compare_last_tokens,
)
from tests.rank_processes import run_ranks

SHAPE = {key: SIZES[key] for key in SIZES if not key.endswith("_id")}


class Matrix(nn.Module):
    """In place of a branch, under its name in the published checkpoint."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.attends = name == "linear_attn"
        self.add_module(name, nn.Linear(SIZES["hidden_size"], SIZES["hidden_size"], bias=False))

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        (matrix,) = self.children()
        y = matrix(hidden_states)
        return (y, None) if self.attends else y


class Nothing(nn.Module):
    """In place of a branch: what it adds is 0."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.attends = attends

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.attends else zeros


def changed(config: Any, **sizes: int) -> Any:
    other = copy.deepcopy(config)
    for key, size in sizes.items():
        setattr(other, key, size)
    return other


def deci(folder: Path, blocks: list[dict[str, Any]], **changes: Any) -> Any:
    """A Llama with the branches of `blocks`, and its checkpoint as Nemotron's are published."""
    config = transformers.LlamaConfig(**SIZES, rope_parameters={"rope_theta": 500.0})
    config._attn_implementation = "eager"
    oracle = transformers.LlamaForCausalLM(config).eval()
    for i, (layer, block) in enumerate(zip(oracle.model.layers, blocks, strict=True)):
        attention, mlp = block["attention"], block["ffn"]
        if attention["no_op"]:
            layer.self_attn, layer.input_layernorm = Nothing(attends=True), nn.Identity()
        elif attention["replace_with_linear"]:
            layer.self_attn = Matrix("linear_attn")
        else:
            heads = config.num_attention_heads // attention["n_heads_in_group"]
            layer.self_attn = LlamaAttention(changed(config, num_key_value_heads=heads), i)
        if mlp["no_op"]:
            layer.mlp, layer.post_attention_layernorm = Nothing(attends=False), nn.Identity()
        elif mlp["replace_with_linear"]:
            layer.mlp = Matrix("linear_mlp")
        else:
            layer.mlp = LlamaMLP(changed(config, intermediate_size=256))
    randomize(oracle)
    save_file(oracle.state_dict(), folder / "model.safetensors")
    published = {
        **{**SHAPE, "architectures": ["DeciLMForCausalLM"], "block_configs": blocks},
        **{"rope_theta": 500.0, "rms_norm_eps": 1e-6, "num_key_value_heads": None},
        **{"intermediate_size": None, **changes},
    }
    (folder / "config.json").write_text(json.dumps(published))
    return oracle


def block(heads_in_group: int | None, factor: float | None, **attention: Any) -> dict[str, Any]:
    return {
        "attention": {
            **{"n_heads_in_group": heads_in_group, "no_op": heads_in_group is None},
            **{"replace_with_linear": False, "window_length": None, **attention},
        },
        "ffn": {"ffn_mult": factor, "no_op": factor is None, "replace_with_linear": False},
    }


BLOCKS = [block(2, 1.0), block(None, 7.9), block(6, None)]
MATRIX = block(None, 1.0, no_op=False, replace_with_linear=True)
LINEAR = [block(2, 1.0), MATRIX, block(6, 1.0)]
LINEAR[2]["ffn"]["replace_with_linear"] = True


def test_a_matrix_in_place_of_a_branch_equals_a_llama_with_it(tmp_path: Path) -> None:
    models = both_models(tmp_path, deci(tmp_path, LINEAR))
    got = teacher_forced(models.ours, models.rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, models.theirs, 1e-4)
    compare_last_tokens(models)


def test_blocks_without_attention_or_mlp_equal_a_llama_that_lacks_them(tmp_path: Path) -> None:
    models = both_models(tmp_path, deci(tmp_path, BLOCKS))
    got = teacher_forced(models.ours, models.rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, models.theirs, 1e-4)
    compare_last_tokens(models)
    config = in_common_keys(json.loads((tmp_path / "config.json").read_text()))
    located = LocatedModel(path=tmp_path, name="m", format="dummy")
    facts = describe(located, config, {}, None)
    assert facts.windows == (None, 0, None)
    assert facts.kv_bytes_per_token == 2 * 8 * (3 + 0 + 1) * 2
    first = describe(located, first_layers(config, 1), {}, None)
    assert first.windows == (None,) and first.kv_bytes_per_token == 2 * 8 * 3 * 2, "what plan runs"


@pytest.mark.slow
def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    """A rank multiplies its share of a matrix's inputs."""
    deci(tmp_path, [block(3, 1.0), MATRIX, LINEAR[2]])
    rows = random_rows(SIZES["vocab_size"], RANK_LENGTHS)
    ours = load_ours(model_spec(tmp_path))
    alone = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    run_ranks("tests.models.tensor_parallel_rank", 2, tmp_path / "store", tmp_path)
    for rank in range(2):
        compare(torch.load(tmp_path / f"rank{rank}.pt"), alone, 1e-4)


@pytest.mark.parametrize(
    ("blocks", "field"),
    [
        ([block(2, 1.0, unshifted_sink=True), *BLOCKS[1:]], "unshifted_sink"),
        ([block(2, 1.0, window_length=64), *BLOCKS[1:]], "window_length"),
        ([block(4, 1.0), *BLOCKS[1:]], "n_heads_in_group"),
        ([{"ffn": BLOCKS[0]["ffn"]}, *BLOCKS[1:]], "attention"),
    ],
)
def test_blocks_that_are_not_built_are_refused_by_key(
    blocks: list[dict[str, Any]], field: str, tmp_path: Path
) -> None:
    deci(tmp_path, BLOCKS, block_configs=blocks)
    with pytest.raises(CheckpointError) as caught:
        load_ours(model_spec(tmp_path))
    assert caught.value.field == field


def openelm(folder: Path) -> Any:
    """Qwen 3 whose layers have heads and inner sizes of their own, as OpenELM publishes them."""
    heads, kv_heads, inners = [4, 6, 8], [2, 3, 2], [32, 64, 80]
    config = transformers.Qwen3Config(
        **SIZES
        | {"head_dim": 8, "rope_parameters": {"rope_theta": 500.0}, "use_sliding_window": False}
    )
    config._attn_implementation = "eager"
    oracle = transformers.Qwen3ForCausalLM(config).eval()
    for i, layer in enumerate(oracle.model.layers):
        sizes = {"num_attention_heads": heads[i], "num_key_value_heads": kv_heads[i]}
        layer.self_attn = Qwen3Attention(changed(config, **sizes), i)
        layer.mlp = Qwen3MLP(changed(config, intermediate_size=inners[i]))
    randomize(oracle)
    oracle.lm_head.weight = oracle.model.embed_tokens.weight
    tensors = dict(oracle.state_dict())
    del tensors["lm_head.weight"]
    for i in range(3):
        at, to = f"model.layers.{i}", f"transformer.layers.{i}"
        parts = [tensors.pop(f"{at}.self_attn.{one}_proj.weight") for one in "qkv"]
        tensors[f"{to}.attn.qkv_proj.weight"] = torch.cat(parts)
        tensors[f"{to}.attn.out_proj.weight"] = tensors.pop(f"{at}.self_attn.o_proj.weight")
        for one in ("q_norm", "k_norm"):
            tensors[f"{to}.attn.{one}.weight"] = tensors.pop(f"{at}.self_attn.{one}.weight")
        both = [tensors.pop(f"{at}.mlp.{one}_proj.weight") for one in ("gate", "up")]
        tensors[f"{to}.ffn.proj_1.weight"] = torch.cat(both)
        tensors[f"{to}.ffn.proj_2.weight"] = tensors.pop(f"{at}.mlp.down_proj.weight")
        tensors[f"{to}.attn_norm.weight"] = tensors.pop(f"{at}.input_layernorm.weight")
        tensors[f"{to}.ffn_norm.weight"] = tensors.pop(f"{at}.post_attention_layernorm.weight")
    tensors["transformer.norm.weight"] = tensors.pop("model.norm.weight")
    tensors["transformer.token_embeddings.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    published = {
        **{"architectures": ["OpenELMForCausalLM"], "vocab_size": 97, "model_dim": 48},
        **{"num_transformer_layers": 3, "head_dim": 8, "num_query_heads": heads},
        **{"num_kv_heads": kv_heads, "num_gqa_groups": 2, "max_context_length": 128},
        **{"ffn_multipliers": [0.7, 1.4, 1.6], "ffn_dim_divisor": 16, "ffn_with_glu": True},
        **{"rope_freq_constant": 500, "normalize_qk_projections": True},
        **{"share_input_output_layers": True, "activation_fn_name": "swish"},
        "normalization_layer_name": "rms_norm",
    }
    (folder / "config.json").write_text(json.dumps(published))
    return oracle


def test_layers_with_heads_of_their_own_equal_a_qwen3_with_them(tmp_path: Path) -> None:
    """OpenELM."""
    models = both_models(tmp_path, openelm(tmp_path))
    got = teacher_forced(models.ours, models.rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, models.theirs, 1e-4)


def test_layers_that_run_several_times_equal_a_llama_that_runs_again(tmp_path: Path) -> None:
    """Ouro: two norms more in a layer, the last one behind each time, a cache for each."""
    config = transformers.LlamaConfig(**SIZES, rope_parameters={"rope_theta": 500.0})
    config._attn_implementation = "eager"
    oracle = transformers.LlamaForCausalLM(config).eval()
    for layer in oracle.model.layers:
        for name in ("input_layernorm_2", "post_attention_layernorm_2"):
            setattr(layer, name, copy.deepcopy(layer.input_layernorm))
    randomize(oracle)
    gate = {"model.early_exit_gate.weight": torch.zeros(1, 48)}
    save_file(oracle.state_dict() | gate, tmp_path / "model.safetensors")
    published = {
        **{**SHAPE, "architectures": ["OuroForCausalLM"], "rope_theta": 500.0, "head_dim": 8},
        **{"total_ut_steps": 2, "early_exit_threshold": 1.0, "rms_norm_eps": 1e-6},
        **{"layer_types": ["full_attention"] * 3, "use_sliding_window": False},
    }
    (tmp_path / "config.json").write_text(json.dumps(published))

    def logits(row: list[int]) -> torch.Tensor:
        model, length = oracle.model, len(row)
        x = model.embed_tokens(torch.tensor([row]))
        turns = model.rotary_emb(x, torch.arange(length)[None])
        mask = torch.full((1, 1, length, length), float("-inf")).triu(1)
        for layer in [*model.layers, None] * 2:
            if layer is None:
                x = model.norm(x)
                continue
            y = layer.self_attn(layer.input_layernorm(x), turns, mask)[0]
            x = x + layer.input_layernorm_2(y)
            y = layer.mlp(layer.post_attention_layernorm(x))
            x = x + layer.post_attention_layernorm_2(y)
        return oracle.lm_head(x)[0]

    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    with torch.inference_mode():
        theirs = [logits(row) for row in rows]
    models = BothModels(rows, theirs, load_ours(model_spec(tmp_path)))
    got = teacher_forced(models.ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, theirs, 1e-4)
    compare_last_tokens(models)

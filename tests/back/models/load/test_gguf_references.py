"""GGUF files of decoders that no library has a class for: the logits of their references in plain PyTorch, under the
names of the `gguf` library's table, as llama.cpp's converters order them. QNT-15."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import read_model_facts
from tests.back.models.load.checkpoints import _finish, name_table, spec_of
from tests.back.models.load.test_gguf_families import permuted
from tests.back.models.load.test_gguf_mixtures import ROWS, load, logits
from tests.references import arctic, grok, grove_moe, plamo2, plamo3, smallthinker


def sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What all files state."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_eos_token_id(2)
    for count, chosen in (
        ("num_local_experts", "num_experts_per_tok"),
        ("num_experts", "num_experts_per_tok"),
        ("moe_num_primary_experts", "moe_num_active_primary_experts"),
    ):
        if count in config:
            writer.add_expert_count(config[count])
            writer.add_expert_used_count(config[chosen])


def of_grok(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    sizes(writer, config)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_router_logit_softcapping(config["router_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_attn_temperature_length(config["attn_temperature_len"])
    writer.add_attn_output_scale(config["head_dim"] ** -0.5)
    writer.add_embedding_scale(config["embedding_multiplier_scale"])
    writer.add_logit_scale(config["output_multiplier_scale"])


def of_grove(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    sizes(writer, config)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_chunk_feed_forward_length(grove_moe.ADJUGATE)
    writer.add_experts_per_group(grove_moe.GROUP)
    writer.add_expert_group_scale(grove_moe.SHARE)


def of_smallthinker(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    sizes(writer, config)
    writer.add_expert_feed_forward_length(config["moe_ffn_hidden_size"])
    kinds = gguf.ExpertGatingFuncType
    softmax = config["moe_primary_router_apply_softmax"]
    writer.add_expert_gating_func(kinds.SOFTMAX if softmax else kinds.SIGMOID)
    if any(config["sliding_window_layout"]):
        writer.add_sliding_window(config["sliding_window_size"])


def of_plamo3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    sizes(writer, config)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(12)
    writer.add_sliding_window_pattern(2)
    writer.add_float32("plamo3.rope.freq_base_swa", config["rope_local_theta"])


def of_plamo2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    attends = [plamo2.attends(config, i) for i in range(config["num_hidden_layers"])]
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    several = [[of * one for one in attends] for of in heads]
    stated = {"num_attention_heads": several[0], "num_key_value_heads": several[1]}
    sizes(writer, {**config, **stated, "rope_theta": 1e4})
    writer.add_key_length(config["hidden_size_per_head"])
    writer.add_value_length(config["hidden_size_per_head"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["hidden_size_per_head"])
    writer.add_ssm_group_count(0)


def converted(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """As llama.cpp's converters change PLaMo 2 and 3: what norms lack is added, rates of decay are
    -exp of what is stored."""
    for ending, number in {
        **plamo3.OFFSETS,
        "q_norm": 1.0,
        "k_norm": 1.0,
        "model.norm": 1.0,
    }.items():
        if name.endswith(f"{ending}.weight"):
            return name, tensor + number
    if name.endswith(".A_log"):
        return name, -tensor.exp()
    names = {"dt_bias": "dt_proj.bias", "q_weight": "q.weight", "k_weight": "k.weight"}
    stem, _, last = name.rpartition(".")
    return f"{stem}.{names.get(last, last)}", tensor.squeeze(1) if "conv1d" in name else tensor


UNLISTED = {
    "dt_norm_weight": "ssm_dt_norm",
    "B_norm_weight": "ssm_b_norm",
    "C_norm_weight": "ssm_c_norm",
}
"""Tensors of PLaMo 2 that the library's table of names leaves out."""
WHOLE = {**plamo2.CONFIG, "full_attention_idx": [1, 3]}
"""As llama.cpp reads it: no layer has a window."""
SLIDING = {
    **{**smallthinker.CONFIG, "num_hidden_layers": 3, "tie_word_embeddings": False},
    **{"rope_layout": [0, 1, 1], "sliding_window_layout": [0, 1, 1]},
}
"""As published: the first of each four layers slides not."""
EVERY = {**arctic.CONFIG, "moe_layer_frequency": 1, "num_hidden_layers": 2}
"""Arctic's files have experts in all layers."""
FILES: dict[str, tuple[ModuleType, dict[str, Any], Callable[..., None], bool]] = {
    "grok": (grok, grok.CONFIG, of_grok, False),
    "arctic": (arctic, EVERY, sizes, True),
    "grovemoe": (grove_moe, grove_moe.CONFIG, of_grove, False),
    "plamo3": (plamo3, {**plamo3.CONFIG, "sliding_window": [12, None, 12]}, of_plamo3, False),
    "plamo2": (plamo2, WHOLE, of_plamo2, False),
    "smallthinker": (smallthinker, SLIDING, of_smallthinker, False),
    "smallthinker-whole": (smallthinker, smallthinker.SOFTMAX, of_smallthinker, False),
}
"""The reference, its config, its metadata, and whether rows of queries and keys are in pairs."""


def with_joined_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of a layer in one tensor for each matrix."""
    joined: dict[str, list[torch.Tensor]] = {}
    kept = {}
    for name, tensor in tensors.items():
        block, _, rest = name.partition("experts.")
        if rest and rest[0].isdigit():
            joined.setdefault(f"{block}experts.{rest.split('.')[1]}.weight", []).append(tensor)
        else:
            kept[name] = tensor
    return kept | {name: torch.stack(each) for name, each in joined.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_file_answers_as_its_reference(name: str, tmp_path: Path) -> None:
    reference, config, metadata, in_pairs = FILES[name]
    weights = reference.tensors(config)
    named = name.removesuffix("-whole")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", named)
    metadata(writer, config)
    table = name_table(named, config["num_hidden_layers"])
    for one, tensor in with_joined_experts(weights).items():
        if one.endswith("mlp.expert_bias"):
            continue  # converters leave it out
        if name.startswith("plamo"):
            one, tensor = converted(one, tensor)
        values = tensor.numpy()
        for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if in_pairs and f"self_attn.{part}_proj" in one:
                values = permuted(values, config[heads])
        stored = table.get_name(one, try_suffixes=(".weight", ".bias"))
        if one.rpartition(".")[2] in UNLISTED:
            stem, _, last = one.rpartition(".")
            stored = f"blk.{stem.split('.')[3]}.{UNLISTED[last]}.weight"
        assert stored is not None, one
        writer.add_tensor(stored, np.ascontiguousarray(values))
    _finish(writer)
    facts = read_model_facts(LocatedModel(path=tmp_path / "m.gguf", name="m", format="gguf"))
    spec = spec_of(tmp_path / "m.gguf", facts.config, family=facts.family, format="gguf")
    ours, _ = load(spec)
    for mine, row in zip(logits(ours), ROWS, strict=True):
        torch.testing.assert_close(
            mine, reference.logits(config, weights, row), rtol=1e-4, atol=1e-4
        )

"""GGUF files of models with Mamba's layers, alone and beside attention: the logits of the model they were written from,
under the names of the `gguf` library's table, with the conventions of llama.cpp's converters. QNT-15."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from headrace.base.config.gguf import read_gguf
from headrace.base.config.gguf_config import gguf_config
from headrace.base.errors import CheckpointError
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import read_model_facts
from tests.back.models.load.checkpoints import SIZES, _finish, _separated, name_table
from tests.back.models.load.test_gguf_blocks import gguf_spec, library, run
from tests.back.models.load.test_gguf_mixtures import ROWS, load, logits
from tests.models.oracle import oracle_logits, randomize

HEAD = {"head_dim": 16}
NEMOTRON: dict[str, Any] = {
    **{**HEAD, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2},
    "num_hidden_layers": 3,
}
ATTENTION = ("attention", "full_attention")
MULTIPLIERS: dict[str, Any] = {
    **{"attention_in_multiplier": 1.1, "attention_out_multiplier": 0.9, "key_multiplier": 0.7},
    **{"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "mlp_multipliers": [0.9, 1.3]},
    **{"ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "lm_head_multiplier": 0.5},
    "embedding_multiplier": 3.0,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """`kind`: the prefix of its classes in transformers; `metadata`: what its converter writes; `heads`: Mamba 2's."""

    kind: str
    sizes: dict[str, Any] = field(default_factory=dict)
    metadata: Callable[[gguf.GGUFWriter, Any], None]
    heads: int = 0
    groups: int = 1


def scan(
    writer: gguf.GGUFWriter, *, taps: int, state: int, inner: int, rank: int, groups: int = 0
) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(state)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(rank)
    if groups:
        writer.add_ssm_group_count(groups)


def alone(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(1 << 20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)


def mamba(writer: gguf.GGUFWriter, config: Any) -> None:
    alone(writer, config)
    inner, rank = config.intermediate_size, config.time_step_rank
    scan(writer, taps=config.conv_kernel, state=config.state_size, inner=inner, rank=rank)
    writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def mamba2(writer: gguf.GGUFWriter, config: Any) -> None:
    alone(writer, config)
    inner = config.num_heads * config.head_dim
    scan(
        writer,
        taps=config.conv_kernel,
        state=config.state_size,
        inner=inner,
        rank=config.num_heads,
        groups=config.n_groups,
    )


def attending(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(
        getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
    )


def jamba(writer: gguf.GGUFWriter, config: Any) -> None:
    attending(writer, config)
    kinds = config.layers_block_type
    writer.add_head_count_kv([config.num_key_value_heads * (kind in ATTENTION) for kind in kinds])
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    inner = config.mamba_expand * config.hidden_size
    rank, state = config.mamba_dt_rank, config.mamba_d_state
    scan(writer, taps=config.mamba_d_conv, state=state, inner=inner, rank=rank)


def falcon_h1(writer: gguf.GGUFWriter, config: Any) -> None:
    attending(writer, config)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    scan(
        writer,
        taps=config.mamba_d_conv,
        state=config.mamba_d_state,
        inner=config.mamba_d_ssm,
        rank=config.mamba_n_heads,
        groups=config.mamba_n_groups,
    )


def nemotron_h(writer: gguf.GGUFWriter, config: Any) -> None:
    attending(writer, config)
    kinds = config.layers_block_type
    writer.kv_data[0].pop(f"{writer.arch}.feed_forward_length")
    experts = "moe" in kinds
    inner = config.moe_intermediate_size if experts else config.intermediate_size
    writer.add_feed_forward_length([inner * (kind in ("mlp", "moe")) for kind in kinds])
    writer.add_head_count_kv([config.num_key_value_heads * (kind in ATTENTION) for kind in kinds])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    heads = config.mamba_num_heads
    scan(
        writer,
        taps=config.conv_kernel,
        state=config.ssm_state_size,
        inner=heads * config.mamba_head_dim,
        rank=heads,
        groups=config.n_groups,
    )
    if experts:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)


FAMILIES: dict[str, tuple[str, Family]] = {
    "mamba": (
        "mamba",
        Family(
            kind="Mamba",
            sizes={"state_size": 8, "intermediate_size": 128, "tie_word_embeddings": True},
            metadata=mamba,
        ),
    ),
    "falcon-mamba": (
        "mamba",
        Family(
            kind="FalconMamba",
            sizes={
                **{"state_size": 8, "intermediate_size": 128, "layer_norm_epsilon": 1e-6},
                "tie_word_embeddings": False,
            },
            metadata=mamba,
        ),
    ),
    "mamba2": (
        "mamba2",
        Family(
            kind="Mamba2",
            sizes={
                **{"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2},
                **{"tie_word_embeddings": False, "expand": 2},
            },
            metadata=mamba2,
            heads=8,
            groups=2,
        ),
    ),
    "jamba": (
        "jamba",
        Family(
            kind="Jamba",
            sizes={
                **{"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 3},
                **{"attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 6},
                **{"num_hidden_layers": 4, "use_mamba_kernels": False},
            },
            metadata=jamba,
        ),
    ),
    "falcon-h1": (
        "falcon-h1",
        Family(
            kind="FalconH1",
            sizes={
                **{**HEAD, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8},
                **{"mamba_n_groups": 2, "mamba_d_ssm": 128, "mamba_rms_norm": True},
                **{"mamba_norm_before_gate": False, **MULTIPLIERS, "tie_word_embeddings": False},
            },
            metadata=falcon_h1,
            heads=8,
            groups=2,
        ),
    ),
    "nemotron-h": (
        "nemotron_h",
        Family(
            kind="NemotronH",
            sizes={**NEMOTRON, "layers_block_type": ["mamba", "attention", "mlp"]},
            metadata=nemotron_h,
            heads=8,
            groups=2,
        ),
    ),
    "nemotron-h-moe": (
        "nemotron_h_moe",
        Family(
            kind="NemotronH",
            sizes={
                **{**NEMOTRON, "layers_block_type": ["mamba", "attention", "moe"]},
                **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
                **{"moe_shared_expert_intermediate_size": 48, "n_group": 1, "topk_group": 1},
                **{"routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_shared_experts": 1},
            },
            metadata=nemotron_h,
            heads=8,
            groups=2,
        ),
    ),
}


def tiny(family: Family) -> Any:
    sizes = SIZES | family.sizes
    if "layers_block_type" in sizes:
        del sizes["num_hidden_layers"]
    config = getattr(transformers, f"{family.kind}Config")(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.kind}ForCausalLM")(config).eval()
    randomize(model)
    return model


def multiplied(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Falcon-H1's multipliers become part of the weights."""
    before = config.attention_in_multiplier
    gate, down = config.mlp_multipliers
    if ".mamba.in_proj" in name:
        states = config.mamba_n_groups * config.mamba_d_state
        sizes = (config.mamba_d_ssm, config.mamba_d_ssm, states, states, config.mamba_n_heads)
        parts = zip(tensor.split(sizes), config.ssm_multipliers, strict=True)
        return torch.cat([part * scale for part, scale in parts]) * config.ssm_in_multiplier
    scales = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": before * config.key_multiplier,
        "q_proj": before,
        "v_proj": before,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return tensor * next((s for part, s in scales.items() if f".{part}." in f".{name}"), 1.0)


def converted(
    family: Family, name: str, tensor: torch.Tensor, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """As the converters leave Mamba's tensors."""
    if family.kind == "FalconH1":
        tensor = multiplied(name, tensor, config)
    if name.endswith(".A_log"):
        tensor = -tensor.exp()
    if family.heads and name.endswith((".A_log", ".D")):
        tensor = tensor[:, None]
    elif name.endswith(".dt_bias"):
        name = name.removesuffix(".dt_bias") + ".dt_proj.bias"
    elif ".conv1d.weight" in name:
        tensor = tensor.squeeze(1)
    elif name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        tensor = tensor.reshape(family.groups, -1)
    elif name.endswith("gate.e_score_correction_bias"):
        name = name.removesuffix("_bias") + ".bias"
    if family.kind == "NemotronH":
        name = name.replace("model.", "backbone.").replace("mixer.dt_proj", "mixer.dt")
        if ".mixer.experts." in name:
            name = name.replace("backbone.", "model.").replace("mixer.", "mlp.")
    yield name, tensor


def write(path: Path, architecture: str, family: Family, model: Any, quantize: Any = None) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    family.metadata(writer, config)
    writer.add_eos_token_id(2)
    names = name_table(architecture, config.num_hidden_layers)
    state = {
        f"{name}.weight" if ".mixer.experts." in name else name: tensor
        for name, tensor in model.state_dict().items()
    }
    if family.kind == "Jamba":
        state = _separated(architecture, state)
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for own, values in converted(family, name, tensor, config):
            stored = names.get_name(own, try_suffixes=(".weight", ".bias"))
            assert stored is not None, own
            stored += ".weight" if stored.endswith("ffn_norm") else ""
            raw, kind = np.ascontiguousarray(values.numpy()), None
            if quantize is not None and raw.ndim > 1 and raw.shape[-1] % 32 == 0:
                flat, kind = quantize(stored, raw.reshape(-1, raw.shape[-1]))
                raw = flat.reshape(*raw.shape[:-1], -1)
            writer.add_tensor(stored, raw, raw_dtype=kind)
    _finish(writer)
    return path


ALIKE = ("falcon-mamba", "nemotron-h")
"""Every part of these stands in another case."""


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in FAMILIES]
)
def test_files_answer_as_the_model_they_are_of(case: str, tmp_path: Path) -> None:
    architecture, family = FAMILIES[case]
    oracle = tiny(family)
    path = write(tmp_path / "m.gguf", architecture, family, oracle)
    facts = read_model_facts(LocatedModel(path=path, name="m", format="gguf"))
    assert facts.num_layers == oracle.config.num_hidden_layers and facts.logits_width == 96
    model, _ = load(gguf_spec(path))
    for mine, theirs in zip(logits(model), oracle_logits(oracle, ROWS), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("case", ["nemotron-h-moe", pytest.param("mamba", marks=pytest.mark.slow)])
def test_projections_stay_as_the_file_holds_them(case: str, tmp_path: Path) -> None:
    architecture, family = FAMILIES[case]
    oracle = tiny(family)
    path = write(tmp_path / "m.gguf", architecture, family, oracle, library("Q8_0"))
    model, report = load(gguf_spec(path))
    kept = next(one for one in report.decisions if one.field == "weights")
    assert "Q8_0" in kept.chosen
    plain, _ = load(gguf_spec(write(tmp_path / "plain.gguf", architecture, family, oracle)))
    assert torch.nn.functional.cosine_similarity(run(model), run(plain)).mean() > 0.98


def test_layers_in_no_period_are_named(tmp_path: Path) -> None:
    """Jamba's attention, of which files say where it is, and configs how often."""
    architecture, family = FAMILIES["jamba"]
    file = read_gguf(write(tmp_path / "m.gguf", architecture, family, tiny(family)))
    tensors = {**file.tensors, "blk.2.attn_q.weight": file.tensors["blk.1.attn_q.weight"]}
    with pytest.raises(CheckpointError, match=r"attn_q are in the layers \[1, 2\], in no period"):
        gguf_config(replace(file, tensors=tensors))


def test_heads_that_do_not_divide_are_named(tmp_path: Path) -> None:
    architecture, family = FAMILIES["mamba2"]
    file = read_gguf(write(tmp_path / "m.gguf", architecture, family, tiny(family)))
    file.metadata["mamba2.ssm.inner_size"] = 129
    with pytest.raises(CheckpointError, match=r"ssm\.inner_size is 129.*a multiple of 8 heads"):
        gguf_config(file)

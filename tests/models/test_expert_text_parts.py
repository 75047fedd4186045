"""Text parts of mixtures that see or hear as published, which transformers has no class for (MOD-02)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.base.errors import CheckpointError
from tests.models import test_published_names as published
from tests.models.oracle import (
    BLOCK_TOKENS,
    load_ours,
    model_spec,
    oracle_logits,
)
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import LENGTHS, SIZES, compare


def hold(
    folder: Path, config: dict[str, Any], within: str = "", others: tuple[str, ...] = ()
) -> None:
    """The checkpoint with its tensors below `within`, beside those of other parts."""
    tensors = {within + name: one for name, one in load_file(folder / "model.safetensors").items()}
    tensors |= {name: torch.zeros(2, 2) for name in others}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def agree(folder: Path, rows: list[list[int]], theirs: list[torch.Tensor]) -> None:
    ours = load_ours(model_spec(folder))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, theirs, 1e-4)


@pytest.mark.slow
def test_mimo_v2_omni_has_the_logits_of_its_text_model(tmp_path: Path) -> None:
    oracle = published.publish("mimo-v2", tmp_path, architectures=["MiMoV2OmniForCausalLM"])
    config = json.loads((tmp_path / "config.json").read_text())
    others = ("model.mtp.layers.0.eh_proj.weight", "visual.merger.weight", "audio_encoder.weight")
    hold(tmp_path, config, others=(*others, "speech_embeddings.0.weight"))
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    agree(tmp_path, rows, oracle_logits(oracle, rows))


QKV_BLOCK = (16, 32)


def in_sections(
    weight_OI: torch.Tensor, sections: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3, the scales of its blocks, which begin anew with each section, and what both stand for."""
    values, scales, plain = [], [], []
    for part_OI in weight_OI.chunk(sections):
        rows, columns = (-(-size // by) for size, by in zip(part_OI.shape, QKV_BLOCK, strict=True))
        spread = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                block = part_OI[row * 16 : row * 16 + 16, column * 32 : column * 32 + 32]
                spread[row, column] = block.abs().max() / 448
        scales.append(spread)
        whole = spread.repeat_interleave(16, 0).repeat_interleave(32, 1)
        whole = whole[: part_OI.shape[0], : part_OI.shape[1]]
        values.append((part_OI / whole).to(torch.float8_e4m3fn))
        plain.append(values[-1].float() * whole)
    return torch.cat(values), torch.cat(scales), torch.cat(plain)


def in_one_tensor(tensors: dict[str, torch.Tensor], sections: int) -> dict[str, torch.Tensor]:
    """Queries, keys and values as so many ranks of tensor parallelism have them, in e4m3; in
    `tensors` then what these numbers stand for."""
    kept = dict(tensors)
    for query in [name for name in tensors if name.endswith("q_proj.weight")]:
        names = [query.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
        parts = [tensors[name].chunk(sections) for name in names]
        shares = [torch.cat(ranks) for ranks in zip(*parts, strict=True)]
        values, scales, plain = in_sections(torch.cat(shares), sections)
        one = query.replace("q_proj", "qkv_proj")
        kept |= {one: values, one + "_scale_inv": scales}
        rows = [len(part[0]) for part in parts]
        split = [share.split(rows) for share in plain.chunk(sections)]
        for name, shards in zip(names, zip(*split, strict=True), strict=True):
            tensors[name] = torch.cat(shards)
            kept.pop(name)
    return kept


def test_mimo_v2_5_has_its_logits_from_one_tensor_of_the_attention_in_fp8(tmp_path: Path) -> None:
    """Sections are those of layers without windows, and no multiple of a block (MOD-02)."""
    stored = {
        **{"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(QKV_BLOCK)},
        "ignored_layers": [f"model.layers.{i}.self_attn.o_proj" for i in range(3)]
        + [f"model.layers.{i}.mlp" for i in range(3)],
    }
    fused = {"attention_projection_layout": "fused_qkv", "quantization_config": stored}
    oracle = published.publish("mimo-v2", tmp_path, **fused)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(in_one_tensor(tensors, sections=2), tmp_path / "model.safetensors")
    oracle.load_state_dict(
        {name: one for name, one in tensors.items() if "self_attn" in name}, strict=False
    )
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    cpu = torch.device("cpu")
    ours, _ = load_model(model_spec(tmp_path), mesh=Mesh(), device=cpu, block_tokens=BLOCK_TOKENS)
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(oracle, rows), 1e-4)


def test_mimo_v2_5_in_one_tensor_of_floats_is_refused(tmp_path: Path) -> None:
    published.publish("mimo-v2", tmp_path, attention_projection_layout="fused_qkv")
    with pytest.raises(CheckpointError, match="has no FP8 in blocks") as caught:
        load_ours(model_spec(tmp_path))
    assert caught.value.field == "attention_projection_layout"

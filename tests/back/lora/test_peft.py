"""Adapter folders that do not fit are refused with the names and numbers of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.back.layers.adapter_shares import AdaptedModule
from headrace.back.lora.peft import read_adapter, read_config
from headrace.base.errors import CheckpointError
from tests.back.lora.adapters import write_adapter

SIZES = {f"model.layers.{i}.self_attn.{name}": (12, 8) for i in range(2) for name in ("q_proj", "v_proj")}  # fmt: skip
MODULES = {
    name: AdaptedModule(inputs=inputs, outputs=outputs, parts=(0,), pieces=())
    for name, (outputs, inputs) in SIZES.items()
}
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def change(folder: Path, **keys: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def rewrite(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def refusal(folder: Path, **more: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        read_adapter(folder, MODULES, **{"max_rank": 8, **more})
    return error.value.message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tmp_path, SIZES)
    return tmp_path


def test_matrices_and_scales_are_those_of_the_files(tmp_path: Path) -> None:
    written = write_adapter(
        tmp_path, SIZES, rank=4, alpha=6, use_rslora=True, dtype=torch.bfloat16,
        rank_pattern={"layers.1.self_attn.q_proj": 2}, alpha_pattern={"v_proj": 3},
    )  # fmt: skip
    adapter = read_adapter(tmp_path, MODULES, max_rank=4)
    assert adapter.rank == 4 and adapter.pairs.keys() == SIZES.keys()
    for name, (a, b) in written.pairs.items():
        pair = adapter.pairs[name]
        assert torch.equal(pair.a_RI, a) and torch.equal(pair.b_OR, b)
        assert pair.scale == pytest.approx(written.scales[name])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("use_dora", True, "DoRA"),
        ("bias", "lora_only", "bias is 'lora_only'"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("layer_replication", [[0, 2]], "layer_replication"),
        ("target_parameters", ["experts"], "target_parameters"),
        ("init_lora_weights", "pissa", "changes the base's weights"),
        ("peft_type", "IA3", "peft_type"),
        ("r", 0, "r is 0"),
        ("lora_alpha", "high", "lora_alpha is 'high'"),
        ("use_magic", True, "use_magic"),
        ("rank_pattern", {"(a+)+q_proj": 2}, "regular expression"),
        ("alpha_pattern", {"q_proj": None}, "q_proj"),
    ],
)
def test_a_key_that_asks_for_what_is_not_done_is_refused_by_name(
    folder: Path, key: str, value: Any, words: str
) -> None:
    change(folder, **{key: value})
    assert words in refusal(folder)


def test_an_unknown_key_that_is_off_asks_for_nothing(folder: Path) -> None:
    change(folder, use_magic=False, magic_config=None, magic_names=[])
    assert read_config(folder).rank == 4


def test_a_rank_above_the_limit_is_refused_with_both_numbers(folder: Path) -> None:
    assert "has rank 4, at most 3 are served (--max-lora-rank)" in refusal(folder, max_rank=3)


def test_a_missing_half_a_wrong_shape_and_a_layer_left_out_are_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(f"{Q0}.lora_B.weight"))
    assert f"{Q0}.lora_B.weight is missing" in refusal(folder)
    rewrite(folder, lambda tensors: tensors.update({f"{Q0}.lora_B.weight": torch.ones(13, 4)}))
    assert "has the shape [13, 4], of this base and rank 4 it is [12, 4]" in refusal(folder)
    rewrite(folder, lambda tensors: [tensors.pop(f"{Q0}.lora_{half}.weight") for half in "AB"])
    assert "layers.0.self_attn.q_proj: target_modules names them" in refusal(folder)
    change(folder, layers_to_transform=[1])
    assert len(read_adapter(folder, MODULES, max_rank=8).pairs) == 3


def test_a_layer_the_model_does_not_have_is_named(folder: Path) -> None:
    extra = {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 8)}
    extra["base_model.model.lm_head.lora_B.weight"] = torch.ones(12, 4)
    rewrite(folder, lambda tensors: tensors.update(extra))
    assert "lm_head: this model has no linear layer of that name" in refusal(folder)


def test_tensors_that_are_no_matrices_of_an_adapter_are_named(folder: Path) -> None:
    extra = {f"{Q0}.lora_magnitude_vector.weight": torch.ones(12)}
    rewrite(folder, lambda tensors: tensors.update(extra))
    assert "lora_magnitude_vector" in refusal(folder)


def test_what_slots_have_no_room_for_is_refused_with_the_option(folder: Path) -> None:
    change(folder, use_dora=True)
    assert "need --lora-kinds magnitudes" in refusal(folder)
    assert "q_proj: use_dora is set, its magnitudes are missing" in refusal(
        folder, kinds=["magnitudes"]
    )
    change(folder, use_dora=False)
    table = "base_model.model.model.embed_tokens.lora_embedding_"
    extra = {f"{table}A": torch.ones(4, 9), f"{table}B": torch.ones(8, 4)}
    rewrite(folder, lambda tensors: tensors.update(extra))
    assert "model.embed_tokens: this model has no" in refusal(folder)
    assert "of tables and experts: --lora-kinds" in refusal(folder)


def test_a_number_that_is_not_finite_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors[f"{Q0}.lora_A.weight"].fill_(torch.nan))
    assert f"{Q0}.lora_A.weight holds NaN or Inf" in refusal(folder)


def test_pickles_are_never_read(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "adapter_model.bin is a pickle and never read" in refusal(folder)


def test_a_truncated_file_and_an_absent_configuration_are_refused(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    assert "truncated" in refusal(folder)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json" in refusal(folder)

"""What a built model asks of a loader: global shapes, checkpoint names, and weights held once after finish_load."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from headrace.back.models.registry import FAMILIES, build_model, family_of
from headrace.back.parallel.mesh import Mesh
from headrace.base.errors import CheckpointError
from tests.models.oracle import BLOCK_TOKENS, fill, load_ours, model_spec, save_oracle
from tests.models.paged import PagedRun, random_rows
from tests.models.test_parity import tiny_config


def test_pieces_cover_each_parameter_exactly_once(tmp_path: Path) -> None:
    save_oracle(tiny_config("qwen2"), tmp_path)
    model = build_model(
        model_spec(tmp_path), mesh=Mesh(), device=torch.device("cpu"), block_tokens=BLOCK_TOKENS
    )
    for param in model.weights.params:
        sizes = [torch.Size(piece.shape).numel() for piece in param.pieces]
        assert sum(sizes) == torch.Size(param.shape).numel()
        ends = [piece.offset + piece.shape[piece.dim] for piece in param.pieces]
        assert [piece.offset for piece in param.pieces] == [0, *ends[:-1]]


def test_finish_load_gives_up_the_plain_weights(tmp_path: Path) -> None:
    """REG-124: after packing nobody but the layer holds a weight."""
    save_oracle(tiny_config("llama"), tmp_path)
    model = build_model(
        model_spec(tmp_path, dtype="bfloat16"),
        mesh=Mesh(),
        device=torch.device("cpu"),
        block_tokens=BLOCK_TOKENS,
    )
    fill(model, tmp_path)
    model.finish_load()
    gc.collect()
    assert all(param.tensor is None for param in model.weights.params)


def test_a_model_that_is_not_finished_refuses_to_run(tmp_path: Path) -> None:
    save_oracle(tiny_config("llama"), tmp_path)
    model = build_model(
        model_spec(tmp_path), mesh=Mesh(), device=torch.device("cpu"), block_tokens=BLOCK_TOKENS
    )
    run = PagedRun(model, random_rows(97, (3,)), block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    with pytest.raises(AssertionError, match="before finish_load"):
        run.step([(0, 3)])


def test_decisions_name_the_kernel_of_every_op(tmp_path: Path) -> None:
    save_oracle(tiny_config("llama"), tmp_path)
    fields = {decision.field for decision in load_ours(model_spec(tmp_path)).decisions}
    ops = (
        "linear",
        "rms_norm",
        "add_rms_norm",
        "fused_linear",
        "rope",
        "qk_rope_write",
        "attention",
    )
    assert {f"kernel.{op}" for op in ops} <= fields


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_act": "quick_snail"}, "hidden_act"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_key(
    tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    save_oracle(tiny_config("llama"), tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_ours(model_spec(tmp_path, **changes))
    assert caught.value.field == field


def test_every_family_of_the_table_can_be_imported() -> None:
    for name in FAMILIES:
        assert callable(FAMILIES.load(name))


def test_an_unknown_architecture_goes_to_the_fallback() -> None:
    assert family_of({"architectures": ["XLNetLMHeadModel"]}) == "transformers"

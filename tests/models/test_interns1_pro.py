"""Intern-S1-Pro (MOD-17), which transformers has not: an independent reference of its text, behind transformers' eyes
of Qwen3-VL."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.base.errors import CheckpointError
from tests.front.media.pictures import picture
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, randomize
from tests.models.paged import random_rows, teacher_forced
from tests.models.sight import agree, processed, read_spec, write_checkpoint
from tests.models.tensor_parallel_rank import LENGTHS as RANK_LENGTHS
from tests.models.test_parity import LENGTHS, compare
from tests.rank_processes import run_ranks
from tests.references import interns1_pro as reference

VISION: dict[str, Any] = {
    **{"num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 48},
    **{"num_position_embeddings": 36, "hidden_act": "gelu_pytorch_tanh", "in_channels": 3},
}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "min_pixels": 64, "max_pixels": 4096}


def checkpoint(folder: Path, **text: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """As it is published; the tensors of the text, and its eyes."""
    said = {**copy.deepcopy(reference.TEXT), **text}
    weights = reference.tensors(said)
    whole = transformers.Qwen3VLMoeVisionConfig(**VISION, deepstack_visual_indexes=[])
    torch.manual_seed(5)
    eyes = transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionModel(whole)
    randomize(eyes.eval())
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in weights.items()
    }
    tensors |= {f"model.visual.{name}": tensor for name, tensor in eyes.state_dict().items()}
    config = {
        **{"architectures": ["InternS1ProForConditionalGeneration"], "model_type": "interns1_pro"},
        **{"text_config": said, "vision_config": VISION, "tie_word_embeddings": False},
        **{"image_token_id": 100, "video_token_id": 101, "torch_dtype": "float32"},
        **{"vision_start_token_id": 102, "vision_end_token_id": 103},
    }
    write_checkpoint(folder, tensors, config, files={"preprocessor_config": HALF})
    return weights, eyes


@pytest.mark.parametrize(
    "rope", [{}, {"fope_sep_head": False, "num_inv_freq": 3}], ids=["by-heads", "one-for-all"]
)
def test_its_text_has_the_logits_of_the_reference(rope: dict[str, Any], tmp_path: Path) -> None:
    scaling = {**reference.TEXT["rope_scaling"], **rope}
    weights, _ = checkpoint(tmp_path, rope_scaling=scaling)
    rows = random_rows(99, LENGTHS)
    text = {**reference.TEXT, "rope_scaling": scaling}
    wide = {name: tensor.double() for name, tensor in weights.items()}
    theirs = [reference.logits(text, wide, row).float() for row in rows]
    ours = load_ours(model_spec(tmp_path))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, theirs, 1e-4)


class Text:
    """The reference as a decoder of transformers."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def get_input_embeddings(self) -> Any:
        table = self.weights["model.embed_tokens.weight"]
        return lambda ids: table[ids].clone()

    def decode(self, ids: torch.Tensor, x_1TE: torch.Tensor) -> torch.Tensor:
        return reference.decoded(reference.TEXT, self.weights, x_1TE[0])[None]


def test_pictures_are_seen_at_positions_in_one_axis(tmp_path: Path) -> None:
    weights, eyes = checkpoint(tmp_path)
    pictures = [picture(40, 24, 0), picture(16, 32, 1)]
    inputs = [one.inputs[0] for one in processed(read_spec(tmp_path), pictures)]
    rows = []
    for one in inputs:
        pixels = torch.from_numpy(np.asarray(one.rows)).float()
        pixels = (pixels.view(len(pixels), 1, 3, -1) / 255 - 0.5) / 0.5
        patches = pixels.expand(-1, 2, -1, -1).transpose(1, 2).flatten(1)
        with torch.inference_mode():
            grid = torch.tensor([[1, *one.grid[-2:]]])
            rows.append(eyes(patches, grid_thw=grid).pooler_output)
    text = Text(weights)
    agree(tmp_path, text, pictures, torch.cat(rows), decode=text.decode)


@pytest.mark.slow
def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    run_ranks("tests.models.tensor_parallel_rank", 2, tmp_path / "store", tmp_path)
    rows = random_rows(model_spec(tmp_path).logits_width, RANK_LENGTHS)
    alone = teacher_forced(
        load_ours(model_spec(tmp_path)), rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32
    )
    for rank in range(2):
        compare(torch.load(tmp_path / f"rank{rank}.pt"), alone, 1e-4)


@pytest.mark.parametrize(
    ("key", "value"), [("num_experts_per_tok", 4), ("num_experts", 11), ("router_n_groups", "x")]
)
def test_what_does_not_divide_is_refused_by_key(key: str, value: Any, tmp_path: Path) -> None:
    checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load_ours(model_spec(tmp_path))
    assert caught.value.field == key

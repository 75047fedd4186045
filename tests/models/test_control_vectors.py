"""Control vectors of GGUF files against transformers with the same vectors added by hooks behind
its layers (BEY-42)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch

from headrace.base.config.residual import ControlSpec
from headrace.base.config.tree import ModelOptions, Options
from headrace.base.errors import ConfigError
from headrace.launch.control_vectors import control_spec
from tests.launch.test_resolve import MODEL
from tests.models.oracle import load_ours, model_spec, oracle_logits, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import SIZES, BothModels, compare_last_tokens, tiny_config

WIDTH = SIZES["hidden_size"]


def vectors(path: Path, seed: int, layers: tuple[int, ...], width: int = WIDTH) -> np.ndarray:
    """Writes a direction for each layer; all of them, [3, E], zeros where there is none."""
    made = np.zeros((3, width), np.float32)
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(layers))
    for layer in layers:
        direction = rng.standard_normal(width).astype(np.float32)
        writer.add_tensor(f"direction.{layer}", direction)
        if layer < 3:
            made[layer] = direction
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def steered_logits(oracle: Any, added_LE: torch.Tensor, rows: list[list[int]]) -> Any:
    """What transformers says with these added behind its layers."""
    handles = [
        layer.register_forward_hook(lambda _, __, out, add_E=add_E: out + add_E)
        for layer, add_E in zip(oracle.model.layers, added_LE, strict=True)
    ]
    logits = oracle_logits(oracle, rows)
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize(("case", "first", "last"), [("llama", 1, 2), ("gemma2", 2, 2)])
def test_logits_are_those_of_transformers_with_the_same_added(
    case: str, first: int, last: int, tmp_path: Path
) -> None:
    oracle = save_oracle(tiny_config(case), tmp_path)
    one = vectors(tmp_path / "one.gguf", 1, (1, 2))
    two = vectors(tmp_path / "two.gguf", 2, (2,))
    added_LE = torch.from_numpy(0.5 * one - 1.25 * two)
    added_LE[:first] = 0
    files = ((str(tmp_path / "one.gguf"), 0.5), (str(tmp_path / "two.gguf"), -1.25))
    control = ControlSpec(files=files, first=first, last=last)
    rows = random_rows(SIZES["vocab_size"], (21, 9))
    theirs = steered_logits(oracle, added_LE, rows)
    ours = load_ours(msgspec.structs.replace(model_spec(tmp_path), control=control))
    compare_last_tokens(BothModels(rows, theirs, ours))
    plain = teacher_forced(
        load_ours(model_spec(tmp_path)), rows, block_tokens=8, dtype=torch.float32
    )
    assert (plain[0] - theirs[0]).abs().max() > 0.1  # it matters


def control(*files: str, layers: str | None = None) -> ControlSpec | None:
    options = ModelOptions(control_vectors=files, control_vector_layers=layers)
    return control_spec(Options(model=options), msgspec.structs.replace(MODEL, num_layers=3))


def test_options_say_factors_and_layers(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    vectors(path, 1, (1,))
    assert control() is None
    assert control(str(path)) == ControlSpec(files=((str(path), 1.0),), first=1, last=2)
    assert control(f"{path}:-0.5", layers="2-2") == ControlSpec(
        files=((str(path), -0.5),), first=2, last=2
    )


@pytest.mark.parametrize(
    ("files", "layers", "message"),
    [
        (("none.gguf",), None, "none.gguf: no such file"),
        (("{}:nan",), None, "v.gguf:nan: a scale of at most 1e"),
        (("{}",), "0-2", "'0-2': FIRST-LAST within 1-2"),
        (("{}",), "2-3", "'2-3': FIRST-LAST within 1-2"),
        (("{}",), "2", "'2': FIRST-LAST"),
        ((), "1-2", "there is no --control-vectors"),
    ],
)
def test_wrong_options_are_refused(
    files: tuple[str, ...], layers: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "v.gguf"
    vectors(path, 1, (1,))
    with pytest.raises(ConfigError, match=message):
        control(*(file.format(path) for file in files), layers=layers)


@pytest.mark.parametrize(
    ("layers", "width", "first", "message"),
    [
        ((1,), 16, 1, "directions of 16 numbers; the model's hidden size is 48"),
        ((1,), WIDTH, 2, "no direction of layers 2 to 2"),
        ((0, 1), WIDTH, 1, "direction.0: tensors of control vectors are direction.N"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    layers: tuple[int, ...], width: int, first: int, message: str, tmp_path: Path
) -> None:
    save_oracle(tiny_config("llama"), tmp_path)
    vectors(tmp_path / "v.gguf", 1, layers, width)
    spec = ControlSpec(files=((str(tmp_path / "v.gguf"), 1.0),), first=first, last=2)
    with pytest.raises(ConfigError, match=message):
        load_ours(msgspec.structs.replace(model_spec(tmp_path), control=spec))

"""New weights in a loaded model equal a fresh load of them, bit by bit, whatever became of the old
ones (ENG-19): packed, quantized, converted, shared by two layers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from headrace.back.models.load import load_model
from headrace.back.models.load.safetensors import SafetensorsSource
from headrace.back.parallel.mesh import Mesh
from headrace.back.transfer.direct import DirectUpdate
from headrace.back.transfer.sources import TensorSource
from headrace.back.transfer.update import WeightUpdate
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import InvalidRequest
from tests.models.oracle import BLOCK_TOKENS, model_spec, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import CASES, tiny_config

CPU = torch.device("cpu")
FORMS = [("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int4")]
SHORT = [("gemma3", *FORMS[1]), ("qwen3", *FORMS[2]), ("deepseek-v3", *FORMS[0])]


def loaded(spec: ModelSpec) -> tuple[Any, WeightUpdate]:
    model, report = load_model(spec, mesh=Mesh(), device=CPU, block_tokens=BLOCK_TOKENS)
    assert report.origin is not None
    return model, WeightUpdate(report.origin, CPU)


def logits(model: Any, dtype: str) -> list[torch.Tensor]:
    rows = random_rows(97, (21, 9))
    return teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=getattr(torch, dtype))


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "before", tmp_path / "after"


def saved(case: str, folders: tuple[Path, Path]) -> None:
    for seed, folder in enumerate(folders):
        save_oracle(tiny_config(case), folder, seed=11 + seed)


def check_whole(case: str, dtype: str, quantization: str | None, folders: Any) -> None:
    saved(case, folders)
    before, after = (
        replace(model_spec(folder, dtype=dtype), quantization=quantization) for folder in folders
    )
    model, update = loaded(before)
    old, new = logits(model, dtype), logits(loaded(after)[0], dtype)
    assert not equal(old, new)
    update.push(SafetensorsSource(folders[1]), last=True)
    assert update.num_bytes > 0
    assert equal(logits(model, dtype), new)
    if (direct := update.direct()) is not None:
        DirectUpdate(direct, CPU).push(SafetensorsSource(folders[0]), last=True)
        assert equal(logits(model, dtype), old)


@pytest.mark.parametrize(("case", "dtype", "quantization"), SHORT)
def test_a_whole_checkpoint_takes_the_place_of_another(
    case: str, dtype: str, quantization: str | None, folders: tuple[Path, Path]
) -> None:
    check_whole(case, dtype, quantization, folders)


@pytest.mark.slow
def test_what_onednn_has_packed_takes_new_weights_too() -> None:
    """Without native kernels; PyTorch knows no storage of such weights."""
    name = f"{__file__}::test_a_whole_checkpoint_takes_the_place_of_another[gemma3-bfloat16-None]"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", name]
    subprocess.run(command, check=True, env={**os.environ, "HEADRACE_NATIVE": "0"})


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "quantization"), FORMS)
@pytest.mark.parametrize("case", CASES)
def test_every_family_takes_new_weights(
    case: str, dtype: str, quantization: str | None, folders: tuple[Path, Path]
) -> None:
    check_whole(case, dtype, quantization, folders)


def test_a_later_update_needs_no_second_model_and_checks_as_much(
    folders: tuple[Path, Path],
) -> None:
    """Its norms are kept in float32, one more than the checkpoint says."""
    saved("gemma3", folders)
    model, update = loaded(model_spec(folders[0], dtype="bfloat16"))
    old = logits(model, "bfloat16")
    update.push(SafetensorsSource(folders[1]), last=True)
    direct, new = update.direct(), logits(model, "bfloat16")
    assert direct is not None
    tensors = load_file(folders[0] / "model.safetensors")
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    one = DirectUpdate(direct, CPU)
    with pytest.raises(InvalidRequest, match="holds NaN or Inf"):
        one.push(TensorSource({**tensors, "model.norm.weight": broken["model.norm.weight"]}, "it"))
    assert equal(logits(model, "bfloat16"), new) and one.num_bytes == 0
    one = DirectUpdate(direct, CPU)
    one.push(TensorSource(tensors, "it"))
    assert equal(logits(model, "bfloat16"), old)
    with pytest.raises(InvalidRequest, match="comes twice"):
        one.push(TensorSource(tensors, "it"))


def half(folder: Path, *endings: str) -> TensorSource:
    tensors = load_file(folder / "model.safetensors")
    return TensorSource({n: t for n, t in tensors.items() if n.endswith(endings)}, "memory")


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_norms_alone_are_replaced_in_whichever_form_the_rest_is(
    quantization: str | None, folders: tuple[Path, Path]
) -> None:
    """They lie in kernels that multiply by weights which do not come."""
    saved("qwen3", folders)
    tensors = [load_file(folder / "model.safetensors") for folder in folders]
    norms = {name: tensor for name, tensor in tensors[1].items() if "norm" in name}
    save_file({**tensors[0], **norms}, folders[1] / "model.safetensors")
    before, after = (replace(model_spec(folder), quantization=quantization) for folder in folders)
    model, update = loaded(before)
    update.push(half(folders[1], "norm.weight"), last=True)
    assert equal(logits(model, "float32"), logits(loaded(after)[0], "float32"))


def test_a_part_of_a_packed_weight_is_refused_before_anything_changes(
    folders: tuple[Path, Path],
) -> None:
    saved("qwen3", folders)
    model, update = loaded(replace(model_spec(folders[0]), quantization="int8"))
    old = logits(model, "float32")
    with pytest.raises(InvalidRequest, match="give all or none"):
        update.push(half(folders[1], "norm.weight", "k_proj.weight"), last=True)
    assert equal(logits(model, "float32"), old) and update.num_bytes == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buckets_in_any_order_make_the_same_model(dtype: str, folders: tuple[Path, Path]) -> None:
    """The norm before a linear layer comes after it."""
    saved("llama-biased-tied", folders)
    before, after = (model_spec(folder, dtype=dtype) for folder in folders)
    model, update = loaded(before)
    tensors = list(load_file(folders[1] / "model.safetensors").items())[::-1]
    for start in range(0, len(tensors), 3):
        update.push(TensorSource(dict(tensors[start : start + 3]), "memory"))
    update.finish()
    assert equal(logits(model, dtype), logits(loaded(after)[0], dtype))

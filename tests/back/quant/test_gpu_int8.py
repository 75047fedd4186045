"""Weights of 8-bit integers as GPUs keep them: the numbers, and a model made of them. QNT-01."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.back.kernels.linear_int8.layout import Int8Weight, dequantize
from headrace.back.models.load.asked import with_asked_rows
from headrace.back.models.load.gguf_dequant import DEQUANTIZE
from headrace.back.parallel.param import Param, StoredRows, WeightPiece, copies
from headrace.back.quant.activations import inputs_of
from headrace.back.quant.gpu_int8 import (
    BYTE_TYPES,
    INT8_SCHEMES,
    OnlineInt8Weight,
    StoredInt8Weight,
    stored_int8,
)
from headrace.base.errors import CheckpointError
from tests.back.quant.formats.stored_weights import open_weight
from tests.back.quant.test_gpu import INPUTS, OUTPUTS, param_of

COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}


@pytest.mark.parametrize("columns", [slice(0, INPUTS), slice(64, INPUTS)])
def test_a_rank_keeps_its_numbers_as_they_are_stored(columns: slice, tmp_path: Path) -> None:
    torch.manual_seed(3)
    values = torch.randint(-128, 128, (OUTPUTS, INPUTS), dtype=torch.int8)
    scales = torch.rand(OUTPUTS, 1) / 50
    param = param_of(columns)
    stored = {"m.weight": values, "m.weight_scale": scales}
    with closing(open_weight(tmp_path, COMPRESSED, stored)) as source:
        entry = source.entries["m.weight"]
        assert stored_int8(param, {"m.weight": entry.scheme}) == entry.scheme == "int8"
        weight = StoredInt8Weight(param, entry.scheme)
        for copy in copies(param):
            assert param.on_groups is not None
            assert param.on_groups(copy, *source.groups("m.weight", copy.source)) is None
    taken = weight.take()
    assert torch.equal(dequantize(taken), (values.float() * scales)[:, columns])
    assert param.packed_bytes == taken.num_bytes and param.tensor is None
    with pytest.raises(AssertionError, match="taken before"):
        weight.take()


def merged(folder: Path, *, symmetric: bool, **inputs: tuple[float, int | None]) -> Int8Weight:
    """Two projections as one weight: of each the scale and the zero point of its inputs."""
    folder.mkdir()
    weights = COMPRESSED["config_groups"]["group_0"]["weights"]
    asked = {
        "num_bits": 8,
        "type": "int",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": symmetric,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": asked}
    config = {**COMPRESSED, "config_groups": {"group_0": group}}
    half, stored = OUTPUTS // 2, {}
    for part, (scale, zero) in inputs.items():
        stored[f"{part}.weight"] = torch.ones(half, INPUTS, dtype=torch.int8)
        stored[f"{part}.weight_scale"] = torch.ones(half, 1)
        stored[f"{part}.input_scale"] = torch.tensor([scale])
        if zero is not None:
            stored[f"{part}.input_zero_point"] = torch.tensor([zero], dtype=torch.int8)
    pieces = tuple(
        WeightPiece(name=f"{part}.weight", shape=(half, INPUTS), offset=place * half)
        for place, part in enumerate(inputs)
    )
    param = replace(param_of(slice(0, INPUTS)), pieces=pieces)
    with closing(open_weight(folder, config, stored)) as source:
        kept = with_asked_rows({name: e.scheme for name, e in source.entries.items()}, source)
        name = stored_int8(param, kept)
        assert name is not None
        if symmetric:
            told = "int8, the stored scale, from 65 tokens of a step on"
            assert inputs_of(name, "cuda") == told
        weight = StoredInt8Weight(param, name)
        for copy in copies(param):
            assert param.on_groups is not None
            param.on_groups(copy, *source.groups(copy.name, copy.source))
    return weight.take()


def test_stored_scales_of_inputs_are_kept_with_their_zero_points(tmp_path: Path) -> None:
    """QNT-17. Of projections that are multiplied together those of the range that holds both."""
    one = merged(tmp_path / "one", symmetric=True, q=(0.25, None), k=(0.75, 0))
    assert one.inputs_1 is not None and one.inputs_1.tolist() == [0.75] and one.zero_1 is None
    same = merged(tmp_path / "same", symmetric=False, q=(0.3, -7), k=(0.3, -7))
    assert same.inputs_1 is not None and same.zero_1 is not None
    assert same.inputs_1.tolist() == [pytest.approx(0.3)] and same.zero_1.tolist() == [-7]
    both = merged(tmp_path / "both", symmetric=False, q=(0.25, -128), k=(0.25, -2))
    assert both.inputs_1 is not None and both.zero_1 is not None  # 0 .. 63.75 and -31.5 .. 32.25
    assert float(both.inputs_1) == pytest.approx(95.25 / 255) and float(both.zero_1) == -44
    plain = merged(tmp_path / "plain", symmetric=False, q=(0.25, None), k=(0.25, None))
    assert plain.int8_rows and plain.inputs_1 is None  # a scale without its zero point is none
    with pytest.raises(CheckpointError, match=r"q\.weight.*input_zero_point.*3.*symmetric"):
        merged(tmp_path / "zero", symmetric=True, q=(0.25, 3), k=(0.25, 0))
    with pytest.raises(CheckpointError, match=r"k\.weight.*input_scale.*0\.0.*positive"):
        merged(tmp_path / "bad", symmetric=True, q=(0.25, None), k=(0.0, None))


@pytest.mark.parametrize("type", BYTE_TYPES)
def test_blocks_of_gguf_keep_their_numbers(type: str) -> None:
    """In an order of rows of the format's own."""
    kind = BYTE_TYPES[type]
    inputs = 2 * kind.block
    generator = np.random.default_rng(5)
    data = generator.integers(0, 256, (OUTPUTS, inputs // kind.block, kind.size), dtype=np.uint8)
    last = type in ("Q6_K", "Q3_K")
    for at in (kind.size - 2,) if last else (0, 2) if kind.minima else (0,):  # float16 numbers
        if type == "IQ1_M":  # whose scale, 0.5, lies in four parts
            for byte, part in zip((49, 51, 53, 55), (0x00, 0x00, 0x80, 0x30), strict=True):
                data[..., byte] = data[..., byte] & 15 | part
            break
        scales = generator.random((OUTPUTS, inputs // kind.block, 1)).astype(np.float16)
        data[..., at : at + 2] = scales.view(np.uint8)
    order = np.random.default_rng(6).permutation(OUTPUTS)
    plain = DEQUANTIZE[type](data[order].reshape(-1, kind.size)).reshape(OUTPUTS, inputs)
    param = Param(
        name="m", shape=(OUTPUTS, inputs), dtype=torch.float32,
        pieces=(WeightPiece(name="m.weight", shape=(OUTPUTS, inputs)),),
        tensor=torch.empty(OUTPUTS, inputs),
    )  # fmt: skip
    assert stored_int8(param, {"m.weight": type}) == type
    weight = StoredInt8Weight(param, type)
    (copy,) = copies(param)
    assert param.on_blocks is not None
    assert param.on_blocks(copy, StoredRows(data.reshape(OUTPUTS, -1), order)) is None
    torch.testing.assert_close(dequantize(weight.take()), torch.from_numpy(plain))


def test_a_cut_group_an_odd_size_and_a_changed_weight_become_floats() -> None:
    kept = {"m.weight": "int8-g64"}
    assert stored_int8(param_of(slice(0, 256)), kept) == "int8-g64"
    assert stored_int8(param_of(slice(0, 160)), kept) is None
    assert stored_int8(param_of(slice(0, 136)), {"m.weight": "int8"}) is None
    assert stored_int8(param_of(slice(0, 256)), {"m.weight": "int4"}) is None
    assert stored_int8(param_of(slice(0, 160)), {"m.weight": "Q6_K"}) is None
    halved = param_of(slice(0, 256))
    halved.pieces = (WeightPiece(name="m.weight", shape=(OUTPUTS, INPUTS), scale=0.5),)
    assert stored_int8(halved, kept) is None


@pytest.mark.parametrize("name", INT8_SCHEMES)
def test_a_full_parameter_becomes_integers_by_its_scheme(name: str) -> None:
    param, scheme = param_of(slice(0, 256)), INT8_SCHEMES[name]
    plain = torch.randn(OUTPUTS, 256, generator=torch.Generator().manual_seed(3))
    plain[5] = 0
    weight = OnlineInt8Weight(param, scheme)
    param.present().copy_(plain)
    param.filled()
    kept = weight.take()
    values, scales, _ = scheme.quantize(plain)
    spread = torch.arange(256) // (scheme.group or 256)
    expected = values.float() * scales[:, spread]
    assert torch.equal(dequantize(kept), expected)
    assert param.packed_bytes == kept.num_bytes

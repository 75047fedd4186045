"""Weights of 8-bit integers as GPUs keep them: the numbers, and a model made of them. QNT-01."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.back.kernels.linear_int8.layout import dequantize
from headrace.back.models.load.gguf_dequant import DEQUANTIZE
from headrace.back.parallel.param import Param, StoredRows, WeightPiece, copies
from headrace.back.quant.gpu_int8 import (
    BYTE_TYPES,
    INT8_SCHEMES,
    OnlineInt8Weight,
    StoredInt8Weight,
    stored_int8,
)
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

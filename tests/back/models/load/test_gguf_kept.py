"""GGUF's narrow types stay numbers in groups on CPUs: the packed weight, and logits. QNT-03 QNT-17."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import headrace.back.kernels.linear_blocks.layout as linear_blocks
import headrace.back.kernels.linear_quant.layout as linear_quant
from headrace.back.kernels.linear_blocks.layout import BlockWeight
from headrace.back.kernels.native import library as native
from headrace.back.models import load as loading
from headrace.back.models.load import load_model
from headrace.back.models.load.gguf import GGUFSource
from headrace.back.models.load.gguf_dequant import DEQUANTIZE
from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.param import Copy, Param, WeightPiece
from headrace.back.quant.formats.floats4 import E2M1
from headrace.back.quant.gguf_kept import KEPT_TYPES
from headrace.back.quant.kept import PANEL_SCHEMES, KeptWeight
from headrace.base.config.gguf_types import TYPES
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import read_model_facts
from tests.back.models.load.checkpoints import tiny_model, write_gguf
from tests.back.models.load.test_gguf_blocks import WIDE, gguf_spec, run

DOWN = "model.layers.1.mlp.down_proj.weight"
NUMBERS = {kind.name: number for number, kind in TYPES.items()}
HALF_AT = {"TQ1_0": 52, "TQ2_0": 64}
"""Where the scale lies, if not first."""
CPU = torch.device("cpu")


def random_rows(name: str, rows: int, columns: int) -> np.ndarray:
    """Random blocks with small scales."""
    kind = TYPES[NUMBERS[name]]
    generator = np.random.default_rng(len(name) + rows)
    raw = generator.integers(0, 256, (rows, columns // kind.block, kind.size), dtype=np.uint8)
    if name == "NVFP4":
        raw[..., :4] = generator.integers(8, 60, raw[..., :4].shape)
    elif name == "IQ1_M":  # a float16 in the upper halves of four words
        scales = (generator.random(raw.shape[:2]) * 0.01).astype(np.float16).view(np.uint16)
        for i in range(4):
            nibble = (scales >> 4 * i & 15).astype(np.uint8)
            raw[..., 49 + 2 * i] = raw[..., 49 + 2 * i] & 15 | nibble << 4
    else:
        at = HALF_AT.get(name, 0)
        scales = generator.random((*raw.shape[:2], 1)).astype(np.float16) * np.float16(0.01)
        raw[..., at : at + 2] = scales.view(np.uint8)
    return raw.reshape(rows, -1)


def file_of(path: Path, name: str, *, matrix: str = "", scale: float | None = None) -> Path:
    """All matrices of layers, or one, in that type."""

    def quantize(stored: str, values: np.ndarray) -> tuple[np.ndarray, Any]:
        if not stored.startswith(matrix or "blk."):
            return values, None
        return random_rows(name, *values.shape), NUMBERS[name]

    def extra(writer: gguf.GGUFWriter) -> None:
        if scale is not None:
            writer.add_tensor(f"{matrix.removesuffix('.weight')}.scale", np.float32([scale]))

    return write_gguf(path, "qwen2", tiny_model("qwen2", **WIDE), quantize=quantize, extra=extra)


@pytest.mark.parametrize("name", KEPT_TYPES)
def test_values_times_scales_are_what_blocks_stand_for(name: str) -> None:
    raw = random_rows(name, 4, 256).reshape(-1, TYPES[NUMBERS[name]].size)
    values, scales = KEPT_TYPES[name].unpack(raw)
    if name == "NVFP4":
        values = np.float32(E2M1)[values]
    wide = values.reshape(*scales.shape, -1) * scales[..., None]
    np.testing.assert_array_equal(wide.reshape(len(raw), -1), DEQUANTIZE[name](raw))


@pytest.mark.parametrize("name", [one for one in KEPT_TYPES if one != "Q2_0"])
@pytest.mark.parametrize("cut", [(slice(0, 256), slice(0, 256)), (slice(8, 72), slice(0, 256))])
def test_packed_numbers_are_those_of_the_file(
    name: str, cut: tuple[slice, slice], tmp_path: Path
) -> None:
    scale = 0.5 if name == "NVFP4" else None
    path = file_of(tmp_path / "m.gguf", name, matrix="blk.1.ffn_down.weight", scale=scale)
    source = GGUFSource(path)
    assert source.entries[DOWN].scheme == KEPT_TYPES[name].scheme
    shape = (cut[0].stop - cut[0].start, 256)
    groups, numbers = source.groups(DOWN, cut)
    piece = WeightPiece(name=DOWN, shape=(256, 256))
    param = Param(
        name="m", shape=shape, dtype=torch.float32, pieces=(piece,), tensor=torch.empty(shape)
    )
    kept = KeptWeight(param, PANEL_SCHEMES[KEPT_TYPES[name].scheme])
    whole = (slice(0, shape[0]), slice(0, 256))
    assert param.on_groups is not None
    copy = Copy(name=DOWN, shape=(256, 256), source=cut, target=whole)
    assert param.on_groups(copy, groups, numbers) is None
    param.filled()
    packed, rows = kept.take(), torch.arange(shape[0])
    if isinstance(packed, BlockWeight):
        back = linear_blocks.dequantize_rows(packed.segments[0], rows)
    else:
        back = linear_quant.dequantize_rows(packed, rows)
    raw = random_rows(name, 256, 256).reshape(-1, TYPES[NUMBERS[name]].size)
    plain = torch.from_numpy(DEQUANTIZE[name](raw).reshape(256, 256)[cut]) * (scale or 1.0)
    torch.testing.assert_close(back, plain, rtol=0.005, atol=1e-6)


@pytest.mark.skipif(
    native.unsupported("cpu", torch.float32) is not None, reason="no native kernels"
)
@pytest.mark.parametrize("name", ["IQ1_M", "IQ2_XS", "IQ3_S", "TQ1_0", "NVFP4"])
def test_logits_are_those_of_the_widened_weights(name: str, tmp_path: Path) -> None:
    spec = gguf_spec(file_of(tmp_path / "m.gguf", name))
    model, report = load_model(spec, mesh=Mesh(), device=CPU, block_tokens=16)
    (weights,) = (one for one in report.decisions if one.field == "weights")
    assert weights.why.startswith("read as the file holds them"), weights
    kept = run(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "unsupported", lambda device, dtype: "is not built")
        widened, _ = load_model(spec, mesh=Mesh(), device=CPU, block_tokens=16)
    wide = run(widened)
    assert (kept - wide).norm() < 0.05 * wide.norm()  # inputs are rounded to int8


@pytest.mark.skipif(
    native.unsupported("cpu", torch.float32) is not None, reason="no native kernels"
)
@pytest.mark.parametrize("name", ["IQ2_S", "IQ3_S", "TQ2_0"])
def test_the_plan_counts_what_narrow_types_take_once_loaded(name: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.gguf", name)
    facts = read_model_facts(LocatedModel(path=path, name="m", format="gguf"))
    model, _ = load_model(gguf_spec(path), mesh=Mesh(), device=CPU, block_tokens=16)
    taken = sum(
        param.packed_bytes or math.prod(param.shape) * param.dtype.itemsize
        for param in model.weights.params
    )
    assert taken == pytest.approx(facts.weight_bytes, rel=0.05)


@pytest.mark.skipif(
    native.unsupported("cpu", torch.float32) is not None, reason="no native kernels"
)
@pytest.mark.parametrize("name", ["IQ2_S", "IQ3_XXS", "NVFP4"])
def test_experts_stay_quantized_too(name: str, tmp_path: Path) -> None:
    oracle = tiny_model("qwen3moe", hidden_size=256, moe_intermediate_size=256)
    count = oracle.config.num_experts

    def quantize(stored: str, values: np.ndarray) -> tuple[np.ndarray, Any]:
        if "_exps" not in stored:
            return values, None
        return random_rows(name, *values.shape), NUMBERS[name]

    def extra(writer: gguf.GGUFWriter) -> None:
        if name == "NVFP4":
            scales = np.linspace(0.5, 1.5, count, dtype=np.float32)
            writer.add_tensor("blk.0.ffn_up_exps.scale", scales)

    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", oracle, quantize=quantize, extra=extra)
    model, report = load_model(gguf_spec(path), mesh=Mesh(), device=CPU, block_tokens=16)
    (weights,) = (one for one in report.decisions if one.field == "weights")
    layers = oracle.config.num_hidden_layers
    assert weights.chosen == f"{3 * layers * count} {name}", weights
    kept = run(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "unsupported", lambda device, dtype: "is not built")
        widened, _ = load_model(gguf_spec(path), mesh=Mesh(), device=CPU, block_tokens=16)
    wide = run(widened)
    assert (kept - wide).norm() < 0.05 * wide.norm()

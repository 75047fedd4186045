"""Weights of e4m3 numbers as GPUs keep them: the numbers, and a model made of them (whole models on a GPU:
tests/back/test_cuda_fp8.py). QNT-06."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import headrace.back.models.load as loading
from headrace.back.kernels.linear_fp8.layout import Fp8Weight, dequantize
from headrace.back.kernels.linear_fp8.op import LinearFp8Problem
from headrace.back.layers.scope import Scope
from headrace.back.models.load import load_model
from headrace.back.models.load.asked import with_asked_rows
from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.param import Param, WeightPiece, copies
from headrace.back.parallel.shard import Part, Shard, Span
from headrace.back.platforms.detect import FAKES
from headrace.back.quant.activations import inputs_of
from headrace.back.quant.gpu import (
    FP8_STORED_SCALE,
    OnlineFp8Weight,
    StoredFp8Weight,
    stored_scheme,
)
from headrace.back.quant.kept import BLOCKS, MICROSCALED
from headrace.back.quant.scheme import SCHEMES
from headrace.base.errors import CheckpointError
from headrace.launch.performance_model import ModelCost
from headrace.launch.plan import (
    build_without_memory,
    cost_of,
    kernels_on_absent_device,
    stored_on_absent_device,
)
from tests.back.quant.formats.stored_weights import open_weight
from tests.models.oracle import BLOCK_TOKENS, model_spec, oracle_logits, save_oracle
from tests.models.paged import teacher_forced
from tests.models.test_parity import tiny_config

E4M3 = torch.float8_e4m3fn
OUTPUTS, INPUTS = 200, 320


def tensor_scale(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, the one scale, and what they stand for."""
    scale = weight.abs().amax() / 448
    values = (weight / scale).to(E4M3)
    return values, scale, values.float() * scale


def block_scales(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of blocks of 128 x 128."""
    rows, columns = weight.shape
    scales = torch.rand(-(-rows // 128), -(-columns // 128)) / 100 + 0.01
    spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    values = (weight / spread).clamp(-448, 448).to(E4M3)
    return values, scales, values.float() * spread


def micro_scales(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of 32 inputs, powers of two by their exponents (QNT-02)."""
    exponents = torch.randint(115, 122, (weight.shape[0], weight.shape[1] // 32))
    spread = torch.exp2(exponents - 127.0).repeat_interleave(32, 1)
    values = (weight / spread).clamp(-448, 448).to(E4M3)
    return values, exponents.to(torch.uint8), values.float() * spread


FORMATS = {
    "micro": (
        micro_scales,
        "weight_scale",
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        MICROSCALED,
    ),
    "tensor": (tensor_scale, "weight_scale", {"quant_method": "fp8"}, "fp8"),
    "blocks": (
        block_scales,
        "weight_scale_inv",
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        BLOCKS,
    ),
}


def param_of(columns: slice) -> Param:
    """A rank's inputs of a weight."""
    size = columns.stop - columns.start
    part = Part("inputs", INPUTS, INPUTS, uneven=True)
    return Param(
        name="m",
        shape=(OUTPUTS, INPUTS),
        dtype=torch.float32,
        pieces=(WeightPiece(name="m.weight", shape=(OUTPUTS, INPUTS)),),
        shard=Shard(axis="tp", dim=1, parts=(part,)),
        spans=(Span(start=columns.start, size=size, local=0),),
        tensor=torch.empty(OUTPUTS, size),
    )


@pytest.mark.parametrize("columns", [slice(0, INPUTS), slice(128, INPUTS), slice(0, 256)])
@pytest.mark.parametrize("format", FORMATS)
def test_a_rank_keeps_its_numbers_as_they_are_stored(
    format: str, columns: slice, tmp_path: Path
) -> None:
    quantize, leaf, config, scheme = FORMATS[format]
    torch.manual_seed(3)
    values, scales, plain = quantize(torch.randn(OUTPUTS, INPUTS))
    stored = {"m.weight": values, f"m.{leaf}": scales}
    param = param_of(columns)
    with closing(open_weight(tmp_path, config, stored)) as source:
        entry = source.entries["m.weight"]
        assert stored_scheme(param, {"m.weight": entry.scheme}) == entry.scheme == scheme
        weight = StoredFp8Weight(param, scheme)
        for copy in copies(param):
            assert param.on_groups is not None
            assert param.on_groups(copy, *source.groups("m.weight", copy.source)) is None
    taken = weight.take()
    assert torch.equal(dequantize(taken), plain[:, columns])
    assert param.packed_bytes == taken.num_bytes and param.tensor is None
    with pytest.raises(AssertionError, match="taken before"):
        weight.take()


def test_a_cut_group_an_odd_size_and_a_changed_weight_become_floats() -> None:
    kept = {"m.weight": BLOCKS}
    assert stored_scheme(param_of(slice(0, 256)), kept) == BLOCKS
    assert stored_scheme(param_of(slice(0, 160)), kept) is None
    assert stored_scheme(param_of(slice(0, 136)), {"m.weight": "fp8"}) is None
    assert stored_scheme(param_of(slice(0, 160)), {"m.weight": "int4"}) is None
    halved = param_of(slice(0, 256))
    halved.pieces = (WeightPiece(name="m.weight", shape=(OUTPUTS, INPUTS), scale=0.5),)
    assert stored_scheme(halved, kept) is None


def test_a_damaged_scale_is_told_by_its_row(tmp_path: Path) -> None:
    quantize, leaf, config, scheme = FORMATS["blocks"]
    values, scales, _ = quantize(torch.randn(OUTPUTS, INPUTS))
    scales[1, 2] = float("nan")
    param = param_of(slice(0, INPUTS))
    with closing(
        open_weight(tmp_path, config, {"m.weight": values, f"m.{leaf}": scales})
    ) as source:
        StoredFp8Weight(param, scheme)
        (copy,) = copies(param)
        assert param.on_groups is not None
        assert param.on_groups(copy, *source.groups("m.weight", copy.source)) == 128


def test_a_stored_scale_of_inputs_is_kept_and_must_be_a_positive_number(tmp_path: Path) -> None:
    """QNT-17. The largest of those of projections that are multiplied together."""
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }
    half = torch.randn(OUTPUTS // 2, INPUTS).to(torch.float8_e4m3fn)
    stored = {f"{part}.weight": half.clone() for part in "qk"}
    stored |= {f"{part}.weight_scale": torch.full((1,), 0.5) for part in "qk"}
    scales = {"q.input_scale": torch.tensor([0.25]), "k.input_scale": torch.tensor([0.75])}
    pieces = tuple(
        WeightPiece(
            name=f"{part}.weight", shape=(OUTPUTS // 2, INPUTS), offset=place * OUTPUTS // 2
        )
        for place, part in enumerate("qk")
    )

    def filled(folder: Path, held: dict[str, torch.Tensor]) -> Fp8Weight:
        folder.mkdir()
        param = replace(param_of(slice(0, INPUTS)), pieces=pieces)
        with closing(open_weight(folder, config, {**stored, **held})) as source:
            names = {name: entry.scheme for name, entry in source.entries.items()}
            kept = with_asked_rows(names, source)
            scheme = stored_scheme(param, kept)
            assert scheme is not None
            weight = StoredFp8Weight(param, scheme)
            for copy in copies(param):
                assert param.on_groups is not None
                param.on_groups(copy, *source.groups(copy.name, copy.source))
        return weight.take()

    held = filled(tmp_path / "both", scales).input_scale_1
    assert held is not None and held.tolist() == [0.75]
    assert filled(tmp_path / "none", {}).input_scale_1 is None
    assert filled(tmp_path / "one", {"q.input_scale": torch.ones(1)}).input_scale_1 is None
    with pytest.raises(CheckpointError, match=r"q\.weight.*input_scale.*0\.0.*positive"):
        filled(tmp_path / "bad", {**scales, "q.input_scale": torch.zeros(1)})
    assert (
        inputs_of(FP8_STORED_SCALE, "cuda") == "e4m3, the stored scale, from 2 tokens of a step on"
    )


def test_a_full_parameter_becomes_e4m3_with_a_scale_for_each_output() -> None:
    param = param_of(slice(0, INPUTS))
    plain = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(3))
    plain[5] = 0
    weight = OnlineFp8Weight(param)
    param.present().copy_(plain)
    param.filled()
    assert param.tensor is None
    taken = weight.take()
    bits, scales, _ = SCHEMES["fp8"].quantize(plain)
    assert torch.equal(taken.values_OI.view(torch.int8), bits)
    assert torch.equal(taken.scales_OG, scales) and param.packed_bytes == taken.num_bytes


def quantized_folder(folder: Path, format: str) -> Any:
    """A checkpoint with quantized layers; the transformers model with the weights that are stored."""
    config = tiny_config("qwen3")
    config.update({"hidden_size": 256, "intermediate_size": 384, "head_dim": 64})
    oracle = save_oracle(config, folder)
    quantize, leaf, quantization, _ = FORMATS[format]
    stored, back = load_file(folder / "model.safetensors"), oracle.state_dict()
    for name, weight in list(stored.items()):
        if ".layers." in name and weight.dim() == 2:
            stored[name], scales, back[name] = quantize(weight)
            stored[name.removesuffix("weight") + leaf] = scales
    whole = {name: value.contiguous() for name, value in stored.items()}
    save_file(whole, folder / "model.safetensors")
    oracle.load_state_dict(back)
    file = folder / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization})
    )
    return oracle


@pytest.mark.parametrize("format", FORMATS)
def test_layers_multiply_by_what_is_stored(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of a GPU by the definition of their op, which a CPU takes; no tokens become e4m3."""
    oracle = quantized_folder(tmp_path, format)

    def quantized_gemm(scope: Scope, weight: Param) -> Param | StoredFp8Weight:
        scheme = stored_scheme(weight, scope.stored)
        return weight if scheme is None else StoredFp8Weight(weight, scheme)

    monkeypatch.setattr(Scope, "quantized_gemm", quantized_gemm)
    monkeypatch.setattr(LinearFp8Problem, "quantized_from", 1 << 30)
    monkeypatch.setattr(loading, "unsupported", lambda device, dtype: None)
    model, report = load_model(
        model_spec(tmp_path),
        mesh=Mesh(),
        device=torch.device("cpu"),
        block_tokens=BLOCK_TOKENS,
    )
    (weights,) = (one for one in report.decisions if one.field == "weights")
    assert weights.chosen.startswith("21 8-bit"), weights
    assert "kernel.linear_fp8" in {one.field for one in report.decisions}
    rows = [list(range(3, 30)), [5, 1, 2]]
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for row, expected in zip(ours, oracle_logits(oracle, rows), strict=True):
        torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-3)


def test_a_plan_counts_the_bytes_that_a_gpu_keeps(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    quantized_folder(tmp_path, "blocks")
    spec, device = model_spec(tmp_path, dtype="bfloat16"), FAKES["h200"]
    stored = stored_on_absent_device(spec, device)

    def cost(stored: dict[str, str]) -> ModelCost:
        model = build_without_memory(spec, block_tokens=16, planned="cuda", stored=stored)
        return cost_of(model, dtype=torch.bfloat16)

    kept, floats = cost(dict(stored)), cost({})
    assert kept.multiplied == floats.multiplied
    saved = floats.weight_bytes - kept.weight_bytes
    layers = floats.weight_bytes - 2 * floats.head_bytes  # embedding and head
    assert 0.45 * layers < saved < 0.5 * layers
    chosen = {d.field: d.chosen for d in kernels_on_absent_device(spec, device, block_tokens=16)}
    assert chosen["kernel.linear_fp8"] == "triton"


def test_a_weight_that_is_quantized_when_full_takes_no_memory_before() -> None:
    param = param_of(slice(0, INPUTS))
    OnlineFp8Weight(param)
    assert param.tensor is None
    (copy,) = copies(param)
    target = param.target(copy)
    assert param.tensor is not None and target.shape == (OUTPUTS, INPUTS)
    target.fill_(1)
    param.filled()
    assert param.tensor is None
    with pytest.raises(AssertionError, match="taken before"):
        param.present()

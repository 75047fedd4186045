"""Weights of 4-bit integers as GPUs keep them: the numbers, and a model made of them (whole models on a GPU:
tests/back/test_cuda_int4.py). QNT-01."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import headrace.back.models.load as loading
from headrace.back.kernels.linear_int4.layout import (
    Int4Weight,
    dequantize,
    empty,
    packed_bytes,
    write,
)
from headrace.back.layers.scope import Scope
from headrace.back.models.load import load_model
from headrace.back.models.load.gguf_dequant import DEQUANTIZE
from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.param import Param, StoredRows, WeightPiece, copies
from headrace.back.platforms.detect import FAKES
from headrace.back.quant.gguf_int4 import BLOCK_TYPES
from headrace.back.quant.gpu_int4 import (
    INT4_SCHEMES,
    OnlineInt4Weight,
    StoredInt4Weight,
    quantize_int4,
    stored_int4,
)
from headrace.back.quant.scheme import SCHEMES
from headrace.base.errors import CheckpointError
from headrace.launch.plan import (
    build_without_memory,
    cost_of,
    kernels_on_absent_device,
    stored_on_absent_device,
)
from tests.back.quant.formats.stored_weights import golden, open_weight
from tests.back.quant.test_gpu import INPUTS, OUTPUTS, param_of
from tests.models.oracle import BLOCK_TOKENS, model_spec, oracle_logits, save_oracle
from tests.models.paged import teacher_forced
from tests.models.test_parity import tiny_config

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]


def gptq(weight: torch.Tensor, group: int, *, symmetric: bool) -> Stored:
    """Members of a GPTQ weight of version 1, and what they stand for."""
    values, scales, zeros = rounded(weight, group, symmetric=symmetric)
    spread = torch.arange(weight.shape[1]) // group
    plain = (values - zeros[:, spread]) * scales[:, spread]
    return {
        "qweight": packed(values.t(), dim=0),
        "qzeros": packed((zeros.t() - 1) & 15, dim=1),
        "scales": scales.t().contiguous(),
        "g_idx": spread.int(),
    }, plain


def gptq_by_activity(weight: torch.Tensor, group: int, *, symmetric: bool) -> Stored:
    """The same with act-order: inputs belong to groups by an index, one for all weights of a size."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(9))
    members, plain = gptq(weight[:, order], group, symmetric=symmetric)
    back = order.argsort()
    values = unpacked(members["qweight"], dim=0)[back]
    return members | {
        "qweight": packed(values, dim=0),
        "g_idx": members["g_idx"][back].contiguous(),
    }, plain[:, back]


def awq(weight: torch.Tensor, group: int, *, symmetric: bool) -> Stored:
    """The same of an AWQ weight."""
    values, scales, zeros = rounded(weight, group, symmetric=symmetric)
    spread = torch.arange(weight.shape[1]) // group
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(numbers: torch.Tensor) -> torch.Tensor:
        return packed(numbers.unflatten(1, (-1, 8))[..., order].flatten(1), dim=1)

    return {
        "qweight": interleaved(values.t()),
        "qzeros": interleaved(zeros.t()),
        "scales": scales.t().contiguous(),
    }, (values - zeros[:, spread]) * scales[:, spread]


def compressed(weight: torch.Tensor, group: int, *, symmetric: bool) -> Stored:
    """The same of compressed-tensors' pack-quantized."""
    values, scales, zeros = rounded(weight, group, symmetric=symmetric)
    spread = torch.arange(weight.shape[1]) // group
    members = {
        "weight_packed": packed(values, dim=1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        members["weight_zero_point"] = packed(zeros, dim=0)
    return members, (values - zeros[:, spread]) * scales[:, spread]


def rounded(
    weight: torch.Tensor, group: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers 0 .. 15, scales that bfloat16 holds, and zero points."""
    groups = -(-weight.shape[1] // group)
    scales = (torch.rand(len(weight), groups) / 20 + 0.02).bfloat16().float()
    zeros = torch.full_like(scales, 8).int()
    if not symmetric:
        zeros = torch.randint(1, 16, scales.shape).int()
    spread = torch.arange(weight.shape[1]) // group
    values = (weight / scales[:, spread] + zeros[:, spread]).round().clamp(0, 15).int()
    return values, scales, zeros


def packed(values: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Eight values to a word along a dimension, lowest first; the last word filled with zeros."""
    moved = values.movedim(dim, -1)
    moved = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % 8)).unflatten(-1, (-1, 8))
    words = (moved.long() << torch.arange(8) * 4).sum(-1)
    return (
        torch.where(words >= 1 << 31, words - (1 << 32), words).int().movedim(-1, dim).contiguous()
    )


def unpacked(words: torch.Tensor, *, dim: int) -> torch.Tensor:
    """`packed` undone."""
    nibbles = words.movedim(dim, -1)[..., None] >> torch.arange(8) * 4 & 15
    return nibbles.flatten(-2).movedim(-1, dim)


GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False}
FORMATS: dict[str, tuple[Callable[..., Stored], bool, int, dict[str, Any], str]] = {
    "gptq": (gptq, True, 64, {**GPTQ, "group_size": 64, "sym": True}, "int4-g64"),
    "gptq-order": (
        gptq_by_activity, True, 64, {**GPTQ, "desc_act": True, "group_size": 64, "sym": True},
        "int4-g64",
    ),
    "gptq-asym": (gptq, False, 32, {**GPTQ, "group_size": 32, "sym": False}, "int4-asym"),
    "awq": (
        awq, False, 64,
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        "int4-asym-g64",
    ),
    "compressed": (
        compressed, True, 32,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                        "group_size": 32,
                    },
                }
            },
        },
        "int4",
    ),
}  # fmt: skip


def taken(param: Param, name: str, fill: Callable[[Param], None]) -> Int4Weight:
    """What a parameter that is kept so becomes."""
    weight = StoredInt4Weight(param, name)
    fill(param)
    param.filled()
    kept = weight.take()
    assert param.packed_bytes == kept.num_bytes and param.tensor is None
    with pytest.raises(AssertionError, match="taken before"):
        weight.take()
    return kept


@pytest.mark.parametrize("columns", [slice(0, INPUTS), slice(64, INPUTS), slice(0, 256)])
@pytest.mark.parametrize("format", FORMATS)
def test_a_rank_keeps_its_numbers_as_they_are_stored(
    format: str, columns: slice, tmp_path: Path
) -> None:
    quantize, symmetric, group, config, scheme = FORMATS[format]
    torch.manual_seed(3)
    members, plain = quantize(torch.randn(OUTPUTS, INPUTS) / 5, group, symmetric=symmetric)
    param = param_of(columns)
    stored = {f"m.{name}": value for name, value in members.items()}
    with closing(open_weight(tmp_path, config, stored)) as source:
        entry = source.entries["m.weight"]
        if config.get("desc_act"):
            is_whole = columns == slice(0, INPUTS)
            scheme = entry.scheme
            assert scheme.startswith("int4-g64+order-")
            assert stored_int4(param, {"m.weight": scheme}) == (scheme if is_whole else None)
            if not is_whole:
                return
        assert stored_int4(param, {"m.weight": entry.scheme}) == entry.scheme == scheme

        def fill(param: Param) -> None:
            for copy in copies(param):
                assert param.on_groups is not None
                assert param.on_groups(copy, *source.groups("m.weight", copy.source)) is None

        weight = taken(param, scheme, fill)
    torch.testing.assert_close(dequantize(weight, torch.float32), plain[:, columns])


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_blocks_of_gguf_keep_their_numbers(type: str) -> None:
    """In an order of rows of the format's own, and of a rank's columns."""
    kind = BLOCK_TYPES[type]
    inputs = 2 * kind.block
    generator = np.random.default_rng(5)
    data = generator.integers(0, 256, (OUTPUTS, inputs // kind.block, kind.size), dtype=np.uint8)
    first = {"Q2_K": 80, "TQ1_0": 52, "TQ2_0": 64}.get(type, 0)
    for at in (first, first + 2):  # scales are float16
        scales = generator.random((OUTPUTS, inputs // kind.block, 1)).astype(np.float16)
        if at == first or type not in ("Q4_0", "Q1_0", "Q2_0", "TQ1_0", "TQ2_0"):
            data[..., at : at + 2] = scales.view(np.uint8)
    order = np.random.default_rng(6).permutation(OUTPUTS)
    plain = DEQUANTIZE[type](data[order].reshape(-1, kind.size)).reshape(OUTPUTS, inputs)
    param = Param(
        name="m", shape=(OUTPUTS, inputs), dtype=torch.float32,
        pieces=(WeightPiece(name="m.weight", shape=(OUTPUTS, inputs)),),
        tensor=torch.empty(OUTPUTS, inputs),
    )  # fmt: skip
    assert stored_int4(param, {"m.weight": type}) == type

    def fill(param: Param) -> None:
        (copy,) = copies(param)
        assert param.on_blocks is not None
        assert param.on_blocks(copy, StoredRows(data.reshape(OUTPUTS, -1), order)) is None

    weight = taken(param, type, fill)
    torch.testing.assert_close(dequantize(weight, torch.float32), torch.from_numpy(plain))


def test_an_order_of_inputs_is_told_by_a_mark(tmp_path: Path) -> None:
    """One in which all is in place is none; with groups of unequal sizes the weight becomes floats; two orders do not
    lie side by side. REG: act-order."""
    members, _ = gptq(torch.randn(OUTPUTS, INPUTS), 64, symmetric=True)
    config = {**GPTQ, "desc_act": True, "group_size": 64, "sym": True}
    schemes = []
    mixed = members["g_idx"][torch.randperm(INPUTS)]
    other = mixed.flip(0)
    unequal = torch.where(mixed == 1, 0, mixed)
    for place, index in enumerate((members["g_idx"], mixed, other, unequal)):
        folder = tmp_path / str(place)
        folder.mkdir()
        stored = {f"m.{name}": value for name, value in (members | {"g_idx": index}).items()}
        with closing(open_weight(folder, config, stored)) as source:
            schemes.append(source.entries["m.weight"].scheme)
    assert schemes[0] == "int4-g64" and schemes[3] == ""
    assert schemes[1] != schemes[2] and schemes[1].startswith("int4-g64+order-")
    both = param_of(slice(0, INPUTS))
    sizes = (OUTPUTS // 2, INPUTS)
    both.pieces = tuple(WeightPiece(name=name, shape=sizes) for name in ("a", "b"))
    assert stored_int4(both, {"a": schemes[1], "b": schemes[1]}) == schemes[1]
    assert stored_int4(both, {"a": schemes[1], "b": schemes[2]}) is None


def test_a_cut_group_an_odd_size_and_a_changed_weight_become_floats() -> None:
    kept = {"m.weight": "int4-g64"}
    assert stored_int4(param_of(slice(0, 256)), kept) == "int4-g64"
    assert stored_int4(param_of(slice(0, 160)), kept) is None
    assert stored_int4(param_of(slice(0, 136)), {"m.weight": "int4-whole"}) is None
    assert stored_int4(param_of(slice(0, 256)), {"m.weight": "int8"}) is None
    assert stored_int4(param_of(slice(0, 160)), {"m.weight": "Q4_K"}) is None
    halved = param_of(slice(0, 256))
    halved.pieces = (WeightPiece(name="m.weight", shape=(OUTPUTS, INPUTS), scale=0.5),)
    assert stored_int4(halved, kept) is None


def test_a_damaged_scale_is_told_by_its_row(tmp_path: Path) -> None:
    quantize, symmetric, group, config, scheme = FORMATS["compressed"]
    members, _ = quantize(torch.randn(OUTPUTS, INPUTS), group, symmetric=symmetric)
    members["weight_scale"][77, 2] = float("nan")
    param = param_of(slice(0, INPUTS))
    stored = {f"m.{name}": value for name, value in members.items()}
    with closing(open_weight(tmp_path, config, stored)) as source:
        StoredInt4Weight(param, scheme)
        (copy,) = copies(param)
        assert param.on_groups is not None
        assert param.on_groups(copy, *source.groups("m.weight", copy.source)) == 77


@pytest.mark.parametrize("case", ["nvfp4", "mxfp4"])
def test_e2m1_numbers_are_kept_with_scales_that_bfloat16_holds(case: str, tmp_path: Path) -> None:
    """As a public package wrote them."""
    config, stored, expected = golden(case)
    outputs, inputs = expected.shape
    whole = (WeightPiece(name="module.weight", shape=(outputs, inputs)),)
    param = Param(
        name="m", shape=(outputs, inputs), dtype=torch.bfloat16, pieces=whole,
        tensor=torch.empty(outputs, inputs, dtype=torch.bfloat16),
    )  # fmt: skip
    with closing(open_weight(tmp_path, config, stored)) as source:
        scheme = source.entries["module.weight"].scheme
        assert scheme == case == stored_int4(param, {"module.weight": scheme})

        def fill(param: Param) -> None:
            (copy,) = copies(param)
            assert param.on_groups is not None
            assert param.on_groups(copy, *source.groups("module.weight", copy.source)) is None

        weight = taken(param, scheme, fill)
    found = dequantize(weight, torch.float32)
    torch.testing.assert_close(found, expected.float(), rtol=2**-8, atol=0)


ONLINE = [name for name in INT4_SCHEMES if name in SCHEMES]


@pytest.mark.parametrize("name", ONLINE)
def test_a_full_parameter_becomes_integers_by_its_scheme(name: str) -> None:
    param, scheme = param_of(slice(0, INPUTS)), INT4_SCHEMES[name]
    plain = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(3))
    plain[5] = 0
    weight = OnlineInt4Weight(param, scheme)
    param.present().copy_(plain)
    param.filled()
    kept = weight.take()
    values, scales, minima = scheme.quantize(plain)
    spread = torch.arange(INPUTS) // scheme.group
    expected = values.float() * scales[:, spread]
    if minima is not None:
        expected -= minima[:, spread]
    assert torch.equal(dequantize(kept, torch.float32), expected)
    assert param.packed_bytes == kept.num_bytes


@pytest.mark.parametrize("outputs, inputs", [(64, 128), (130, 304)])
@pytest.mark.parametrize("group, minima", [(32, True), (64, False), (128, True), (None, True)])
def test_the_layout_is_undone(outputs: int, inputs: int, group: int | None, minima: bool) -> None:
    """Written in two pieces."""
    torch.manual_seed(1)
    groups = 1 if group is None else -(-inputs // group)
    values = torch.randint(0, 16, (outputs, inputs))
    scales, lows = torch.rand(2, outputs, groups).bfloat16()
    weight = empty(outputs, inputs, group, minima=minima, dtype=torch.bfloat16, device="cpu")
    for rows in (slice(0, 64), slice(64, outputs)):
        if rows.start < outputs:
            write(
                weight, rows.start // 64, values[rows], scales[rows], lows[rows] if minima else None
            )
    spread = torch.arange(inputs) // (group or inputs)
    expected = values.float() - (0 if minima else 8)
    expected = expected * scales.float()[:, spread]
    if minima:
        expected = expected - lows.float()[:, spread]
    assert torch.equal(dequantize(weight, torch.float32), expected)
    sizes = packed_bytes(outputs, inputs, group, minima=minima, dtype=torch.bfloat16)
    assert sizes == weight.num_bytes


def quantized_folder(folder: Path, format: str) -> Any:
    """A checkpoint with quantized layers; the transformers model with the weights that are stored."""
    config = tiny_config("qwen3")
    config.update({"hidden_size": 256, "intermediate_size": 384, "head_dim": 64})
    oracle = save_oracle(config, folder)
    quantize, symmetric, group, quantization, _ = FORMATS[format]
    stored, back = load_file(folder / "model.safetensors"), oracle.state_dict()
    for name, weight in list(stored.items()):
        if ".layers." in name and weight.dim() == 2:
            members, back[name] = quantize(stored.pop(name), group, symmetric=symmetric)
            stored |= {name.removesuffix("weight") + leaf: one for leaf, one in members.items()}
    save_file({n: v.contiguous() for n, v in stored.items()}, folder / "model.safetensors")
    oracle.load_state_dict(back)
    file = folder / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization})
    )
    return oracle


@pytest.mark.parametrize("format", ["gptq-asym", "compressed", "gptq-order"])
def test_layers_multiply_by_what_is_stored(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of a GPU by the definition of their op, which a CPU takes."""
    oracle = quantized_folder(tmp_path, format)

    def quantized_gemm(scope: Scope, weight: Param) -> Param | StoredInt4Weight:
        scheme = stored_int4(weight, scope.stored)
        return weight if scheme is None else StoredInt4Weight(weight, scheme)

    monkeypatch.setattr(Scope, "quantized_gemm", quantized_gemm)
    monkeypatch.setattr(loading, "unsupported", lambda device, dtype: None)
    model, report = load_model(
        model_spec(tmp_path), mesh=Mesh(), device=torch.device("cpu"), block_tokens=BLOCK_TOKENS
    )
    (weights,) = (one for one in report.decisions if one.field == "weights")
    assert weights.chosen.startswith("21 4-bit"), weights
    assert "kernel.linear_int4" in {one.field for one in report.decisions}
    rows = [list(range(3, 30)), [5, 1, 2]]
    ours = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    for row, expected in zip(ours, oracle_logits(oracle, rows), strict=True):
        torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-3)


def test_a_plan_counts_the_bytes_that_a_gpu_keeps(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    quantized_folder(tmp_path, "compressed")
    spec, device = model_spec(tmp_path, dtype="bfloat16"), FAKES["h200"]
    stored = stored_on_absent_device(spec, device)
    layers = [
        cost_of(
            build_without_memory(spec, block_tokens=16, planned="cuda", stored=one),
            dtype=torch.bfloat16,
        )
        for one in (dict(stored), {})
    ]
    kept, floats = (one.weight_bytes - 2 * one.head_bytes for one in layers)
    assert layers[0].multiplied == layers[1].multiplied
    assert 0.25 * floats < kept < 0.3 * floats
    chosen = {d.field: d.chosen for d in kernels_on_absent_device(spec, device, block_tokens=16)}
    assert chosen["kernel.linear_int4"] == "triton"


def test_rows_are_quantized_as_a_whole_weight_is() -> None:
    """Some at a time."""
    weight = torch.randn(300, 128, generator=torch.Generator().manual_seed(3))
    kept = quantize_int4(weight, INT4_SCHEMES["int4-asym-g64"])
    part = quantize_int4(weight[:64], INT4_SCHEMES["int4-asym-g64"])
    assert torch.equal(kept.words_NBW[:1], part.words_NBW)


def turned(case: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """What bitsandbytes has written, as if its weight had rows of 64: a run shares a scale."""
    config, stored, expected = golden(case)
    rows = expected.numel() // 64
    expected = expected.flatten()[: rows * 64].view(rows, 64)
    name = f"module.weight.quant_state.bitsandbytes__{case}"
    state = json.loads(bytes(stored[name].tolist())) | {"shape": [rows, 64]}
    data = json.dumps(state).encode()
    stored = dict(stored) | {name: torch.tensor(list(data), dtype=torch.uint8)}
    stored["module.weight"] = stored["module.weight"].flatten()[: rows * 32, None]
    stored["module.weight.absmax"] = stored["module.weight.absmax"][:rows]
    return config, stored, expected


@pytest.mark.parametrize("case", ["nf4", "fp4"])
def test_levels_of_bitsandbytes_are_kept_with_their_scales(case: str, tmp_path: Path) -> None:
    config, stored, expected = turned(case)
    param = Param(
        name="m", shape=tuple(expected.shape), dtype=torch.float32,
        pieces=(WeightPiece(name="module.weight", shape=tuple(expected.shape)),),
        tensor=torch.empty(expected.shape),
    )  # fmt: skip
    with closing(open_weight(tmp_path, config, stored)) as source:
        entry = source.entries["module.weight"]
        assert stored_int4(param, {"module.weight": entry.scheme}) == entry.scheme == f"{case}-g64"

        def fill(param: Param) -> None:
            (copy,) = copies(param)
            assert param.on_groups is not None
            assert param.on_groups(copy, *source.groups("module.weight", copy.source)) is None

        weight = taken(param, entry.scheme, fill)
    assert weight.levels == case
    torch.testing.assert_close(dequantize(weight, torch.float32), expected, rtol=1e-5, atol=1e-6)


def test_other_levels_are_refused_and_runs_across_rows_become_floats(tmp_path: Path) -> None:
    config, stored, expected = turned("nf4")
    stored["module.weight.quant_map"] = stored["module.weight.quant_map"] * 1.01
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with closing(open_weight(tmp_path / "a", config, stored)) as source:
        whole = tuple(slice(0, size) for size in expected.shape)
        with pytest.raises(CheckpointError, match="quant_map: holds other levels than nf4"):
            source.groups("module.weight", whole)
    with closing(open_weight(tmp_path / "b", *golden("nf4")[:2])) as source:
        assert source.entries["module.weight"].scheme == ""

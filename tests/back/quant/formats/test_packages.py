"""What SINQ, Quanto, Four Over Six, BitBLAS and transformers' Gemma store equals what is decoded here number
by number, or what transformers reads. QNT-17."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.base.config.levels import LEVELS
from headrace.base.errors import CheckpointError
from tests.back.quant.formats.stored_weights import Stored, open_weight
from tests.back.quant.formats.test_formats import assert_rectangles, bit_stream, integers

FIELDS = {1: 8, 2: 4, 3: 10, 4: 2, 5: 6, 6: 5, 8: 1}


def packed_rows(values_NG: torch.Tensor, bits: int, *, lowest_first: bool = False) -> torch.Tensor:
    """A word has one value of each part of the rows, the first part in its highest bits."""
    count, size = values_NG.shape
    fields = FIELDS[bits]
    step = -(-count // fields)
    words = torch.zeros(step, size, dtype=torch.int64)
    for row in range(count):
        part, place = divmod(row, step)
        words[place] |= values_NG[row] << bits * (part if lowest_first else fields - 1 - part)
    return words.to(torch.int32) if bits in (3, 5, 6) else words.to(torch.uint8)


def sinq_stored(bits: int, *, auxiliary: bool) -> tuple[Stored, torch.Tensor]:
    generator = torch.Generator().manual_seed(bits)
    outputs, inputs, size = 16, 128, 32
    values = torch.randint(0, 1 << bits, (outputs * inputs // size, size), generator=generator)
    columns = torch.rand(1, inputs, generator=generator) + 0.5
    stored = {"module.W_q": packed_rows(values, bits), "module.meta.scale2": columns}
    parts = {}
    for name, rows in (("scale", 32), ("zero", len(values))):
        if auxiliary:  # of scales 32 rows share a step and a minimum, of zero points all
            x = torch.randint(0, 256, (rows, len(values) // rows), generator=generator)
            s, m = torch.rand(2, 1, x.shape[1], generator=generator) + 0.1
            stored |= {f"module.meta.{name}.{k}": v for k, v in (("s", s), ("m", m))}
            stored[f"module.meta.{name}.x"] = x.to(torch.uint8)
            parts[name] = torch.tensor(
                [float(x[i // x.shape[1], i % x.shape[1]]) * s[0, i % x.shape[1]] + m[0, i % x.shape[1]]
                 for i in range(len(values))]
            )  # fmt: skip
        else:
            stored[f"module.meta.{name}"] = torch.rand(len(values), 1, generator=generator)
            parts[name] = stored[f"module.meta.{name}"].flatten()
    weight = torch.empty(outputs, inputs)
    for o in range(outputs):
        for i in range(inputs):
            row = o * (inputs // size) + i // size
            number = values[row, i % size] - parts["zero"][row]
            weight[o, i] = number * parts["scale"][row] * columns[0, i]
    return stored, weight


@pytest.mark.parametrize(("bits", "auxiliary"), [(4, True), (3, False), (5, True), (8, False)])
def test_sinq_has_scales_of_inputs_too(bits: int, auxiliary: bool, tmp_path: Path) -> None:
    stored, weight = sinq_stored(bits, auxiliary=auxiliary)
    config = {"quant_method": "sinq", "nbits": bits, "group_size": 32, "method": "sinq"}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert list(source.entries) == ["module.weight"]
        target = torch.empty(9, 100)
        source.copy("module.weight", (16, 128), (slice(3, 12), slice(20, 120)), target)
        torch.testing.assert_close(target, weight[3:12, 20:120], rtol=1e-5, atol=1e-4)
    del stored["module.meta.zero.m" if auxiliary else "module.meta.zero"]
    with pytest.raises(CheckpointError, match=r"module\.meta\.zero is missing"):
        open_weight(tmp_path, config, stored)


NF4 = torch.tensor(LEVELS["nf4"])


def test_sinq_of_levels_of_normal_values(tmp_path: Path) -> None:
    """Its indices mean levels of nf4; zero points are subtracted from these."""
    stored, _ = sinq_stored(4, auxiliary=False)
    config = {"quant_method": "sinq", "nbits": 4, "group_size": 32, "method": "sinq_nf4"}
    with closing(open_weight(tmp_path, {**config, "method": "sinq"}, stored)) as source:
        plain = torch.empty(16, 128)
        source.copy("module.weight", (16, 128), (slice(0, 16), slice(0, 128)), plain)
    scales, zeros = (stored[f"module.meta.{one}"].view(16, 4) for one in ("scale", "zero"))
    scales, zeros = (one.repeat_interleave(32, 1) for one in (scales, zeros))
    scales = scales * stored["module.meta.scale2"]
    indices = (plain / scales + zeros).round().long()
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert_rectangles(source, "module.weight", (NF4[indices] - zeros) * scales)
    with pytest.raises(CheckpointError, match=r"nbits is 3.* 4, of nf4"):
        open_weight(tmp_path, {**config, "nbits": 3}, stored)


@pytest.mark.parametrize("method", ["sinq", "sinq_nf4", "sinq_quantAux"])
def test_sinq_in_square_tiles(method: str, tmp_path: Path) -> None:
    """Scales and zero points of each tile's rows, a scale of each of its columns."""
    generator = torch.Generator().manual_seed(4)
    outputs, inputs, size = 32, 64, 16
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
    tiles = (2, 4)
    rows, zeros = torch.rand(2, *tiles, size, generator=generator)
    columns = torch.rand(*tiles, size, generator=generator)
    stored = {
        "module.W_q": packed_rows(codes.view(-1, size), 4),
        "module.meta.scale2": columns.view(-1, 1, size),
        "module.meta.zero": zeros.view(-1, size, 1),
        "module.meta.scale": rows.view(-1, size, 1),
    }
    if method.endswith("quantAux"):
        x = torch.randint(0, 256, (32, 4), generator=generator)
        steps = torch.rand(1, 4, generator=generator)
        del stored["module.meta.scale"]
        stored |= {"module.meta.scale.x": x.to(torch.uint8), "module.meta.scale.s": steps}
        stored["module.meta.scale.m"] = torch.ones(1, 4)
        rows = (x * steps + 1).view(*tiles, size)
    weight = torch.empty(outputs, inputs)
    for o in range(outputs):
        for i in range(inputs):
            number = NF4[codes[o, i]] if "nf4" in method else codes[o, i]
            tile = (o // size, i // size)
            own = number - zeros[tile][o % size]
            weight[o, i] = own * rows[tile][o % size] * columns[tile][i % size]
    config = {"quant_method": "sinq", "nbits": 4, "group_size": size, "method": method}
    config |= {"tiling_mode": "2D", "hidden_size": inputs}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert_rectangles(source, "module.weight", weight)
    with pytest.raises(CheckpointError, match=r"8 tiles of 16 x 16 are no 26 x 77"):
        open_weight(tmp_path, {**config, "hidden_size": 77}, stored)
    del config["hidden_size"]
    with pytest.raises(CheckpointError, match=r"tiling_mode .* 1D, where hidden_size is not"):
        open_weight(tmp_path, config, stored)


def quanto_stored(bits: int, *, whole: bool) -> tuple[Stored, torch.Tensor]:
    """Shifts that are whole numbers come before the scale, others behind it."""
    generator = torch.Generator().manual_seed(bits)
    outputs, inputs, size = 10, 256, 64
    values = torch.randint(0, 1 << bits, (outputs * inputs // size, size), generator=generator)
    scales = torch.rand(len(values), 1, generator=generator) + 0.1
    shifts = torch.rand(len(values), 1, generator=generator)
    if whole:
        shifts = torch.randint(0, 1 << bits, (len(values), 1), generator=generator).to(torch.int8)
    weight = torch.empty(outputs, inputs)
    for o in range(outputs):
        for i in range(inputs):
            row = o * (inputs // size) + i // size
            value, scale, shift = (
                float(t) for t in (values[row, i % size], scales[row], shifts[row])
            )
            weight[o, i] = (value - shift) * scale if whole else value * scale - shift
    return {
        "module.weight._data._data": packed_rows(values, bits, lowest_first=True),
        "module.weight._scale": scales,
        "module.weight._shift": shifts,
        "module.input_scale": torch.ones(()),
        "module.output_scale": torch.ones(()),
    }, weight


def quanto(weights: str, **changed: Any) -> dict[str, Any]:
    modules = {"module": {"weights": weights, "activations": "none"}}
    return {"quant_method": "quanto", "modules": modules, "hidden_size": 256, **changed}


@pytest.mark.parametrize(("bits", "whole"), [(4, False), (4, True), (2, False)])
def test_quanto_in_groups_is_kept(bits: int, whole: bool, tmp_path: Path) -> None:
    stored, weight = quanto_stored(bits, whole=whole)
    with closing(open_weight(tmp_path, quanto(f"qint{bits}"), stored)) as source:
        assert source.entries["module.weight"].scheme == "int4-asym-g64"
        assert source.decisions() == () and source.cache_scales() is None
        groups, _ = source.groups("module.weight", (slice(None), slice(None)))
        torch.testing.assert_close(groups.dequantized(), weight)
        target = torch.empty(4, 100)
        source.copy("module.weight", (10, 256), (slice(3, 7), slice(20, 120)), target)
        torch.testing.assert_close(target, weight[3:7, 20:120])
    with pytest.raises(CheckpointError, match=r"40 groups of 64 are no rows of 288 inputs"):
        open_weight(tmp_path, quanto(f"qint{bits}", hidden_size=288), stored)


@pytest.mark.parametrize("weights", ["qint8", "qfloat8_e4m3fn", "qfloat8_e5m2"])
def test_quanto_of_a_byte_has_a_scale_for_each_output(weights: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-127, 128, (24, 48), generator=generator).float()
    dtypes = {"qint8": torch.int8, "qfloat8_e5m2": torch.float8_e5m2}
    dtype = dtypes.get(weights, torch.float8_e4m3fn)
    stored = {
        "module.weight._data": values.to(dtype),
        "module.weight._scale": torch.rand(24, 1, generator=generator).bfloat16(),
    }
    weight = values.to(dtype).float() * stored["module.weight._scale"].float()
    with closing(open_weight(tmp_path, quanto(weights), stored)) as source:
        kept = {"qint8": "int8", "qfloat8_e4m3fn": "fp8"}
        assert source.entries["module.weight"].scheme == kept.get(weights, "")
        assert_rectangles(source, "module.weight", weight)


def fouroversix_stored(dtype: str) -> tuple[Stored, torch.Tensor]:
    """Of 130 x 100 numbers in 256 x 128, scale (o, g) where 128 x 4 of them lie by 32 outputs."""
    generator = torch.Generator().manual_seed(5)
    group, outputs, inputs, rows, columns = (16, 130, 100, 256, 128)
    if dtype == "mxfp4":
        group, inputs, columns = 32, 250, 256
    values = torch.randint(0, 16, (rows, columns), generator=generator)
    low, high = (1, 127) if dtype == "nvfp4" else (120, 132)
    scales = torch.randint(low, high, (rows, columns // group), generator=generator)
    flat = torch.empty(scales.numel(), dtype=torch.uint8)
    for o in range(rows):
        for g in range(columns // group):
            tile = o // 128 * (columns // group // 4) + g // 4
            flat[tile * 512 + o % 32 * 16 + o % 128 // 32 * 4 + g % 4] = scales[o, g]
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = levels[values & 7] * (1 - 2 * (values >> 3))
    kind = torch.float8_e4m3fn if dtype == "nvfp4" else torch.float8_e8m0fnu
    spread = scales.to(torch.uint8).view(kind).float().repeat_interleave(group, 1)
    outer = 3.5 / (6 * 256) if dtype == "nvfp4" else 1.0
    return {
        "module.quantized_weight_values": (values[:, 1::2] << 4 | values[:, ::2]).to(torch.uint8),
        "module.quantized_weight_scale_factors": flat.view(kind),
        "module.quantized_weight_amax": torch.tensor([3.5]),
        "module.quantized_weight_metadata": torch.tensor([outputs, inputs, rows, columns, 1, 1]),
    }, (numbers * spread * outer)[:outputs, :inputs]


@pytest.mark.parametrize("dtype", ["nvfp4", "mxfp4"])
def test_four_over_six_is_repacked(dtype: str, tmp_path: Path) -> None:
    stored, weight = fouroversix_stored(dtype)
    config: dict[str, Any] = {"quant_method": "fouroversix", "dtype": dtype}
    if dtype == "mxfp4":
        config["scale_rule"] = "static_6"
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert source.entries["module.weight"].scheme == dtype
        assert_rectangles(source, "module.weight", weight)
    stored["module.quantized_weight_metadata"][5] = 0
    with pytest.raises(CheckpointError, match="not in the layout of Blackwell"):
        open_weight(tmp_path, config, stored)


def test_a_scale_rule_says_what_the_largest_magnitude_stands_for(tmp_path: Path) -> None:
    stored, weight = fouroversix_stored("nvfp4")
    config = {"quant_method": "fouroversix", "weight_scale_rule": "static_4"}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert_rectangles(source, "module.weight", weight * (6 * 256 / (4 * 448)))


@pytest.mark.parametrize(("bits", "scheme"), [(2, "int4-whole"), (4, "int4-whole"), (8, "int8")])
def test_integers_of_gemma_are_read_as_transformers_reads_them(
    bits: int, scheme: str, tmp_path: Path
) -> None:
    from transformers.integrations.gemma_quant import QuantizedEmbedding, QuantizedLinear

    generator = torch.Generator().manual_seed(bits)
    layer = QuantizedLinear(48, 24, num_bits=bits)
    table = QuantizedEmbedding(24, 48, torch.float32, num_bits=bits)
    bound = 128 if bits == 8 else 256
    stored = torch.randint(bound - 256, bound, layer.weight.shape, generator=generator)
    layer.weight.data = stored.to(layer.weight.dtype)
    table.embedding_quantized.data = layer.weight.data.clone()
    layer.weight_scale.data = torch.rand(24, 1, generator=generator)
    table.embedding_scale.data = torch.rand(24, 3, generator=generator)
    tensors = {f"module.{name}": value.data for name, value in layer.named_parameters()}
    tensors |= {f"embed_tokens.{name}": value.data for name, value in table.named_parameters()}
    config = {
        "quant_method": "gemma",
        "num_bits": 8 if bits != 8 else 4,
        "quantize_embeddings": True,
        "module_quant_configs": {"mod.le|embed": {"num_bits": bits}},
    }
    with closing(open_weight(tmp_path, config, tensors)) as source:
        assert set(source.entries) == {"module.weight", "embed_tokens.weight"}
        assert source.entries["module.weight"].scheme == scheme
        assert_rectangles(source, "module.weight", layer._dequantize_weights())
        assert_rectangles(source, "embed_tokens.weight", table.weight)


def test_mxfp8_of_transformers_has_powers_of_two_for_32_inputs(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(40, 96, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.randint(120, 132, (40, 3), generator=generator).to(torch.uint8)
    stored = {"module.weight": weight, "module.weight_scale_inv": scales}
    spread = (2.0 ** (scales.float() - 127)).repeat_interleave(32, 1)
    config = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert source.entries["module.weight"].scheme == "fp8-g32"
        assert_rectangles(source, "module.weight", weight.float() * spread)


def bitblas_row(values: list[int], bits: int) -> list[int]:
    """Bytes of a row, by Python's integers: in a word even values lie below odd ones; of 2 bits the
    middle bytes change places."""
    row = []
    for first in range(0, len(values), 32 // bits):
        word = values[first : first + 32 // bits]
        halves = [sum(value << bits * i for i, value in enumerate(word[odd::2])) for odd in (0, 1)]
        number = halves[0] | halves[1] << 16
        if bits == 8:
            number = sum(value << 8 * i for i, value in enumerate(word))
        content = list(number.to_bytes(4, "little"))
        row += [content[i] for i in (0, 2, 1, 3)] if bits == 2 else content
    return row


@pytest.mark.parametrize(("bits", "scheme"), [(2, "int4-asym"), (4, "int4-asym"), (8, "int8-asym")])
def test_rows_of_bitblas(bits: int, scheme: str, tmp_path: Path) -> None:
    values, scales, zeros, weight = integers(bits, 2, torch.arange(64) // 32)
    packed = torch.tensor([bitblas_row(row, bits) for row in values.tolist()])
    bytes_of = bit_stream(zeros.t(), bits).view(torch.int8)
    stored = {"module.qweight": packed.to(torch.uint8).view(torch.int8), "module.scales": scales}
    stored["module.zeros"] = bytes_of
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False}
    config["checkpoint_format"] = "bitblas"
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert source.entries["module.weight"].scheme == scheme
        assert_rectangles(source, "module.weight", weight)
    stored["module.qweight"] = stored["module.qweight"].view(2, 16, -1, 16)
    with pytest.raises(CheckpointError, match=r"tiles of a GPU's own \(propagate_b\) are not read"):
        open_weight(tmp_path, config, stored)

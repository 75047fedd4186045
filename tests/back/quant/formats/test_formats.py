"""Every format's numbers equal what the public packages read back (golden.py), or what the packers
below store, in any rectangle. QNT-01 QNT-02 QNT-05 QNT-06."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.back.kernels.linear_blocks.layout import (
    ONLINE_LAYOUTS,
    dequantize_rows,
    empty_segment,
    write_quantized,
)
from headrace.back.models.load.asked import sparse_decisions
from headrace.back.models.load.quantized import QuantizedSource
from headrace.back.quant.kept import INT8_ASYMMETRIC, normal_values
from headrace.base.config.levels import LEVELS
from headrace.base.errors import CheckpointError
from tests.back.quant.formats.stored_weights import Stored, golden, golden_cases, open_weight


def assert_rectangles(source: QuantizedSource, name: str, expected: torch.Tensor) -> None:
    """The whole weight, and pieces of it that begin and end anywhere."""
    shape = tuple(expected.shape)
    assert source.entries[name].shape == shape
    cuts = [tuple(slice(0, size) for size in shape)]
    cuts += [tuple(slice(size // 3, size - 1) for size in shape)]
    cuts += [tuple(slice(size // 2, size) for size in shape)]
    cuts += [(*(slice(0, size) for size in shape[:-1]), slice(7, 8))]
    for cut in cuts:
        assert_rectangle(source, name, expected, cut)


def assert_rectangle(
    source: QuantizedSource, name: str, expected: torch.Tensor, cut: tuple[slice, ...]
) -> None:
    """Equal within the roundings of the dtype that the expected values were computed in."""
    wanted = expected[cut].float()
    target = torch.full(wanted.shape, torch.nan)
    source.copy(name, tuple(expected.shape), cut, target)
    rounding = 2 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(target, wanted, rtol=rounding, atol=0)


@pytest.mark.parametrize("case", golden_cases())
def test_what_packages_have_written_is_read_as_they_read_it(case: str, tmp_path: Path) -> None:
    config, stored, expected = golden(case)
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert list(source.entries) == ["module.weight"]
        assert_rectangles(source, "module.weight", expected)


def bit_stream(values_NC: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of fields as int32 words, lowest bits first, by Python's integers."""
    rows = []
    for row in values_NC.tolist():
        number = sum(int(value) << (i * bits) for i, value in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([number >> (32 * i) & 0xFFFFFFFF for i in range(count)])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def integers(bits: int, groups: int, order_I: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Values [O, I], scales and zero points [O, G], and the weight they stand for."""
    generator = torch.Generator().manual_seed(bits)
    outputs, top = 32, 1 << bits
    values = torch.randint(0, top, (outputs, len(order_I)), generator=generator)
    zeros = torch.randint(1, top, (outputs, groups), generator=generator)
    scales = (torch.rand(outputs, groups, generator=generator) + 0.1).half()
    weight = (values - zeros[:, order_I]) * scales.float()[:, order_I]
    return values, scales, zeros, weight


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(bits: int, version: str, act_order: bool, tmp_path: Path) -> None:
    order = torch.arange(96) // 32
    if act_order:
        order = order[torch.randperm(96, generator=torch.Generator().manual_seed(3))]
    values, scales, zeros, weight = integers(bits, 3, order)
    stored_zeros = zeros - 1 if version == "gptq" else zeros
    stored = {
        "module.qweight": bit_stream(values, bits).t(),
        "module.qzeros": bit_stream(stored_zeros.t(), bits),
        "module.scales": scales.t(),
        "module.g_idx": order.int(),
    }
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 32,
        "desc_act": act_order,
        "checkpoint_format": version,
    }
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert_rectangles(source, "module.weight", weight)


def awq_words(values_NO: torch.Tensor) -> torch.Tensor:
    """Eight outputs to a word in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    return bit_stream(values_NO.unflatten(1, (-1, 8))[..., order].flatten(1), 4)


def awq_stored() -> tuple[Stored, torch.Tensor]:
    values, scales, zeros, weight = integers(4, 2, torch.arange(64) // 32)
    stored = {
        "module.qweight": awq_words(values.t()),
        "module.qzeros": awq_words(zeros.t()),
        "module.scales": scales.t(),
    }
    return stored, weight


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def test_awq(tmp_path: Path) -> None:
    stored, weight = awq_stored()
    with closing(open_weight(tmp_path, AWQ, stored)) as source:
        assert_rectangles(source, "module.weight", weight)


@pytest.mark.parametrize("dtype", ["uint4", "int4"])
def test_integers_of_quark_lie_as_awq_has_them(dtype: str, tmp_path: Path) -> None:
    """QNT-01: signed ones too, of which the zero points may lack."""
    values, scales, zeros, weight = integers(4, 2, torch.arange(64) // 32)
    stored = {"module.weight": awq_words(values.t()), "module.weight_scale": scales.t()}
    if dtype == "uint4":
        stored["module.weight_zero_point"] = awq_words(zeros.t())
    else:
        weight = (values ^ 8).sub(8) * scales.float()[:, torch.arange(64) // 32]
    spec = {"dtype": dtype, "qscheme": "per_group", "group_size": 32, "ch_axis": -1}
    config = {"quant_method": "quark", "global_quant_config": {"weight": spec}}
    with closing(open_weight(tmp_path, config, stored)) as source:
        kept = {"uint4": "int4-asym", "int4": "int4"}
        assert source.entries["module.weight"].scheme == kept[dtype]
        assert_rectangles(source, "module.weight", weight)
    if dtype == "uint4":
        del stored["module.weight_zero_point"]
        with pytest.raises(CheckpointError, match=r"module\.weight_zero_point is missing"):
            open_weight(tmp_path, config, stored)


@pytest.mark.parametrize("linear", ["autobitlinear", "bitlinear"])
def test_ternary_weights_of_bitnet_are_those_that_transformers_packs(
    linear: str, tmp_path: Path
) -> None:
    from transformers.integrations.bitnet import pack_weights  # brings in torch's compiler: 1 s

    generator = torch.Generator().manual_seed(4)
    weight = torch.randint(-1, 2, (24, 20), generator=generator).float()
    scale = torch.tensor([0.37])
    stored = {"module.weight": pack_weights(weight.clone()), "module.weight_scale": scale}
    config = {"quant_method": "bitnet", "linear_class": linear, "quantization_mode": "offline"}
    source = open_weight(tmp_path, config, stored)
    expected = weight * scale if linear == "autobitlinear" else weight / scale
    assert_rectangles(source, "module.weight", expected)


@pytest.mark.parametrize(("bits", "scheme"), [(2, "int4-asym"), (8, "int8-asym")])
def test_metal_of_transformers_is_read_as_it_reads_it(
    bits: int, scheme: str, tmp_path: Path
) -> None:
    from transformers.integrations import metal_quantization as metal

    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(bits))
    packed, scales, biases = metal._affine_quantize_tensor(weight, 32, bits)
    expected = metal._affine_dequantize_tensor(packed, scales, biases, 32, bits)
    stored = {"module.weight": packed, "module.scales": scales, "module.qbiases": biases}
    config = {"quant_method": "metal", "bits": bits, "group_size": 32}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert source.entries["module.weight"].scheme == scheme
        target = torch.empty(24, 96)
        source.copy("module.weight", (24, 96), (slice(0, 24), slice(0, 96)), target)
        torch.testing.assert_close(target, expected, rtol=1e-5, atol=1e-6)
    del stored["module.qbiases"]
    with pytest.raises(CheckpointError, match=r"module\.qbiases is missing"):
        open_weight(tmp_path, config, stored)


def test_what_deepspeed_makes_while_loading_is_plain_in_the_file(tmp_path: Path) -> None:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    config = {"quant_method": "deepspeedfp", "bits": 8, "group_size": 512}
    with closing(open_weight(tmp_path, config, {"module.weight": weight})) as source:
        assert_rectangles(source, "module.weight", weight)
        (decision,) = source.decisions()
        assert "--quantization" in decision.why and decision.requested == "deepspeedfp"


def test_fp8_in_blocks_whose_last_ones_are_cut(tmp_path: Path) -> None:
    weight = torch.randn(40, 72, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3, generator=torch.Generator().manual_seed(2))
    stored = {"module.weight": weight, "module.weight_scale_inv": scales}
    spread = scales.repeat_interleave(16, 0)[:40].repeat_interleave(32, 1)[:, :72]
    config = {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert_rectangles(source, "module.weight", weight.float() * spread)


def test_fp8_of_experts_in_one_tensor(tmp_path: Path) -> None:
    weight = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(1))
    weight = weight.to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 2, generator=torch.Generator().manual_seed(2))
    stored = {"mlp.experts.gate_up_proj": weight, "mlp.experts.gate_up_proj_scale_inv": scales}
    spread = scales.repeat_interleave(16, 1).repeat_interleave(32, 2)
    config = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert_rectangles(source, "mlp.experts.gate_up_proj", weight.float() * spread)


def test_mxfp4_of_gpt_oss_equals_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (2, 12, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 134, (2, 12, 3), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    stored = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    with closing(open_weight(tmp_path, {"quant_method": "mxfp4"}, stored)) as source:
        assert_rectangles(source, "experts.down_proj", expected)


def test_mxfp4_of_quark_is_the_same_in_a_matrix(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(6)
    blocks = torch.randint(0, 256, (1, 12, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 134, (1, 12, 3), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t()
    stored = {"module.weight": blocks[0].flatten(1), "module.weight_scale": scales[0]}
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert source.entries["module.weight"].scheme == "mxfp4"
        assert_rectangles(source, "module.weight", expected)


def test_modelopt_nvfp4_multiplies_by_its_outer_scale(tmp_path: Path) -> None:
    _, stored, expected = golden("nvfp4")
    stored = {
        "module.weight": stored["module.weight_packed"],
        "module.weight_scale": stored["module.weight_scale"],
        "module.weight_scale_2": 1 / stored["module.weight_global_scale"][0],
        "module.input_scale": torch.ones(()),
        "attn.k_proj.k_scale": torch.ones(()),
    }
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert list(source.entries) == ["module.weight"]
        assert_rectangles(source, "module.weight", expected)
        assert [one.requested for one in source.decisions()] == ["1 stored"]
        scales = source.cache_scales()
        assert scales is not None and len(scales) == 1


@pytest.mark.parametrize("smooth", [True, False])
def test_int4_of_modelopt_pairs_outputs_and_may_be_smoothed(smooth: bool, tmp_path: Path) -> None:
    """AWQ: two signed outputs to a byte, and what inputs are multiplied with before."""
    values, scales, _, _ = integers(4, 2, torch.arange(64) // 32)
    signed, factor = values - 8, torch.rand(64) + 0.5
    weight = signed * scales.float().repeat_interleave(32, 1)
    stored = {
        "module.weight": ((signed[1::2] & 15) * 16 + (signed[::2] & 15)).to(torch.uint8),
        "module.weight_scale": scales,
    }
    if smooth:
        stored["module.pre_quant_scale"] = factor
        weight = weight * factor
    config = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 32}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert_rectangles(source, "module.weight", weight)
        assert source.entries["module.weight"].scheme == ("" if smooth else "int4")


def test_smoothquant_of_modelopt_multiplies_inputs_before(tmp_path: Path) -> None:
    weight = torch.randint(-127, 128, (40, 64), generator=torch.Generator().manual_seed(1))
    scales, factor = torch.rand(40) + 0.1, torch.rand(64) + 0.5
    stored = {
        "module.weight": weight.to(torch.int8),
        "module.weight_scale": scales,
        "module.input_scale": torch.ones(()),
        "module.pre_quant_scale": factor,
    }
    config = {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert_rectangles(source, "module.weight", weight * scales[:, None] * factor)
    del stored["module.pre_quant_scale"]  # it lies in the norm before
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert_rectangles(source, "module.weight", weight * scales[:, None])
        assert source.entries["module.weight"].scheme == "int8"


def test_blocks_of_modelopt_keep_dimensions_of_their_own(tmp_path: Path) -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)).to(
        torch.float8_e4m3fn
    )
    scales = torch.rand(2, 3, generator=torch.Generator().manual_seed(2))
    stored = {"module.weight": weight, "module.weight_scale": scales[:, None, :, None]}
    spread = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert_rectangles(source, "module.weight", weight.float() * spread)
        assert source.entries["module.weight"].scheme == "fp8-g128"


def test_int8_of_bitsandbytes(tmp_path: Path) -> None:
    weight = torch.randint(-127, 128, (8, 16), generator=torch.Generator().manual_seed(1))
    magnitudes = torch.rand(8, generator=torch.Generator().manual_seed(2))
    stored = {"module.weight": weight.to(torch.int8), "module.SCB": magnitudes}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    with closing(open_weight(tmp_path, config, stored)) as source:
        assert_rectangles(source, "module.weight", weight * magnitudes[:, None] / 127)


@given(st.data())
def test_any_rectangle_of_any_format(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    case = data.draw(st.sampled_from(golden_cases()))
    config, stored, expected = golden(case)
    cut = []
    for size in expected.shape:
        first = data.draw(st.integers(0, size - 1))
        cut.append(slice(first, data.draw(st.integers(first + 1, size))))
    folder = tmp_path_factory.mktemp("weights")
    with closing(open_weight(folder, config, stored)) as source:
        assert_rectangle(source, "module.weight", expected, tuple(cut))


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    stored, _ = awq_stored()
    del stored["module.scales"]
    with pytest.raises(CheckpointError, match=r"module\.qweight is quantized.*module\.scales is"):
        open_weight(tmp_path, AWQ, stored)


def test_a_scale_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    stored, _ = awq_stored()
    stored["module.scales"] = stored["module.scales"][:1]
    with pytest.raises(
        CheckpointError, match=r"module\.scales has the shape \[1, 32\], not \[2, 32\]"
    ):
        open_weight(tmp_path, AWQ, stored)


def test_a_weight_that_the_config_says_is_plain_is_refused(tmp_path: Path) -> None:
    stored, _ = awq_stored()
    config = {**AWQ, "modules_to_not_convert": ["module"]}
    with pytest.raises(CheckpointError, match=r"module\.qweight is quantized.*plain"):
        open_weight(tmp_path, config, stored)


def test_a_surplus_scale_stays_in_the_list_of_tensors(tmp_path: Path) -> None:
    stored, _ = awq_stored()
    stored["other.scales"] = torch.ones(2, 8)
    with closing(open_weight(tmp_path, AWQ, stored)) as source:
        assert "other.scales" in source.entries


def test_int4_of_torchao_has_float_zero_points(tmp_path: Path) -> None:
    """`Int4Tensor`, whose packer needs a GPU's library: two signed values to a byte."""
    values, scales, _, _ = integers(4, 2, torch.arange(64) // 32)
    zeros = torch.randn(32, 2, generator=torch.Generator().manual_seed(5))
    order = torch.arange(64) // 32
    weight = (values - 8) * scales.float()[:, order] + zeros.bfloat16().float()[:, order]
    low, high = (values - 8)[:, ::2] & 15, (values - 8)[:, 1::2]
    stored = {
        "module._weight_qdata": (high * 16 + low).to(torch.int8),
        "module._weight_scale": scales.t(),
        "module._weight_zero_point": zeros.bfloat16().t(),
    }
    data = {
        "group_size": 32,
        "int4_packing_format": {"_type": "Int4PackingFormat", "_data": "PLAIN"},
    }
    kind = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": data}
    config = {"quant_method": "torchao", "quant_type": {"default": kind}}
    with closing(open_weight(tmp_path, config, stored)) as source:
        target = torch.empty(32, 64)
        source.copy("module.weight", (32, 64), (slice(0, 32), slice(0, 64)), target)
        torch.testing.assert_close(target, weight, rtol=1e-5, atol=1e-6)
        assert source.entries["module.weight"].scheme == "int4-asym"


KEPT = {
    "sparse-24-fp8": "fp8",
    "sparse-fp8": "fp8",
    "sparse-24": "",
    "ao-int8": "int8",
    "ao-float8": "fp8",
    "ao-intx-4": "int4",
    "ao-intx-4-zeros": "int4-asym-g64",
    "ao-intx-6": "int8-g32",
    "hqq-4": "int4-asym-g64",
    "hqq-3": "int4-asym-g64",
    "hqq-4-axis0": "",
    "mxfp6": "",
    "mlx-2": "int4-asym-g64",
    "mlx-4": "int4-asym-g64",
    "mlx-8": "int8-asym-g64",
    "mlx-mxfp4": "mxfp4",
    "mlx-nvfp4": "nvfp4",
    "mlx-mxfp8": "",
}


@pytest.mark.parametrize("case", KEPT)
def test_what_a_kernel_can_read_keeps_its_numbers(case: str, tmp_path: Path) -> None:
    config, stored, expected = golden(case)
    with closing(open_weight(tmp_path, config, stored)) as source:
        scheme = source.entries["module.weight"].scheme
        assert scheme == KEPT[case]
        if scheme:
            whole = tuple(slice(0, size) for size in expected.shape)
            groups, _ = source.groups("module.weight", whole)
            if scheme in ("mxfp4", "nvfp4"):  # of which the bits are kept
                numbers = torch.tensor(LEVELS["e2m1"])[groups.values_RC.long()]
                groups = replace(groups, values_RC=numbers)
            torch.testing.assert_close(groups.dequantized(), expected.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", ["mlx-8", "mlx-6", "hqq-8"])
def test_eight_bits_with_zero_points_fit_into_panels(case: str, tmp_path: Path) -> None:
    """Minima lie around 0, so that what bfloat16 rounds of them is less than a step."""
    config, stored, expected = golden(case)
    with closing(open_weight(tmp_path, config, stored)) as source:
        groups, numbers = source.groups("module.weight", (slice(None), slice(None)))
        scheme = INT8_ASYMMETRIC[source.entries["module.weight"].scheme]
    scales = groups.scales_RG.float()
    values, minima = normal_values(groups, scales, slice(None), scheme, numbers, "module.weight")
    assert minima is not None and scheme.group is not None
    layout = ONLINE_LAYOUTS[f"int8-asym-g{scheme.group}"]
    segment = empty_segment(layout, *expected.shape)
    write_quantized(segment, 0, values, scales.bfloat16(), minima.bfloat16())
    got = dequantize_rows(segment, torch.arange(len(expected)))
    step = scales.repeat_interleave(scheme.group, 1).abs()
    rounding = expected.float().abs() / 256 + step
    assert bool(((got - expected.float()).abs() <= rounding).all())


def test_a_bit_too_many_of_a_sparse_row_is_named(tmp_path: Path) -> None:
    config, stored, _ = golden("sparse-24")
    stored["module.bitmask"] = stored["module.bitmask"].clone()
    stored["module.bitmask"][3, 2] = 255
    with closing(open_weight(tmp_path, config, stored)) as source:
        target = torch.empty(12, 128)
        with pytest.raises(CheckpointError, match=r"module\.bitmask: rows 0 to 11 have 77\d bits"):
            source.copy("module.weight", (12, 128), (slice(0, 12), slice(0, 128)), target)


@pytest.mark.parametrize("case, said", [("sparse-24", 1), ("sparse-fp8", 1), ("hqq-4", 0)])
def test_zeros_that_are_multiplied_are_told(case: str, said: int, tmp_path: Path) -> None:
    """QNT-05: weights without two of four are multiplied like whole ones."""
    config, stored, _ = golden(case)
    with closing(open_weight(tmp_path, config, stored)) as source:
        decisions = sparse_decisions(source)
    assert [one.why for one in decisions] == [
        "of 1 weights: no kernel here leaves out zeros"
    ] * said


@pytest.mark.parametrize(
    "case, tensor, message",
    [
        (
            "sparse-24",
            "module.bitmask",
            r"module\.bitmask has the shape \[11, 16\], not \[12, 16\]",
        ),
        ("hqq-4", "module.W_q", r"module\.W_q has the shape \[11, 64\], not \[12, 64\]"),
        ("ao-int8", "module._weight_scale", r"module\._weight_scale has the shape \[11, 1\]"),
    ],
)
def test_a_part_of_another_shape_is_named(
    case: str, tensor: str, message: str, tmp_path: Path
) -> None:
    config, stored, _ = golden(case)
    stored[tensor] = stored[tensor][:11]
    with pytest.raises(CheckpointError, match=message):
        open_weight(tmp_path, config, stored)

"""`quantization_config` becomes rules; unknown variants are refused by key, value and known values."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.base.config.quantization import StoredQuantization
from headrace.base.config.quantization_formats import stored_quantization
from headrace.base.errors import CheckpointError

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FP8 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": FP8, "format": "float-quantized"},
        "group_1": {"targets": ["re:.*down_proj"], "weights": INT4, "format": "pack-quantized"},
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}


def rotation(*locations: str) -> dict[str, Any]:
    apply = [{"targets": ["Linear"], "location": location} for location in locations]
    return {"config_groups": {"R1": {"type": "hadamard", "apply": apply}}}


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    default = {"_type": kind, "_version": 2, "_data": data}
    return {"quant_method": "torchao", "quant_type": {"default": default}}


def hqq(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": weights}}


def marlin_24(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "marlin-24",
        "config_groups": {"group_0": group},
    }


def vptq(**changed: Any) -> dict[str, Any]:
    layer = {
        "vector_lens": [-1, 8],
        "num_centroids": [-1, 256],
        "num_res_centroids": [-1, -1],
        "group_size": 64,
        "is_indice_packed": True,
    }
    return {"quant_method": "vptq", "config_for_layers": {"q_proj": layer | changed}}


W8 = {"num_bits": 8, "type": "int", "strategy": "channel"}


def with_inputs(**inputs: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": W8, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
    }


INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def read(config: dict[str, Any], section: str | None = None) -> StoredQuantization | None:
    raw = {"quantization_config": config}
    return stored_quantization({section: raw} if section else raw, "config.json")


def test_a_plain_checkpoint_has_none() -> None:
    assert (
        stored_quantization({"hidden_size": 3, "quantization_config": None}, "config.json") is None
    )


def test_the_text_part_may_have_it() -> None:
    assert read({"quant_method": "mxfp4"}, "text_config") == read({"quant_method": "mxfp4"})


def test_a_named_module_goes_before_its_class_and_an_ignored_one_before_both() -> None:
    quantization = read(MIXED)
    assert quantization is not None
    down = quantization.of("model.layers.1.mlp.down_proj")
    up = quantization.of("model.layers.1.mlp.up_proj")
    assert down is not None and (down.arrangement, down.bits, down.group) == ("packed", 4, (1, 128))
    assert up is not None and (up.arrangement, up.group) == ("scaled", (128, 128))
    assert quantization.of("lm_head") is None
    assert quantization.of("model.layers.1.mlp.gate") is None


def test_what_is_not_converted_covers_all_below_and_only_whole_names() -> None:
    names = ["lm_head", "model.layers.0", "model.vision*"]
    quantization = read({"quant_method": "fp8", "modules_to_not_convert": names})
    assert quantization is not None
    assert quantization.of("model.layers.0.mlp.up_proj") is None
    assert quantization.of("model.layers.01.mlp.up_proj") is not None
    assert quantization.of("model.visions.mlp.up_proj") is None


def test_gptq_says_which_modules_differ() -> None:
    dynamic = {"-:.*k_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 64}}
    quantization = read({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic})
    assert quantization is not None
    assert quantization.of("model.layers.0.self_attn.k_proj") is None
    down = quantization.of("model.layers.0.mlp.down_proj")
    assert down is not None and (down.bits, down.group) == (8, (1, 64))


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        ({"quant_method": "quip"}, "quant_method", "'quip'.*gptq"),
        ({"quant_method": "aqlm", "nbits_per_codebook": 17}, "nbits_per_codebook", "17.*16"),
        ({"quant_method": "aqlm", "num_codebooks": 1 << 40}, "num_codebooks", "16"),
        ({"quant_method": "vptq"}, "config_for_layers", "a section for each module"),
        (vptq(is_indice_packed=False), "is_indice_packed", "true"),
        (vptq(vector_lens=[-1, 1 << 40]), "vector_lens", "1 to 256"),
        (vptq(num_centroids=[-1, 100]), "num_centroids", "powers of two"),
        (vptq(num_res_centroids=[-1, 1 << 17]), "num_res_centroids", "powers of two"),
        (vptq(num_centroids=[64, 64], outlier_size=8), "vector_lens", "for outliers"),
        (vptq(group_size=-1), "group_size", "-1"),
        ({"quant_method": "exl2", "bits": -3}, "bits", "-3"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 128}, "bits", "5.*2 or 3 or 4 or 8"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "v3"},
            "checkpoint_format",
            "'v3'.*gptq, gptq_v2, marlin, marlin_24",
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": 128, "is_marlin_format": True},
            "bits",
            "8.*must be 4",
        ),
        (
            {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 128,
                "desc_act": True,
                "checkpoint_format": "marlin_24",
            },
            "desc_act",
            "false, in the layout marlin_24",
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "exllama"},
            "version",
            "'exllama'.*gemm or gemv or gemv_fast or marlin",
        ),
        ({"quant_method": "eetq", "weights": "int4"}, "weights", "'int4'.*int8"),
        (marlin_24(num_bits=3, strategy="group", group_size=128), "num_bits", "3.*4 or 8"),
        (marlin_24(num_bits=4, strategy="tensor"), "strategy", "'tensor'.*group or channel"),
        (
            marlin_24(num_bits=4, strategy="channel", symmetric=False),
            "symmetric",
            "true, in the format marlin-24",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt", "'e5m2'.*e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size", "two positive"),
        ({"quant_method": "fp8", "activation_scheme": "token"}, "activation_scheme", "static"),
        (with_inputs(**{**INT8_INPUTS, "num_bits": 6}), "num_bits", "6.*4 or 8"),
        (with_inputs(**{**INT8_INPUTS, "type": "uint"}), "type", "'uint'.*float, int"),
        (with_inputs(**{**INT8_INPUTS, "strategy": "row"}), "strategy", "'row'.*token"),
        (with_inputs(**{**INT8_INPUTS, "strategy": "group"}), "group_size", "a positive size"),
        (with_inputs(**{**INT8_INPUTS, "dynamic": "often"}), "dynamic", "'often'.*\"local\""),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo", "'W4A8'.*NVFP4"),
        (
            {**MIXED, "transform_config": rotation("weight_input", "input")},
            "location",
            "'input'.*activations are not rotated",
        ),
        (
            {**MIXED, "sparsity_config": {"format": "sparse-48"}},
            "format",
            "sparse-48.*sparse-24-bitmask",
        ),
        (torchao("UIntXWeightOnlyConfig"), "_type", "Int4WeightOnlyConfig"),
        (
            torchao("Int4WeightOnlyConfig", int4_packing_format="preshuffled"),
            "int4_packing_format",
            "'preshuffled'.*plain or tile_packed_to_4d",
        ),
        (torchao("IntxWeightOnlyConfig", intx_packing_format="x"), "intx_packing_format", "'x'"),
        (torchao("Float8WeightOnlyConfig", weight_dtype="e5m2"), "weight_dtype", "float8_e4m3fn"),
        ({"quant_method": "torchao", "quant_type": "int4wo"}, "quant_type", "int4wo"),
        (hqq(nbits=5, group_size=64, axis=1), "nbits", "5.*1, 2, 3, 4 or 8"),
        (hqq(nbits=4, axis=0), "group_size", "along axis 0"),
        (hqq(nbits=4, group_size=64, axis=1, view_as_float=True), "view_as_float", "false"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf3"},
            "bnb_4bit_quant_type",
            "'nf3'.*fp4, nf4",
        ),
    ],
)
def test_unknown_variants_are_refused(config: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as seen:
        read(config)
    assert seen.value.field == field


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        (with_inputs(**INT8_INPUTS), "int8, a scale for a token, found as they come"),
        (
            with_inputs(num_bits=8, type="int", strategy="tensor", dynamic=False, symmetric=False),
            "int8, a scale and a zero point for a tensor, stored",
        ),
        (
            with_inputs(
                num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic="local"
            ),
            "e2m1, a scale for 16 inputs of a token, found as they come",
        ),
        ({"quant_method": "fp8"}, "e4m3, a scale for a token, found as they come"),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            "e4m3, a scale for a tensor, stored",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "e4m3, a scale for 128 inputs of a token, found as they come",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "e4m3, a scale for a tensor, stored"),
        (
            torchao("Int8DynamicActivationInt8WeightConfig"),
            "int8, a scale for a token, found as they come",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "None"),
    ],
)
def test_activations_are_read_as_they_are_asked_for(config: dict[str, Any], asked: str) -> None:
    quantization = read(config)
    assert quantization is not None
    numbers = quantization.of("model.layers.0.mlp.up_proj")
    assert numbers is not None and str(numbers.activations) == asked


def test_auto_round_says_which_modules_differ() -> None:
    """INC's name for it means the same (QNT-17)."""
    extra = {
        "model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"},
        "model.layers.1.mlp.up_proj": {"bits": 8, "group_size": 32, "sym": False},
        ".*down_proj": {"bits": 2},
    }
    common = {"bits": 4, "group_size": 128, "sym": True, "extra_config": extra}
    quantization = read({"quant_method": "auto-round", **common})
    assert quantization is not None and quantization.method == "auto-round"
    assert quantization == read({"quant_method": "inc", **common})
    assert quantization.of("model.layers.0.mlp.gate") is None
    up = quantization.of("model.layers.1.mlp.up_proj")
    assert up is not None and (up.bits, up.group, up.symmetric) == (8, (1, 32), False)
    down = quantization.of("model.layers.1.mlp.down_proj")
    assert down is not None and (down.bits, down.group) == (2, (1, 128))
    other = quantization.of("model.layers.0.mlp.up_proj")
    assert other is not None and (other.bits, other.symmetric) == (4, True)
    awq = {**common, "packing_format": "auto_round:auto_awq", "version": "gemm"}
    with pytest.raises(CheckpointError, match="bits"):
        read({"quant_method": "auto-round", **awq})


def test_auto_round_mixes_floats_of_two_sizes() -> None:
    extra = {
        "model.layers.1.mlp.up_proj": {"bits": 8, "data_type": "mx_fp", "act_bits": 8},
        "model.layers.0.mlp.up_proj": {"bits": 16},
    }
    quantization = read(
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "act_bits": 4,
         "data_type": "mx_fp", "packing_format": "auto_round:mx_fp", "extra_config": extra}
    )  # fmt: skip
    assert quantization is not None and quantization.of("model.layers.0.mlp.up_proj") is None
    up = quantization.of("model.layers.1.mlp.up_proj")
    assert up is not None and (up.arrangement, up.bits, up.group) == ("scaled", 8, (1, 32))
    down = quantization.of("model.layers.1.mlp.down_proj")
    assert down is not None and (down.arrangement, down.bits) == ("mxfp4-packed", 4)
    assert down.activations is not None and up.activations is not None
    assert (down.activations.bits, up.activations.bits) == (4, 8)


QUIP = {"codebook": "E8P12", "codebook_version": 1, "fused": False, "lora_rank": 0}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"codebook": "D4"}, "codebook"),
        ({"codebook_version": 0}, "codebook_version"),
        ({"lora_rank": 4}, "lora_rank"),
        ({"rescale_WH": True}, "rescale_WH"),
        ({"fused": True}, "num_attention_heads"),
    ],
)
def test_other_variants_of_quip_are_refused_by_key(changed: dict, field: str) -> None:
    assert stored_quantization({"quip_params": QUIP}, "config.json") is not None
    with pytest.raises(CheckpointError) as seen:
        stored_quantization({"quip_params": QUIP | changed}, "config.json")
    assert seen.value.field == field


QUARK_FP8 = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
QUARK_FP4 = {
    "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
}


def test_quark_says_how_modules_are_stored() -> None:
    config = {
        "quant_method": "quark",
        "global_quant_config": QUARK_FP8,
        "layer_quant_config": {"*down_proj": QUARK_FP4, "*up_proj": {"weight": None}},
        "exclude": ["lm_head"],
    }
    quantization = read(config)
    assert quantization is not None and quantization.of("lm_head") is None
    gate = quantization.of("model.layers.0.mlp.gate_proj")
    assert gate is not None and (gate.arrangement, gate.group) == ("scaled", (0, 0))
    down = quantization.of("model.layers.0.mlp.down_proj")
    assert down is not None and (down.arrangement, down.group) == ("mxfp4-quark", (1, 32))
    assert quantization.of("model.layers.0.mlp.up_proj") is None


@pytest.mark.parametrize(
    "weight, field",
    [
        ({"dtype": "uint2", "qscheme": "per_group"}, "dtype"),
        ({"dtype": "int4", "qscheme": "per_group"}, "group_size"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_group"}, "qscheme"),
        ({"dtype": "fp4", "qscheme": "per_group", "scale_format": "fp32"}, "scale_format"),
        ({"dtype": "fp4", "qscheme": "per_group", "group_size": 16}, "group_size"),
    ],
)
def test_unknown_variants_of_quark_are_refused(weight: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError, match=field):
        read({"quant_method": "quark", "global_quant_config": {"weight": weight}})


def test_rotations_that_are_in_the_weights_need_nothing() -> None:
    rotated = {**MIXED, "transform_config": rotation("weight_input", "weight_output")}
    assert read(rotated) == read(MIXED)


def test_torchao_says_by_name_how_modules_are_stored() -> None:
    int8 = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}
    modules = {
        "model.layers.0.mlp.up_proj": None,
        r"re:.*\.down_proj": torchao("Float8WeightOnlyConfig")["quant_type"]["default"],
        "_default": int8,
    }
    data = {"fqn_to_config": modules}
    config = {"quant_type": {"default": {"_type": "FqnToConfig", "_version": 1, "_data": data}}}
    quantization = read({"quant_method": "torchao", **config})
    assert quantization is not None
    assert quantization.of("model.layers.0.mlp.up_proj") is None
    down = quantization.of("model.layers.0.mlp.down_proj")
    assert down is not None and down.arrangement == "torchao-float8"
    other = quantization.of("model.layers.1.mlp.up_proj")
    assert other is not None and other.arrangement == "torchao-int8"


def test_hqq_says_by_kind_how_modules_are_stored() -> None:
    whole = hqq(nbits=4, group_size=64, axis=1)
    kinds = {"self_attn.q_proj": whole["quant_config"], "mlp.up_proj": None}
    quantization = read({**whole, "quant_config": kinds, "skip_modules": ["lm_head"]})
    assert quantization is not None
    query = quantization.of("model.layers.3.self_attn.q_proj")
    assert query is not None and (query.arrangement, query.bits) == ("hqq", 4)
    assert quantization.of("model.layers.3.mlp.up_proj") is None
    assert quantization.of("model.layers.3.mlp.down_proj") is None

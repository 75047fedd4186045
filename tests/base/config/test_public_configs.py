"""`quantization_config` as public checkpoints have it, with the keys their tools write: each is read, or refused by
the key that says what is not. QNT-01, QNT-02, QNT-03, QNT-05, QNT-06, QNT-17, PLT-01."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.base.config.quantization_formats import METHODS, stored_quantization
from headrace.base.errors import CheckpointError
from headrace.launch.config_files import read_config

UP = "model.layers.0.mlp.up_proj"
ARGS = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
    "observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True,
}  # fmt: skip
INPUTS = {**ARGS, "dynamic": True, "strategy": "token", "observer": "memoryless"}
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": True,
    "static_groups": False, "sym": True, "true_sequential": True, "model_name_or_path": None,
    "model_file_base_name": "model",
}  # fmt: skip
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None,
}  # fmt: skip
MLX = {"group_size": 64, "bits": 4}
ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
    "autoround_version": "0.5.1", "iters": 1000, "low_gpu_mem_usage": True, "nsamples": 512,
    "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers",
}  # fmt: skip
ROUND_MX = {
    **ROUND, "data_type": "mx_fp", "group_size": 32, "act_bits": 4, "act_data_type": "mx_fp",
    "packing_format": "auto_round:mx_fp",
}  # fmt: skip
ROUND_E4M3 = {
    **ROUND, "data_type": "fp8", "bits": 8, "group_size": -1, "act_bits": 8, "act_dynamic": False,
    "fmt": "e4m3", "packing_format": "auto_round:fp8_static",
}  # fmt: skip
BNB = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
    "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": ["lm_head"],
    "llm_int8_threshold": 6.0,
}  # fmt: skip
QUARK_WEIGHT = {
    "dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor", "ch_axis": None,
    "group_size": None, "symmetric": None, "round_method": "half_even", "scale_type": "float",
    "scale_format": None, "scale_calculation_mode": None, "mx_element_dtype": None,
    "observer_cls": "PerTensorMinMaxObserver", "is_scale_quant": False,
}  # fmt: skip


def compressed(weights: dict[str, Any], format: str, inputs: Any = None, **more: Any) -> Any:
    group = {
        "input_activations": inputs, "output_activations": None, "targets": ["Linear"],
        "weights": {**ARGS, **weights},
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "format": format,
        "global_compression_ratio": 1.5, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
        "version": "0.12.3", **more,
    }  # fmt: skip


def modelopt(algorithm: str, **more: Any) -> Any:
    return {
        "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.33.0"}, "kv_cache_quant_algo": "FP8", **more,
    }  # fmt: skip


def quark(weight: Any, **more: Any) -> Any:
    whole = {
        "bias": None, "output_tensors": None, "target_device": None, "weight": weight,
        "input_tensors": {**QUARK_WEIGHT, "is_dynamic": False},
    }  # fmt: skip
    return {
        "quant_method": "quark", "global_quant_config": whole, "exclude": ["lm_head"],
        "layer_quant_config": {}, "layer_type_quant_config": {}, "kv_cache_quant_config": {},
        "algo_config": None, "quant_mode": "eager_mode", "softmax_quant_spec": None,
        "export": {
            "kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder",
            "weight_format": "real_quantized", "min_kv_scale": 1.0, "weight_merge_groups": None,
        },
        **more,
    }  # fmt: skip


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FP4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
READ: dict[str, tuple[Any, tuple[str, int, tuple[int, int] | None]]] = {
    "DeepSeek V3": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
         "weight_block_size": [128, 128]},
        ("fp8-blocks", 8, (128, 128)),
    ),
    "DeepSeek V3.1": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0",
         "weight_block_size": [128, 128]},
        ("fp8-blocks", 8, (128, 128)),
    ),
    "AutoFP8 static": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"],
         "kv_cache_scheme": "static"},
        ("scaled", 8, None),
    ),
    "Llama 3.1 405B": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0,
         "modules_to_not_convert": ["model.layers.1", "lm_head"]},
        ("scaled", 8, (1, 0)),
    ),
    "AutoGPTQ": (GPTQ, ("gptq", 4, (1, 128))),
    "GPTQModel": (
        {**GPTQ, "checkpoint_format": "gptq_v2", "pack_dtype": "int32", "lm_head": False,
         "dynamic": {r"-:.*shared.*": {}}, "meta": {"quantizer": ["gptqmodel:2.2.0"]}},
        ("gptq", 4, (1, 128)),
    ),
    "GPTQ of a whole row": ({**GPTQ, "bits": 8, "group_size": -1}, ("gptq", 8, (1, 0))),
    "AutoAWQ": (AWQ, ("awq", 4, (1, 128))),
    "AutoAWQ, older": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"},
        ("awq", 4, (1, 64)),
    ),
    "AutoRound": (ROUND, ("gptq", 4, (1, 128))),
    "AutoRound as AWQ": (
        {**ROUND, "packing_format": "auto_round:auto_awq", "sym": False}, ("awq", 4, (1, 128))
    ),
    "AutoRound MXFP4": (ROUND_MX, ("mxfp4-packed", 4, (1, 32))),
    "AutoRound MXFP8": (
        {**ROUND_MX, "bits": 8, "data_type": "mx_fp_rceil", "packing_format": "auto_round:mxfp8"},
        ("scaled", 8, (1, 32)),
    ),
    "AutoRound NVFP4": (
        {**ROUND_MX, "data_type": "nv_fp4_with_static_gs", "group_size": 16,
         "packing_format": "auto_round:nvfp4"},
        ("nvfp4-packed", 4, (1, 16)),
    ),
    "AutoRound e4m3": (ROUND_E4M3, ("scaled", 8, (1, 0))),
    "AutoRound e4m3 of a tensor": ({**ROUND_E4M3, "group_size": 0}, ("scaled", 8, (0, 0))),
    "AutoRound e4m3 of blocks": (
        {**ROUND_E4M3, "group_size": [128, 64]}, ("fp8-blocks", 8, (128, 64))
    ),
    "AutoRound e5m2": ({**ROUND_E4M3, "fmt": "e5m2"}, ("scaled-e5m2", 8, (1, 0))),
    "AutoRound MXINT4": (
        {**ROUND_MX, "data_type": "mx_int", "packing_format": "auto_round:mxint4"},
        ("mxint4-packed", 4, (1, 32)),
    ),
    "SINQ of levels": (
        {"quant_method": "sinq", "method": "sinq_nf4_quantAux"}, ("sinq-nf4", 4, None)
    ),
    "W4A8 of SGLang": ({"quant_method": "w4afp8"}, ("fp8-blocks", 8, (128, 128))),
    "INC": ({**ROUND, "quant_method": "inc"}, ("gptq", 4, (1, 128))),
    "W4A16": (compressed(INT4, "pack-quantized"), ("packed", 4, (1, 128))),
    "W4A16, ordered in quantization alone": (
        compressed({**INT4, "actorder": "weight"}, "pack-quantized"), ("packed", 4, (1, 128))
    ),
    "W8A16": (compressed({"type": "int"}, "pack-quantized"), ("packed", 8, (1, 0))),
    "W8A8 int8": (compressed({"type": "int"}, "int-quantized", INPUTS), ("scaled", 8, (1, 0))),
    "W8A8 int8, static": (
        compressed(
            {"type": "int"}, "int-quantized",
            {**ARGS, "type": "int", "strategy": "tensor", "symmetric": False},
        ),
        ("scaled", 8, (1, 0)),
    ),
    "W4A8": (compressed(INT4, "pack-quantized", INPUTS), ("packed", 4, (1, 128))),
    "FP8 dynamic": (
        compressed({"type": "float"}, "float-quantized", {**INPUTS, "type": "float"}),
        ("scaled", 8, (1, 0)),
    ),
    "FP8 with KV scales": (
        compressed(
            {"type": "float", "strategy": "tensor"}, "naive-quantized",
            {**ARGS, "type": "float", "strategy": "tensor"}, quantization_status="frozen",
            kv_cache_scheme={**ARGS, "type": "float", "strategy": "tensor"},
        ),
        ("scaled", 8, (0, 0)),
    ),
    "FP8 in blocks": (
        compressed(
            {"type": "float", "strategy": "block", "block_structure": [128, 128]},
            "float-quantized", {**INPUTS, "type": "float", "strategy": "group", "group_size": 128},
        ),
        ("scaled", 8, (128, 128)),
    ),
    "FP8 in blocks, in one word": (
        compressed(
            {"type": "float", "strategy": "block", "block_structure": "128x128"}, "float-quantized"
        ),
        ("scaled", 8, (128, 128)),
    ),
    "NVFP4": (
        compressed(FP4, "nvfp4-pack-quantized", {**FP4, "dynamic": "local"}),
        ("nvfp4-packed", 4, (1, 16)),
    ),
    "MXFP4": (
        compressed(
            {**FP4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
            "mxfp4-pack-quantized",
        ),
        ("mxfp4-packed", 4, (1, 32)),
    ),
    "ModelOpt FP8": (modelopt("FP8"), ("scaled", 8, None)),
    "ModelOpt FP8 by channel": (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), ("scaled", 8, (1, 0))),
    "ModelOpt FP8 in blocks": (modelopt("FP8_PB_WO"), ("scaled", 8, (128, 128))),
    "ModelOpt NVFP4": (modelopt("NVFP4", group_size=16), ("nvfp4", 4, (1, 16))),
    "ModelOpt NVFP4, named so": (
        {**modelopt("NVFP4", group_size=16), "quant_method": "modelopt_fp4"}, ("nvfp4", 4, (1, 16))
    ),
    "ModelOpt NVFP4 AWQ": (
        modelopt("NVFP4_AWQ", group_size=16, has_zero_point=False, pre_quant_scale=True),
        ("nvfp4", 4, (1, 16)),
    ),
    "ModelOpt INT4 AWQ": (
        modelopt("W4A16_AWQ", group_size=64, has_zero_point=False, pre_quant_scale=True),
        ("modelopt-int4", 4, (1, 64)),
    ),
    "ModelOpt SmoothQuant": (modelopt("W8A8_SQ_PER_CHANNEL"), ("scaled", 8, (1, 0))),
    "ModelOpt MXFP8": (modelopt("MXFP8"), ("scaled", 8, (1, 32))),
    "ModelOpt mixed": (
        modelopt(
            "MIXED_PRECISION",
            quantized_layers={
                UP: {"quant_algo": "W4A16_AWQ", "group_size": 128},
                "model.layers.0.mlp.down_proj": {"quant_algo": "FP8"},
            },
        ),
        ("modelopt-int4", 4, (1, 128)),
    ),
    "Quark FP8": (quark(QUARK_WEIGHT), ("scaled", 8, (0, 0))),
    "Quark INT8": (
        quark({**QUARK_WEIGHT, "dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}),
        ("scaled", 8, (1, 0)),
    ),
    "Quark UINT4": (
        quark({**QUARK_WEIGHT, "dtype": "uint4", "qscheme": "per_group", "group_size": 128,
               "ch_axis": -1, "symmetric": False}),
        ("quark-uint4", 4, (1, 128)),
    ),
    "Quark MXFP4": (
        quark({**QUARK_WEIGHT, "dtype": "fp4", "qscheme": "per_group", "group_size": 32,
               "scale_format": "e8m0", "ch_axis": -1}),
        ("mxfp4-quark", 4, (1, 32)),
    ),
    "gpt-oss": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        ("mxfp4-blocks", 4, (1, 32)),
    ),
    "bitsandbytes nf4": (BNB, ("bnb-4bit", 4, None)),
    "bitsandbytes int8": (
        {**BNB, "load_in_4bit": False, "_load_in_4bit": False, "load_in_8bit": True},
        ("bnb-int8", 8, (1, 0)),
    ),
    "MXFP8 of transformers": (
        {"quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic"},
        ("fp8-blocks", 8, (1, 32)),
    ),
    "HQQ whose scales were to be quantized": (
        {"quant_method": "hqq", "skip_modules": ["lm_head"],
         "quant_config": {
             "weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1, "channel_wise": True},
             "scale_quant_params": {"nbits": 8, "channel_wise": True, "group_size": 128},
             "zero_quant_params": None, "offload_meta": False}},
        ("hqq", 4, (1, 64)),
    ),
    "BitBLAS": (
        {**GPTQ, "desc_act": False, "is_bitblas_format": True}, ("bitblas", 4, (1, 128))
    ),
    "HIGGS": (
        {"quant_method": "higgs", "bits": 4, "p": 2, "group_size": 256, "hadamard_size": 512,
         "modules_to_not_convert": ["lm_head"],
         "tune_metadata": {UP: {"M": 1, "N": 14336, "K": 4096, "num_bits": 4, "group_size": 256,
                                "num_sms": 128, "dtype": "torch.float16", "device": "cuda:0",
                                "template_id": 44}}},
        ("higgs", 4, (1, 256)),
    ),
    "SpQR": (
        {"quant_method": "spqr", "bits": 3, "beta1": 16, "beta2": 16,
         "shapes": {"model.layers.0.mlp.up_proj.dense_weights.shape": 512}},
        ("spqr", 3, None),
    ),
    "SINQ": (
        {"quant_method": "sinq", "nbits": 4, "group_size": 64, "tiling_mode": "1D", "method": "sinq"},
        ("sinq", 4, None),
    ),
    "SINQ by its own package": (
        {"sinq": True, "backend": "sinq", "quantization_method": "sinq", "sinq_version": "auto"},
        ("sinq", 4, None),
    ),
    "Quanto of transformers": (
        {"quant_method": "quanto", "weights": "int8", "activations": None}, ("quanto", 8, (1, 0)),
    ),
    "Four Over Six": (
        {"quant_method": "fouroversix", "dtype": "nvfp4", "scale_rule": "mse",
         "module_config_overrides": {"model.layers.1.mlp.up_proj": {"dtype": "mxfp4",
                                                                    "scale_rule": "static_6"}},
         "modules_to_not_convert": ["lm_head"]},
        ("fouroversix-nvfp4", 4, (1, 16)),
    ),
    "Gemma's integers": (
        {"quant_method": "gemma", "num_bits": 4, "modules_to_not_convert": ["lm_head"],
         "module_quant_configs": {"mlp\\.up_proj$": {"num_bits": 2}}},
        ("row-integers", 2, (1, 0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_public_config_is_read(name: str) -> None:
    config, (arrangement, bits, group) = READ[name]
    quantization = stored_quantization({"quantization_config": config}, "config.json")
    assert quantization is not None
    numbers = quantization.of(UP)
    assert numbers is not None
    assert (numbers.arrangement, numbers.bits, numbers.group) == (arrangement, bits, group)


@pytest.mark.parametrize("groups", [{}, {"config_groups": {}}, {"config_groups": None}])
def test_sparse_weights_need_no_groups(groups: dict[str, Any]) -> None:
    """REG-056: plain numbers of which only some are stored."""
    sparsity = {"format": "sparse-24-bitmask", "targets": ["Linear"], "sparsity_structure": "2:4"}
    config = {"quant_method": "compressed-tensors", "sparsity_config": sparsity, **groups}
    quantization = stored_quantization({"quantization_config": config}, "config.json")
    assert quantization is not None
    assert quantization.sparse == "sparse-24" and quantization.of(UP) is None


REFUSED: dict[str, tuple[Any, str]] = {
    "marlin": ({**GPTQ, "is_marlin_format": True, "desc_act": True}, "desc_act"),
    "other words": ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype"),
    "bitblas in order": ({**GPTQ, "is_bitblas_format": True, "desc_act": True}, "desc_act"),
    "exllama": ({**AWQ, "version": "exllama"}, "version"),
    "AutoRound NVFP4 of 32": (
        {**ROUND_MX, "data_type": "nv_fp", "packing_format": "auto_round:nv_fp"}, "group_size"
    ),
    "AutoRound MXFP6": ({**ROUND_MX, "bits": 6}, "bits"),
    "AutoRound of integers in MXFP4's parts": (
        {**ROUND_MX, "data_type": "mx_int"}, "packing_format"
    ),
    "AutoRound of other integers": (
        {**ROUND_MX, "data_type": "mx_int8", "packing_format": "auto_round:mx_int"}, "data_type"
    ),
    "AutoRound MXFP4 for others": (
        {**ROUND_MX, "packing_format": "auto_round:llm_compressor"}, "packing_format"
    ),
    "AutoRound e3m4": ({**ROUND_E4M3, "fmt": "e3m4"}, "fmt"),
    "AutoRound e5m2 of blocks": (
        {**ROUND_E4M3, "fmt": "e5m2", "group_size": [128, 128]}, "group_size"
    ),
    "AutoRound of floats beside integers": (
        {**ROUND, "extra_config": {"model.layers.0": {"data_type": "mx_fp"}}}, "data_type"
    ),
    "AutoRound for others": (
        {**ROUND, "packing_format": "auto_round:llm_compressor"}, "packing_format"
    ),
    "marlin-24": (compressed({**INT4, "symmetric": False}, "marlin-24"), "symmetric"),
    "not compressed": (
        compressed(INT4, "pack-quantized", quantization_status="calibration"),
        "quantization_status",
    ),
    "dynamic weights": (compressed({**INT4, "dynamic": True}, "pack-quantized"), "dynamic"),
    "another order": (compressed({**INT4, "actorder": "random"}, "pack-quantized"), "actorder"),
    "ModelOpt W4A8": (modelopt("W4A8_AWQ", group_size=128), "quant_algo"),
    "ModelOpt SVD": (modelopt("NVFP4_SVD"), "quant_algo"),
    "ModelOpt of 32": (modelopt("NVFP4", group_size=32), "group_size"),
    "Quark twice": (quark([QUARK_WEIGHT, {"dtype": "int4"}]), "weight"),
    "Quark INT4 per output": (
        quark({**QUARK_WEIGHT, "dtype": "int4", "qscheme": "per_channel", "ch_axis": 0}), "qscheme"
    ),
    "Quark along outputs": (
        quark({**QUARK_WEIGHT, "dtype": "uint4", "qscheme": "per_group", "group_size": 128, "ch_axis": 0}), "ch_axis"
    ),
    "Quark of layer types": (
        quark(QUARK_WEIGHT, layer_type_quant_config={"Linear": {}}), "layer_type_quant_config"
    ),
    "Quark not real": (quark(QUARK_WEIGHT, export={"weight_format": "fake_quantized"}), "weight_format"),
    "MLX of 7 bits": ({"quant_method": "mlx", **dict(MLX, bits=7)}, "bits"),
    "MLX of another mode": ({"quant_method": "mlx", **MLX, "mode": "mxfp3"}, "mode"),
    "MLX of other groups": ({"quant_method": "mlx", **MLX, "mode": "mxfp4"}, "group_size"),
    "QLoRA storage": ({**BNB, "bnb_4bit_quant_storage": "int8"}, "bnb_4bit_quant_storage"),
    "another size of MXFP4": (
        {"quant_method": "fp8", "store_dtype": "mxfp4", "mxfp4_block_size": 16}, "mxfp4_block_size"
    ),
    "another exponent": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "e5m2"}, "scale_fmt"
    ),
    "Four Over Six of integers": ({"quant_method": "fouroversix", "dtype": "nvint4"}, "dtype"),
    "Four Over Six of 6": ({"quant_method": "fouroversix", "scale_rule": "static_5"}, "scale_rule"),
    "HIGGS of another group": (
        {"quant_method": "higgs", "group_size": 32, "tune_metadata": {}}, "group_size"
    ),
    "HIGGS without its kernels": ({"quant_method": "higgs", "bits": 4}, "tune_metadata"),
    "SpQR in other tiles": ({"quant_method": "spqr", "beta1": 32}, "beta1"),
    "SINQ in tiles": ({"quant_method": "sinq", "tiling_mode": "2D"}, "tiling_mode"),
    "SINQ of other levels": ({"quant_method": "sinq", "method": "sinq_fp4"}, "method"),
    "Quanto of e3m4": ({"quant_method": "quanto", "weights": "qfloat8_e3m4"}, "weights"),
    "Quanto of a size unknown": ({"quant_method": "quanto", "weights": "int4"}, "weights"),
    "Gemma of 3 bits": ({"quant_method": "gemma", "num_bits": 3}, "num_bits"),
    "MXFP8 in blocks": (
        {"quant_method": "mxfp8", "weight_block_size": [128, 128]}, "weight_block_size"
    ),
    **{
        name: ({"quant_method": name}, "quant_method")
        for name in (
            "aqlm", "bitnet", "eetq", "fp_quant", "higgs", "quanto", "quip", "spqr", "vptq", "sinq",
            "deepspeedfp", "tpu_int8", "ptpc_fp8", "experts_int8", "bitblas", "moe_wna16", "exl2",
            "squeezellm", "marlin", "smoothquant", "qqq", "rtn", "four_over_six", "metal",
        )
        if name not in METHODS
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "module", "expected"),
    [
        ({"quantization": MLX}, UP, ("mlx", 4, (1, 64))),
        ({"quantization": MLX, "quantization_config": MLX}, UP, ("mlx", 4, (1, 64))),
        (
            {"quantization": {**MLX, "mode": "affine", UP: {"group_size": 32, "bits": 8}}},
            UP,
            ("mlx", 8, (1, 32)),
        ),
        ({"quantization": {**MLX, UP: False}}, UP, None),
        (
            {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
            UP,
            ("mlx-mxfp4", 4, (1, 32)),
        ),
        (
            {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"}},
            UP,
            ("mlx-nvfp4", 4, (1, 16)),
        ),
    ],
)
def test_mlx_names_no_method(
    config: dict[str, Any], module: str, expected: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    quantization = stored_quantization(read_config(tmp_path), "config.json")
    assert quantization is not None
    numbers = quantization.of(module)
    found = None if numbers is None else (numbers.arrangement, numbers.bits, numbers.group)
    assert found == expected


def test_fp8_of_mimo_has_experts_in_mxfp4_and_sections_of_outputs() -> None:
    """Keys beside DeepSeek's; what is listed as plain comes first."""
    config = {
        **{"quant_method": "fp8", "weight_block_size": [128, 128], "store_dtype": "mxfp4"},
        **{"mxfp4_block_size": 32, "ignored_layers": ["model.layers.0.self_attn.o_proj"]},
        "output_sections": {"qkv_proj": 4},
    }
    quantization = stored_quantization({"quantization_config": config}, "config.json")
    assert quantization is not None
    found = {
        name: quantization.of(f"model.layers.0.{name}")
        for name in (
            "mlp.experts.7.up_proj",
            "self_attn.qkv_proj",
            "self_attn.o_proj",
            "mlp.up_proj",
        )
    }
    assert [one and (one.arrangement, one.group, one.sections) for one in found.values()] == [
        ("mxfp4-quark", (1, 32), 1),
        ("fp8-blocks", (128, 128), 4),
        None,
        ("fp8-blocks", (128, 128), 1),
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_another_variant_is_refused_by_its_key(name: str) -> None:
    config, field = REFUSED[name]
    with pytest.raises(CheckpointError) as seen:
        stored_quantization({"quantization_config": config}, "config.json")
    assert seen.value.field == field and field in str(seen.value)


@pytest.mark.parametrize(
    ("file", "written", "expected"),
    [
        ("hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "FP8"}}, "scaled"),
        ("quantize_config.json", {**GPTQ, "bits": 8}, "gptq"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4}, "awq"),
        ("quanto_qmap.json", {UP: {"weights": "qint4", "activations": "none"}}, "quanto-packed"),
    ],
)
def test_a_file_beside_the_config_may_say_it(
    file: str, written: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    (tmp_path / file).write_text(json.dumps(written))
    quantization = stored_quantization(read_config(tmp_path), "config.json")
    assert quantization is not None
    numbers = quantization.of(UP)
    assert numbers is not None and numbers.arrangement == expected

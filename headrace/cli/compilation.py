"""vLLM's `--compilation-config`, key by key: how steps are recorded, and which kernels that do
several operations in one are left out. Nothing is compiled here, so what says how is left out; a
key or a value that is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.base.errors import ConfigError

FLAG = "--compilation-config"
MODES = {
    "NONE": ["--enforce-eager"],
    "PIECEWISE": [],
    "FULL": [],
    "FULL_DECODE_ONLY": [],
    "FULL_AND_PIECEWISE": [],
}
"""`cudagraph_mode` -> our words. Steps are recorded whole, with attention, in all but the first."""
COMPILER = frozenset(
    [
        "mode",
        "level",
        "backend",
        "custom_ops",
        "splitting_ops",
        "compile_mm_encoder",
        "compile_sizes",
        "compile_ranges_split_points",
        "compile_ranges_endpoints",
        "inductor_compile_config",
        "inductor_passes",
        "use_inductor",
        "use_inductor_graph_partition",
        "cache_dir",
        "local_cache_dir",
        "debug_dump_path",
        "dynamic_shapes_config",
        "evaluate_guards",
        "fast_moe_cold_start",
        "assume_32_bit_indexing",
        "cudagraph_num_of_warmups",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "cudagraph_copy_inputs",
        "cudagraph_specialize_lora",
        "cudagraph_mm_encoder",
        "use_cudagraph",
        "full_cuda_graph",
    ]
)
"""Keys that say how torch.compile works or which sizes are recorded beforehand."""
PASSES: Mapping[str, str] = {
    "fuse_norm_quant": "norm-quant",
    "enable_fusion": "norm-quant",
    "fuse_allreduce_rms": "all-reduce-norm",
    "enable_fi_allreduce_fusion": "all-reduce-norm",
    "enable_qk_norm_rope_fusion": "qk-rope",
    "fuse_rope_kvcache": "qk-rope",
    "fuse_act_quant": "linear",
}
"""Keys of `pass_config` -> what --unfused calls them: there unless they are switched off."""
ABSENT: Mapping[str, str] = {
    "fuse_attn_quant": "attention leaves floats, which the product behind it quantizes",
    "enable_attn_fusion": "attention leaves floats, which the product behind it quantizes",
    "fuse_gemm_comms": "products and sums over ranks are kernels of their own",
    "enable_async_tp": "products and sums over ranks are kernels of their own",
}
"""Those of which there is no kernel -> why."""
SEQUENCE = ("enable_sp", "enable_sequence_parallelism")
LEFT_OUT = frozenset(
    [
        "eliminate_noops",
        "enable_noop",
        "fuse_act_padding",
        "fi_allreduce_fusion_max_size_mb",
        "sp_min_token_num",
        "fi_allreduce_fusion_max_token_num",
    ]
)


def compilation_words(values: list[str]) -> list[str]:
    """Our words for the value, an object or a level; ConfigError for a key or a value that is not
    known."""
    try:
        config = msgspec.json.decode(values[0], type=dict[str, Any] | int)
    except msgspec.DecodeError as error:
        raise _wrong(values[0], f"an object is wanted ({error})") from None
    if isinstance(config, int):
        return []
    words: list[str] = []
    for key, value in config.items():
        if key == "cudagraph_mode":
            words += _mode(value)
        elif key == "pass_config":
            words += _passes(value)
        elif key not in COMPILER:
            known = ", ".join(sorted(("cudagraph_mode", "pass_config", *COMPILER)))
            raise _wrong(key, f"no such key (known: {known})")
    return words


def _mode(value: object) -> list[str]:
    mode = str(value or "FULL_AND_PIECEWISE").upper()
    if mode not in MODES:
        raise _wrong(f"cudagraph_mode {value}", f"known: {', '.join(MODES)}")
    return MODES[mode]


def _passes(value: object) -> list[str]:
    if not isinstance(value, dict):
        raise _wrong(f"pass_config {value}", "an object is wanted")
    left_out, words = [], list[str]()
    for key, wanted in value.items():
        if key in LEFT_OUT or wanted is None:
            continue
        if not isinstance(wanted, bool):
            raise _wrong(f"pass_config.{key} {wanted}", "true or false is wanted")
        if key in PASSES:
            left_out += [] if wanted else [PASSES[key]]
        elif key in SEQUENCE:
            words += ["--sequence-parallel"] if wanted else []
        elif key not in ABSENT:
            known = ", ".join(sorted((*PASSES, *ABSENT, *SEQUENCE, *LEFT_OUT)))
            raise _wrong(f"pass_config.{key}", f"no such key (known: {known})")
        elif wanted:
            raise _wrong(f"pass_config.{key}", ABSENT[key])
    if left_out:
        words += ["--unfused", ",".join(dict.fromkeys(left_out))]
    return words


def _wrong(what: str, why: str) -> ConfigError:
    return ConfigError(f"{FLAG}, -cc (vLLM's flag): {what}: {why}", field=FLAG)

"""Keys of `quantization_config` of weights in e4m3, as transformers and DeepSeek write them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headrace.base.config.hf import ConfigReader
from headrace.base.config.quantization import (
    EVERY,
    Numbers,
    Rule,
    StoredQuantization,
    everything,
    plain_modules,
)
from headrace.base.config.quantization_activations import (
    E4M3_TOKENS,
    MXFP8_GROUPS,
    fp8_activations,
)


def fp8(config: ConfigReader) -> StoredQuantization:
    """fp8 of transformers and DeepSeek: e4m3, a scale per block of outputs x inputs, or one; with
    `store_dtype` mxfp4 or `expert_dtype` fp4 experts are e2m1 (MiMo, DeepSeek V4).
    `output_sections`, ours: see Numbers.sections, by the module's last name."""
    config.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    config.choice("scale_fmt", ("ue8m0", "float", "float32"), "float")
    block = config.list("weight_block_size", (), of=int)
    if block and (len(block) != 2 or min(block) < 1):
        raise config.wrong("weight_block_size", "two positive sizes, of outputs and of inputs")
    numbers = Numbers(
        arrangement="fp8-blocks" if block else "scaled",
        bits=8,
        group=(block[0], block[1]) if block else None,
        activations=fp8_activations(config, block[1] if block else 0),
    )
    plain = Rule(targets=plain_modules(config), numbers=None)
    every = Rule(targets=(EVERY,), numbers=numbers)
    return StoredQuantization(method="fp8", rules=(plain, *_others(config, numbers), every))


def _others(config: ConfigReader, numbers: Numbers) -> Iterator[Rule]:
    """Of modules that are stored otherwise than all."""
    fours = config.choice("store_dtype", ("fp8", "mxfp4"), "fp8") == "mxfp4"
    if config.choice("expert_dtype", ("fp8", "fp4"), "fp8") == "fp4" or fours:
        size = config.int("mxfp4_block_size", 32, ge=32, le=32)
        experts = Numbers(arrangement="mxfp4-quark", bits=4, group=(1, size))
        yield Rule(targets=(r"re:.*\.experts\.\d+\.",), numbers=experts)
    if numbers.group is not None:  # DeepSeek V4.1's tables of n-grams, row by row
        rows = msgspec.structs.replace(numbers, group=(1, 32))
        yield Rule(targets=(r"re:.*\.engram\.embed$",), numbers=rows)
    sections = config.section("output_sections")
    if sections is not None:
        for module in sections.raw:
            parted = msgspec.structs.replace(numbers, sections=sections.int(module, ge=1))
            yield Rule(targets=(module,), numbers=parted)


def mxfp8(config: ConfigReader) -> StoredQuantization:
    """MXFP8 of transformers: e4m3, a power of two for 32 inputs."""
    config.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    config.choice("scale_fmt", ("ue8m0",), "ue8m0")
    if tuple(config.list("weight_block_size", (1, 32), of=int)) != (1, 32):
        raise config.wrong("weight_block_size", "1 output and 32 inputs")
    numbers = Numbers(arrangement="fp8-blocks", bits=8, group=(1, 32), activations=MXFP8_GROUPS)
    return everything("mxfp8", numbers, plain_modules(config))


def fbgemm(config: ConfigReader) -> StoredQuantization:
    """e4m3 with a scale for each output."""
    numbers = Numbers(arrangement="scaled", bits=8, group=(1, 0), activations=E4M3_TOKENS)
    return everything("fbgemm_fp8", numbers, plain_modules(config))

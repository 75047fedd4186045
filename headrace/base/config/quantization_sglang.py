"""`quantization_config` under the names that SGLang gives to methods: int8 in blocks, int8 and e4m3
with a scale per output, and experts of 4 bits beside blocks of e4m3."""

from __future__ import annotations

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
    E4M3_TENSOR,
    E4M3_TOKENS,
    INT8_TOKENS,
    Activations,
)


def blockwise_int8(config: ConfigReader) -> StoredQuantization:
    """int8 with a scale for each block of outputs x inputs (DeepSeek-R1-Block-INT8)."""
    config.choice("activation_scheme", ("dynamic",), "dynamic")
    outputs, inputs = _block(config)
    asked = Activations(bits=8, floating=False, shared="group", group=inputs)
    numbers = Numbers(arrangement="int8-blocks", bits=8, group=(outputs, inputs), activations=asked)
    return everything("blockwise_int8", numbers, plain_modules(config))


def w8a8_int8(config: ConfigReader) -> StoredQuantization:
    """int8 with a scale for each output, as compressed-tensors stores it."""
    numbers = Numbers(arrangement="scaled", bits=8, group=(1, 0), activations=INT8_TOKENS)
    return everything("w8a8_int8", numbers, plain_modules(config))


def w8a8_fp8(config: ConfigReader) -> StoredQuantization:
    """e4m3 likewise."""
    numbers = Numbers(arrangement="scaled", bits=8, group=(1, 0), activations=E4M3_TOKENS)
    return everything("w8a8_fp8", numbers, plain_modules(config))


def w4afp8(config: ConfigReader) -> StoredQuantization:
    """Routed experts in 4 bits, groups of inputs, with a stored scale of their inputs; all else as
    fp8 in blocks (DeepSeek-R1-W4AFP8)."""
    config.choice("linear_activation_scheme", ("dynamic",), "dynamic")
    config.choice("moe_activation_scheme", ("static",), "static")
    experts = Numbers(
        arrangement="signed-pairs",
        bits=4,
        group=(1, config.int("group_size", 128, ge=2)),
        activations=E4M3_TENSOR,
    )
    dense = Numbers(arrangement="fp8-blocks", bits=8, group=_block(config), activations=E4M3_TOKENS)
    return StoredQuantization(
        method="w4afp8",
        rules=(
            Rule(targets=plain_modules(config), numbers=None),
            Rule(targets=(r"re:.*\.experts\.\d+\.",), numbers=experts),
            Rule(targets=(EVERY,), numbers=dense),
        ),
    )


def _block(config: ConfigReader) -> tuple[int, int]:
    outputs, inputs = config.list("weight_block_size", (128, 128), of=int, length=2)
    if min(outputs, inputs) < 1:
        raise config.wrong("weight_block_size", "two positive sizes, of outputs and of inputs")
    return outputs, inputs

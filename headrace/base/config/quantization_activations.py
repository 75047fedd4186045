"""What a quantized checkpoint says of the inputs of its GEMMs: how they are to be quantized, and
whether their scales were found beforehand (static) or are found as they come (dynamic)."""

from __future__ import annotations

import msgspec

from headrace.base.config.hf import ConfigReader


class Activations(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a GEMM.

    bits      of a number
    floating  e4m3, or e2m1 of 4 bits; else integers
    shared    what shares a scale: "tensor", "token", or "group" of `group` inputs of a token
    dynamic   scales are found as tokens come; else the checkpoint holds them
    symmetric without a zero point
    """

    bits: int
    floating: bool
    shared: str = "token"
    group: int = 0
    dynamic: bool = True
    symmetric: bool = True

    def __str__(self) -> str:
        kinds = {(8, True): "e4m3", (4, True): "e2m1"}
        numbers = kinds.get((self.bits, self.floating), f"int{self.bits}")
        whose = f"{self.group} inputs of a token" if self.shared == "group" else f"a {self.shared}"
        zero = "" if self.symmetric else " and a zero point"
        origin = "found as they come" if self.dynamic else "stored"
        return f"{numbers}, a scale{zero} for {whose}, {origin}"


def fp8_activations(config: ConfigReader, block: int = 0) -> Activations:
    """`activation_scheme` of fp8: of weights in blocks, tokens have a scale for as many inputs as a
    block has."""
    dynamic = config.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "dynamic"
    if not dynamic:
        return Activations(bits=8, floating=True, shared="tensor", dynamic=False)
    if block:
        return Activations(bits=8, floating=True, shared="group", group=block)
    return Activations(bits=8, floating=True)


_STRATEGIES = ("tensor", "token", "channel", "group", "tensor_group", "block")


def compressed_activations(group: ConfigReader) -> Activations | None:
    """`input_activations` of a group of compressed-tensors; None: they stay as they are."""
    inputs = group.section("input_activations")
    if inputs is None:
        return None
    bits = inputs.int("num_bits", 8)
    kind = inputs.choice("type", ("int", "float"), "int")
    if bits not in (4, 8):
        raise inputs.wrong("num_bits", "4 or 8 (without input_activations they stay as they are)")
    dynamic = inputs.raw.get("dynamic", False)
    if dynamic not in (True, False, "local", None):
        raise inputs.wrong("dynamic", 'true, false or "local"')
    size = inputs.int("group_size", 0, ge=-1) or 0
    default = "token" if dynamic else "tensor"
    strategy = inputs.choice("strategy", _STRATEGIES, default)
    shared = {"tensor": "tensor", "token": "token", "channel": "token"}.get(strategy, "group")
    if shared == "group" and size < 1:
        raise inputs.wrong("group_size", f"a positive size, with the strategy {strategy}")
    return Activations(
        bits=bits,
        floating=kind == "float",
        shared=shared,
        group=size if shared == "group" else 0,
        dynamic=bool(dynamic),
        symmetric=inputs.bool("symmetric", True),
    )


_QUARK = {
    "fp8_e4m3": (8, True),
    "int8": (8, False),
    "fp4": (4, True),
    "fp6_e2m3": (6, True),
    "fp6_e3m2": (6, True),
}
_QUARK_SHARED = {"per_tensor": "tensor", "per_channel": "token", "per_token": "token",
                 "per_group": "group"}  # fmt: skip


def quark_activations(entry: ConfigReader) -> Activations | None:
    """`input_tensors` of Quark; None: they stay as they are."""
    inputs = entry.section("input_tensors")
    if inputs is None:
        return None
    bits, floating = _QUARK[inputs.choice("dtype", _QUARK)]
    shared = _QUARK_SHARED[inputs.choice("qscheme", _QUARK_SHARED, "per_tensor")]
    return Activations(
        bits=bits,
        floating=floating,
        shared=shared,
        group=inputs.int("group_size", 32, ge=1) if shared == "group" else 0,
        dynamic=inputs.bool("is_dynamic", False),
        symmetric=inputs.bool("symmetric", True) if "symmetric" in inputs else True,
    )


INT8_TOKENS = Activations(bits=8, floating=False)
INT8_TENSOR = Activations(bits=8, floating=False, shared="tensor", dynamic=False)
E4M3_TOKENS = Activations(bits=8, floating=True)
E4M3_TENSOR = Activations(bits=8, floating=True, shared="tensor", dynamic=False)
MXFP8_GROUPS = Activations(bits=8, floating=True, shared="group", group=32)
NVFP4_GROUPS = Activations(bits=4, floating=True, shared="group", group=16)

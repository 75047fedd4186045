"""The self-check at start refuses every quantized GEMM and mixture whose scales are wrong, for some outputs alone
too. BEY-26, BEY-55, REG-121."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from headrace.back.kernels.experts.op import ExpertsProblem
from headrace.back.kernels.experts_bytes import op as experts_bytes
from headrace.back.kernels.experts_bytes.layout import ByteForm
from headrace.back.kernels.experts_fp8 import op as experts_fp8
from headrace.back.kernels.experts_int4 import op as experts_int4
from headrace.back.kernels.experts_int4.layout import Int4Form
from headrace.back.kernels.linear_fp8 import op as linear_fp8
from headrace.back.kernels.linear_int4 import op as linear_int4
from headrace.back.kernels.linear_int8 import op as linear_int8
from headrace.back.kernels.op import Kernel

DTYPE = torch.bfloat16
LAYER: dict[str, Any] = {"device": "cpu", "dtype": DTYPE, "inputs": 256, "outputs": 128}
MIXTURE = ExpertsProblem(device="cpu", dtype=DTYPE, experts=4, slots=2, width=256, inner=128)
CASES: dict[str, tuple[Any, Any]] = {
    **{
        f"fp8 {group}": (linear_fp8, linear_fp8.LinearFp8Problem(**LAYER, group=group))
        for group in (None, 32, 128)
    },
    "int4": (linear_int4, linear_int4.LinearInt4Problem(**LAYER, group=128)),
    "int4-asym": (linear_int4, linear_int4.LinearInt4Problem(**LAYER, group=32, minima=True)),
    "mxfp4": (linear_int4, linear_int4.LinearInt4Problem(**LAYER, group=32, floats=True)),
    "int8": (linear_int8, linear_int8.LinearInt8Problem(**LAYER, group=None)),
    "int8-g64": (linear_int8, linear_int8.LinearInt8Problem(**LAYER, group=64)),
    "experts fp8": (experts_fp8, experts_fp8.ExpertsFp8Problem(mixture=MIXTURE, group=128)),
    "experts mxfp4": (
        experts_int4,
        experts_int4.ExpertsInt4Problem(mixture=MIXTURE, form=Int4Form(32, floats=True)),
    ),
    "experts int8": (
        experts_bytes,
        experts_bytes.ExpertsBytesProblem(mixture=MIXTURE, form=ByteForm(None)),
    ),
    "experts mxfp8": (
        experts_bytes,
        experts_bytes.ExpertsBytesProblem(mixture=MIXTURE, form=ByteForm(32, floats=True)),
    ),
}


def wrong(weight: Any, by: float) -> Any:
    """The weight with half of its scales off: those of a layer, or of all that an object holds."""
    changes = {}
    for field in fields(weight):
        value = getattr(weight, field.name)
        if isinstance(value, torch.Tensor) and field.name.startswith("scales"):
            flat = value.clone()
            flat.view(-1)[: flat.numel() // 2] *= by
            changes[field.name] = flat
        elif is_dataclass(value):
            changes[field.name] = wrong(value, by)
    return replace(weight, **changes)


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_scale_is_caught_before_a_kernel_is_used(case: str) -> None:
    module, problem = CASES[case]

    def kernel(by: float) -> Kernel[Any]:
        def bind(problem: Any, weight: Any, *rest: Any) -> Any:
            return module.bind_reference(problem, wrong(weight, by), *rest)

        return Kernel(name="another", supports=lambda problem: None, bind=bind)

    assert module.OP.failures(kernel(1.0), problem) == []
    for by in (1.1, 0.5, float("nan")):
        ((_, reason),) = module.OP.failures(kernel(by), problem)
        assert "self-check failed" in reason

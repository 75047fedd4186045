"""Kernels that do several operations in one: by what --unfused calls them, and in how many places
of a model they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from headrace.back.kernels.op import KernelChoice
from headrace.base.config.resolved import Decision

FUSIONS = {
    "qk_rope_write": "qk-rope",
    "rms_norm_quant": "norm-quant",
    "fused_linear": "linear",
    "fused_route": "linear",
}
"""Ops of several operations -> their names; the sum over ranks with a norm is not an op."""


def fusions(choices: Iterable[KernelChoice[Any]]) -> Counter[str]:
    """How many places of each there are, where a kernel does it."""
    chosen = (one for one in choices if one.kernel.name != "torch")
    return Counter(FUSIONS[one.op] for one in chosen if one.op in FUSIONS)


def counted(choices: Iterable[KernelChoice[Any]]) -> tuple[Decision, ...]:
    """The same as a decision, if there are any."""
    names = ", ".join(f"{name} {count}" for name, count in sorted(fusions(choices).items()))
    why = "so many places in which one kernel does several operations (--unfused)"
    return (Decision("fusions", "auto", names, why),) if names else ()

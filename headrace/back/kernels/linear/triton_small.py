"""Chooses and launches our kernels of products by table.py: triton_gemv.py, triton_skinny.py, triton_stream.py and
triton_wide.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import triton

from headrace.back.kernels.gated_act.triton_gated_act import ACTIVATIONS
from headrace.back.kernels.linear import stream, wide
from headrace.back.kernels.linear.table import ProductPlan, padded, plan_for
from headrace.back.kernels.linear.triton_gemv import gemv_kernel
from headrace.back.kernels.linear.triton_skinny import skinny_kernel
from headrace.back.kernels.triton.room import fitting_stages
from headrace.back.kernels.triton.wrap import (
    COUNTERS,
    counters,
    launch,
)

Launch = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Product:
    """y = act(norm(x) W^T + b), with `add` added to what y holds. `activation` "" and `norm_I` None: none."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None = None
    norm_I: torch.Tensor | None = None
    eps: float = 0.0
    activation: str = ""
    add: bool = False

    @property
    def results(self) -> int:
        """Columns of y."""
        return len(self.weight_OI) // (2 if self.activation else 1)


def refusal(inputs: int, activation: str | None) -> str | None:
    """Why these kernels cannot compute a product, if so."""
    if inputs % 8:
        return f"{inputs} inputs are no multiple of 8"
    if activation and activation not in ACTIVATIONS:
        return f"does not know {activation}"
    return None


def small(product: Product) -> Callable[[int], Launch | None]:
    """For a number of tokens the launch `f(x_TI, y_TY)`, None where the library's product is taken. With a norm one
    token only: see triton_skinny.py."""
    outputs, inputs = product.weight_OI.shape
    device = product.weight_OI.device

    @cache
    def launch_of(tokens: int) -> Launch | None:
        plan = plan_for(
            device_name(device),
            outputs,
            inputs,
            tokens,
            gated=bool(product.activation),
            without=unfit(product),
        )
        return plan and launcher(product, plan, tokens)

    one_alone = product.norm_I is not None
    return lambda tokens: None if one_alone and tokens > 1 else launch_of(padded(tokens))


def unfit(product: Product) -> set[str]:
    """The kernels that not every device and product has, where this one lacks them."""
    weight_OI, activation = product.weight_OI, product.activation
    reasons = {
        "stream": stream.unfit(weight_OI, activation),
        "wide": wide.unfit(weight_OI, product.bias_O, activation, add=product.add),
    }
    return {kernel for kernel, reason in reasons.items() if reason is not None}


@cache
def device_name(device: torch.device) -> str:
    """The device's name in tables."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def launcher(product: Product, plan: ProductPlan, tokens: int) -> Launch:
    """The launch for up to `tokens` tokens (a padded number) by a plan."""
    return _KINDS[plan.kernel](product, plan, tokens)


def _shared(product: Product) -> dict[str, int | bool | str]:
    return {
        "INPUTS": product.weight_OI.shape[1],
        "OUTPUTS": product.results,
        "BIAS": product.bias_O is not None,
        "ACTIVATION": product.activation,
        "ADD": product.add,
    }


def _gemv(product: Product, plan: ProductPlan, tokens: int) -> Launch:
    assert tokens == 1, tokens
    grid = (triton.cdiv(product.results, plan.n),)
    rest = product.weight_OI.shape[1] - plan.k
    constants = {
        **_shared(product), "NORM": product.norm_I is not None, "N": plan.n, "K": plan.k,
        "PREFETCH": plan.prefetch if plan.prefetch * plan.k <= rest else 0,
    }  # fmt: skip

    def run(x_TI: torch.Tensor, y_TY: torch.Tensor) -> None:
        assert x_TI.stride(1) == y_TY.stride(1) == 1
        gemv_kernel[grid](
            x_TI, product.weight_OI, product.bias_O, product.norm_I, y_TY, product.eps,
            **constants, num_warps=plan.warps, **launch(x_TI.device),
        )  # fmt: skip

    return run


def _skinny(product: Product, plan: ProductPlan, tokens: int) -> Launch:
    m, tiles = max(16, tokens), triton.cdiv(product.results, plan.n)
    split = plan.split
    assert product.norm_I is None and (split == 1 or tiles <= COUNTERS), (tiles, split)
    share = triton.cdiv(product.weight_OI.shape[1], plan.k * split) * plan.k
    prefetch = plan.prefetch if plan.prefetch * plan.k <= share else 0
    constants = {
        **_shared(product), "M": m, "N": plan.n, "K": plan.k, "SPLIT": split,
        "PREFETCH": prefetch, "SWAP": plan.swap,
    }  # fmt: skip
    parts = tiles * split * (2 if product.activation else 1) * m * plan.n
    rows = m + plan.n * (2 if product.activation else 1)
    stages = fitting_stages(plan.stages, rows * plan.k * product.weight_OI.element_size())

    def run(x_TI: torch.Tensor, y_TY: torch.Tensor) -> None:
        assert x_TI.stride(1) == y_TY.stride(1) == 1
        partial = x_TI
        if split > 1:
            partial = torch.empty(parts, dtype=torch.float32, device=x_TI.device)
        skinny_kernel[(tiles, split)](
            x_TI, product.weight_OI, product.bias_O, y_TY, partial, counters(x_TI.device),
            len(x_TI), x_TI.stride(0), y_TY.stride(0), **constants, num_warps=plan.warps,
            num_stages=stages, **launch(x_TI.device),
        )  # fmt: skip

    return run


def _stream(product: Product, plan: ProductPlan, tokens: int) -> Launch:
    assert product.norm_I is None, "the norm is a kernel of its own"
    return stream.bind(
        stream.Streamed(
            weight_OI=product.weight_OI,
            bias_O=product.bias_O,
            gated=bool(product.activation),
            add=product.add,
            results=product.results,
        ),
        k=plan.k,
        stages=plan.stages,
        per_sm=plan.split,
        most_tokens=tokens,
    )


def _wide(product: Product, plan: ProductPlan, tokens: int) -> Launch:
    assert product.norm_I is None, "the norm is a kernel of its own"
    return wide.bind(product.weight_OI, m=plan.m, group=plan.group)


_KINDS = {"gemv": _gemv, "skinny": _skinny, "stream": _stream, "wide": _wide}

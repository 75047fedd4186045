"""Uniform routing for benchmarks: routers see seeded random logits in place of their own, which, of dummy weights,
send all tokens to a few experts.

The router's product and the choice run as ever; only what is chosen from is exchanged. Row i of a step has the same
logits in every step, and every layer its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.h200.shapes import layer_weights, routing
from headrace.back.executor.processes import ProcessExecutor
from headrace.back.kernels.fused_route.op import FusedRoute
from headrace.back.kernels.route.op import bind_reference
from headrace.back.layers.moe.mixture import Mixture
from headrace.back.layers.moe.router import route_problem
from headrace.back.models import load

ROWS = 16384 + 64
APART = 389
"""Rows between two layers' logits."""


@cache
def _logits(columns: int, layers: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(17)
    return torch.randn(ROWS + APART * layers, columns, generator=generator)


@cache
def _device_logits(columns: int, layers: int, device: torch.device) -> torch.Tensor:
    return _logits(columns, layers).to(device)


@contextmanager
def uniform_routing(shape: str) -> Iterator[None]:
    """Models built meanwhile route so; nothing changes for shapes without experts."""
    experts, _ = routing(shape)
    layers = sum(layer.expert > 0 for layer in layer_weights(shape))
    if experts and torch.cuda.is_available():
        _device_logits(
            experts, layers, torch.device("cuda", torch.cuda.current_device())
        )  # not while a graph is recorded
    finish = Mixture._finish
    count = 0

    def finish_uniform(mixture: Mixture) -> None:
        nonlocal count
        finish(mixture)
        route, begin = mixture._route, APART * (count % layers)
        count += 1

        def uniform(logits_TG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            known = _device_logits(logits_TG.shape[1], layers, logits_TG.device)
            return route(known[begin : begin + len(logits_TG)])

        mixture._route = uniform
        if mixture._fused_route is not None:
            mixture._fused_route = _uniform_one(mixture, mixture._fused_route, layers, begin)

    if not experts:
        yield
        return
    with patch.object(Mixture, "_finish", finish_uniform):
        yield


def _uniform_one(mixture: Mixture, fused_route: FusedRoute, layers: int, begin: int) -> FusedRoute:
    """The same of one token whose norm, router and choice are one kernel: it runs as ever, and what it chose is
    exchanged for what the choice would be."""
    problem = route_problem(
        mixture._spec.router,
        "cpu",
        shared=mixture._num_shared,
        shared_gate=mixture._is_gated,
        joint=False,
    )
    logits = _logits(problem.columns, layers)[begin : begin + 1]
    chosen = [one.to(mixture._scope.device) for one in bind_reference(problem)(logits)]

    def uniform(x_1E: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fused_route(x_1E)[0], *chosen

    return uniform


SHAPE_VARIABLE = "BENCHMARK_SHAPE"
"""Tells the processes of ranks which shape they load."""


@contextmanager
def uniform_ranks(shape: str) -> Iterator[None]:
    """Executors made meanwhile whose ranks are processes of their own load their models by `load_model` below."""
    loader = {"loader": f"{__name__}:load_model"}
    with (
        patch.dict(os.environ, {SHAPE_VARIABLE: shape}),
        patch.object(ProcessExecutor.__init__, "__kwdefaults__", loader),
    ):
        yield


def load_model(*arguments: Any, **named: Any) -> Any:
    """The engine's own loader; a router built by this process routes uniformly from now on."""
    ExitStack().enter_context(uniform_routing(os.environ[SHAPE_VARIABLE]))
    return load.load_model(*arguments, **named)


def distinct_experts(shape: str, rows: int) -> float:
    """Experts of a layer that so many rows are sent to, on average over the layers; 0 without experts."""
    experts, chosen = routing(shape)
    if not experts:
        return 0.0
    layers = sum(layer.expert > 0 for layer in layer_weights(shape))
    logits = _logits(experts, layers)
    counts = [
        logits[APART * i : APART * i + rows].topk(chosen, dim=1).indices.unique().numel()
        for i in range(layers)
    ]
    return sum(counts) / layers

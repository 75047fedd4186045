"""Dummy weights: seeded, the same however the model is split, of the right spread, and fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from headrace.back.models.load.dummy import POOL_SIZE, DummyWeights
from headrace.back.models.registry import build_model
from headrace.back.models.weights import Param, WeightPiece
from headrace.back.parallel.mesh import Axis, Mesh
from tests.back.models.load.checkpoints import MODELS, spec_of, tiny_model
from tests.spent import fastest


def filled(config: dict[str, Any], *, seed: int = 0, mesh: Mesh = Mesh()) -> dict[str, Param]:
    spec = spec_of(Path("/nowhere"), config, format="dummy")
    model = build_model(spec, mesh=mesh, device=torch.device("cpu"), block_tokens=16)
    weights = DummyWeights(seed)
    for param in model.weights.params:
        assert param.tensor is not None
        param.tensor.fill_(float("nan"))
        weights.fill(param)
    return {param.name: param for param in model.weights.params}


def values(param: Param) -> torch.Tensor:
    assert param.tensor is not None
    return param.tensor


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_slices_of_two_ranks_are_those_of_one(architecture: str) -> None:
    config = tiny_model(architecture).config.to_dict()
    config["architectures"] = [MODELS[architecture][2]]
    whole = filled(config)
    for rank in (0, 1):
        group = cast(Any, object())
        part = filled(config, mesh=Mesh(tp=Axis(size=2, rank=rank, group=group)))
        assert part.keys() == whole.keys()
        for name, param in part.items():
            assert torch.isfinite(values(param)).all(), name
            if param.shard is None:
                torch.testing.assert_close(values(param), values(whole[name]), rtol=0, atol=0)
            for span in param.spans:
                dim = cast(Any, param.shard).dim
                here = values(param).narrow(dim, span.local, span.size)
                there = values(whole[name]).narrow(dim, span.start, span.size)
                torch.testing.assert_close(here, there, rtol=0, atol=0)


def param_of(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Param:
    return Param(
        name=name,
        shape=shape,
        dtype=dtype,
        pieces=(WeightPiece(name=name, shape=shape),),
        tensor=torch.full(shape, float("nan"), dtype=dtype),
    )


def test_seed_and_name_decide_the_values() -> None:
    def drawn(seed: int, name: str) -> torch.Tensor:
        param = param_of(name, (8, 32))
        DummyWeights(seed).fill(param)
        return values(param)

    torch.testing.assert_close(drawn(3, "a"), drawn(3, "a"), rtol=0, atol=0)
    assert not torch.equal(drawn(3, "a"), drawn(4, "a"))
    assert not torch.equal(drawn(3, "a"), drawn(3, "b"))


def test_a_tensor_larger_than_the_pool_is_normal_with_the_scale_asked_for() -> None:
    param = param_of("w", (1030, 1024))
    assert values(param).numel() > POOL_SIZE
    DummyWeights(0).fill(param)
    assert abs(values(param).mean().item()) < 1e-4
    assert abs(values(param).std().item() - 0.02) < 1e-4
    rows = values(param)[:512]
    products = torch.nn.functional.normalize(rows) @ torch.nn.functional.normalize(rows).T
    assert (products - torch.eye(512)).abs().max() < 0.2


@pytest.mark.slow
@pytest.mark.serial
def test_filling_costs_about_as_much_as_copying() -> None:
    """64 million numbers; drawing them takes more than twenty times as long as copying them."""
    param = param_of("w", (8192, 8192), torch.bfloat16)
    weights = DummyWeights(0)
    weights.fill(param_of("warm", (1, 1), torch.bfloat16))
    copied = torch.ones_like(values(param))

    def spent(work: Callable[[], object]) -> float:
        return fastest(work, rounds=5, clock=time.process_time)  # of all threads

    assert spent(lambda: weights.fill(param)) < 5 * spent(lambda: values(param).copy_(copied))

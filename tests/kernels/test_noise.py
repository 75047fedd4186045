"""The noise is what its definition says, everywhere, and its tail is not cut off."""

from __future__ import annotations

import math

import numpy as np
import torch

from headrace.back.kernels.gumbel import noise
from tests.back.sampling import reference


def device_keys(seeds: list[int], positions: list[int]) -> torch.Tensor:
    keys = noise.keys(np.array(seeds, np.uint64), np.array(positions))
    return torch.from_numpy(keys.view(np.int64))


def test_uniforms_equal_the_definition_in_plain_integers() -> None:
    seeds = [0, 1, 2**63 - 1, 2**64 - 1, 123456789]
    positions = [0, 1, 7, 131071, 2**31]
    ids = torch.tensor([-1, 0, 1, 5, 262143])
    found = noise.uniform(device_keys(seeds, positions), ids)
    wanted = [
        [reference.uniform(seed, position, token) for token in ids.tolist()]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert found.tolist() == wanted


def test_the_extremes_of_64_bits_give_finite_noise_up_to_44_nats() -> None:
    """ENG-25: the winning side is u -> 0."""
    bits = torch.tensor([0, 1, 2, -1, -2, 2**63 - 1, -(2**63)])
    exponential = -torch.log1p(-noise.from_bits(bits))
    assert torch.isfinite(exponential).all() and (exponential > 0).all()
    assert abs(-math.log(exponential[0].item()) - 64 * math.log(2)) < 1e-12


def test_small_exponentials_are_distinct_and_as_frequent_as_they_should_be() -> None:
    """REG-029: 31-bit uniforms would repeat about 930 times among two million."""
    keys = device_keys(list(range(1000)), list(range(1000)))
    found = noise.exponential(keys, torch.arange(2000)).flatten().numpy()
    assert len(np.unique(found)) == found.size
    for bound in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5):
        expected = found.size * -math.expm1(-bound)
        assert abs((found < bound).sum() - expected) < 5 * expected**0.5
    assert abs(found.mean() - 1) < 5 / found.size**0.5


def test_noise_of_neighbouring_seeds_positions_and_ids_is_uncorrelated() -> None:
    seeds, positions = np.meshgrid(np.arange(60), np.arange(60), indexing="ij")
    keys = device_keys(seeds.ravel().tolist(), positions.ravel().tolist())
    u = noise.uniform(keys, torch.arange(60)).view(60, 60, 60).numpy()
    for axis in range(3):
        for lag in (1, 2, 7):
            a = np.take(u, range(60 - lag), axis).ravel()
            b = np.take(u, range(lag, 60), axis).ravel()
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / a.size**0.5

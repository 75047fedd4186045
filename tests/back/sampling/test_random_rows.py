"""The cheap ways of drawing on a CPU choose what the plain way over whole rows chooses, on any logits."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from headrace.back.kernels.gumbel import native, race
from headrace.back.kernels.gumbel.op import GumbelProblem, bind_reference
from headrace.back.kernels.native.build import build
from headrace.back.kernels.native.library import NativeLibrary
from headrace.back.sampling.chains import SamplerChains
from headrace.back.sampling.dry import repeats, repeats_dense
from headrace.back.sampling.features import FeatureRows, RowNumbers
from headrace.back.sampling.in_step import DeviceRows, SamplingTable
from headrace.back.sampling.random_rows import RandomRows, sample_random
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import RowStart

CPU = torch.device("cpu")
PROBLEM = GumbelProblem(device="cpu")


@cache
def native_library() -> NativeLibrary:
    """Building looks for the compiler and asks it for this CPU: once is enough."""
    return NativeLibrary(build(here=True))


GUMBELS = {
    "native": lambda: native.bind_with(native_library()),
    "race": lambda: race.bind(PROBLEM),
    "torch": lambda: bind_reference(PROBLEM),
}

LOGITS = {
    "usual": lambda rng, width: rng.standard_normal(width) * 3,
    "peaked": lambda rng, width: rng.standard_normal(width) * 40,
    "flat": lambda rng, width: np.zeros(width),
    "ties": lambda rng, width: np.round(rng.standard_normal(width)),
    "few": lambda rng, width: np.where(rng.random(width) < 0.01, 1.0, -np.inf),
    "tiny": lambda rng, width: rng.standard_normal(width) * 1e-42,
    "huge": lambda rng, width: rng.standard_normal(width) * 1e37,
}

SETTINGS: list[dict[str, float]] = [
    {},
    {"temperature": 1e-3},
    {"temperature": 50.0},
    {"top_k": 1},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 100000},
    {"top_p": 0.95},
    {"top_p": 0.3, "min_p": 0.02},
    {"min_p": 0.1},
    {"typical_p": 0.9},
    {"top_k": 20, "typical_p": 0.5, "xtc_probability": 0.7, "xtc_threshold": 0.03},
    {"xtc_probability": 0.5, "xtc_threshold": 0.2},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("gumbel", ["native", "race", "torch"])
@pytest.mark.parametrize("width", [1, 31, 4099, 40000])
@pytest.mark.parametrize("kind", LOGITS)
def test_every_way_chooses_the_same_token(kind: str, width: int, gumbel: str) -> None:
    """KRN-02, PLT-10: candidates and the race against noise and a sort over whole rows, as other devices do it."""
    rng = np.random.default_rng(width)
    numbers = RowNumbers(len(SETTINGS))
    for row, settings in enumerate(SETTINGS):
        sampling = RowSampling(seed=row + width, **settings)
        numbers.start(
            RowStart(
                row=row,
                request=row,
                tokens=np.zeros(1, np.int32),
                num_prompt=1,
                num_computed=0,
                sampling=sampling,
            ),
            width,
        )
    logits = np.stack([LOGITS[kind](rng, width) for _ in SETTINGS]).astype(np.float32)
    logits[:, 0] = np.where(np.isfinite(logits).any(1), logits[:, 0], 0.0)
    feature_rows = FeatureRows(
        rows=np.arange(len(SETTINGS)),
        positions=rng.integers(1, 9999, len(SETTINGS)),
        num_output=np.zeros(len(SETTINGS), np.int64),
        tokens=torch.zeros(1, 1, dtype=torch.int32),
    )
    chosen, max_logit = sample_random(
        torch.from_numpy(logits), numbers, feature_rows, GUMBELS[gumbel](), SamplerChains(CPU)
    )
    wanted, wanted_best = RandomRows(numbers, feature_rows, CPU).whole(torch.from_numpy(logits))
    assert chosen.tolist() == wanted.tolist()
    torch.testing.assert_close(max_logit, wanted_best)
    assert all(np.isfinite(logits[row, token]) for row, token in enumerate(chosen.tolist()))


@pytest.mark.parametrize("width", [31, 4099])
@pytest.mark.parametrize("kind", ["usual", "peaked", "flat", "ties", "few"])
def test_the_op_of_devices_chooses_the_same_token(kind: str, width: int) -> None:
    """Greedy rows keep their pick; rows of the table lie in any order."""
    rng = np.random.default_rng(width)
    simple = [s for s in SETTINGS if not {"typical_p", "xtc_probability"} & set(s)]
    host = RowNumbers(len(simple) + 1)
    drawn = DeviceRows(SamplingTable(host, CPU), CPU)
    for row, settings in enumerate([{"temperature": 0.0}, *simple]):
        sampling = RowSampling(seed=row + width, **settings)
        tokens = np.zeros(1, np.int32)
        start = RowStart(
            row=row, request=row, tokens=tokens, num_prompt=1, num_computed=0, sampling=sampling
        )
        host.start(start, width)
    drawn.refresh()
    rows = rng.permutation(len(host.use))
    logits = np.stack([LOGITS[kind](rng, width) for _ in rows]).astype(np.float32)
    logits[:, 0] = np.where(np.isfinite(logits).any(1), logits[:, 0], 0.0)
    positions = rng.integers(1, 9999, len(rows))
    value, token = torch.from_numpy(logits).max(dim=1)
    found, z = drawn.sample_random(
        torch.from_numpy(logits),
        (token, value),
        torch.from_numpy(rows),
        torch.from_numpy(positions),
    )
    feature_rows = FeatureRows(
        rows=rows,
        positions=positions,
        num_output=np.zeros(len(rows), np.int64),
        tokens=torch.zeros(1, 1, dtype=torch.int32),
    )
    wanted, wanted_z = RandomRows(host, feature_rows, CPU).whole(torch.from_numpy(logits))
    greedy = int(np.flatnonzero(rows == 0)[0])
    wanted[greedy], wanted_z[greedy] = token[greedy], value[greedy]
    assert found.tolist() == wanted.tolist()
    torch.testing.assert_close(z, wanted_z)


@pytest.mark.parametrize("seed", range(8))
def test_repetitions_are_the_same_followed_one_by_one_or_compared_at_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    history = torch.from_numpy(rng.integers(0, 4, int(rng.integers(1, 60))).astype(np.int32))
    breakers = torch.from_numpy(rng.integers(0, 6, int(rng.integers(0, 3))).astype(np.int32))
    for most in (1, 2, 5, 200):
        ids, lengths = repeats(history, breakers, most=most)
        all_ids, all_lengths = repeats_dense(history, breakers, most=most)
        kept = all_lengths > 0
        assert all_ids[kept].tolist() == ids.tolist()
        assert all_lengths[kept].tolist() == lengths.tolist()

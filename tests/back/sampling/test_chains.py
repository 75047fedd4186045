"""Rows that choose by a chain of their own equal a naive reference token by token: top-n-sigma,
dynamic temperature, mirostat, adaptive-p, any order of the steps (BEY-42)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.back.sampling.sampler import Sampler
from headrace.base.wire.request import RowSampling
from headrace.base.wire.sampler_chain import SAMPLERS
from headrace.base.wire.step import RowStart
from tests.back.sampling import reference

WIDTH, PROMPT, STEPS = 211, 3, 12
PLACES = ("temperature", "xtc", "min_p", "top_p", "typical_p", "top_k", "top_n_sigma")
CASES: dict[str, dict[str, object]] = {
    "top_n_sigma": {"top_n_sigma": 1.0, "temperature": 1.7},
    "top_n_sigma before others": {"top_n_sigma": 0.5, "top_k": 9, "min_p": 0.05},
    "dynamic temperature": {"dynatemp_range": 0.6, "temperature": 0.8},
    "dynamic temperature from 0": {"dynatemp_range": 5.0, "dynatemp_exponent": 0.5, "top_p": 0.9},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.2},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 2.0, "temperature": 1.2, "top_k": 1},
    "adaptive_p": {"adaptive_target": 0.3, "adaptive_decay": 0.7, "min_p": 0.01},
    "adaptive_p without a past": {"adaptive_target": 0.9, "adaptive_decay": 0.0},
    "temperature last": {
        "samplers": (*SAMPLERS[1:], "temperature"),
        "top_p": 0.8,
        "temperature": 3.0,
    },
    "the other way round": {"samplers": PLACES[1:] + PLACES[:1], "top_p": 0.9, "top_k": 30},
    "with all of them": {
        "samplers": PLACES,
        "top_n_sigma": 2.0,
        "top_k": 50,
        "typical_p": 0.95,
        "top_p": 0.97,
        "min_p": 0.001,
        "xtc_probability": 0.5,
        "temperature": 1.3,
    },
    "what is not named is off": {"samplers": ("top_k",), "top_k": 7, "temperature": 9.0},
    "beside penalties and masks": {
        "mirostat": 2,
        "frequency_penalty": 0.5,
        "allowed_ids": tuple(range(0, WIDTH, 2)),
    },
}


REQUESTS = list(range(1000, 2000))


class Row:
    """A request that goes on for some tokens, and what the reference says of each."""

    def __init__(self, number: int, options: dict[str, object]) -> None:
        self.rng = np.random.default_rng(number)
        self.sampling = RowSampling(seed=int(self.rng.integers(2**62)), **options)
        self.number, self.tokens, self.request = number, [1, 2, 3], REQUESTS.pop()
        asked = self.sampling
        if not asked.samplers:
            asked = RowSampling(**{**_fields(asked), "samplers": SAMPLERS})
        self.reference = reference.Chain(asked)

    def start(self, sampler: Sampler) -> None:
        tokens = np.array(self.tokens, np.int32)
        sampler.start(
            RowStart(
                row=self.number,
                request=self.request,
                tokens=tokens,
                num_prompt=PROMPT,
                num_computed=0,
                sampling=self.sampling,
            )
        )

    def logits(self) -> np.ndarray:
        return (self.rng.standard_normal(WIDTH) * 3).astype(np.float32)


def _fields(sampling: RowSampling) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def _step(sampler: Sampler, rows: list[Row]) -> None:
    """Samples a token of each row, beside one that asks for nothing, and compares."""
    logits = np.stack([row.logits() for row in rows])
    tokens = torch.zeros(64, 64, dtype=torch.int32)
    for row in rows:
        tokens[row.number, : len(row.tokens)] = torch.tensor(row.tokens)
    given = torch.from_numpy(logits.copy())
    found = sampler.sample(
        given,
        sampler.greedy(given),
        rows=np.array([row.number for row in rows]),
        positions=np.array([len(row.tokens) for row in rows]),
        tokens=tokens,
    )
    for one, row, token in zip(logits, rows, found.token_N.tolist(), strict=True):
        wanted = row.reference.sample(one, row.tokens, PROMPT)
        assert token == wanted, f"{row.sampling} at {len(row.tokens)}"
        row.tokens.append(token)


def test_each_chain_equals_the_reference_in_mixed_batches() -> None:
    sampler = Sampler(max_rows=64, logits_width=WIDTH, device=torch.device("cpu"))
    rows = [Row(number, options) for number, options in enumerate([{}, *CASES.values()])]
    for row in rows:
        row.start(sampler)
    for _ in range(STEPS):
        _step(sampler, rows)


@pytest.mark.parametrize("name", ["mirostat 1", "mirostat 2", "adaptive_p"])
def test_what_was_chosen_counts_also_after_a_preemption(name: str) -> None:
    """The token that was sampled last before it may be lost, and others take the row meanwhile."""
    sampler = Sampler(max_rows=64, logits_width=WIDTH, device=torch.device("cpu"))
    row, other = Row(5, CASES[name]), Row(5, {"mirostat": 2})
    row.start(sampler)
    for _ in range(5):
        _step(sampler, [row])
    lost = row.rng.bit_generator.state
    untold = torch.from_numpy(row.logits())
    place = {"rows": np.array([5]), "positions": np.array([len(row.tokens)])}
    tokens = torch.zeros(64, 64, dtype=torch.int32)
    sampler.sample(untold[None], sampler.greedy(untold[None]), tokens=tokens, **place)
    sampler.end(np.array([5]))
    other.start(sampler)
    _step(sampler, [other])
    sampler.end(np.array([5]))
    row.rng.bit_generator.state = lost
    row.start(sampler)
    for _ in range(5):
        _step(sampler, [row])


def test_mirostat_holds_the_surprise() -> None:
    """Over many tokens its mean is tau, in bits, whatever the distribution's own is."""
    for version in (1, 2):
        sampler = Sampler(max_rows=4, logits_width=WIDTH, device=torch.device("cpu"))
        row = Row(1, {"mirostat": version, "mirostat_tau": 2.5})
        row.start(sampler)
        tokens, surprises = torch.zeros(4, 4096, dtype=torch.int32), []
        for step in range(300):
            logits = torch.from_numpy(row.logits())[None]
            own = (logits.double().log_softmax(1) / np.log(2)).neg()
            found = sampler.sample(
                logits,
                sampler.greedy(logits),
                rows=np.array([1]),
                positions=np.array([PROMPT + step]),
                tokens=tokens,
            )
            surprises.append(float(own[0, int(found.token_N)]))
        plain = float((own.exp2().reciprocal() * own).sum())
        assert abs(np.mean(surprises[50:]) - 2.5) < 0.7 < abs(plain - 2.5), version


def test_masks_that_leave_nothing_fail_that_request() -> None:
    sampler = Sampler(max_rows=4, logits_width=WIDTH, device=torch.device("cpu"))
    row = Row(1, {"top_n_sigma": 1.0, "allowed_ids": (4,), "bad_words": ((4,),)})
    row.start(sampler)
    logits = torch.from_numpy(row.logits())[None]
    found = sampler.sample(
        logits,
        sampler.greedy(logits),
        rows=np.array([1]),
        positions=np.array([PROMPT]),
        tokens=torch.zeros(4, 64, dtype=torch.int32),
    )
    assert not torch.isfinite(found.chosen_logit_N).any()

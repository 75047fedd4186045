"""The sampler on Triton's kernels: how many launches a step makes, and that it samples what a CPU's does (in the
interpreter and on a GPU, as test_kernels.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

triton = pytest.importorskip("triton")

from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from headrace.back.kernels.greedy.op import OP as GREEDY
from headrace.back.kernels.gumbel.op import OP as GUMBEL
from headrace.back.kernels.logit_masks.op import OP as LOGIT_MASKS
from headrace.back.kernels.nucleus.op import OP as NUCLEUS
from headrace.back.kernels.penalties import op as penalties
from headrace.back.kernels.penalties import triton_penalties
from headrace.back.kernels.sample.op import OP as SAMPLE
from headrace.back.kernels.token_scores.op import OP as TOKEN_SCORES
from headrace.back.kernels.triton.wrap import interpreted
from headrace.back.sampling.features import Sampled
from headrace.back.sampling.in_step import AskedRows, InStepSampling, StepSamples
from headrace.back.sampling.sampler import Sampler
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import RowStart
from tests.back.sampling.logprobs import assert_same_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (interpreted() or torch.cuda.is_available()),
        reason="no CUDA device here; test_interpreter.py runs these tests in the interpreter",
    ),
]
DEVICE = torch.device("cpu" if interpreted() else "cuda")
CPU = torch.device("cpu")
WIDTH = 4200
PENALISED = RowSampling(
    temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2, seed=3
)
FREE = {
    *(
        "empty",
        "empty_strided",
        "empty_like",
        "new_empty",
        "pin_memory",
        "_pin_memory",
        "is_pinned",
    ),
    *("view", "_unsafe_view", "as_strided", "alias", "slice", "select", "expand", "unsqueeze"),
    *("split", "split_with_sizes", "unbind", "detach", "lift_fresh", "t", "transpose", "permute"),
}
"""Operations of torch that launch nothing."""


class Launches(TorchDispatchMode):
    """Counts what is launched within it, copies included: torch's operations and Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2]
        if not self.inside and name.partition(".")[0] not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[str]]:
    """The names of all launches within it."""
    seen = Launches()
    owner, attribute = (GridExecutor, "__call__") if interpreted() else (JITFunction, "run")
    launch: Callable[..., Any] = getattr(owner, attribute)

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        seen.names.append(self.fn.__name__)
        seen.inside = True
        try:
            return launch(self, *args, **options)
        finally:
            seen.inside = False

    setattr(owner, attribute, noted)
    try:
        with seen:
            yield seen.names
    finally:
        setattr(owner, attribute, launch)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether samplers take Triton's kernels, in the interpreter too, or torch's references."""

    def use(triton_kernels: bool) -> None:
        for op in (GREEDY, GUMBEL, NUCLEUS, SAMPLE, TOKEN_SCORES, LOGIT_MASKS, penalties.OP):
            found = [name for name in op.kernels if "triton" in name] if triton_kernels else []
            monkeypatch.setattr(op, "kernels", tuple(found))
            monkeypatch.setattr(op, "_choices", {})
        monkeypatch.setattr("headrace.back.kernels.op.GPU_MODULES", "none_")

    return use


class Steps:
    """Rows that decode step after step on logits that are given."""

    def __init__(self, samplings: list[RowSampling], device: torch.device) -> None:
        self.device, self.count = device, len(samplings)
        self.sampler = Sampler(
            max_rows=self.count, logits_width=WIDTH, device=device, on_device=True
        )
        rng = np.random.default_rng(5)
        self.positions = rng.integers(2, 30, self.count)
        prompts = rng.integers(0, WIDTH, (self.count, 30)).astype(np.int32)
        self.tokens = torch.zeros((self.count, 60), dtype=torch.int32, device=device)
        self.tokens[:, :30] = torch.from_numpy(prompts)
        for row, sampling in enumerate(samplings):
            length = int(self.positions[row])
            self.sampler.start(
                RowStart(
                    row=row,
                    request=row,
                    tokens=prompts[row, :length],
                    num_prompt=length - 1,
                    num_computed=0,
                    sampling=sampling,
                )
            )

    def within(self, logits: torch.Tensor) -> tuple[StepSamples, list[str]]:
        """The same by what steps do themselves, in a bucket with a row of padding."""
        rows = np.arange(self.count)
        in_step = self.sampler.needs(rows)
        assert isinstance(in_step, InStepSampling)
        logits = torch.cat([logits, torch.zeros(1, WIDTH)]).to(self.device)
        columns = np.array([[*rows, self.count], [*self.positions, 0], [*(rows >= 0), 0]], np.int32)
        row_R, position_R, sample_R = torch.from_numpy(columns).to(self.device)
        asked = AskedRows(
            row_R=row_R,
            position_R=position_R,
            sample_R=sample_R,
            tokens_MC=torch.cat([self.tokens, torch.zeros_like(self.tokens[:1])]),
        )
        with counted() as launches:
            chosen = self.sampler.in_step_sampler(in_step, logits, asked)
            self.sampler.in_step_sampler.count(in_step, chosen.token_R, asked, sample_R)
        token_R = chosen.token_R
        at = torch.from_numpy(self.positions).to(self.device)
        each = torch.arange(self.count, device=self.device)
        self.tokens[each, at] = token_R[: self.count].int()
        self.positions = self.positions + 1
        if chosen.words_RW is None:
            values = torch.stack([token_R.int(), chosen.max_logit_R.view(torch.int32)])
            return StepSamples.of(values[:, : self.count].cpu().numpy(), 0), launches
        words = chosen.words_RW[: self.count].cpu().numpy().ravel()
        return StepSamples.of(words, in_step.words), launches

    def step(self, logits: torch.Tensor) -> tuple[Sampled, list[str]]:
        """Samples every row, and the launches of that."""
        rows, logits = np.arange(self.count), logits.to(self.device, copy=True)
        argmax = self.sampler.greedy(logits)
        with counted() as launches:
            found = self.sampler.sample(
                logits, argmax, rows=rows, positions=self.positions, tokens=self.tokens
            )
        at = torch.from_numpy(self.positions).to(self.device)
        self.tokens[torch.arange(self.count, device=self.device), at] = found.token_N.int()
        self.positions = self.positions + 1
        return found, launches


def flat_logits(count: int, seed: int) -> torch.Tensor:
    """Few values, so that penalties decide and equals are many."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (count, WIDTH), generator=generator) * 0.125


DRAWS = 6
"""Launches of op `draw`, truncated or not."""
LOADS = {
    "5 log-probabilities": (RowSampling(temperature=0.0, logprobs=5), 3),
    "penalties": (PENALISED, 11 + DRAWS),
    "penalties and log-probabilities": (
        RowSampling(temperature=0.0, frequency_penalty=0.3, logprobs=5),
        14,
    ),
    "bias": (RowSampling(temperature=0.7, logit_bias={3: 1.0, 9: -2.0}), 11 + DRAWS),
}


# Each costs the interpreter a second; the largest load has every kernel of the others but the bias's.
SMALLER = ("5 log-probabilities", "penalties")


def largest(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.slow if n in SMALLER else ()) for n in names]


@pytest.mark.parametrize("name", largest(LOADS))
def test_a_step_is_a_handful_of_launches(name: str, kernels: Callable[[bool], None]) -> None:
    """Rows that all ask for it, as in steady decode: what is kept from step to step is not made again."""
    sampling, most = LOADS[name]
    kernels(True)
    steps = Steps([sampling] * (3 if interpreted() else 64), DEVICE)
    for seed in range(3):
        _, launches = steps.step(flat_logits(steps.count, seed))
    assert 0 < len(launches) <= most, launches


@pytest.mark.slow
def test_penalised_rows_get_the_tokens_of_a_cpu(kernels: Callable[[bool], None]) -> None:
    """ENG-26: beside rows without penalties, over steps that count what the ones before have sampled."""
    samplings = [
        PENALISED,
        RowSampling(temperature=0.0, repetition_penalty=0.7, logprobs=3),
        RowSampling(temperature=0.0),
        RowSampling(temperature=0.0, presence_penalty=-2.0, logprobs=2, logprobs_mode="processed"),
        RowSampling(temperature=0.0, frequency_penalty=2.0, logit_bias={7: 0.25, 11: 0.25}),
        RowSampling(temperature=1.3, repetition_penalty=1e300, frequency_penalty=-1e300),
    ]
    found, chosen_logit = [], []
    for triton_kernels, device in ((True, DEVICE), (False, CPU)):
        kernels(triton_kernels)
        steps, logprobs = Steps(samplings, device), []
        for seed in range(8):
            sampled, _ = steps.step(flat_logits(6, seed % 3))
            if device.type == "cuda":
                torch.cuda.synchronize()
            assert sampled.logprobs is not None and sampled.chosen_logit_N is not None
            scores = [(s.index, s.ids.tolist(), s.rank) for s in sampled.logprobs.rows()]
            logprobs.append((sampled.token_N.tolist(), scores))
            chosen_logit.append(sampled.chosen_logit_N.tolist())
        found.append(logprobs)
    assert found[0] == found[1]
    np.testing.assert_allclose(chosen_logit[:8], chosen_logit[8:], rtol=1e-12)
    assert len({tokens[4] for tokens, _ in found[0]}) > 2, "the penalty means to change tokens"


WITHIN = {
    "5 log-probabilities": (RowSampling(temperature=0.0, logprobs=5), 7 + DRAWS),
    "penalties": (PENALISED, 13 + DRAWS),
    "penalties and log-probabilities": (replace(PENALISED, logprobs=20), 15 + DRAWS),
    "masks and biases": (RowSampling(seed=1, logit_bias={3: 1.0}, allowed_ids=(3, 5)), 3 + DRAWS),
}
"""The argmax of the model's logits is one of them."""


@pytest.mark.parametrize("name", largest(WITHIN))
def test_what_a_step_does_itself_is_as_many_launches_for_any_rows(
    name: str, kernels: Callable[[bool], None]
) -> None:
    """They are part of its recording; the host makes none."""
    sampling, most = WITHIN[name]
    kernels(True)
    for count in (1, 3):
        steps = Steps([sampling] * count, DEVICE)
        for seed in range(2):
            _, launches = steps.within(flat_logits(count, seed))
        assert 0 < len(launches) <= most, launches


def test_steps_give_penalised_and_scored_rows_what_a_cpu_does(
    kernels: Callable[[bool], None],
) -> None:
    """ENG-26: to the token, the rank and the order of the alternatives, over steps that count what the ones before have
    sampled."""
    samplings = [
        PENALISED,
        RowSampling(temperature=0.0, repetition_penalty=0.7, logprobs=3),
        RowSampling(temperature=0.0),
        RowSampling(temperature=0.9, seed=8, top_k=30, top_p=0.8, logprobs=5),
        RowSampling(temperature=0.0, frequency_penalty=2.0),
    ]
    kernels(True)
    ours = Steps(samplings, DEVICE)
    found = [ours.within(flat_logits(5, seed % 3))[0] for seed in range(6)]
    kernels(False)
    theirs, changed = Steps(samplings, CPU), set()
    for seed, mine in enumerate(found):
        wanted, _ = theirs.step(flat_logits(5, seed % 3))
        assert (
            wanted.logprobs is not None
            and mine.scores is not None
            and mine.chosen_logit is not None
        )
        assert mine.tokens.tolist() == wanted.token_N.tolist()
        assert (
            mine.max_logit.tolist() == wanted.max_logit_N.tolist() and not mine.chosen_logit.any()
        )
        logprobs = ours.sampler.logprobs(mine.scores, np.arange(5), np.arange(5))
        assert_same_logprobs(logprobs, wanted.logprobs)
        changed.add(int(mine.tokens[4]))
    assert len(changed) > 2, "the penalty means to change tokens"


@pytest.mark.parametrize("turns", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_steps_mask_rows_as_a_cpu_does(turns: int, kernels: Callable[[bool], None]) -> None:
    """ENG-26: biases, allowed ids, suppressed ids and banned words of greedy and random rows."""
    every = tuple(range(0, WIDTH, 2))
    samplings = [
        RowSampling(temperature=0.0, logit_bias=dict.fromkeys(range(0, WIDTH, 9), 2.0)),
        RowSampling(temperature=0.8, seed=3, allowed_ids=every, top_k=30),
        RowSampling(temperature=0.0),
        RowSampling(temperature=0.0, min_tokens=4, suppressed_ids=every[:500]),
        RowSampling(temperature=0.9, seed=5, bad_words=tuple((i,) for i in range(400))),
    ]
    kernels(True)
    ours, seeds = Steps(samplings, DEVICE), [0, 1, 2] * turns
    mine = [ours.within(flat_logits(5, seed))[0].tokens.tolist() for seed in seeds]
    kernels(False)
    host = Steps(samplings, CPU)
    assert mine == [host.step(flat_logits(5, seed))[0].token_N.tolist() for seed in seeds]


@pytest.mark.parametrize("width", [1, 33, 4096, 9001])
def test_only_tokens_seen_are_touched_and_to_the_bit(width: int) -> None:
    """REG-030 too: counts of other slots do not show."""
    generator = torch.Generator().manual_seed(width)
    logits = torch.full((4, width + 3), float("nan"))[:, :width]
    logits[:] = 3 * torch.randn(4, width, generator=generator)
    logits[1, width // 2], logits[2, ::5], logits[3, 0] = float("nan"), -float("inf"), -0.0
    seen = torch.randint(width, (4, 50), generator=generator)
    slot, numbers = torch.tensor([4, 1, 0, 2]), 2 * torch.randn(5, 3, generator=generator)
    numbers[:, 0] = numbers[:, 0].abs() + 0.1
    counts = torch.randint(5, (5, width), generator=generator, dtype=torch.int32)
    for at, row in zip(slot.tolist(), seen, strict=True):
        counts[at] = row[20:].bincount(minlength=width)
        counts[at, row[:20]] += torch.tensor(penalties.PROMPT, dtype=torch.int32) * (
            counts[at, row[:20]] < penalties.PROMPT
        )
    ours = torch.full((4, width + 3), float("nan"), device=DEVICE)[:, :width].copy_(logits)
    drafts = torch.full((4, 5), -1)
    drafts[0, :2], drafts[3] = seen[0, 30], seen[3, 40:45]
    counts[4, seen[0, 30]] = 0  # it stands in drafts alone
    on = [one.to(DEVICE) for one in (counts, numbers, slot)]
    triton_penalties.bind(penalties.PenaltiesProblem(device=DEVICE.type))(
        ours, *on, pytest.fail, drafts.to(DEVICE)
    )
    wanted = logits.clone()
    penalties.bind_reference(penalties.PenaltiesProblem(device="cpu"))(
        wanted, counts, numbers, slot, lambda: seen, drafts
    )
    torch.testing.assert_close(ours.cpu(), wanted, rtol=0.0, atol=0.0, equal_nan=True)

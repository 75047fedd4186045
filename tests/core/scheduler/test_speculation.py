"""Drafts in the core: whatever the workers accept, every request gives what it gives without them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count, product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.back.executor.null import NullBehaviour
from headrace.base import splitmix
from headrace.base.config.resolved import SpeculationSpec
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import StepPlan
from headrace.core.scheduler import draft_prices
from headrace.core.scheduler.draft_prices import DraftPrices
from tests.core.harness import EOS, FULL, Clock, Driver, make_request, make_spec, window_groups
from tests.core.test_properties import alone, outcome, random_requests


def spec_of(num_tokens: int = 3, max_rows: int = 8, adaptive: bool = False) -> SpeculationSpec:
    return SpeculationSpec(
        method="ngram", num_tokens=num_tokens, max_rows=max_rows, adaptive=adaptive
    )


def behaviour(rate: float, **fields: Any) -> NullBehaviour:
    """Drafts stand at random: as many in a row as heads come up first."""

    def accepts(request: int, position: int) -> int:
        rng = random.Random(splitmix.mix(request * 1009 + position))
        count = 0
        while count < 16 and rng.random() < rate:
            count += 1
        return count

    return NullBehaviour(eos_rate=0.03, accepts=accepts, **fields)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    rate=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    num_tokens=st.integers(1, 15),
    max_rows=st.integers(1, 8),
    adaptive=st.booleans(),
    num_blocks=st.integers(80, 160),
    max_step_tokens=st.sampled_from([3, 9, 16, 64, 200]),
    max_running=st.integers(1, 8),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    overlap=st.booleans(),
    prefix_caching=st.booleans(),
    window=st.sampled_from([None, 1, 5, 8, 16]),
)
def test_any_acceptance_leaves_every_request_as_it_is_alone(
    seed: int,
    rate: float,
    num_tokens: int,
    max_rows: int,
    adaptive: bool,
    window: int | None,
    **config: Any,
) -> None:
    """SPC-02, SPC-06: tokens, ends, stop ids and prompt scores, under preemption, chunks, hits, windows."""
    groups = FULL if window is None else window_groups(window)
    requests = random_requests(seed, 10)
    spec = make_spec(speculation=spec_of(num_tokens, max_rows, adaptive), **config)
    driver = Driver(spec, groups=groups, behaviour=behaviour(rate))
    rng = random.Random(seed)
    for request in requests:
        driver.add_suited(request)
        for _ in range(rng.choice([0, 0, 1, 3])):
            driver.step()
    driver.run()
    assert outcome(driver) == {request.id: alone(request, groups) for request in requests}
    assert not driver.core.rows.num_unverified[driver.core.rows.decoding].any()
    driver.assert_at_rest()


def run_one(rate: float, **fields: Any) -> Driver:
    driver = Driver(make_spec(speculation=spec_of(**fields)), behaviour=behaviour(rate))
    driver.add(make_request(1, 8, max_tokens=41))
    driver.run()
    return driver


def test_drafts_that_stand_save_steps():
    plain, drafted = run_one(0.0), run_one(1.0)
    assert drafted.tokens == plain.tokens and len(plain.tokens[1]) > 30
    assert drafted.num_steps < plain.num_steps / 2


def test_a_row_whose_drafts_fail_drafts_fewer():
    """At full length each of 40 steps would draft 7 tokens."""
    drafted = run_one(0.0, num_tokens=7).ask("status")["draft_tokens"]
    assert 40 <= drafted <= 40 + 7 + 3 + 7


def test_counts_say_which_drafts_stood():
    status = run_one(1.0).ask("status")
    accepted = status["accepted_draft_tokens_by_position"]
    assert sum(accepted) == status["accepted_draft_tokens"] > 0
    assert accepted == sorted(accepted, reverse=True) and len(accepted) == 3
    assert status["draft_tokens"] >= status["accepted_draft_tokens"] >= status["drafts"] > 0


def test_no_token_comes_beyond_the_length_limit():
    for max_tokens in range(1, 12):
        driver = Driver(make_spec(speculation=spec_of(15)), behaviour=NullBehaviour(accepts=many))
        driver.add(make_request(1, 8, max_tokens=max_tokens))
        driver.run()
        assert len(driver.tokens[1]) == max_tokens and driver.finished[1].reason == "length"


def many(request: int, position: int) -> int:
    return 15


def test_more_rows_than_pay_draft_nothing():
    spec = make_spec(speculation=spec_of(3, max_rows=2))
    driver = Driver(spec, behaviour=NullBehaviour(accepts=many))
    driver.add(*(make_request(id, 8, max_tokens=20) for id in range(3)))
    for _ in range(8):
        driver.step()
    assert driver.ask("status")["draft_tokens"] == 0
    driver.run()
    assert all(len(driver.tokens[id]) == 20 for id in range(3))


def test_rows_that_a_network_has_lost_are_planned_without_drafts():
    """Nothing is proposed for any: a text's drafter may find something later, a network does not (SPC-05)."""
    planned = {}
    for network in (False, True):
        spec = make_spec(speculation=spec_of(3))
        model = spec.model if network else None
        speculation = msgspec.structs.replace(spec.speculation, model=model)
        driver = Driver(msgspec.structs.replace(spec, speculation=speculation))
        submit, drafts = driver.executor.submit, list[bool]()
        driver.executor.submit = lambda plan, d=drafts, s=submit: (
            d.append(bool(plan.drafts.any())),
            s(plan),
        )[1]
        driver.add(*(make_request(id, 8, max_tokens=20) for id in range(3)))
        driver.run()
        assert all(len(driver.tokens[id]) == 20 for id in range(3))
        planned[network] = sum(drafts)
    assert planned[False] > 8 and planned[True] <= 3, planned


def test_rows_whose_samples_count_tokens_draft_like_others():
    driver = Driver(make_spec(speculation=spec_of()), behaviour=NullBehaviour(accepts=many))
    driver.add(make_request(1, 8, sampling=RowSampling(temperature=0.0, repetition_penalty=1.1)))
    driver.run()
    assert driver.ask("status")["draft_tokens"] > 0 and len(driver.tokens[1]) == 8


def test_steps_schedule_as_without_drafts():
    """SPC-05: a budget of as many tokens as rows leaves no room for drafts in itself, and needs none. REG-082."""
    spec = make_spec(speculation=spec_of(5), max_step_tokens=16, max_running=16, num_blocks=512)
    driver = Driver(spec, behaviour=NullBehaviour(accepts=many))
    driver.add(*(make_request(id, 8, max_tokens=30) for id in range(16)))
    driver.run()
    assert driver.ask("status")["draft_tokens"] > 0
    assert all(len(driver.tokens[id]) == 30 for id in range(16))


def test_a_failing_token_behind_drafts_ends_its_request_alone():
    """What stood before it is not lost."""
    fails = behaviour(1.0, fails=lambda request, position: request == 1 and position == 20)
    driver = Driver(make_spec(speculation=spec_of()), behaviour=fails)
    driver.add(make_request(1, 8, max_tokens=30), make_request(2, 8, max_tokens=30))
    driver.run()
    whole = Driver(make_spec(speculation=spec_of()), behaviour=behaviour(1.0))
    whole.add(make_request(1, 8, max_tokens=30))
    whole.run()
    assert driver.finished[1].reason == "error"
    assert driver.tokens[1] == whole.tokens[1][:12]
    assert driver.finished[2].reason in ("length", "stop")
    driver.assert_at_rest()


def test_log_probabilities_come_with_each_accepted_token():
    asked = RowSampling(temperature=0.0, logprobs=1)
    driver = Driver(make_spec(speculation=spec_of()), behaviour=NullBehaviour(accepts=many))
    driver.add(make_request(1, 8, max_tokens=20, sampling=asked, stop_ids=(EOS,)))
    driver.run()
    ids = [int(scores.ids[0]) for scores in driver.logprobs[1] if scores is not None]
    assert ids == driver.tokens[1] and len(ids) == 20
    assert np.unique(ids).size > 1


class PricedDriver(Driver):
    """A step takes a second, and `price` seconds for each draft of a row on average. `delays`: how
    much longer a step seems to take now and then, which is not its own fault."""

    def __init__(
        self,
        price: float,
        rate: float,
        *,
        num_tokens: int,
        adaptive: bool = True,
        delays: float = 0.0,
    ):
        speculation = spec_of(num_tokens, adaptive=adaptive) if num_tokens else None
        spec = make_spec(speculation=speculation, overlap=False, num_blocks=2048)
        super().__init__(spec, behaviour=NullBehaviour(accepts=behaviour(rate).accepts))
        submit, random, self.spent_s = self.executor.submit, np.random.default_rng(5), 0.0

        def timed(plan: StepPlan) -> Any:
            assert isinstance(self.clock, Clock)
            seconds = 1.0 + price * float(plan.drafts.sum()) / len(plan.rows)
            self.spent_s += seconds
            late = random.lognormal(0.0, 0.15) * (1.0 + delays * (random.random() < 0.1))
            self.clock.now += seconds * (late if delays else 1.0)
            return submit(plan)

        self.executor.submit = timed

    def seconds(self) -> float:
        """Of answers of four rows, once the prices are known."""
        for turn in range(3):
            begin = self.spent_s
            self.add(*(make_request(4 * turn + n, 8, max_tokens=240) for n in range(4)))
            self.run()
        return self.spent_s - begin


@pytest.mark.parametrize(
    ("rate", "price"),
    [
        pytest.param(*both, marks=() if both == (0.0, 0.3) else pytest.mark.slow)
        for both in product((0.0, 0.3, 0.8, 1.0), (0.0, 0.05, 0.3, 0.9))
    ],
)
def test_drafts_never_cost_more_than_they_bring(rate: float, price: float):
    """Beside plain steps, and beside the better of drafting always and never."""
    plain = PricedDriver(price, rate, num_tokens=0).seconds()
    always = PricedDriver(price, rate, num_tokens=7, adaptive=False).seconds()
    adaptive = PricedDriver(price, rate, num_tokens=7).seconds()
    assert plain / adaptive > 0.97
    assert min(plain, always) / adaptive > 0.85


@pytest.mark.covering(0)
@pytest.mark.parametrize("price", [pytest.param(0.3, marks=pytest.mark.slow), 0.6, 0.9])
@pytest.mark.parametrize("rate", [pytest.param(0.3, marks=pytest.mark.slow), 0.6, 0.8])
def test_delays_by_others_do_not_make_drafts_look_cheap(price: float, rate: float):
    plain = PricedDriver(price, rate, num_tokens=0).seconds()
    assert plain / PricedDriver(price, rate, num_tokens=7, delays=8.0).seconds() > 0.97


class SharedDriver(PricedDriver):
    """On a machine that others use too, by turns: then all steps take four times as long."""

    def __init__(self, turn: int, *, num_tokens: int = 7, adaptive: bool = True):
        super().__init__(0.15, 0.8, num_tokens=num_tokens, adaptive=adaptive)
        submit, steps = self.executor.submit, count()

        def timed(plan: StepPlan) -> Any:
            assert isinstance(self.clock, Clock)
            before = self.clock.now
            handle = submit(plan)
            self.clock.now += (next(steps) // turn % 2) * 3.0 * (self.clock.now - before)
            return handle

        self.executor.submit = timed


@pytest.mark.parametrize(
    "turn", [90, *(pytest.param(n, marks=pytest.mark.slow) for n in (40, 60, 150))]
)
def test_a_busy_machine_does_not_make_drafts_look_dear(turn: int):
    always = SharedDriver(turn, adaptive=False).seconds()
    assert SharedDriver(turn, num_tokens=0).seconds() / always > 1.5
    assert always / SharedDriver(turn).seconds() > 0.9


@pytest.mark.parametrize("every", [8, 13, 16, 32, 48, 64])
def test_steps_that_try_drafts_are_not_those_that_are_to_be_plain(every: int):
    prices = observed(*[(0, 1.0)] * draft_prices.PLAIN_KNOWN)
    turns = [turn for turn in range(4096) if draft_prices.is_probe(turn, every)]
    plain = [turn for turn in turns if prices.wants_plain(4, turn)]
    assert turns and len(plain) <= len(turns) // 8


def test_drafts_that_begin_to_stand_are_noticed():
    copies = NullBehaviour(accepts=lambda request, position: 7 if position > 100 else 0)
    driver = PricedDriver(0.1, 0.0, num_tokens=7)
    driver.executor.behaviour = copies
    driver.seconds()
    assert driver.ask("status")["accepted_draft_tokens"] > 3 * 4 * 40


def observed(*steps: tuple[int, float]) -> DraftPrices:
    """Runs of steps of four rows: drafts, seconds of each."""
    prices = DraftPrices()
    for drafts, seconds in steps:
        for _ in range(draft_prices.UNCOUNTED + draft_prices.RUN):
            prices.observe(4, drafts, seconds)
    return prices


def test_the_price_of_a_draft_is_what_it_adds_to_a_plain_step():
    prices = observed((0, 1.0), (8, 1.5))
    assert prices.price(4, 8) == pytest.approx(0.25)  # half a step, 2 tokens, for 8 drafts
    assert prices.price(4, 28) < prices.price(4, 8) < prices.price(4, 4), "a part of it is shared"


def test_first_steps_of_a_size_do_not_count():
    """They are run and recorded, which takes many times as long as to replay them."""
    prices = observed((0, 1.0))
    for seconds in (900.0, 900.0, *4 * (1.5,)):
        prices.observe(4, 8, seconds)
    assert prices.price(4, 8) == pytest.approx(0.25)


def test_what_one_step_takes_in_late_another_takes_in_early():
    prices = observed((0, 1.0))
    for seconds in (1.5, 1.5, *2 * (2.9, 0.1)):
        prices.observe(4, 8, seconds)
    assert prices.price(4, 8) == pytest.approx(0.25)


class RecordingDriver(PricedDriver):
    """The first two steps of each size take eight plain ones more; one row at a time. A step with
    drafts costs `shared` plain ones more, whatever their number."""

    def __init__(self, shared: float, rate: float, *, num_tokens: int = 4, adaptive: bool = True):
        super().__init__(0.1, rate, num_tokens=num_tokens, adaptive=adaptive)
        submit, seen = self.executor.submit, Counter[int]()

        def timed(plan: StepPlan) -> Any:
            assert isinstance(self.clock, Clock)
            drafts = int(plan.drafts.sum())
            seen[drafts] += 1
            more = (shared if drafts else 0.0) + (8.0 if seen[drafts] <= 2 else 0.0)
            self.spent_s += more
            self.clock.now += more
            return submit(plan)

        self.executor.submit = timed

    def seconds(self) -> float:
        """Of short answers behind others."""
        begin = 0.0
        for number in range(16):
            begin = self.spent_s if number < 5 else begin
            self.add(make_request(number, 8, max_tokens=30))
            self.run()
        return self.spent_s - begin


@pytest.mark.parametrize(
    ("shared", "rate"),
    [(0.3, 0.8), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((0.5, 0.95), (0.3, 0.95)))],
)
def test_short_answers_have_drafts_although_steps_are_recorded(shared: float, rate: float):
    """Nine tenths of what drafting always brings, or more."""
    plain = RecordingDriver(shared, rate, num_tokens=0).seconds()
    always = RecordingDriver(shared, rate, adaptive=False).seconds()
    assert plain / always > 1.4
    assert always / RecordingDriver(shared, rate).seconds() > 0.9

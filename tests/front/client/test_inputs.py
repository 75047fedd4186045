import math
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import ContextTooLong, InvalidRequest
from headrace.base.wire.request import SamplingParams
from headrace.front.client.events import Generation
from headrace.front.client.inputs import InputChecker
from headrace.front.client.limits import Limits, RequestBounds
from tests.front.text import vocabularies
from tests.spent import assert_within

WIDTHS = RequestBounds(logits_width=500, context_tokens=64, eos_ids=(2, 3))
LIMITS = Limits()
INF, NAN = math.inf, math.nan


def made(prompt=(1, 2, 3), envelope=None, **params):
    return Generation(prompt_ids=list(prompt), params=SamplingParams(**params), **(envelope or {}))


@cache
def checker():
    return InputChecker(vocabularies.byte_level(), LIMITS)


def request(generation, request_id=1):
    checker().check(generation, WIDTHS)
    return checker().request(generation, WIDTHS, request_id)


# field -> (a value at the bound that works, values beyond it); T8
BOUNDS = {
    "temperature": ([0, 0.0, 100.0], [-0.01, 100.1, INF, NAN, -INF, "1", None, True]),
    "top_p": ([1e-9, 1.0], [0.0, 1.01, NAN]),
    "min_p": ([0.0, 1.0], [-0.1, 1.1]),
    "typical_p": ([0.1, 1.0], [0.0, 1.1]),
    "repetition_penalty": ([0.01, 100.0], [0.0, -1, 101, INF]),
    "presence_penalty": ([-2, 2.0], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2.0], [-2.1, 2.1]),
    "length_penalty": ([-10, 10], [10.1, NAN]),
    "dry_multiplier": ([0, 100], [-1, 101]),
    "dry_base": ([1, 100], [0.9, 101]),
    "dry_allowed_length": ([1, 64], [0, 65, 1.5]),
    "dry_range": ([0, 2**31 - 1], [-1, 2**31]),
    "xtc_probability": ([0, 1], [-0.1, 1.1]),
    "xtc_threshold": ([0, 1], [-0.1, 1.1]),
    "top_n_sigma": ([-1, 0, 100], [-1.1, 101, NAN]),
    "dynatemp_range": ([0, 100], [-0.1, 101]),
    "dynatemp_exponent": ([0.01, 100], [0, 101]),
    "mirostat": ([0, 1, 2], [-1, 3, 1.5]),
    "mirostat_tau": ([0, 100], [-0.1, 101, INF]),
    "mirostat_eta": ([0, 10], [-0.1, 11]),
    "adaptive_target": ([-1, 0, 1], [-1.1, 1.1]),
    "adaptive_decay": ([0, 0.99], [-0.1, 1]),
    "samplers": ([("top_k", "temperature"), ()], [("top_k", "top_k"), ("other",), "top_k", (1,)]),
    "n": ([1, 128], [0, 129, -1, 2**63, True, 1.0]),
    "best_of": ([1, 128], [0, 129]),
    "beam_width": ([1, 64], [0, 65]),
    "top_k": ([-1, 0, 2**31 - 1], [-2, 2**31, 1.5]),
    "max_tokens": ([0, 64], [-1, 65, 2**63, "5"]),
    "min_tokens": ([0, 61], [-1, 65]),
    "seed": ([-(2**63), 2**63 - 1, 0], [2**63, -(2**63) - 1, 1.0]),
    "stop": (
        [("a",) * 16, ("a" * 1024,), ()],
        [("a",) * 17, ("a" * 1025,), ("",), (1,), "a", ("\ud800",)],
    ),
    "bad_words": ([("a",) * 128], [("a",) * 129, ("",), ("a" * 257,)]),
    "dry_sequence_breakers": ([("a",) * 64, ()], [("a",) * 65, ("",)]),
    "stop_token_ids": ([(0, 499), (1,) * 128], [(500,), (-1,), (1,) * 129, (1.0,), ("1",)]),
    "allowed_token_ids": ([(0, 499), tuple(range(500))], [(), (500,), (-1,), (0,) * 501, {1: 1.0}]),
    "ignore_eos": ([True, False], [1, None, "yes"]),
    "skip_special_tokens": ([True], [0]),
    "logit_bias": ([{0: -100.0, 499: 100}], [{500: 1.0}, {-1: 1.0}, {1: 101.0}, {1: NAN}]),
    "logprobs": ([0, 20], [-2, 21, -1, 2**63]),
    "prompt_logprobs": ([0, 20], [-2, 21, -1]),
}
ENVELOPE = {
    "label": (["x" * 256], ["x" * 257]),
    "tenant": (["x" * 256], ["x" * 257]),
    "cache_salt": (["x" * 128], ["x" * 129, "a@b", "a/b", "a\\b", "a\0b"]),
    "weight": ([0.1, 1e6], [0.0, -1.0, INF, NAN, 1e7]),
    "priority": ([-(2**31), 2**31 - 1], [2**31, -(2**31) - 1]),
    "deadline_s": ([0.1, 1e9], [0.0, -1.0, NAN, INF]),
}


@pytest.mark.serial
@pytest.mark.parametrize("field", BOUNDS)
def test_each_bound_works_and_one_beyond_is_refused(field):
    """P8, T8."""
    good, bad = BOUNDS[field]
    for value in good:
        request(made(**{field: value}))
    for value in bad:

        def refuse(value=value):
            with pytest.raises(InvalidRequest) as caught:
                request(made(**{field: value}))
            assert caught.value.field == field or caught.value.field.startswith(field + "[")
            assert str(caught.value).startswith(field)

        assert_within(refuse, 0.05)


@pytest.mark.parametrize("field", ENVELOPE)
def test_each_bound_of_the_envelope_works_and_one_beyond_is_refused(field):
    good, bad = ENVELOPE[field]
    for value in good:
        request(made(envelope={field: value}))
    for value in bad:
        with pytest.raises(InvalidRequest):
            request(made(envelope={field: value}))


def test_logprob_token_ids_bounds():
    request(made(logprobs=0, logprob_token_ids=tuple(range(128))))
    for wrong in (tuple(range(129)), (500,), (-1,)):
        with pytest.raises(InvalidRequest, match="logprob_token_ids"):
            request(made(logprobs=0, logprob_token_ids=wrong))
    with pytest.raises(InvalidRequest, match="needs logprobs"):
        request(made(logprob_token_ids=(1,)))


def test_a_message_names_field_value_and_limit():
    with pytest.raises(InvalidRequest) as caught:
        request(made(temperature=-1.5))
    assert str(caught.value) == "temperature: -1.5 is not a finite number from 0 to 100"
    with pytest.raises(InvalidRequest) as caught:
        request(made(stop_token_ids=(7, 512)))
    assert str(caught.value) == "stop_token_ids: 512 is not an integer from 0 to 499"


def test_a_message_does_not_reflect_megabytes():
    with pytest.raises(InvalidRequest) as caught:
        request(made(stop=("x" * 10**6,)))
    assert len(str(caught.value)) < 300


def test_minus_one_means_all_only_where_all_are_allowed():
    checker = InputChecker(vocabularies.byte_level(), Limits(max_logprobs=500))
    wanted = made(logprobs=-1)
    checker.check(wanted, WIDTHS)
    assert checker.request(wanted, WIDTHS, 1).sampling.logprobs == -1


@pytest.mark.parametrize(
    ("length", "params", "fits"),
    [
        (63, {}, True),
        (64, {}, False),
        (64, {"max_tokens": 0}, True),
        (65, {"max_tokens": 0}, False),
        (60, {"min_tokens": 4}, True),
        (61, {"min_tokens": 4}, False),
        (10**6, {}, False),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_with_both_numbers(length, params, fits):
    """Reliability 1.8."""
    wanted = made([1] * length, **params)
    if fits:
        request(wanted)
        return
    with pytest.raises(ContextTooLong, match=rf"prompt is too long: {length} tokens > \d+ maximum"):
        request(wanted)


def test_max_tokens_is_bounded_by_what_is_left():
    assert request(made([1] * 60)).stop.max_tokens == 4
    assert request(made([1] * 60, max_tokens=64)).stop.max_tokens == 4
    assert request(made([1] * 60, max_tokens=2)).stop.max_tokens == 2


@pytest.mark.parametrize("prompt", [[], [500], [-1], [2**40], [2**70], ["a"], [[1]], [None], [1.5]])
def test_prompts_that_are_no_ids_are_refused(prompt):
    with pytest.raises(InvalidRequest) as caught:
        request(made(prompt))
    assert caught.value.field == "prompt"


def test_stop_ids_hold_eos_unless_ignored():
    assert request(made(stop_token_ids=(9, 2))).stop.stop_ids == (9, 2, 3)
    assert request(made(stop_token_ids=(9,), ignore_eos=True)).stop.stop_ids == (9,)
    made_ = request(made(min_tokens=2, stop_token_ids=(9,)))
    assert made_.sampling.suppressed_ids == (9, 2, 3)
    assert request(made(stop_token_ids=(9,))).sampling.suppressed_ids == ()


def test_seeds_are_kept_or_random_and_always_in_63_bits():
    assert request(made(seed=7)).sampling.seed == 7
    assert 0 <= request(made(seed=-1)).sampling.seed < 2**63
    assert len({request(made()).sampling.seed for _ in range(8)}) == 8


def test_bad_words_and_breakers_become_ids():
    tokenizer = vocabularies.byte_level()
    sampling = request(made(bad_words=("hello",), dry_multiplier=1.0)).sampling
    assert set(sampling.bad_words) == {
        tuple(tokenizer.encode_plain("hello")),
        tuple(tokenizer.encode_plain(" hello")),
    }
    expected = {tokenizer.encode_plain("a" + text)[-1] for text in ("\n", ":", '"', "*")}
    assert set(sampling.dry_breaker_ids) == expected
    assert request(made()).sampling.dry_breaker_ids == ()


def test_control_tokens_cannot_be_named_as_bad_words():
    tokenizer = vocabularies.byte_level()
    words = request(made(bad_words=("<|im_end|>",))).sampling.bad_words
    assert not tokenizer.special_ids.intersection(i for word in words for i in word)


@pytest.mark.parametrize(
    "extra", [{"best_of": 2}, {"stop": ("a",)}, {"bad_words": ("a",)}, {"logit_bias": {1: 1.0}}]
)
def test_beam_search_refuses_what_it_does_not_do(extra):
    with pytest.raises(InvalidRequest, match="does not go with beam search"):
        request(made(beam_width=2, **extra))


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from([2**31, 2**63, -(2**63), "", "\ud800", INF, NAN]),
    st.lists(st.integers(-5, 600), max_size=5).map(tuple),
    st.lists(st.text(max_size=3), max_size=3).map(tuple),
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(
    field=st.sampled_from([f.name for f in msgspec.structs.fields(SamplingParams)]), value=_VALUES
)
def test_any_value_is_refused_or_survives_the_wire(field, value):
    """P7: what passes the check can be encoded, and nothing but InvalidRequest is raised."""
    try:
        message = request(made(**{field: value}))
    except InvalidRequest:
        return
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
    assert again == message

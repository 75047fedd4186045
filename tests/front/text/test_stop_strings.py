import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.front.text.stop_strings import StopMatch, StopStrings
from tests.spent import assert_linear

WORDS = st.text(alphabet="ab", min_size=1, max_size=5)


def reference(text, stops, include):
    """The match that ends first, the longest of those; None if there is none."""
    ends = [(text.index(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return None, text
    end, _, stop = min(ends)
    return stop, text[:end] if include else text[: end - len(stop)]


def run(text, stops, cuts, include=False):
    watch, out, start = StopStrings(stops, include=include), "", 0
    for end in sorted({*(c % (len(text) + 1) for c in cuts), len(text)}):
        got = watch.push(text[start:end])
        start = end
        if isinstance(got, StopMatch):
            return got.stop, out + got.text
        out += got
    return None, out + watch.finish()


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(WORDS, min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 40), max_size=30),
    include=st.booleans(),
)
def test_any_split_gives_the_match_of_the_whole(text, stops, cuts, include):
    assert run(text, stops, cuts, include) == reference(text, stops, include)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abc", max_size=20), stops=st.lists(WORDS, min_size=1, max_size=3))
def test_only_what_may_become_a_stop_string_is_held_back(text, stops):
    if any(stop in text for stop in stops):
        return
    sent = StopStrings(stops).push(text)
    held = text[len(sent) :]
    longest = max(
        k for k in range(len(text) + 1) if k == 0 or any(s.startswith(text[-k:]) for s in stops)
    )
    assert text.startswith(sent) and len(held) == longest


@pytest.mark.parametrize("include", [True, False])
def test_include_keeps_the_stop_string(include):
    got = StopStrings(["END"], include=include).push("text END more")
    assert got == StopMatch("END", "text END" if include else "text ")


def test_what_was_held_back_comes_out_at_the_end():
    watch = StopStrings(["END"])
    assert watch.push("the EN") == "the "
    assert watch.finish() == "EN"


def test_time_is_linear_for_adversarial_text():
    """P12: a long stop string that almost matches everywhere."""
    stop = "a" * 1000 + "b"

    def read(size):
        watch = StopStrings([stop])
        for _ in range(size):
            watch.push("aaaa")

    assert_linear(read, 2000)

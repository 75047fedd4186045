from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.wire.request import Finished, SamplingParams, StopRules
from headrace.front.client.events import Delta, Ended
from headrace.front.client.outputs import ChoiceState
from tests.front.text import vocabularies


def fold(ids, reads, stop):
    """The text of an answer that is read after some of its tokens only, and how it ended."""
    answer = ChoiceState(
        index=0,
        tokenizer=vocabularies.byte_level(),
        params=SamplingParams(stop=stop),
        stop=StopRules(max_tokens=99),
    )
    events = []
    for i, token_id in enumerate(ids):
        if answer.add_token(token_id, None):
            break
        if i in reads:
            events += answer.take(1)
    if not answer.done:
        answer.finish(Finished(id=1, reason="length"))
    events += answer.take(1)
    assert isinstance(events[-1], Ended)
    deltas = [event for event in events if isinstance(event, Delta)]
    return "".join(d.text for d in deltas), sum(len(d.token_ids) for d in deltas), events[-1].stop


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab☃ \n", max_size=20),
    stop=st.lists(st.text(alphabet="ab☃", min_size=1, max_size=3), max_size=2).map(tuple),
    reads=st.sets(st.integers(0, 60)),
)
def test_the_answer_does_not_depend_on_when_it_is_read(text, stop, reads):
    ids = vocabularies.byte_level().encode_plain(text)
    assert fold(ids, reads, stop) == fold(ids, set(), stop)
    found, _, stopped = fold(ids, reads, stop)
    if any(s in text for s in stop):
        assert stopped in stop and text.startswith(found + stopped)
    else:
        assert found == text


def test_a_stop_string_completed_by_the_last_half_character_is_found():
    tokenizer = vocabularies.byte_level()
    ids = tokenizer.encode_plain("☃")[:1]
    assert fold(ids, set(), ("\ufffd",)) == ("", 1, "\ufffd")

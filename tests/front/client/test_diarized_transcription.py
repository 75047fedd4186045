"""Answers of models that write who speaks, as segments."""

from __future__ import annotations

from headrace.front.client.diarized_transcription import diarized


def test_segments_have_speakers_and_times_within_the_window() -> None:
    said = "[0.00][S01]Hello there.[7.56][1:05.5][S02] And you? [01:02:03]"
    first, second = diarized(said, 600.0, 1100.0)
    assert (first.start, first.end, first.speaker, first.text) == (
        600.0,
        607.56,
        "A",
        "Hello there.",
    )
    assert (second.start, second.end, second.speaker) == (665.5, 1100.0, "B")
    assert second.text == "And you?"
    (other,) = diarized("nothing of the kind [S01]", 3.0, 9.0)
    assert (other.start, other.end, other.speaker) == (3.0, 9.0, "")
    assert diarized(" ", 0.0, 1.0) == [] and diarized("[.][S30]x[:]", 0.0, 1.0)[0].speaker == "S30"

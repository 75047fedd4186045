"""What a speech model says, as text with times: its control tokens, its answer's segments, and the
formats that players read (SubRip, WebVTT).

A segment stands between two time tokens; times count from the beginning of the window that was
heard, in steps of 20 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.base.errors import CheckpointError, InvalidRequest
from headrace.front.text.tokenizer import Tokenizer

STEP_S = 0.02
_CODES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th "
    "ur hr bg lt la mi ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr "
    "pa si km sn yo so af oc ka be tg sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt "
    "haw ln ha ba jw su yue"
)
LANGUAGES = tuple(_CODES.split())
"""The codes a model may know; which it does, its vocabulary says."""


class SpeechSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the text and its times in seconds; `tokens` without the times. `speaker`: "": it is
    not known."""

    start: float
    end: float
    text: str
    tokens: list[int]
    speaker: str = ""


@dataclass(frozen=True)
class SpeechTokens:
    """The control tokens of a speech model's vocabulary. `first_time`: that of 0.00 s; `languages`:
    code -> token, empty for models of one language."""

    start: int
    end: int
    transcribe: int | None
    translate: int | None
    no_times: int
    previous: int | None
    nothing: int | None
    languages: dict[str, int]

    @property
    def first_time(self) -> int:
        """The token of 0.00 s."""
        return self.no_times + 1

    @staticmethod
    def of(tokenizer: Tokenizer) -> SpeechTokens:
        """By their names; CheckpointError where the vocabulary lacks what every model has."""
        named = tokenizer.token_id
        start, no_times = named("<|startoftranscript|>"), named("<|notimestamps|>")
        if start is None or no_times is None:
            raise CheckpointError(
                "the tokenizer has no <|startoftranscript|> or no <|notimestamps|>: it is no "
                "speech model's"
            )
        end = named("<|endoftext|>")
        known = {code: named(f"<|{code}|>") for code in LANGUAGES}
        nothing = named("<|nospeech|>")
        return SpeechTokens(
            start=start,
            end=no_times if end is None else end,
            transcribe=named("<|transcribe|>"),
            translate=named("<|translate|>"),
            no_times=no_times,
            previous=named("<|startofprev|>"),
            nothing=named("<|nocaptions|>") if nothing is None else nothing,
            languages={code: token for code, token in known.items() if token is not None},
        )

    def language(self, code: str) -> int | None:
        """The token of a language; None for models of one language; InvalidRequest lists what the
        model knows."""
        if not self.languages:
            if code.lower() in ("en", "english"):
                return None
            raise InvalidRequest(
                f"language: {code[:30]!r} given; this model knows English alone", field="language"
            )
        if code.lower() not in self.languages:
            raise InvalidRequest(
                f"language: {code[:30]!r} given; known: {', '.join(sorted(self.languages))}",
                field="language",
            )
        return self.languages[code.lower()]


def segments_of(
    token_ids: Sequence[int],
    decode: Callable[[list[int]], str],
    *,
    first_time: int,
    begin_s: float,
    end_s: float,
) -> list[SpeechSegment]:
    """The segments of a window's answer, whose tokens from `first_time` on are times; what is not
    closed by a time ends with the window."""
    segments: list[SpeechSegment] = []
    start, tokens = begin_s, list[int]()

    def close(end: float) -> None:
        if tokens and (text := decode(tokens)).strip():
            stop = min(max(end, start), end_s)
            segments.append(SpeechSegment(start=start, end=stop, text=text, tokens=list(tokens)))
        tokens.clear()

    for token in token_ids:
        if token < first_time:
            tokens.append(token)
            continue
        at = min(begin_s + (token - first_time) * STEP_S, end_s)
        close(at)
        start = at
    close(end_s)
    return segments


class JoinedText:
    """A text that comes in parts, without the spaces around the whole. The parts that `add` gives
    back are together `text`."""

    def __init__(self) -> None:
        self.text = ""
        self._spaces = ""

    def add(self, part: str) -> str:
        """What is certain with this part."""
        part = self._spaces + part
        if not self.text:
            part = part.lstrip()
        shown = part.rstrip()
        self._spaces = part[len(shown) :]
        self.text += shown
        return shown


def subrip(segments: Sequence[SpeechSegment]) -> str:
    """SubRip (.srt)."""
    cues = [
        f"{i}\n{_clock(one.start, ',')} --> {_clock(one.end, ',')}\n{one.text.strip()}\n"
        for i, one in enumerate(segments, start=1)
    ]
    return "\n".join(cues)


def webvtt(segments: Sequence[SpeechSegment]) -> str:
    """WebVTT (.vtt)."""
    cues = [
        f"{_clock(one.start, '.')} --> {_clock(one.end, '.')}\n"
        f"{one.text.strip().replace('-->', '->')}\n"
        for one in segments
    ]
    return "\n".join(["WEBVTT\n", *cues])


def _clock(seconds: float, comma: str) -> str:
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{comma}{rest % 1000:03}"

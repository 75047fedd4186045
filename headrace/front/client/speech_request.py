"""What is wanted of a file of speech, whatever model hears it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.base.wire.request import SamplingParams


class SpeechRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted of a file: the language spoken (None: to be found out, among `languages` if
    there are any), whether it is translated into English, what the text before it may be, and
    whether times are wanted, of segments and of words. `sampling`: how text is sampled, but for
    the temperature."""

    language: str | None = None
    languages: tuple[str, ...] = ()
    translates: bool = False
    prompt: str = ""
    temperature: float = 0.0
    times: bool = False
    words: bool = False
    sampling: SamplingParams = SamplingParams()

    def params(self, temperature: float, *, room: int) -> SamplingParams:
        """How a window's text is sampled; at most `room` tokens of it."""
        most = self.sampling.max_tokens
        longest = max(1, room if most is None else min(room, most))
        return msgspec.structs.replace(
            self.sampling, temperature=temperature, max_tokens=longest, logprobs=0
        )


def with_keywords(prompt: str, keywords: Sequence[str]) -> str:
    """Words that may occur before what else the model is told: all models read them as text."""
    parts = (", ".join(keywords), prompt.strip())
    return ". ".join(part for part in parts if part)

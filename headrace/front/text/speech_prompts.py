"""What the decoder of a speech model begins with, by what is wanted: its own tokens for the
language that is spoken and the one that is written (transformers 5.23, processing_canary.py,
processing_cohere_asr.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.base.errors import CheckpointError, InvalidRequest
from headrace.front.text.tokenizer import Tokenizer
from headrace.front.text.transcript import LANGUAGES

ENGLISH = "en"
THREE_LETTERS = {
    **{"af": "afr", "am": "amh", "ar": "arb", "as": "asm", "az": "azj", "be": "bel", "bn": "ben"},
    **{"bs": "bos", "bg": "bul", "ca": "cat", "cs": "ces", "cy": "cym", "da": "dan", "de": "deu"},
    **{"el": "ell", "en": "eng", "et": "est", "eu": "eus", "fi": "fin", "fr": "fra", "gl": "glg"},
    **{"gu": "guj", "ha": "hau", "he": "heb", "hi": "hin", "hr": "hrv", "hu": "hun", "hy": "hye"},
    **{"id": "ind", "is": "isl", "it": "ita", "ja": "jpn", "jw": "jav", "ka": "kat", "kk": "kaz"},
    **{"km": "khm", "kn": "kan", "ko": "kor", "lo": "lao", "lt": "lit", "lv": "lvs", "mk": "mkd"},
    **{"ml": "mal", "mn": "khk", "mr": "mar", "ms": "zsm", "mt": "mlt", "my": "mya", "ne": "npi"},
    **{"nl": "nld", "no": "nob", "nn": "nno", "oc": "oci", "pa": "pan", "fa": "pes", "pl": "pol"},
    **{"pt": "por", "ro": "ron", "ru": "rus", "sd": "snd", "sk": "slk", "sl": "slv", "sn": "sna"},
    **{"so": "som", "es": "spa", "sr": "srp", "sv": "swe", "sw": "swh", "ta": "tam", "te": "tel"},
    **{"tg": "tgk", "th": "tha", "tl": "tgl", "tr": "tur", "uk": "ukr", "ur": "urd", "uz": "uzn"},
    **{"vi": "vie", "yo": "yor", "zh": "cmn", "yue": "yue"},
}
"""SeamlessM4T's names of languages, by the usual codes."""


@dataclass(frozen=True, kw_only=True)
class SpeechPrompt:
    """`begins(source, target)`: the decoder's first tokens. `languages`: the codes it knows;
    `translates`: whether what is written may be English where another language is spoken."""

    begins: Callable[[str, str], list[int]]
    languages: Sequence[str]
    translates: bool

    def tokens(self, language: str | None, *, translates: bool) -> list[int]:
        """Of a request; without a language English is spoken."""
        source = (language or ENGLISH).lower()
        return self.begins(source, ENGLISH if translates else source)

    def check(self, language: str | None, *, translates: bool) -> None:
        """InvalidRequest for what the model does not know."""
        if translates and not self.translates:
            raise InvalidRequest("this model writes what is said, and translates nothing")
        if language is not None and language.lower() not in self.languages:
            raise InvalidRequest(
                f"language: {language[:30]!r} given; known: {', '.join(sorted(self.languages))}",
                field="language",
            )


def _named(tokenizer: Tokenizer, names: Sequence[str]) -> list[int]:
    ids = []
    for name in names:
        token = tokenizer.token_id(name)
        if token is None:
            raise CheckpointError(f"the tokenizer has no {name}: it is not this speech model's")
        ids.append(token)
    return ids


def _contextual(tokenizer: Tokenizer, lead: Sequence[str], *, translates: bool) -> SpeechPrompt:
    """Of Canary and its successors: no context, no mood, two languages, punctuation, no times."""

    def begins(source: str, target: str) -> list[int]:
        names = (
            *lead,
            *("<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>"),
            *(f"<|{source}|>", f"<|{target}|>"),
            *("<|pnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>"),
        )
        return _named(tokenizer, names)

    begins(ENGLISH, ENGLISH)  # a vocabulary without these ends the start
    known = [code for code in LANGUAGES if tokenizer.token_id(f"<|{code}|>") is not None]
    return SpeechPrompt(begins=begins, languages=known, translates=translates)


def _context(tokenizer: Tokenizer, start: Sequence[int]) -> SpeechPrompt:
    return _contextual(tokenizer, (), translates=True)


def _piece_context(tokenizer: Tokenizer, start: Sequence[int]) -> SpeechPrompt:
    return _contextual(tokenizer, ("▁",), translates=False)


def _target(tokenizer: Tokenizer, start: Sequence[int]) -> SpeechPrompt:
    """The language that is written; what is spoken the model hears."""
    known = {
        code: token
        for code, name in THREE_LETTERS.items()
        if (token := tokenizer.token_id(f"__{name}__")) is not None
    }
    if ENGLISH not in known:
        _named(tokenizer, ("__eng__",))
    return SpeechPrompt(
        begins=lambda source, target: [*start[:1], known[target]],
        languages=tuple(known),
        translates=True,
    )


_PROMPTS: Mapping[str, Callable[[Tokenizer, Sequence[int]], SpeechPrompt]] = {
    "context": _context,
    "piece_context": _piece_context,
    "target": _target,
}


def speech_prompt(name: str, tokenizer: Tokenizer, start: Sequence[int]) -> SpeechPrompt | None:
    """By its name; None for "": the start tokens alone, whatever is spoken."""
    return _PROMPTS[name](tokenizer, start) if name else None

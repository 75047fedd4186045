"""What a request asks of sampling: `SamplingParams` as users write it, and its two resolved halves.

`SamplingParams` is public. The front checks it, resolves every text to token ids and every default
to a number, and splits it: `StopRules` is what the core needs to end a request, `RowSampling` what
the sampler needs for one row.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

LOGPROBS_MODES = ("raw", "processed")


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the text of an answer must be; exactly one of the first six.

    `json` is a JSON schema (an object or its text), `json_object` any JSON object, `regex` a
    pattern for the whole text (Rust's syntax), `choice` a list of texts, `grammar` Lark or GBNF,
    `structural_tag` free text with tagged parts. The others are about JSON: no white space but one
    space after `,` and `:`; a pattern for white space; objects have no properties but those named
    unless their schema says so.
    """

    json: dict[str, Any] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None


MAX_PATTERN_TOKENS = 1024
MAX_PATTERN_COUNT = 65536


class RepetitionDetection(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Ends an answer ("repetition") whose last tokens are one pattern of `min_pattern_size` (0: 1)
    to `max_pattern_size` tokens, `min_count` times over. A greatest size of 0 is off."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class Bound(msgspec.Struct, frozen=True):
    """The finite numbers a parameter may be; with `above` the least itself is not one of them."""

    least: float
    greatest: float
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether `value` is allowed; NaN is not."""
        high_enough = value > self.least if self.above else value >= self.least
        return high_enough and value <= self.greatest and not math.isinf(value)

    def __str__(self) -> str:
        start = "above" if self.above else "from"
        return f"a finite number {start} {self.least:g} to {self.greatest:g}"

    def meta(self, *, greatest: float | None = None) -> msgspec.Meta:
        """It as the constraint of a field; `greatest` where a dialect allows less."""
        most = self.greatest if greatest is None else min(greatest, self.greatest)
        if self.above:
            return msgspec.Meta(gt=self.least, le=most)
        return msgspec.Meta(ge=self.least, le=most)


BOUNDS = {
    "temperature": Bound(0.0, 100.0),
    "top_p": Bound(0.0, 1.0, above=True),
    "min_p": Bound(0.0, 1.0),
    "typical_p": Bound(0.0, 1.0, above=True),
    "repetition_penalty": Bound(0.0, 100.0, above=True),
    "presence_penalty": Bound(-2.0, 2.0),
    "frequency_penalty": Bound(-2.0, 2.0),
    "length_penalty": Bound(-10.0, 10.0),
    "dry_multiplier": Bound(0.0, 100.0),
    "dry_base": Bound(1.0, 100.0),
    "xtc_probability": Bound(0.0, 1.0),
    "xtc_threshold": Bound(0.0, 1.0),
    "logit_bias": Bound(-100.0, 100.0),
}
"""The one table of what the numbers of sampling may be: server, client and core check against
it."""
ROW_BOUNDS = {k: v for k, v in BOUNDS.items() if k not in ("logit_bias", "length_penalty")}
"""The part of it that the sampler sees as one number per row."""


class SamplingNumbers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What users write and the sampler takes as it is."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_tokens: int = 0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    capture_layers: tuple[int, ...] = ()


class SamplingParams(SamplingNumbers, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample one prompt. Defaults leave the model's distribution unchanged (temperature 1).

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1, `min_p` 0, `typical_p` 1 are off. `n`
    answers are returned out of `best_of` sampled ones (ranked by mean log-probability).
    `beam_width` turns beam search on. `logprobs` and `prompt_logprobs` are the numbers of
    alternatives beside the token itself (0: only the token's own; -1: all). `logprobs_mode` "raw"
    scores by the model's own distribution, "processed" by the one that is drawn from: after
    penalties, bias, masks, temperature and truncation. Prompt tokens are not drawn and always raw.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionDetection | None = None


class StopRules(msgspec.Struct, frozen=True, kw_only=True):
    """When the core ends a request. `stop_ids` holds the end-of-sequence ids too, unless they are
    ignored.

    `max_tokens` is at least 0 and already bounded by the context; stop ids count only from
    `min_tokens` on. 0 means the prompt is only scored: the request ends ("length") when its prompt
    is computed.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    repetition: RepetitionDetection | None = None


class RowSampling(SamplingNumbers, frozen=True, kw_only=True, omit_defaults=True):
    """What the sampler needs for one row; every number resolved, every text already token ids.

    `seed` is always set (random if the user gave none): the noise of a token is a function of
    (seed, position, id). `suppressed_ids` may not be sampled while fewer than `min_tokens` tokens
    are out (stop and eos ids). `bad_words` are token-id sequences whose last id is forbidden when
    the others precede it.
    """

    dry_breaker_ids: tuple[int, ...] = ()
    suppressed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    seed: int = 0
    logprob_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the token is the argmax of the processed logits."""
        return self.temperature == 0.0


POOLINGS = ("cls", "last", "mean", "tokens")


class RowPooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request that is pooled instead of continued wants of its hidden states.

    `how`: the first token's, the last one's, the mean over all, or every token's. `head`: through
    the model's classification head, which gives one logit per label. `second_at`: where the second
    text of a pair begins, for models with token types; 0: there is one text only.
    """

    how: str = "last"
    head: bool = False
    second_at: int = 0

    @property
    def from_last(self) -> bool:
        """Whether the last token is enough, so that a cached prefix needs no computing."""
        return self.how == "last"

"""From a `Generation` to what one engine core is sent: checked against the model's bounds, every
text turned into ids.

Everything a core could choke on is refused here, with the field, what was given and the bound:
floats are finite, counts bounded, token ids below the width of the logits (not the length of the
vocabulary), and the prompt fits. Stop strings stay in the front (`outputs.py`)."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from headrace.base.errors import ContextTooLong, InvalidRequest
from headrace.base.extensions import check_processors
from headrace.base.wire.grammar import GRAMMAR_HOOK, Constraint, StructuredOutputs, pack
from headrace.base.wire.repetition import MAX_PATTERN_COUNT, MAX_PATTERN_TOKENS, RepetitionDetection
from headrace.base.wire.request import (
    BOUNDS,
    LOGPROBS_MODES,
    ROW_BOUNDS,
    Bound,
    EngineRequest,
    RowSampling,
    SamplingNumbers,
    SamplingParams,
    StopRules,
)
from headrace.front.client.encoder_prompt import check_encoder_prompt, halves_of
from headrace.front.client.events import Generation
from headrace.front.client.limits import Limits, RequestBounds
from headrace.front.client.refused_together import CHAIN_FIELDS, check_beam, check_chain
from headrace.front.text.structure.requested import node_of
from headrace.front.text.tokenizer import Tokenizer

_SEED_MASK = (1 << 63) - 1
_INT32 = (-(1 << 31), (1 << 31) - 1)
_NUMBERS = SamplingNumbers.__struct_fields__
_CARRIED = (
    "label",
    "external_id",
    "tenant",
    "weight",
    "priority",
    "deadline_s",
    "cache_salt",
    "pooling",
    "adapter",
    "media",
)


_PLAIN = SamplingParams()


class InputChecker:
    """Checks and resolves generations for one model."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._breaker_ids: dict[str, int | None] = {}

    def check(self, generation: Generation, bounds: RequestBounds) -> None:
        """Refuses what is malformed, out of range or can never fit."""
        _check_envelope(generation, self._limits)
        _check_params(generation.params, self._limits, bounds)
        _check_prompt(generation, bounds)
        _check_grammar(generation)

    def request(
        self, generation: Generation, bounds: RequestBounds, request_id: int
    ) -> EngineRequest:
        """The engine request of a checked generation (one choice: `n` is not looked at)."""
        ids, encoder = generation.prompt_ids, generation.encoder
        if bounds.encoder_tokens:
            reads, ids = halves_of(generation, bounds)
            encoder = np.asarray(reads, dtype="<i4").tobytes()
        stop = self._stop_rules(generation.params, bounds, len(ids))
        return EngineRequest(
            id=request_id,
            prompt=np.asarray(ids, dtype="<i4").tobytes(),
            encoder=encoder,
            stop=stop,
            sampling=self._row_sampling(generation.params, stop),
            hook_payloads=_hook_payloads(generation),
            prediction=np.asarray(generation.predicted_ids, dtype="<i4").tobytes(),
            **{name: getattr(generation, name) for name in _CARRIED},
        )

    def _stop_rules(
        self, params: SamplingParams, bounds: RequestBounds, num_prompt: int
    ) -> StopRules:
        room = bounds.context_tokens - num_prompt
        eos, rule = () if params.ignore_eos else bounds.eos_ids, params.repetition_detection
        return StopRules(
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            min_tokens=params.min_tokens,
            stop_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
            repetition=rule if rule is not None and rule.max_pattern_size else None,
        )

    def _row_sampling(self, params: SamplingParams, stop: StopRules) -> RowSampling:
        numbers: dict[str, Any] = {name: getattr(params, name) for name in _NUMBERS}
        numbers |= {name: float(numbers[name]) for name in ROW_BOUNDS}
        numbers["top_k"] = max(params.top_k, 0)
        numbers["logit_bias"] = {int(k): float(v) for k, v in params.logit_bias.items()}
        dry = params.dry_multiplier > 0
        return RowSampling(
            **numbers,
            dry_breaker_ids=self._breakers(params.dry_sequence_breakers) if dry else (),
            suppressed_ids=stop.stop_ids if params.min_tokens else (),
            bad_words=self._bad_words(params.bad_words),
            allowed_ids=params.allowed_token_ids,
            seed=secrets.randbits(63) if params.seed is None else params.seed & _SEED_MASK,
            logprob_ids=params.logprob_token_ids,
        )

    def _bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as ids, at the start of a text and after a space, which vocabularies spell
        differently."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip(" ")):
                if ids := tuple(self._tokenizer.encode_plain(text)):
                    sequences[ids] = None
        return tuple(sequences)

    def _breakers(self, texts: Iterable[str]) -> tuple[int, ...]:
        """The token that ends each breaker where it follows a letter."""
        breaker_ids: dict[int, None] = {}
        for text in texts:
            if text not in self._breaker_ids:
                if len(self._breaker_ids) > 4096:
                    self._breaker_ids.clear()
                ids = self._tokenizer.encode_plain("a" + text)
                self._breaker_ids[text] = ids[-1] if ids else None
            if (breaker := self._breaker_ids[text]) is not None:
                breaker_ids[breaker] = None
        return tuple(breaker_ids)


def _check_grammar(generation: Generation) -> None:
    asked, field = generation.params.structured_outputs, generation.grammar_field
    if asked is not None:
        if not isinstance(asked, StructuredOutputs):
            raise bad(field, asked, "a StructuredOutputs")
        node_of(asked, field=field)
    if generation.grammar is not None and generation.params.beam_width is not None:
        raise InvalidRequest(f"{field}: does not go with beam search", field=field)


def _hook_payloads(generation: Generation) -> dict[str, msgspec.Raw]:
    """What the core's hooks must know of the request; nothing for most."""
    grammar, asked = generation.grammar, generation.params.structured_outputs
    rule, field = generation.reasoning, generation.grammar_field
    if grammar is None and asked is None and (rule is None or rule.budget is None):
        return {} if generation.hints is None else generation.hints.payloads(generation.label)
    if grammar is None and asked is not None:
        grammar = node_of(asked, field=field)
    constraint = Constraint(grammar=grammar, reasoning=rule, field=field)
    passing = {} if generation.hints is None else generation.hints.payloads(generation.label)
    return {GRAMMAR_HOOK: pack(constraint), **passing}


# (field as sent, attribute, its limit)
_LABELS = (
    ("request_id", "label", "max_label_chars"),
    ("user", "tenant", "max_label_chars"),
    ("cache_salt", "cache_salt", "max_salt_chars"),
)
# (field, limit of their number, limit of each)
_TEXTS = (
    ("stop", "max_stop_strings", "max_stop_chars"),
    ("bad_words", "max_bad_words", "max_bad_word_chars"),
    ("dry_sequence_breakers", "max_breakers", "max_bad_word_chars"),
)


def _check_envelope(generation: Generation, limits: Limits) -> None:
    for field, name, most in _LABELS:
        _text(field, getattr(generation, name), getattr(limits, most))
    if any(character in generation.cache_salt for character in "@/\\\0"):
        raise bad("cache_salt", generation.cache_salt, "text without @ / \\ and NUL")
    _number("weight", generation.weight, Bound(0.0, 1e6, above=True))
    _integer("priority", generation.priority, *_INT32)
    if generation.deadline_s is not None:
        _number("timeout_s", generation.deadline_s, Bound(0.0, 1e9, above=True))


def _check_params(params: SamplingParams, limits: Limits, bounds: RequestBounds) -> None:
    for field, bound in BOUNDS.items():
        if field != "logit_bias":
            _number(field, getattr(params, field), bound)
    _check_counts(params, limits, bounds)
    for check, names in _CHECKS:
        if any(getattr(params, name) != getattr(_PLAIN, name) for name in names):
            check(params, limits, bounds)
    _check_types(params)


def _check_types(params: SamplingParams) -> None:
    """What is left: flags, and types that only look right. Nothing that the wire would refuse may
    leave the front."""
    try:
        msgspec.convert(msgspec.to_builtins(params), SamplingParams)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        match = re.search(r"`\$\.(\w+)", str(error))
        field = match[1] if match else "params"
        raise InvalidRequest(f"{field}: {error}", field=field) from None


def _check_counts(params: SamplingParams, limits: Limits, bounds: RequestBounds) -> None:
    context = bounds.context_tokens
    _integer("n", params.n, 1, limits.max_n)
    if params.best_of is not None:
        _integer("best_of", params.best_of, params.n, limits.max_n)
    if params.beam_width is not None:
        _integer("beam_width", params.beam_width, params.n, limits.max_beam_width)
        check_beam(params)
    _integer("top_k", params.top_k, -1, _INT32[1])
    _integer("dry_range", params.dry_range, 0, _INT32[1])
    _integer("dry_allowed_length", params.dry_allowed_length, 1, context)
    if params.max_tokens is not None:
        _integer("max_tokens", params.max_tokens, 0, context)
    most = context if params.max_tokens is None else params.max_tokens
    _integer("min_tokens", params.min_tokens, 0, most)
    if params.seed is not None:
        _integer("seed", params.seed, -(1 << 63), (1 << 63) - 1)


def _check_repetition(params: SamplingParams, limits: Limits, bounds: RequestBounds) -> None:
    rule = params.repetition_detection
    if not isinstance(rule, RepetitionDetection):
        raise bad("repetition_detection", rule, "a RepetitionDetection")
    field, most = "repetition_detection.", rule.max_pattern_size
    _integer(field + "max_pattern_size", most, 0, MAX_PATTERN_TOKENS)
    _integer(field + "min_pattern_size", rule.min_pattern_size, 0, most)
    _integer(field + "min_count", rule.min_count, 2 if most else 0, MAX_PATTERN_COUNT)


def _check_lists(params: SamplingParams, limits: Limits, bounds: RequestBounds) -> None:
    width = bounds.logits_width
    for field, count, chars in _TEXTS:
        _texts(field, getattr(params, field), getattr(limits, count), getattr(limits, chars))
    _ids("stop_token_ids", params.stop_token_ids, limits.max_stop_ids, width)
    _ids("logprob_token_ids", params.logprob_token_ids, limits.max_named_logprobs, width)
    if not isinstance(params.logit_bias, dict):
        raise bad("logit_bias", params.logit_bias, "an object of token ids and numbers")
    _ids("logit_bias", tuple(params.logit_bias), limits.max_logit_bias, width)
    for token_id, bias in params.logit_bias.items():
        _number(f"logit_bias[{token_id}]", bias, BOUNDS["logit_bias"])
    if params.allowed_token_ids is not None:
        _ids("allowed_token_ids", params.allowed_token_ids, width, width)
        if not params.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids: an empty list; at least one id is needed",
                field="allowed_token_ids",
            )


def _check_logprobs(params: SamplingParams, limits: Limits, bounds: RequestBounds) -> None:
    if params.logprobs_mode not in LOGPROBS_MODES:
        raise bad("logprobs_mode", params.logprobs_mode, f"one of {', '.join(LOGPROBS_MODES)}")
    _num_logprobs("logprobs", params.logprobs, limits.max_logprobs, bounds)
    _num_logprobs("prompt_logprobs", params.prompt_logprobs, limits.max_prompt_logprobs, bounds)
    for field in ("logprob_token_ids", "sampling_mask"):
        if getattr(params, field) and params.logprobs is None:
            raise InvalidRequest(f"{field}: needs logprobs (0 gives no alternatives)", field=field)


# What is left at its default needs no check; most requests leave all of these.
_CHECKS = (
    (
        _check_lists,
        (
            *("stop", "bad_words", "dry_sequence_breakers", "stop_token_ids", "logprob_token_ids"),
            *("logit_bias", "allowed_token_ids"),
        ),
    ),
    (
        _check_logprobs,
        ("logprobs_mode", "logprobs", "prompt_logprobs", "logprob_token_ids", "sampling_mask"),
    ),
    (_check_repetition, ("repetition_detection",)),
    (lambda params, *_: check_chain(params), CHAIN_FIELDS),
    (lambda params, *_: check_processors(params.logits_processors), ("logits_processors",)),
)


def _num_logprobs(field: str, number: int | None, most: int, bounds: RequestBounds) -> None:
    if number is None:
        return
    wanted = bounds.logits_width if number == -1 else number
    _integer(field, number, -1, most)
    if wanted > most:
        raise bad(field, number, f"at most {most} (-1 means all {bounds.logits_width})")


def _check_prompt(generation: Generation, bounds: RequestBounds) -> None:
    prompt, params = generation.prompt_ids, generation.params
    if not prompt:
        raise InvalidRequest("prompt: is empty; at least one token is needed", field="prompt")
    context = bounds.context_tokens
    wanted = 0 if params.max_tokens == 0 else max(params.min_tokens, 1)
    if bounds.encoder_tokens:
        check_encoder_prompt(generation, bounds, wanted)
    elif len(prompt) + wanted > context:
        raise ContextTooLong(
            f"prompt is too long: {len(prompt)} tokens > {context - wanted} maximum "
            f"(the context is {context})"
            + (f", of which min_tokens takes {wanted}" if wanted > 1 else ""),
            field=generation.prompt_field,
        )
    try:
        ids = np.asarray(prompt)
    except (ValueError, TypeError, OverflowError):
        ids = np.empty((0, 0))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequest("prompt: must be a list of token ids (integers)", field="prompt")
    width = bounds.encoder_vocabulary or bounds.logits_width
    if int(ids.min()) < 0 or int(ids.max()) >= width:
        wrong = next(i for i in prompt if not 0 <= i < width)
        raise bad("prompt", wrong, f"a token id from 0 to {width - 1}")


def bad(field: str, value: object, allowed: str) -> InvalidRequest:
    """The error for a value that is not allowed."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidRequest(f"{field}: {shown} is not {allowed}", field=field)


def _number(field: str, value: Any, bound: Bound) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not bound.holds(value):
        raise bad(field, value, str(bound))


def _integer(field: str, value: Any, least: int, greatest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= greatest:
        raise bad(field, value, f"an integer from {least} to {greatest}")


def _text(field: str, value: Any, most: int) -> None:
    if not isinstance(value, str) or len(value) > most or not _encodable(value):
        raise bad(field, value, f"a text of at most {most} characters")


def _encodable(text: str) -> bool:
    """Whether `text` is Unicode, without halves of surrogate pairs."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _entries(field: str, value: Any, most: int, kind: str) -> None:
    if not isinstance(value, tuple | list):
        raise bad(field, value, f"a list of {kind}")
    if len(value) > most:
        raise InvalidRequest(
            f"{field}: {len(value)} entries; at most {most} are allowed", field=field
        )


def _texts(field: str, value: Any, most: int, most_chars: int) -> None:
    _entries(field, value, most, "texts")
    for text in value:
        if not isinstance(text, str) or not 0 < len(text) <= most_chars or not _encodable(text):
            raise bad(field, text, f"a text of 1 to {most_chars} characters")


def _ids(field: str, value: Any, most: int, width: int) -> None:
    _entries(field, value, most, "token ids")
    for token_id in value:
        _integer(field, token_id, 0, width - 1)

"""Bounds on what one request may ask for. The server sets them from its options; `LLM` takes wide
ones."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one request. A value equal to its bound works; one more is refused with field,
    value and bound.

    `max_logprobs`, `max_prompt_logprobs`: alternatives per position; -1 in a request means all ids,
    and is taken only if they are not more than the bound. `max_pending_bytes`: what may wait for a
    reader that does not read, about; beyond it the request is ended."""

    max_n: int = 128
    max_beam_width: int = 64
    max_logprobs: int = 20
    max_prompt_logprobs: int = 20
    max_named_logprobs: int = 128
    max_stop_strings: int = 16
    max_stop_chars: int = 1024
    max_stop_ids: int = 128
    max_bad_words: int = 128
    max_bad_word_chars: int = 256
    max_logit_bias: int = 1024
    max_breakers: int = 64
    max_label_chars: int = 256
    max_salt_chars: int = 128
    max_pending_bytes: int = 4 << 20
    max_unsent_bytes: int = 64 << 20
    hello_timeout_s: float = 600.0
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 5.0


class RequestBounds(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a request: ids are below `logits_width`, prompt and answer together have at most
    `context_tokens`. Of an encoder-decoder the prompt has at most `encoder_tokens`, whose ids are
    below `encoder_vocabulary` (0: `logits_width`), and the answer lies behind `decoder_start`;
    `sees_alone`: see MediaSpec.alone."""

    logits_width: int
    context_tokens: int
    eos_ids: tuple[int, ...]
    encoder_tokens: int = 0
    encoder_vocabulary: int = 0
    decoder_start: tuple[int, ...] = ()
    sees_alone: bool = False

"""From the fields of a request to `SamplingParams`: given value, else the model's default, else ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.base.errors import InvalidRequest
from headrace.base.wire.params import SamplingParams
from headrace.front.server.openai.schema import Common, logit_bias

_GIVEN = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "length_penalty", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_range", "xtc_probability", "xtc_threshold", "min_tokens"),
    *("include_stop_str_in_output", "ignore_eos", "seed", "prompt_logprobs", "skip_special_tokens"),
    *("logprobs_mode", "dry_sequence_breakers", "stop_token_ids", "bad_words", "allowed_token_ids"),
    *("logprob_token_ids", "repetition_detection"),
)


def sampling_params(
    request: Common,
    *,
    defaults: Mapping[str, float | int],
    max_n: int,
    max_tokens: int | None,
    logprobs: int | None,
    best_of: int | None = None,
) -> SamplingParams:
    """The parameters of one prompt of `request`; raises InvalidRequest where fields contradict each other."""
    n = request.n or 1
    _check(request, n=n, best_of=best_of, max_n=max_n, max_tokens=max_tokens)
    # The model's defaults are about sampling: beam search, which refuses such fields, does not get them.
    fields: dict[str, Any] = {} if request.use_beam_search else dict(defaults)
    for name in _GIVEN:
        if (value := getattr(request, name)) is not None:
            fields[name] = tuple(value) if isinstance(value, list) else value
    if request.use_beam_search:
        fields["beam_width"] = max(n, best_of or n)
        best_of = None
    stop = request.stop or ()
    fields |= {"n": n, "best_of": best_of, "max_tokens": max_tokens, "logprobs": logprobs}
    fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    fields["logit_bias"] = logit_bias(request)
    if request.attn_capture:
        fields["capture_layers"] = _capture_layers(request)
    return msgspec.structs.replace(SamplingParams(), **fields)


def _capture_layers(request: Common) -> tuple[int, ...]:
    """The layers whose attention is told; the first one if none is named."""
    if request.stream:
        raise InvalidRequest("attn_capture: cannot be streamed", field="attn_capture")
    return tuple(sorted({int(layer) for layer in (request.attn_capture_layers or "0").split(",")}))


def _check(
    request: Common, *, n: int, best_of: int | None, max_n: int, max_tokens: int | None
) -> None:
    for field, value in (("n", n), ("best_of", best_of or n)):
        if value > max_n:
            raise InvalidRequest(f"{field}: {value} given, at most {max_n} allowed", field=field)
    if best_of is not None and best_of < n:
        raise InvalidRequest(f"best_of: {best_of} given, at least n ({n}) needed", field="best_of")
    if best_of is not None and best_of > n and request.stream:
        raise InvalidRequest("best_of: a ranked choice cannot be streamed", field="best_of")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options: allowed only together with stream: true", field="stream_options"
        )
    if request.stream and (request.prompt_logprobs is not None or request.return_token_offsets):
        field = "return_token_offsets" if request.return_token_offsets else "prompt_logprobs"
        raise InvalidRequest(f"{field}: cannot be streamed", field=field)
    if max_tokens is not None and (request.min_tokens or 0) > max_tokens:
        raise InvalidRequest(
            f"min_tokens: {request.min_tokens} given, max_tokens is {max_tokens}",
            field="min_tokens",
        )


def truncated(prompt_ids: list[int], request: Common, *, max_model_len: int) -> list[int]:
    """The last `truncate_prompt_tokens` ids (the first ones with truncation_side right); -1 keeps what the model can
    hold with one token to spare."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompt_ids
    if keep == -1:
        keep = max_model_len - 1
    if keep < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens: {keep} given; allowed: -1 or at least 1",
            field="truncate_prompt_tokens",
        )
    return prompt_ids[:keep] if request.truncation_side == "right" else prompt_ids[-keep:]

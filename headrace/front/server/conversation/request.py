"""A chat or a completion as it was sent, in the OpenAI dialect with the extensions users rely on,
and its sampling parameters: given value, else the model's default, else ours.

Each bound stands at its field; `parse` turns a breach into an InvalidRequest. Fields whose feature
we do not have are listed in `REFUSED`: they are answered with 400 when asked for, never ignored.
Every dialect's request arrives here as the fields of `ChatRequest`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.base.errors import InvalidRequest, RequestError
from headrace.base.wire.grammar import StructuredOutputs
from headrace.base.wire.repetition import RepetitionDetection
from headrace.base.wire.request import BOUNDS, ROUTED_EXPERTS, SamplingParams
from headrace.base.wire.retention import KVRetention
from headrace.base.wire.transfer import HIDDEN_STATES, KVTransferParams
from headrace.front.server.conversation.chain_fields import ChainFields
from headrace.front.server.http.limits import Count, Keywords, Name, R, TokenId, typed

_SENT_AS_IS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "length_penalty", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_range", "xtc_probability", "xtc_threshold", "min_tokens"),
    *("include_stop_str_in_output", "ignore_eos", "seed", "prompt_logprobs", "skip_special_tokens"),
    *("logprobs_mode", "dry_sequence_breakers", "stop_token_ids", "bad_words", "allowed_token_ids"),
    *("logprob_token_ids", "repetition_detection", "logits_processors", "top_n_sigma"),
    *("dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("adaptive_target", "adaptive_decay", "samplers", "control_vectors"),
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
    """The parameters of one prompt of `request`; raises InvalidRequest where fields contradict each
    other."""
    n = request.n or 1
    _check(request, n=n, best_of=best_of, max_n=max_n, max_tokens=max_tokens)
    # The model's defaults are about sampling: beam search, which refuses such fields, does not
    # get them.
    fields: dict[str, Any] = {} if request.use_beam_search else dict(defaults)
    for name in _SENT_AS_IS:
        if (value := getattr(request, name)) is not None:
            fields[name] = tuple(value) if isinstance(value, list) else value
    if request.use_beam_search:
        fields["beam_width"] = max(n, best_of or n)
        best_of = None
    fields |= {
        "n": n,
        "best_of": best_of,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "stop": (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        "logit_bias": logit_bias(request),
    }
    if request.attn_capture or request.return_routed_experts or request.kv_transfer_params:
        _check_whole(request, n=n, beams=bool(request.use_beam_search))
        fields["capture_layers"] = _capture_layers(request)
    return msgspec.structs.replace(SamplingParams(), **fields)


def _check_whole(request: Common, *, n: int, beams: bool) -> None:
    """Of KV that passes between servers: it goes with one answer, and what is sent is told with a
    whole one."""
    field, transfer = "kv_transfer_params", request.kv_transfer_params
    if transfer is None:
        return
    if transfer.do_remote_decode and request.stream:
        raise InvalidRequest(f"{field}: do_remote_decode cannot be streamed", field=field)
    if n > 1 or beams:
        raise InvalidRequest(f"{field}: goes with one answer, not with n or beams", field=field)


def _capture_layers(request: Common) -> tuple[int, ...]:
    """The layers whose attention is told, the first one if none is named; the routers; and whether
    hidden states of the answer are."""
    transfer = request.kv_transfer_params
    if transfer is not None and transfer.include_output_tokens:
        return (HIDDEN_STATES, *_captured_layers(request))
    return _captured_layers(request)


def _captured_layers(request: Common) -> tuple[int, ...]:
    routed = (ROUTED_EXPERTS,) if request.return_routed_experts else ()
    field = "return_routed_experts" if routed else "attn_capture"
    if not request.attn_capture and not routed:
        return ()
    if request.stream:
        raise InvalidRequest(f"{field}: cannot be streamed", field=field)
    if routed and (request.n or 1) > 1:
        raise InvalidRequest(f"{field}: n is {request.n}, one answer is allowed", field=field)
    if not request.attn_capture:
        return routed
    return routed + tuple(
        sorted({int(layer) for layer in (request.attn_capture_layers or "0").split(",")})
    )


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


Layers = Annotated[str, Meta(max_length=1024, pattern=r"^\d{1,4}(,\d{1,4})*$")]


Label = Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z0-9._:/+=@-]+$")]


StopText = Annotated[str, Meta(min_length=1, max_length=256)]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


MAX_LOGIT_BIAS = 1024


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


NumScores = Annotated[int, Meta(ge=-1, le=2**20)]
"""Alternatives of a token; -1: all."""
"""The server's own bound is --max-logprobs."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`include_usage` adds a last chunk with the usage, `continuous_usage_stats` beside it a
    running one to every chunk.

    A chunk holds `stream_interval` tokens, or those of `stream_interval_ms` milliseconds, or else
    what is there. `include_obfuscation` pads chunks, so that their sizes tell an onlooker nothing
    of the text."""

    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool = False
    stream_interval: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    stream_interval_ms: Annotated[float, Meta(ge=0, le=60_000)] | None = None


NO_STREAM_OPTIONS = StreamOptions()


class Common(ChainFields, frozen=True, kw_only=True):
    """What both routes share; None means "not given" (the model's default, then ours)."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=4)] | None = None
    temperature: Annotated[float, BOUNDS["temperature"].meta(greatest=2)] | None = None
    top_p: Annotated[float, BOUNDS["top_p"].meta()] | None = None
    frequency_penalty: Annotated[float, BOUNDS["frequency_penalty"].meta()] | None = None
    presence_penalty: Annotated[float, BOUNDS["presence_penalty"].meta()] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, BOUNDS["logit_bias"].meta()]],
            Meta(max_length=MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    max_tokens: Count | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None

    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, BOUNDS["min_p"].meta()] | None = None
    typical_p: Annotated[float, BOUNDS["typical_p"].meta()] | None = None
    repetition_penalty: Annotated[float, BOUNDS["repetition_penalty"].meta()] | None = None
    length_penalty: Annotated[float, BOUNDS["length_penalty"].meta()] | None = None
    dry_multiplier: Annotated[float, BOUNDS["dry_multiplier"].meta()] | None = None
    dry_base: Annotated[float, BOUNDS["dry_base"].meta()] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=1, le=1024)] | None = None
    dry_range: Count | None = None
    dry_sequence_breakers: Annotated[list[StopText], Meta(max_length=64)] | None = None
    xtc_probability: Annotated[float, BOUNDS["xtc_probability"].meta()] | None = None
    xtc_threshold: Annotated[float, BOUNDS["xtc_threshold"].meta()] | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[StopText], Meta(max_length=128)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    logits_processors: Annotated[list[Name], Meta(max_length=8)] | None = None
    control_vectors: Annotated[dict[Name, float], Meta(max_length=8)] | None = None
    return_weight_versions: bool | None = None
    attn_capture: Literal[0, 1] | None = None
    attn_capture_layers: Layers | None = None
    return_routed_experts: bool | None = None
    attn_capture_dtype: Literal["float16", "float32"] | None = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    return_token_offsets: bool | None = None
    request_id: Label | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Meta(max_length=128, pattern=r"^[^@/\\\x00]*$")] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=86400)] | None = None
    kv_transfer_params: KVTransferParams | None = None
    kv_retention: Annotated[list[KVRetention], Meta(min_length=1, max_length=16)] | None = None
    routing_key: Label | None = None

    repetition_detection: RepetitionDetection | None = None
    response_format: Keywords | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


class CompletionRequest(Common, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt`: one text or list of ids, or several of either (1024 at most).
    `prompt_embeds`: prompts as vectors, which come first. `source_language`, `target_language`: of
    a translator, by the codes of its vocabulary."""

    prompt: (
        str
        | Annotated[
            list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
            Meta(min_length=1),
        ]
        | None
    ) = None
    prompt_embeds: str | Annotated[list[str], Meta(min_length=1)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    echo: bool | None = None
    logprobs: NumScores | None = None
    suffix: Annotated[str, Meta(max_length=2**22)] | None = None
    source_language: Annotated[str, Meta(min_length=1, max_length=32)] | None = None
    target_language: Annotated[str, Meta(min_length=1, max_length=32)] | None = None


class FunctionName(msgspec.Struct, frozen=True, kw_only=True):
    """The function that must be called."""

    name: Name


class PredictedOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer may be: a text, or parts of one. Drafts are looked up in it where the server
    speculates; the answer does not depend on it."""

    type: Literal["content"]
    content: str | Annotated[list[dict[str, Any]], Meta(max_length=1024)]


class ChatRequest(Common, frozen=True, kw_only=True):
    """POST /v1/chat/completions. Messages are checked by the chat template's own types.

    `functions` and `function_call` are the names that tools had before (calls.py).
    """

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumScores | None = None
    tools: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Count | None = None
    include_reasoning: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    prediction: PredictedOutput | None = None
    chat_template: Annotated[str, Meta(max_length=65536)] | None = None
    chat_template_kwargs: Keywords | None = None
    documents: list[dict[str, Any]] | None = None
    mm_processor_kwargs: Keywords | None = None
    functions: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=1024)] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    store: bool | None = None
    metadata: Metadata | None = None


REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "modalities": (
        lambda value: isinstance(value, list) and "audio" in value,
        "this model cannot answer with audio; allowed: ['text']",
    ),
    "audio": (bool, "this model cannot answer with audio"),
    "moderation": (
        lambda value: isinstance(value, dict) and "block" in str(value.get("policy")),
        "this server moderates nothing, so it cannot block",
    ),
    "vllm_xargs": (bool, "nothing here reads arguments of its own from a request"),
    "ec_transfer_params": (bool, "not accepted by this server"),
    "mm_processor_kwargs": (bool, "a request may not choose how media are processed"),
    "media_io_kwargs": (bool, "a request may not choose how media are read"),
    "watermarking": (bool, "not supported by this server"),
    "web_search_options": (lambda value: value is not None, "there is no web search here"),
}


REFUSED_IN_CHAT: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "prompt_embeds": (bool, "vectors are parts of messages: type prompt_embeds"),
    **{field: rule for field, rule in REFUSED.items() if field != "mm_processor_kwargs"},
    "best_of": (lambda value: value not in (None, 1), "not supported in chat; send n"),
    "suffix": (bool, "not supported in chat; /v1/completions inserts before a suffix"),
}


def parse(document: Any, kind: type[R]) -> R:
    """The typed request; InvalidRequest with field, value and what is allowed otherwise."""
    refused = REFUSED_IN_CHAT if issubclass(kind, ChatRequest) else REFUSED
    for field, (asked, why) in refused.items():
        if isinstance(document, dict) and field in document and asked(document[field]):
            raise InvalidRequest(f"{field}: {why}", field=field)
    return typed(document, kind)


def logit_bias(request: Common) -> dict[int, float]:
    """`logit_bias` with its keys as token ids."""
    biases = request.logit_bias or {}
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(
                f"logit_bias: keys are token ids; got {key[:50]!r}", field="logit_bias"
            )
    return {int(key): value for key, value in biases.items()}


def chat_params(
    request: ChatRequest, *, defaults: Mapping[str, float | int], max_n: int, max_logprobs: int
) -> SamplingParams:
    """The sampling side of the request; InvalidRequest where fields contradict each other."""
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest(
            "top_logprobs: allowed only together with logprobs: true", field="top_logprobs"
        )
    _check_scores("top_logprobs", request.top_logprobs, max_logprobs)
    if request.tool_choice is not None and not request.tools:
        raise InvalidRequest("tool_choice: allowed only together with tools", field="tool_choice")
    limit = request.max_completion_tokens
    wants_scores = request.logprobs or request.logprob_token_ids
    return sampling_params(
        request,
        defaults=defaults,
        max_n=max_n,
        max_tokens=request.max_tokens if limit is None else limit,
        logprobs=(request.top_logprobs or 0) if wants_scores else None,
    )


def _check_scores(field: str, number: int | None, most: int) -> None:
    if number is not None and most >= 0 and not 0 <= number <= most:
        raise InvalidRequest(
            f"{field}: {number} given, at most {most} allowed (--max-logprobs of the server)",
            field=field,
        )


DEFAULT_MAX_TOKENS = 16


def completion_params(
    request: CompletionRequest,
    *,
    defaults: Mapping[str, float | int],
    max_n: int,
    max_logprobs: int,
) -> SamplingParams:
    """The sampling side of the request; with `echo` and `logprobs` the prompt is scored too."""
    _check_scores("logprobs", request.logprobs, max_logprobs)
    limit = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    wants_ids = request.logprob_token_ids is not None
    params = sampling_params(
        request,
        defaults=defaults,
        max_n=max_n,
        best_of=request.best_of,
        max_tokens=limit,
        logprobs=0 if request.logprobs is None and wants_ids else request.logprobs,
    )
    if request.echo and request.logprobs is not None:
        wanted = max(request.logprobs, request.prompt_logprobs or 0)
        if -1 in (request.logprobs, request.prompt_logprobs):
            wanted = -1
        params = msgspec.structs.replace(params, prompt_logprobs=wanted)
    return params


@contextmanager
def numbered(number: int) -> Iterator[None]:
    """Errors about a conversation's messages say which conversation it is."""
    try:
        yield
    except RequestError as error:
        field = error.field or ""
        if not field.startswith("messages"):
            raise
        place = f"messages[{number}]" + field.removeprefix("messages")
        message = error.message
        message = (
            place + message.removeprefix(field)
            if message.startswith(field)
            else f"{place}: {message}"
        )
        raise type(error)(message, field=place) from None

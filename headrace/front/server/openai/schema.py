"""Requests of the OpenAI dialect with the extensions users rely on: fields, types and bounds, nothing else.

Unknown fields are ignored. Each bound stands at its field (P8); `parse` turns a breach into an InvalidRequest that
names the field, the value given and what is allowed. Fields whose feature we do not have are listed in `REFUSED`: they
are answered with 400 when asked for, never ignored.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from headrace.base.errors import InvalidRequest
from headrace.base.wire.params import BOUNDS, RepetitionDetection, StructuredOutputs

Name = Annotated[str, Meta(max_length=256)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Layers = Annotated[str, Meta(max_length=1024, pattern=r"^\d{1,4}(,\d{1,4})*$")]
Label = Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z0-9._:/+=@-]+$")]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_LOGIT_BIAS = 1024
MAX_SHOWN_CHARS = 200
MAX_ENTRIES_TRIED = 4096


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`include_usage` adds a last chunk with the usage, `continuous_usage_stats` a running one to every chunk.

    A chunk holds `stream_interval` tokens, or those of `stream_interval_ms` milliseconds, or else what is there.
    `include_obfuscation` pads chunks, so that their sizes tell an onlooker nothing of the text.
    """

    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool = False
    stream_interval: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    stream_interval_ms: Annotated[float, Meta(ge=0, le=60_000)] | None = None


class Common(msgspec.Struct, frozen=True, kw_only=True):
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
    logit_bias: dict[str, Annotated[float, BOUNDS["logit_bias"].meta()]] | None = None
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
    attn_capture: Literal[0, 1] | None = None
    attn_capture_layers: Layers | None = None
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

    repetition_detection: RepetitionDetection | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


class CompletionRequest(Common, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt`: one text or list of ids, or several of either (1024 at most)."""

    prompt: (
        str
        | Annotated[
            list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
            Meta(min_length=1),
        ]
    )
    best_of: Annotated[int, Meta(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: Annotated[str, Meta(max_length=2**22)] | None = None


class FunctionName(msgspec.Struct, frozen=True, kw_only=True):
    """The function that must be called."""

    name: Name


class ChatRequest(Common, frozen=True, kw_only=True):
    """POST /v1/chat/completions. Messages are checked by the chat template's own types.

    `functions` and `function_call` are the names that tools had before (legacy.py).
    """

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Count | None = None
    include_reasoning: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Meta(max_length=65536)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    functions: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=1024)] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None


R = TypeVar("R", bound=msgspec.Struct)
log = logging.getLogger(__name__)
REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "prompt_embeds": (bool, "prompt embeddings are not accepted"),
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
    "return_weight_versions": (bool, "weights have no versions here"),
    "kv_transfer_params": (bool, "not accepted by this server"),  # a request chooses no peer (P5)
    "ec_transfer_params": (bool, "not accepted by this server"),
    "mm_processor_kwargs": (bool, "a request may not choose how media are processed"),
    "media_io_kwargs": (bool, "a request may not choose how media are read"),
    "logits_processors": (bool, "a request may not name code"),
    "watermarking": (bool, "not supported by this server"),
    "web_search_options": (lambda value: value is not None, "there is no web search here"),
}


REFUSED_IN_CHAT: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **REFUSED,
    "echo": (bool, "not supported in chat; the messages are known to you"),
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


def typed(document: Any, kind: type[R]) -> R:
    """A request of any dialect: the document with its types and bounds checked; unknown fields are ignored."""
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    if log.isEnabledFor(logging.DEBUG):
        ignored = sorted(document.keys() - set(kind.__struct_fields__))
        log.debug("fields that are not known are ignored: %s", [name[:64] for name in ignored[:32]])
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), document, kind) from None


_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")


def _named(message: str, document: dict[str, Any], kind: type[msgspec.Struct]) -> InvalidRequest:
    found = _WHERE.match(message)
    assert found is not None
    what, path = found["what"], (found["path"] or "").removeprefix("$")
    if (entry := _wrong_entry(document, path, kind)) is not None:
        return entry
    missing = _MISSING.search(what)
    if missing:
        field = f"{path.removeprefix('.')}.{missing['name']}".strip(".")
        return InvalidRequest(f"{field}: this field is required", field=field)
    field = path.removeprefix(".").replace("[...]", "")
    allowed = what[:1].lower() + what[1:]
    if what.startswith("Invalid enum value") and (words := _words(kind, path)):
        allowed = f"allowed: {', '.join(map(repr, words))}"
    return InvalidRequest(f"{field}: {allowed}; got {_shown(document, path)}", field=field)


def _words(kind: Any, path: str) -> list[Any]:
    """What a field of fixed words may be."""
    forms = [kind]
    for name, _ in _STEP.findall(path):
        forms = [part for form in forms for part in _parts(form)]
        if name:
            structs = [form for form in forms if name in getattr(form, "__struct_fields__", ())]
            forms = [get_type_hints(form, include_extras=True)[name] for form in structs]
    fixed = [part for form in forms for part in _parts(form) if get_origin(part) is Literal]
    return list(dict.fromkeys(word for form in fixed for word in get_args(form)))


def _parts(form: Any) -> list[Any]:
    """A type, and those that it is put together from."""
    inner = [] if get_origin(form) is Literal else get_args(form)
    return [form, *(part for each in inner for part in _parts(each))]


def _wrong_entry(
    document: dict[str, Any], path: str, kind: type[msgspec.Struct]
) -> InvalidRequest | None:
    """The error of the one entry of an object field that is wrong, which msgspec does not name."""
    field = path.removeprefix(".").removesuffix("[...]")
    given = document.get(field)
    if not isinstance(given, dict) or field not in kind.__struct_fields__:
        return None
    form = get_type_hints(kind, include_extras=True)[field]
    for key, value in islice(given.items(), MAX_ENTRIES_TRIED):
        try:
            msgspec.convert({key: value}, form)
        except msgspec.ValidationError as error:
            at = f"{field}[{key[:64]!r}]"
            found = _WHERE.match(str(error))
            what = found["what"] if found is not None else str(error)
            what = what[:1].lower() + what[1:]
            return InvalidRequest(f"{at}: {what}; got {_shown(value, '')}", field=field)
    return None


def _shown(document: Any, path: str) -> str:
    """The value at `path`, as JSON, cut to 200 characters; a container only by its kind and size."""
    value = document
    for name, index in _STEP.findall(path):
        if isinstance(value, dict) and name:
            value = value.get(name)
        elif isinstance(value, list) and index and int(index) < len(value):
            value = value[int(index)]
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'an array'} with {len(value)} entries"
    if isinstance(value, float) and math.isinf(value):
        return f"a number {'below -' if value < 0 else 'above '}1.8e308"
    text = msgspec.json.encode(value).decode() if not isinstance(value, int) else str(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def logit_bias(request: Common) -> dict[int, float]:
    """`logit_bias` with its keys as token ids."""
    given = request.logit_bias or {}
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias: {len(given)} entries given, {MAX_LOGIT_BIAS} allowed", field="logit_bias"
        )
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(
                f"logit_bias: keys are token ids; got {key[:50]!r}", field="logit_bias"
            )
    return {int(key): value for key, value in given.items()}

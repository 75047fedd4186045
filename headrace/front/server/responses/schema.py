"""Requests of the Responses routes: fields, types and bounds.

Unknown fields are ignored (clients send `client_metadata`, `prompt_cache_key`, `safety_identifier`
and others; the prefix cache works without being told). Sampling fields beyond OpenAI's go on to the
conversation as they are (`EXTENSIONS`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.base.errors import InvalidRequest
from headrace.front.server.conversation.request import Effort, Metadata, NumScores
from headrace.front.server.http.limits import Count, Name, typed

MAX_ITEMS = 4096
MAX_ADDED = 20
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
EXTENSIONS = (
    *("top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_range", "dry_sequence_breakers"),
    *("xtc_probability", "xtc_threshold", "logprobs_mode", "length_penalty", "use_beam_search"),
    *("seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
    *("bad_words", "allowed_token_ids", "logit_bias", "skip_special_tokens", "priority"),
    *("cache_salt", "timeout_s", "chat_template", "chat_template_kwargs", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("guided_whitespace_pattern", "add_special_tokens", "documents", "truncate_prompt_tokens"),
    *("truncation_side", "thinking_token_budget", "include_reasoning", "stream_interval"),
    *("request_id", "repetition_detection", "mm_processor_kwargs", "logits_processors"),
    *("return_weight_versions", "top_n_sigma", "dynatemp_range", "dynatemp_exponent", "mirostat"),
    *("mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay", "samplers"),
    *("kv_retention", "routing_key"),
)
NOT_HERE = (
    *("prompt_embeds", "modalities", "audio", "moderation", "kv_transfer_params", "watermarking"),
    *("ec_transfer_params", "media_io_kwargs", "vllm_xargs", "web_search_options"),
)
"""What conversations refuse by name, here as there."""
ONLY_CHAT = (
    *("n", "prompt_logprobs", "logprob_token_ids", "return_token_ids", "return_prompt_text"),
    "return_token_offsets",
    *("return_tokens_as_token_ids", "continue_final_message", "attn_capture", "echo"),
    "return_routed_experts",
)
"""What has no place in a response."""
Include = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""The first two have an effect; the others are about tools that are not run here, and about
images."""
Json = dict[str, Any]
Ident = Annotated[str, Meta(max_length=128)]


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How much the model thinks, and whether its thinking is summed up (here: shown whole) for
    people."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The structure of the answer's text."""

    format: Json | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`include_obfuscation` pads deltas, so that their sizes tell an onlooker nothing of the
    text."""

    include_obfuscation: bool | None = None


class ConversationRef(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation by its id."""

    id: Ident


class InputRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/responses/input_tokens and /v1/responses/compact: what makes up the prompt."""

    model: Name | None = None
    input: str | Annotated[list[Json], Meta(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: Ident | None = None
    conversation: Ident | ConversationRef | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextConfig | None = None
    tool_choice: str | Json | None = None
    tools: Annotated[list[Json], Meta(max_length=1024)] | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ResponsesRequest(InputRequest, frozen=True, kw_only=True):
    """POST /v1/responses, and `response.create` of the WebSocket. `enable_response_messages`: tell
    prompt and answer as their tokens too, as vLLM does."""

    background: bool | None = None
    include: Annotated[list[Include], Meta(max_length=16)] | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    metadata: Metadata | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: NumScores | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
    enable_response_messages: bool = False


def parse_response(document: Any) -> ResponsesRequest:
    """The request of POST /v1/responses; InvalidRequest where it asks for what is not there."""
    request = typed(document, ResponsesRequest)
    _check(request, document)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "stream_options: allowed only together with stream: true", field="stream_options"
        )
    if request.background and request.store is False:
        raise InvalidRequest("background: needs store: true", field="background")
    if request.background and request.enable_response_messages:
        raise InvalidRequest(
            "enable_response_messages: does not go with background",
            field="enable_response_messages",
        )
    if request.conversation is not None and request.store is False:
        raise InvalidRequest(
            "conversation: keeps what is said, store: false does not", field="conversation"
        )
    return request


def parse_prompt(document: Any) -> InputRequest:
    """The request of POST /v1/responses/input_tokens and /compact."""
    request = typed(document, InputRequest)
    _check(request, document)
    return request


def _check(request: InputRequest, document: Json) -> None:
    if document.get("prompt") is not None:
        raise InvalidRequest(
            "prompt: not kept by this server; send instructions and input", field="prompt"
        )
    if request.conversation is not None and request.previous_response_id is not None:
        raise InvalidRequest(
            "conversation: does not go with previous_response_id; send one of them",
            field="conversation",
        )
    before = request.previous_response_id or request.conversation
    if request.input is None and before is None:
        raise InvalidRequest("input: this field is required", field="input")


def conversation_of(request: InputRequest) -> str | None:
    """The id of the conversation that a request belongs to."""
    conversation = request.conversation
    return conversation.id if isinstance(conversation, ConversationRef) else conversation


def extensions(document: Json) -> Json:
    """The sampling fields beyond OpenAI's, as they were sent."""
    for name in ONLY_CHAT:
        value = document.get(name)
        if value is not None and value is not False and (name, value) != ("n", 1):
            raise InvalidRequest(
                f"{name}: not part of a response; /v1/chat/completions has it", field=name
            )
    names = (*EXTENSIONS, *NOT_HERE)
    return {name: document[name] for name in names if document.get(name) is not None}


class ItemsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/conversations/{id}/items."""

    items: Annotated[list[Json], Meta(min_length=1, max_length=MAX_ADDED)]


class ConversationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/conversations."""

    items: Annotated[list[Json], Meta(max_length=MAX_ADDED)] | None = None
    metadata: Metadata | None = None


class MetadataRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/conversations/{id}."""

    metadata: Metadata | None

"""The service `vllm.Inference`: text or token ids in, text and token ids out, whole or as a
stream."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from headrace.base.errors import InvalidRequest, Unsupported
from headrace.base.wire.media import MediaInput
from headrace.front.client.events import Delta, Ended, PromptScored, ScoredToken, Started
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.fold import logprob
from headrace.front.server.conversation.generation import GenerateRequest, begin_generate
from headrace.front.server.conversation.media import images_beside
from headrace.front.server.conversation.request import parse
from headrace.front.server.grpc.rpc import Fields, Rpc, RpcService

NEW_TOKENS = 20
"""How many tokens are generated where a request does not say (the protocol's own number)."""
_REASONS = {"length": 1, "stop": 2, "abort": 3}
_KINDS = ("json", "regex", "grammar", "json_object", "structural_tag")


async def generate_stream(context: RequestContext, fields: Fields) -> AsyncGenerator[Fields, None]:
    """GenerateStream: what each step adds, and the end of each sequence."""
    request, media = await request_of(context, fields)
    wanted: Fields = fields.get("response", {})
    prompt: Fields = {}
    events, _ = begin_generate(context, request, media=media)
    last: dict[int, int] = {}
    async with aclosing(events):
        async for event in events:
            match event:
                case Started():
                    prompt = {"num_prompt_tokens": event.num_prompt}
                    if wanted.get("prompt_token_ids"):
                        prompt["token_ids"] = request.token_ids
                case PromptScored():
                    prompt |= scored(event.scores)
                case Delta() | Ended():
                    chunk: Fields = {"outputs": _output(context, event, wanted, last)}
                    if prompt:
                        chunk["prompt_info"], prompt = prompt, {}
                    yield chunk


async def generate(context: RequestContext, fields: Fields) -> Fields:
    """Generate: the fold of the stream."""
    if fields.get("sampling", {}).get("num_sequences", 1) != 1:
        raise InvalidRequest(
            "num_sequences: one answer holds one sequence; use GenerateStream for more",
            field="num_sequences",
        )
    whole: Fields = {"outputs": {}}
    async with aclosing(generate_stream(context, fields)) as parts:
        async for part in parts:
            whole.setdefault("prompt_info", part.get("prompt_info", {}))
            for name, value in part["outputs"].items():
                if name in whole["outputs"] and name != "index":
                    whole["outputs"][name] += value
                else:
                    whole["outputs"][name] = value
    return whole


async def request_of(
    context: RequestContext, fields: Fields
) -> tuple[GenerateRequest, tuple[MediaInput, ...]]:
    """The request of the token route that this one is, and its media."""
    kv = fields.get("kv", {})
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if kv.get(name):
            raise InvalidRequest(f"{name}: not accepted by this server", field=name)
    salt = secrets.token_hex(16) if kv.get("bypass_prefix_cache") else kv.get("cache_salt")
    ids = await _prompt_ids(context, fields)
    media: tuple[MediaInput, ...] = ()
    if fields.get("media"):
        ids, media = await images_beside(context, ids, fields["media"], field="media")
    document = {
        "token_ids": ids,
        "sampling_params": sampling_of(fields),
        "model": fields.get("lora_name") or fields.get("model"),
        "cache_salt": salt,
        "priority": fields.get("priority"),
        "request_id": fields.get("request_id"),
    }
    known = {k: v for k, v in document.items() if v is not None}
    return parse(known, GenerateRequest), media


async def _prompt_ids(context: RequestContext, fields: Fields) -> list[int]:
    keep = fields.get("truncate_prompt_tokens")
    if "text" in fields:
        ids = await ids_of(context, fields["text"], truncates=bool(keep))
    else:
        ids = fields.get("token_ids", {}).get("ids", [])
    return ids[-keep:] if keep else ids


async def ids_of(context: RequestContext, text: str, *, truncates: bool) -> list[int]:
    """The ids of a prompt; one that is surely too long is refused before it is tokenized."""
    services = context.services
    limit = None if truncates else services.text.max_model_len
    return await services.tokenizer.encode_async(text, max_tokens=limit, field="text")


def sampling_of(fields: Fields) -> dict[str, Any]:
    """The sampling fields; a zero that the protocol calls "default" is not given at all."""
    random, decoding = fields.get("sampling", {}), fields.get("decoding", {})
    stopping, response = fields.get("stopping", {}), fields.get("response", {})
    sampling = {
        "temperature": fields.get("temperature"),
        "n": random.get("num_sequences"),
        **{name: random.get(name) for name in ("top_k", "top_p", "min_p", "seed")},
        **{
            name: decoding.get(name)
            for name in (
                *("presence_penalty", "frequency_penalty", "repetition_penalty"),
                "allowed_token_ids",
            )
        },
        "logit_bias": {str(k): v for k, v in decoding.get("logit_bias", {}).items()} or None,
        "max_tokens": stopping.get("max_new_tokens", NEW_TOKENS),
        "min_tokens": stopping.get("min_new_tokens"),
        "stop_token_ids": stopping.get("stop_token_ids"),
        "stop": stopping.get("stop_strings"),
        "include_stop_str_in_output": stopping.get("include_stop_strings"),
        "ignore_eos": stopping.get("ignore_eos"),
        "skip_special_tokens": response.get("skip_special_tokens"),
        **_scores_wanted(response),
    }
    structured = {name: decoding[name] for name in _KINDS if name in decoding}
    if "choice" in decoding:
        structured["choice"] = decoding["choice"].get("choices", [])
    if structured:
        sampling["structured_outputs"] = structured
    return {name: value for name, value in sampling.items() if value is not None}


def _scores_wanted(response: Fields) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    for side, name in (("prompt", "prompt_logprobs"), ("output", "logprobs")):
        candidates = response.get(f"{side}_candidates")
        if candidates is None and not response.get(f"{side}_logprobs"):
            continue
        candidates = candidates or {}
        if candidates.get("all") or (side == "prompt" and "token_ids" in candidates):
            raise Unsupported(f"{side}_candidates: only top_n is served here")
        counts[name] = candidates.get("top_n", 0)
        if "token_ids" in candidates:
            counts["logprob_token_ids"] = candidates["token_ids"].get("ids", [])
    return counts


def _output(
    context: RequestContext, event: Delta | Ended, wanted: Fields, last: dict[int, int]
) -> Fields:
    output: Fields = {"index": event.index}
    if isinstance(event, Ended):
        output["finish_info"] = _finish(context, event, last.get(event.index))
        return output
    output["num_tokens"] = len(event.token_ids)
    last[event.index] = event.token_ids[-1] if event.token_ids else last.get(event.index, -1)
    if wanted.get("output_text", True):
        output["text"] = event.text
    if wanted.get("output_token_ids"):
        output["token_ids"] = list(event.token_ids)
    return output | scored(event.scores or [])


def _finish(context: RequestContext, event: Ended, last_id: int | None) -> Fields:
    finish: Fields = {
        "num_output_tokens": event.num_output,
        "finish_reason": _REASONS[event.reason],
    }
    stop = event.stop if event.stop is not None else last_id
    if event.reason != "stop" or stop is None:
        return finish
    if isinstance(stop, str):
        return finish | {"stop_string": stop}
    is_eos = stop in context.services.text.eos_ids
    return finish | {"eos_token_id" if is_eos else "stop_token_id": stop}


def scored(scores: list[ScoredToken] | list[ScoredToken | None]) -> Fields:
    """Log-probabilities, ranks and candidates, parallel to the tokens; the first of a prompt has
    none (0, rank 0)."""
    fields: Fields = {"logprobs": [], "ranks": [], "candidate_tokens": []}
    for one in scores:
        fields["logprobs"].append(0.0 if one is None else logprob(one.token.logprob))
        fields["ranks"].append(0 if one is None else one.token.rank or 0)
        others = [] if one is None else [*one.top, *one.named]
        fields["candidate_tokens"].append(
            {
                "tokens": [
                    {"id": each.id, "logprob": logprob(each.logprob), "rank": each.rank or 0}
                    for each in others
                ]
            }
        )
    return fields


SERVICE = RpcService(
    full_name="vllm.Inference",
    methods={
        "Generate": Rpc(route="/inference/v1/generate", unary=generate, runs=True),
        "GenerateStream": Rpc(route="/inference/v1/generate", stream=generate_stream, runs=True),
    },
)

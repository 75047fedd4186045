"""The service `vllm.grpc.engine.VllmEngine`: what model gateways drive an engine with.

A gateway tokenizes, renders and parses by itself; here come token ids in and go token ids out.
Media and the transfer of KV blocks are refused by name; events of the KV cache are not published
(UNIMPLEMENTED)."""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace import __version__
from headrace.base.errors import HeadraceError, InvalidRequest, NotFound, Unsupported
from headrace.front.client.events import Delta, Ended, ScoredToken
from headrace.front.server.administration import operations
from headrace.front.server.administration.parameters import ProfileParameters, ResetParameters
from headrace.front.server.conversation.context import RequestContext
from headrace.front.server.conversation.fold import Fold, logprob
from headrace.front.server.conversation.generation import GenerateRequest, begin_generate
from headrace.front.server.conversation.pooling import (
    PoolInput,
    PoolJob,
    embeddings,
    one_vector,
    pooled,
)
from headrace.front.server.conversation.request import parse
from headrace.front.server.conversation.resolved import Truncation
from headrace.front.server.grpc.inference import ids_of
from headrace.front.server.grpc.rpc import Fields, Rpc, RpcService

CHUNK_BYTES = 1 << 20
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "config.json"),
    *("generation_config.json", "spiece.model", "sentencepiece.bpe.model", "source.spm"),
    "vocab.txt",
)
_PLAIN = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("n", "logprobs", "prompt_logprobs", "seed", "include_stop_str_in_output"),
)
_REFUSED = (
    *("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs"),
    *("extra_mm_inputs", "data_parallel_rank"),
)
_CONSTRAINTS = {
    "json_schema": "json",
    **{name: name for name in ("regex", "grammar", "structural_tag", "json_object")},
}


async def generate(context: RequestContext, fields: Fields) -> AsyncGenerator[Fields, None]:
    """Generate: chunks if `stream`, and one `complete` per sequence with all of its tokens."""
    request = await _request_of(context, fields)
    events, reply = begin_generate(context, request)
    fold = Fold(reply.num_choices)
    streams, first = fields.get("stream", False), True
    async with aclosing(events):
        async for event in events:
            fold.take(event)
            if isinstance(event, Delta) and streams:
                chunk = {
                    "index": event.index,
                    "token_ids": list(event.token_ids),
                    "prompt_tokens": fold.num_prompt,
                    "completion_tokens": fold.output[event.index],
                    **_scores(event.scores or []),
                }
                if first:
                    chunk |= _prompt_scores(fold)
                first = False
                yield {"chunk": chunk}
            elif isinstance(event, Ended):
                yield {"complete": _complete(fold, event)}


async def _request_of(context: RequestContext, fields: Fields) -> GenerateRequest:
    """The request of the token route that this one is."""
    for name in _REFUSED:
        if fields.get(name):
            raise Unsupported(f"{name}: not accepted by this server", field=name)
    sampling = fields.get("sampling_params", {})
    keep = sampling.get("truncate_prompt_tokens")
    if "text" in fields:
        ids = await ids_of(context, fields["text"], truncates=keep is not None)
    else:
        ids = fields.get("tokenized", {}).get("input_ids", [])
    if keep is not None:
        ids = Truncation(keep=keep)(ids, max_model_len=context.services.text.max_model_len)
    document = {
        "token_ids": ids,
        "sampling_params": _sampling(sampling, room=_room(context, len(ids))),
        "request_id": fields.get("request_id"),
    }
    return parse({k: v for k, v in document.items() if v is not None}, GenerateRequest)


def _room(context: RequestContext, num_prompt: int) -> int:
    """Tokens that fit behind the prompt: the most where a request names none."""
    return max(1, context.services.text.max_model_len - num_prompt)


def _sampling(fields: Fields, *, room: int) -> dict[str, Any]:
    sampling = {name: fields[name] for name in _PLAIN if name in fields}
    sampling.setdefault("max_tokens", room)
    if bias := fields.get("logit_bias"):
        sampling["logit_bias"] = {str(k): v for k, v in bias.items()}
    sampling["skip_special_tokens"] = fields.get("skip_special_tokens", False)
    structured = {ours: fields[name] for name, ours in _CONSTRAINTS.items() if name in fields}
    if "choice" in fields:
        structured["choice"] = fields["choice"].get("choices", [])
    return sampling | ({"structured_outputs": structured} if structured else {})


def _complete(fold: Fold, end: Ended) -> Fields:
    choice = fold.choices[end.index]
    complete = {
        "index": end.index,
        "output_ids": choice.token_ids,
        "finish_reason": end.reason,
        "prompt_tokens": fold.num_prompt,
        "completion_tokens": end.num_output,
        "cached_tokens": fold.num_cached,
        **_scores(choice.scores),
        **_prompt_scores(fold),
    }
    if end.stop is not None:
        complete["matched_stop_str" if isinstance(end.stop, str) else "matched_token_id"] = end.stop
    return complete


def _scores(scores: list[ScoredToken]) -> Fields:
    if not scores:
        return {}
    return {
        "output_logprobs": {
            "token_logprobs": [logprob(one.token.logprob) for one in scores],
            "token_ids": [one.token.id for one in scores],
            "top_logprobs": [_top(one) for one in scores],
        }
    }


def _prompt_scores(fold: Fold) -> Fields:
    """Of prompt tokens; the first has no score."""
    if not fold.prompt_scores:
        return {}
    known = [one for one in fold.prompt_scores if one is not None]
    return {
        "input_logprobs": {
            "token_logprobs": [{}, *({"value": logprob(one.token.logprob)} for one in known)],
            "token_ids": [0, *(one.token.id for one in known)],
            "top_logprobs": [{}, *(_top(one) for one in known)],
        }
    }


def _top(one: ScoredToken) -> Fields:
    return {
        "values": [logprob(each.logprob) for each in one.top],
        "token_ids": [each.id for each in one.top],
    }


async def embed(context: RequestContext, fields: Fields) -> Fields:
    """Embed."""
    spec = one_vector(context)
    ids = fields.get("tokenized", {}).get("input_ids", [])
    if not ids:
        raise InvalidRequest("tokenized: at least one token is needed", field="tokenized")
    context.services.tokenizer.check_ids(ids, field="tokenized.input_ids")
    context.hold_place()
    answers = await pooled(context, [PoolInput(ids=ids)], PoolJob(how=spec.how))
    (vector,) = embeddings(context, answers, None, None)
    return {
        "embedding": vector.tolist(),
        "prompt_tokens": len(ids),
        "embedding_dim": len(vector),
    }


async def health(context: RequestContext, fields: Fields) -> Fields:
    """HealthCheck."""
    services = context.services
    why = "" if services.ready else services.engine.trouble or "not ready"
    return {"healthy": services.ready, "message": why}


async def flush(context: RequestContext, fields: Fields) -> Fields:
    """FlushCache: prefixes that no running request holds."""
    document = await operations.reset_prefix_cache(context, ResetParameters())
    return {**document, "message": ""}


async def start_profile(context: RequestContext, fields: Fields) -> Fields:
    """StartProfile: into the folder of --profile-dir, and no other."""
    for name in ("output_dir", "start_step", "num_steps"):
        if name in fields:
            raise Unsupported(f"{name}: not accepted by this server", field=name)
    return await _profiled(context, "start")


async def stop_profile(context: RequestContext, fields: Fields) -> Fields:
    """StopProfile."""
    return await _profiled(context, "stop")


async def _profiled(context: RequestContext, action: Literal["start", "stop"]) -> Fields:
    asked = ProfileParameters(action=action)
    try:
        document = await operations.profile(context, asked)
    except HeadraceError as error:
        return {"success": False, "message": error.message}
    return {"success": True, "message": " ".join(Path(one).name for one in document["places"])}


async def abort(context: RequestContext, fields: Fields) -> Fields:
    """Abort: requests of the key that asks, under the ids it gave them."""
    await operations.aborted(context, fields.get("request_ids", []), tenant=context.tenant)
    return {}


async def model_info(context: RequestContext, fields: Fields) -> Fields:
    """GetModelInfo. Paths stay inside: the names that are served stand for them."""
    services = context.services
    text, engine = services.text, services.config.get("engine")
    config: Any = engine["model"]["config"] if isinstance(engine, dict) else {}
    return {
        "model_path": text.model_names[0],
        "is_generation": text.generates,
        "max_context_length": text.max_model_len,
        "vocab_size": services.tokenizer.num_ids,
        "served_model_name": text.model_names[0],
        "tokenizer_path": text.model_names[0],
        "model_type": config.get("model_type", ""),
        "architectures": config.get("architectures") or [],
        "eos_token_ids": list(text.eos_ids),
        **{name: config.get(name) or 0 for name in ("pad_token_id", "bos_token_id")},
        "max_req_input_len": text.max_model_len - 1,
        "default_sampling_params_json": msgspec.json.encode(text.generation_defaults).decode(),
    }


async def server_info(context: RequestContext, fields: Fields) -> Fields:
    """GetServerInfo. `server_type` names the protocol that is spoken."""
    services = context.services
    engine: Any = services.config["engine"]
    statuses: list[Any] = await services.engine.call("status")
    reasoning = services.text.reasoning_parser
    return {
        "active_requests": services.shares.total,
        "is_paused": all(one["paused"] for one in statuses),
        "uptime_seconds": max(0.0, time.time() - services.created),
        "server_type": "vllm-grpc",
        "data_parallel_size": len(statuses),
        "kv_cache_dtype": "auto",
        "block_size": statuses[0]["block_tokens"],
        "model_dtype": engine["model"]["dtype"],
        "max_num_seqs": sum(one["total_rows"] for one in statuses),
        "engine_reasoning_parser": "" if reasoning == "none" else reasoning,
        "constrained_decoding_start": "first_token",
    }


async def loads(context: RequestContext, fields: Fields) -> Fields:
    """GetLoads: a row per engine core."""
    statuses: list[Any] = await context.services.engine.call("status")
    rows = [_load(rank, one) for rank, one in enumerate(statuses)]
    wanted = fields.get("dp_rank")
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": __version__,
        "dp_rank_count": len(statuses),
        "loads": [row for row in rows if wanted in (None, row["dp_rank"])],
    }


def _load(rank: int, core: dict[str, Any]) -> Fields:
    size, total = core["block_tokens"], core["total_blocks"]
    asked = core["prefix_query_tokens"]
    return {
        "dp_rank": rank,
        "num_running_reqs": core["running"],
        "num_waiting_reqs": core["waiting"],
        "num_total_reqs": core["running"] + core["waiting"],
        "num_used_tokens": core["held_blocks"] * size,
        "max_total_num_tokens": total * size,
        "token_usage": core["held_blocks"] / max(1, total),
        "gen_throughput": core["tokens_per_s"] or 0.0,
        "cache_hit_rate": core["prefix_hit_tokens"] / max(1, asked),
        "utilization": core["running"] / core["total_rows"],
        "max_running_requests": core["total_rows"],
        "num_waiting_uncached_tokens": core["waiting_tokens"],
    }


async def tokenizer(context: RequestContext, fields: Fields) -> AsyncGenerator[Fields, None]:
    """GetTokenizer: the tokenizer's files as a zip, and its digest in the last chunk. Under the
    switch of GET /tokenizer_info."""
    if not context.services.server.tokenizer_info:
        raise NotFound("GetTokenizer is off on this server; --tokenizer-info turns it on")
    folder = Path(context.services.text.tokenizer_path)
    if not folder.is_dir():
        raise Unsupported("the tokenizer of a GGUF file has no files of its own")
    data = await asyncio.to_thread(_zipped, folder)
    digest = hashlib.sha256(data).hexdigest()
    starts = range(0, len(data), CHUNK_BYTES)
    for start in starts:
        is_last = start + CHUNK_BYTES >= len(data)
        chunk = data[start : start + CHUNK_BYTES]
        yield {"data": chunk, "sha256": digest if is_last else ""}


def _zipped(folder: Path) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                stamp = zipfile.ZipInfo(name)  # no times: the same files have the same digest
                archive.writestr(stamp, (folder / name).read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


async def kv_events(context: RequestContext, fields: Fields) -> AsyncGenerator[Fields, None]:
    """SubscribeKvEvents."""
    raise Unsupported("events of the KV cache are not published by this server")
    yield {}


SERVICE = RpcService(
    full_name="vllm.grpc.engine.VllmEngine",
    methods={
        "Generate": Rpc(route="/inference/v1/generate", stream=generate, runs=True),
        "Embed": Rpc(route="/v1/embeddings", unary=embed, runs=True),
        "HealthCheck": Rpc(route="/health", unary=health),
        "FlushCache": Rpc(route="/reset_prefix_cache", unary=flush),
        "StartProfile": Rpc(route="/start_profile", unary=start_profile),
        "StopProfile": Rpc(route="/stop_profile", unary=stop_profile),
        "Abort": Rpc(route="/inference/v1/abort_requests", unary=abort),
        "GetModelInfo": Rpc(route="/v1/models", unary=model_info),
        "GetServerInfo": Rpc(route="/v1/models", unary=server_info),
        "GetLoads": Rpc(route="/load", unary=loads),
        "GetTokenizer": Rpc(route="/tokenizer_info", stream=tokenizer),
        "SubscribeKvEvents": Rpc(route="/kv_event_sources", stream=kv_events),
    },
)

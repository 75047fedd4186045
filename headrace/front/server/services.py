"""Makes the services of an API process (conversation/context.py) from its spec, and those of each
model where there are several."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from headrace.base import env
from headrace.base.config.resolved import ServerSpec, TextSpec
from headrace.base.errors import StartError
from headrace.base.telemetry.metrics import Metrics
from headrace.front.client.chat_transcription import transcriber_of
from headrace.front.client.context_shift import ShiftingLLM, most_tokens
from headrace.front.client.engine import AsyncLLM
from headrace.front.client.events import EngineClient
from headrace.front.client.io_processor import IOProcessor, io_processor_of
from headrace.front.client.limits import Limits
from headrace.front.client.many_engines import ManyEngines
from headrace.front.client.transcription import SpeechModel
from headrace.front.server.conversation.context import Services, stream_interval_of
from headrace.front.server.conversation.tracing import Tracer
from headrace.front.server.http.auth import KeyShares, tenant_of
from headrace.front.server.http.body_budget import BodyBudget
from headrace.front.server.http.body_checks import BodyChecks
from headrace.front.server.http.keys import ApiKeys
from headrace.front.server.many_models import ManyModels
from headrace.front.server.state.batches import BatchStore
from headrace.front.server.state.database import open_database
from headrace.front.server.state.files import FileStore, private_folder
from headrace.front.server.state.responses import ResponseStore
from headrace.front.server.table import line_routes
from headrace.front.text.chat import ChatTemplate
from headrace.front.text.parsing.parser import AnswerFormat
from headrace.front.text.templates import TemplateLimits, TemplatePool
from headrace.front.text.tokenizer import Tokenizer
from headrace.front.text.tokenizer_files import check_vocabulary, load_tokenizer
from headrace.launch.api_process import ApiSpec

if TYPE_CHECKING:
    from headrace.front.media.prompt_vectors import Preparer

Engine = AsyncLLM | ManyEngines
MOST_LOGPROBS = 1 << 20
"""Above every vocabulary."""


def make_services(spec: ApiSpec, pool: socket.socket | None) -> tuple[Services, Engine]:
    """The services of this process; the engine is not connected yet. `pool`: to the pool of models,
    where there are several."""
    text = spec.text
    tokenizer = tokenizer_of(text)
    if pool is None:
        engine = client_of(spec, text, spec.socket_paths, tokenizer)
        services = services_over(engine, tokenizer, text, spec.server)
        services.replicas = engine.replicas
        return services, engine

    def make(base: Services, own: TextSpec, socket_path: str) -> Services:
        is_default = own == base.text
        known = base.tokenizer if is_default else tokenizer_of(own)
        client = client_of(spec, own, [socket_path], known)
        if is_default:
            return replace(base, engine=client)
        return replace(base, engine=client, **parts_of(known, own, spec.server))

    models = ManyModels(spec.models, spec.socket_paths, make)
    engines = ManyEngines(models.pool, models.engines, pool)
    services = services_over(engines, tokenizer, text, spec.server)
    services.models = models
    return services, engines


def client_of(
    spec: ApiSpec, text: TextSpec, socket_paths: Sequence[str], tokenizer: Tokenizer
) -> AsyncLLM:
    """The client of a model's engine cores; StartError where what is kept of a shifted context
    leaves too little to shift."""
    keep, limits = spec.server.context_keep, limits_of(spec)
    share_experts = spec.engine is not None and spec.engine.device.expert_group is not None
    if not spec.server.context_shift or not text.generates:
        return AsyncLLM(
            text,
            socket_paths,
            limits=limits,
            tokenizer=tokenizer,
            replicas=spec.replicas,
            share_experts=share_experts,
        )
    if keep > text.max_model_len // 2:
        raise StartError(
            f"--context-keep {keep}: at most half of the context may stay, {text.max_model_len // 2} of "
            f"{text.max_model_len} tokens"
        )
    return ShiftingLLM(
        text,
        socket_paths,
        keep=keep,
        limits=limits,
        tokenizer=tokenizer,
        replicas=spec.replicas,
        share_experts=share_experts,
    )


def tokenizer_of(text: TextSpec) -> Tokenizer:
    """The tokenizer of a model; StartError where it does not go with the model."""
    tokenizer = load_tokenizer(text.tokenizer_path, chat_template=text.chat_template)
    check_vocabulary(tokenizer, text.logits_width)
    return tokenizer


def limits_of(spec: ApiSpec) -> Limits:
    """What one request may ask for."""
    most = MOST_LOGPROBS if spec.server.max_logprobs < 0 else spec.server.max_logprobs
    return Limits(
        max_n=spec.server.max_n,
        max_logprobs=most,
        max_prompt_logprobs=most,
        heartbeat_timeout_s=spec.heartbeat_timeout_s,
    )


def services_over(
    engine: EngineClient, tokenizer: Tokenizer, text: TextSpec, server: ServerSpec
) -> Services:
    """The services over any engine."""
    checks = BodyChecks()
    return Services(
        engine=engine,
        guest_templates=TemplatePool(TemplateLimits()),
        server=server,
        metrics=Metrics(),
        keys=ApiKeys(server),
        shares=KeyShares.of(server),
        bodies=BodyBudget(server.body_budget_bytes, rest=checks.close),
        body_checks=checks,
        tracer=None
        if server.otlp_endpoint is None
        else Tracer(server.otlp_endpoint, model=text.model_names[0]),
        interval=stream_interval_of(server.stream_interval, server.stream_interval_ms),
        store=make_store(server),
        line_routes=line_routes(),
        **parts_of(tokenizer, text, server),
    )


class ModelParts(TypedDict):
    """The services that belong to one model."""

    tokenizer: Tokenizer
    template: ChatTemplate
    text: TextSpec
    answers: AnswerFormat
    media: Preparer | None
    io_processor: IOProcessor | None
    speech: SpeechModel | None


def parts_of(tokenizer: Tokenizer, text: TextSpec, server: ServerSpec) -> ModelParts:
    """The parts of a model; nothing is started yet."""
    template_limits = TemplateLimits()
    template = ChatTemplate(
        tokenizer.facts.chat_template,
        tokenizer,
        limits=template_limits,
        pool=TemplatePool(template_limits),
        max_tokens=most_tokens(text.max_model_len, shifts=server.context_shift),
        any_role=server.compat == "vllm",
    )
    answers = AnswerFormat.named(
        tool_parser=text.tool_parser, reasoning_parser=text.reasoning_parser
    )
    return ModelParts(
        tokenizer=tokenizer,
        template=template,
        text=text,
        answers=answers.bound(tokenizer),
        media=_media(text, tokenizer),
        io_processor=io_processor_of(text),
        speech=transcriber_of(text, tokenizer, template),
    )


def _media(text: TextSpec, tokenizer: Tokenizer) -> Preparer | None:
    """Prepares images, video and vectors, if the model takes any: the libraries are imported only
    then."""
    if text.media is None and not text.prompt_width:
        return None
    from headrace.front.media.prompt_vectors import preparer_of

    return preparer_of(text, tokenizer)


def open_stores(name: str, spec: ServerSpec, keys: ApiKeys) -> tuple[FileStore, BatchStore] | None:
    """Where files and batches are kept: by default a folder for each model's name (several: all of
    them), so that none runs another's batches."""
    if spec.file_store == "none":
        return None
    folder, named = Path(spec.file_store).expanduser(), "--file-store"
    if spec.file_store == "auto":
        folder = env.cache_dir() / "files" / hashlib.sha256(name.encode()).hexdigest()[:16]
        named = "--file-store auto (a folder in HEADRACE_CACHE_DIR; none: no files are kept)"
    files = FileStore(
        private_folder(folder, named=named) / "files",
        max_bytes=spec.file_store_bytes,
        owners=[tenant_of(digest) for digest in keys.digests] or ("",),
    )
    return files, BatchStore(folder / "batches")


def make_store(spec: ServerSpec) -> ResponseStore | None:
    """The store of responses, not opened yet."""
    if spec.response_store == "off":
        return None
    return ResponseStore(
        open_database(spec.response_store, folder=env.cache_dir()),
        max_bytes=spec.response_store_bytes,
        ttl_s=spec.response_ttl_s,
    )

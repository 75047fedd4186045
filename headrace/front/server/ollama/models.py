"""What is served, as Ollama's clients list it: /api/tags, /api/show, /api/ps, /api/version.

A digest names what a model is (its files' sizes and its configuration), as an identity of its own:
there is no registry whose digest it could be."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__
from headrace.base.config.resolved import EngineSpec
from headrace.base.errors import InvalidRequest, StartError
from headrace.front.server.conversation.context import RequestContext, Services, json_response
from headrace.front.server.conversation.own_names import served_name
from headrace.front.server.http.limits import typed
from headrace.front.server.ollama.modelfile import parameter_lines, write_modelfile
from headrace.front.server.ollama.named import choose
from headrace.front.server.ollama.schema import OllamaModelRequest
from headrace.front.server.state.named_models import NamedModel
from headrace.front.text.fim import markers_of
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import read_model_facts

Json = dict[str, Any]
NEVER = "9999-12-31T23:59:59Z"
"""When a model is unloaded that stays."""
MAX_READ = 64
_SIZES = (
    ("embedding_length", ("hidden_size", "n_embd", "d_model")),
    ("block_count", ("num_hidden_layers", "n_layer", "num_layers")),
    ("feed_forward_length", ("intermediate_size", "n_inner", "d_ff")),
    ("attention.head_count", ("num_attention_heads", "n_head", "num_heads")),
    ("attention.head_count_kv", ("num_key_value_heads",)),
    ("vocab_size", ("vocab_size",)),
)


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The `details` of a model; `parent_model`: what a client's own name stands for."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


@dataclass(frozen=True, kw_only=True)
class ServedFacts:
    """A served model, as its files say: `num_bytes` of weights, `num_params` (0: not known)."""

    format: str
    family: str
    quantization: str
    config: Mapping[str, Any]
    num_bytes: int
    num_params: int
    changed_at: float
    digest: str

    def details(self, parent: str = "") -> Json:
        """The `details` of a model."""
        details = ModelDetails(
            parent_model=parent,
            format=self.format,
            family=self.family,
            families=[self.family],
            parameter_size=_short(self.num_params),
            quantization_level=self.quantization,
        )
        about: Json = msgspec.to_builtins(details)
        return about


def _short(count: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count) if count else ""


async def get_tags(context: RequestContext, request: Request) -> Response:
    """The models that are served, and the names that this key has given to them."""
    services = context.services
    rows = []
    bases: dict[str, ServedFacts] = {}
    for name, spec in await asyncio.to_thread(_specs, services):
        facts = bases[name] = await asyncio.to_thread(_facts_of, spec)
        rows.append(_row(name, facts, facts.changed_at, facts.details()))
    if services.store is not None:
        for named in await services.store.named_models.all(context.tenant):
            if (base := bases.get(served_name(services, named.base) or "")) is not None:
                details = base.details(named.base)
                rows.append(_row(named.name, base, named.changed_at, details))
    return json_response({"models": rows})


def _row(name: str, facts: ServedFacts, changed_at: float, details: Json) -> Json:
    return {
        "name": name,
        "model": name,
        "modified_at": _time(changed_at),
        "size": facts.num_bytes,
        "digest": facts.digest,
        "details": details,
    }


async def get_ps(context: RequestContext, request: Request) -> Response:
    """The models that are loaded, and when each is unloaded unless it is used."""
    services = context.services
    specs = dict(await asyncio.to_thread(_specs, services))
    rows = []
    if services.models is None:
        for name, spec in specs.items():
            rows.append(await _loaded_row(name, spec, None, NEVER))
        return json_response({"models": rows})
    for place, state in await services.models.states():
        if state.status == "loaded" and place.name in specs:
            expires = NEVER if state.expires_at is None else _time(state.expires_at)
            rows.append(await _loaded_row(place.name, specs[place.name], state.num_bytes, expires))
    return json_response({"models": rows})


async def _loaded_row(name: str, spec: EngineSpec, num_bytes: int | None, expires: str) -> Json:
    facts = await asyncio.to_thread(_facts_of, spec)
    size = facts.num_bytes if num_bytes is None else num_bytes
    row = _row(name, facts, facts.changed_at, facts.details())
    del row["modified_at"]
    return {
        **row,
        "size": size,
        "expires_at": expires,
        "size_vram": 0 if spec.device.device == "cpu" else size,
        "context_length": spec.model.max_model_len,
    }


async def get_ollama_version(context: RequestContext, request: Request) -> Response:
    """The version of headrace."""
    return json_response({"version": __version__})


async def post_show(context: RequestContext, document: Any) -> Response:
    """What a name stands for: sizes, options, prompts, what its answers can be; with
    --tokenizer-info also the chat template."""
    request = typed(document, OllamaModelRequest)
    chosen = await choose(context, wanted_name(request.model, request.name), runs=False)
    services, named = context.services, chosen.target.named
    spec = msgspec.convert(services.config["engine"], EngineSpec)
    facts = await asyncio.to_thread(_facts_of, spec)
    model = named or NamedModel(name=chosen.shown, base=chosen.target.name)
    parameters = {**services.text.generation_defaults, **model.parameters}
    template = model.template
    if not template and services.server.tokenizer_info:
        template = services.text.chat_template or ""
    return json_response(
        {
            "modelfile": write_modelfile(
                model.base,
                system=model.system,
                template=template,
                license=model.license,
                parameters=model.parameters,
                messages=model.messages,
            ),
            "parameters": "\n".join(parameter_lines(parameters)),
            "template": template,
            "license": "\n".join(model.license),
            "system": model.system,
            "messages": list(model.messages),
            "details": facts.details("" if named is None else model.base),
            "model_info": _model_info(spec, facts),
            "capabilities": _capabilities(services),
            "modified_at": _time(model.changed_at or facts.changed_at),
        }
    )


def wanted_name(model: str | None, name: str | None) -> str:
    """The name of a request that must have one."""
    if not (model or name):
        raise InvalidRequest("model: this field is required", field="model")
    return model or name or ""


def _capabilities(services: Services) -> list[str]:
    text = services.text
    media = text.media
    known = {
        "completion": text.generates,
        "embedding": not text.generates,
        "tools": services.answers.tools is not None,
        "thinking": services.answers.reasoning is not None,
        "vision": media is not None and media.image_token is not None,
        "audio": media is not None and media.audio_token is not None,
        "insert": text.generates and markers_of(services.tokenizer) is not None,
    }
    return [name for name, holds in known.items() if holds]


def _model_info(spec: EngineSpec, facts: ServedFacts) -> Json:
    family = facts.family
    about: Json = {
        "general.architecture": family,
        "general.parameter_count": facts.num_params,
        f"{family}.context_length": spec.model.max_model_len,
    }
    config = facts.config.get("text_config") or facts.config
    for name, keys in _SIZES:
        values = [config[key] for key in keys if isinstance(config.get(key), int)]
        if values:
            about[f"{family}.{name}"] = values[0]
    return about


def _specs(services: Services) -> list[tuple[str, EngineSpec]]:
    """The served models by name. Reads a file for each of several."""
    if services.models is None:
        spec = msgspec.convert(services.config["engine"], EngineSpec)
        return [(name, spec) for name in services.all_names]
    places = [place for place in services.models.places if place.engine_path]
    return [(place.name, _spec_in(place.engine_path)) for place in places]


@lru_cache(maxsize=MAX_READ)
def _spec_in(path: str) -> EngineSpec:
    return msgspec.json.decode(Path(path).read_bytes(), type=EngineSpec)


def _facts_of(spec: EngineSpec) -> ServedFacts:
    model = spec.model
    return _facts(model.path, model.format, model.family, model.quantization, model.dtype)


@lru_cache(maxsize=MAX_READ)
def _facts(path: str, kind: str, family: str, quantization: str | None, dtype: str) -> ServedFacts:
    """Reads the headers of the model's files once."""
    where = Path(path)
    config: Mapping[str, Any] = {}
    num_params = num_bytes = 0
    try:
        facts = read_model_facts(LocatedModel(path=where, name=path, format=kind), family=family)
        num_params, num_bytes, config = facts.num_params, facts.weight_bytes, facts.config
    except StartError:
        pass  # weights that are elsewhere, or none at all: their sizes are not known
    own = config.get("quantization_config")
    if isinstance(own, Mapping):
        quantization = quantization or str(own.get("quant_method", ""))
    changed_at = where.stat().st_mtime if where.exists() else 0.0
    identity = msgspec.json.encode([kind, family, num_params, num_bytes, str(config)])
    return ServedFacts(
        format="gguf" if kind == "gguf" else "safetensors",
        family=family,
        quantization=(quantization or _DTYPES.get(dtype, dtype)).upper(),
        config=config,
        num_bytes=num_bytes,
        num_params=num_params,
        changed_at=changed_at,
        digest="sha256:" + hashlib.sha256(identity).hexdigest(),
    )


_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def _time(seconds: float) -> str:
    seconds = seconds if math.isfinite(seconds) else 0.0
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")

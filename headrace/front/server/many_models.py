"""Several models in one API process: which one a request names, and what it takes to serve it
(`Services` of its own: tokenizer, template, formats of answers, engine client).

These are made when a model is first used, in a thread, and the ones used least recently are let go
beyond MAX_PREPARED, unless they are in use or loaded. What belongs to the process (metrics, keys,
stores, limits) all of them share; the default model's own are those of the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from headrace.base.config.many_options import keep_alive_s
from headrace.base.config.resolved import EngineSpec, TextSpec
from headrace.base.errors import (
    ConfigError,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    StartError,
)
from headrace.base.wire.models import ModelPlace, ServedModelState
from headrace.front.client.engine import AsyncLLM
from headrace.front.client.model_pool import ModelPoolClient
from headrace.front.server.conversation.context import RequestContext, Services

MAX_PREPARED = 16
log = logging.getLogger(__name__)
MakeServices = Callable[[Services, TextSpec, str], Services]
"""From those of the process, the model's text spec and its core's socket: the model's own, with an
engine (AsyncLLM) that is not connected."""


@dataclass(eq=False)
class _Model:
    """A model's place, and what was made for it. `used`: requests that use it, with or without its
    engine; `connects` is whether its engine client connects, or is connected."""

    index: int
    place: ModelPlace
    socket_path: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    services: Services | None = None
    used: int = 0
    last_used: int = 0
    connects: bool = False


class ManyModels:
    """Implements `context.ModelChoice`. `engines` is kept up to date for ManyEngines."""

    def __init__(
        self,
        places: tuple[ModelPlace, ...],
        socket_paths: list[str],
        make_services: MakeServices,
    ) -> None:
        self.engines: dict[int, AsyncLLM] = {}
        self.pool = ModelPoolClient(self._gone)
        self._models = [
            _Model(index, place, path)
            for index, (place, path) in enumerate(zip(places, socket_paths, strict=True))
        ]
        self._default = next(model for model in self._models if not model.place.error)
        self._index = {name: m for m in self._models for name in m.place.names}
        self._make_services = make_services
        self._uses = 0
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> list[str]:
        """See ModelChoice."""
        return list(self._index)

    @property
    def places(self) -> list[ModelPlace]:
        """See ModelChoice."""
        return [model.place for model in self._models]

    def check(self, name: str) -> None:
        """See ModelChoice."""
        self._named(name)

    async def states(self) -> list[tuple[ModelPlace, ServedModelState]]:
        """See ModelChoice."""
        states = await self.pool.states()
        return [(model.place, state) for model, state in zip(self._models, states, strict=True)]

    async def change(self, name: str, *, load: bool) -> None:
        """See ModelChoice."""
        await self.pool.change(self._named(name).index, load=load)

    async def choose(self, context: RequestContext, document: object, *, runs: bool) -> None:
        """See ModelChoice."""
        name, kept = _named_in(document)
        model = self._named(name)
        assert context.model_use is None, "a request has one model"
        base = context.services
        use = context.model_use = ModelUse(self, model, keep_alive_s=kept, runs=runs)
        await use.begin(context)
        assert model.services is not None and base.models is self
        context.services = model.services

    def _named(self, name: str | None) -> _Model:
        if name is None:
            return self._default
        model = self._index.get(name)
        if model is None:
            adapted = [m for m in self._models if m.services and name in m.services.engine.adapters]
            if adapted:
                return adapted[0]
            raise ModelNotFound(
                f"model: {name[:200]!r} is not served; available: {', '.join(self._index)}",
                field="model",
            )
        return model

    async def prepare(self, model: _Model, base: Services) -> Services:
        """The services of a model, made where they are not there yet."""
        async with model.lock:
            self._uses += 1
            model.last_used = self._uses
            if model.services is None:
                self._check_place(model)
                try:
                    model.services = await asyncio.to_thread(self._prepared, model, base)
                except StartError as error:
                    log.error("%s cannot be served: %s", model.place.name, error.message)
                    raise EngineError(
                        f"model: the tokenizer or template of {model.place.name!r} cannot be used"
                    ) from error
                assert isinstance(model.services.engine, AsyncLLM)
                self.engines[model.index] = model.services.engine
                self._trim()
            return model.services

    def _check_place(self, model: _Model) -> None:
        if model.place.error:
            raise EngineError(
                f"model: {model.place.name!r} cannot be served: {model.place.error}", field="model"
            )

    def _prepared(self, model: _Model, base: Services) -> Services:
        place = model.place
        text = msgspec.json.decode(Path(place.text_path).read_bytes(), type=TextSpec)
        services = self._make_services(base, text, model.socket_path)
        spec = msgspec.json.decode(Path(place.engine_path).read_bytes(), type=EngineSpec)
        config = {"engine": msgspec.to_builtins(spec), "replicas": 1, "decisions": []}
        return replace(services, config=config)

    def _trim(self) -> None:
        """Lets go of what was prepared for models that nobody uses."""
        others = [m for m in self._models if m is not self._default]
        idle = [m for m in others if m.services is not None and not (m.used or m.connects)]
        num_prepared = sum(m.services is not None for m in self._models)
        for model in sorted(idle, key=lambda m: m.last_used)[: max(0, num_prepared - MAX_PREPARED)]:
            assert model.services is not None
            _end_parts(model.services)
            del self.engines[model.index]
            model.services = None

    async def connect(self, model: _Model) -> None:
        """Returns once the engine of a model that was granted is connected."""
        async with model.lock:
            assert model.services is not None
            engine = self.engines[model.index]
            if not model.connects:
                model.connects = True
                await engine.start()
            elif not engine.connected[0]:
                await engine.wait_ready()

    def _gone(self, index: int) -> None:
        model = self._models[index]
        if model.connects:
            task = asyncio.ensure_future(self._disconnect(model))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _disconnect(self, model: _Model) -> None:
        async with model.lock:
            if model.connects:
                model.connects = False
                await self.engines[model.index].close()

    async def close(self) -> None:
        """Ends what was prepared."""
        for model in self._models:
            if model.services is not None and model is not self._default:
                _end_parts(model.services)


class ModelUse:
    """One request's use of a model, until the request is over. `runs`: it needs the engine."""

    def __init__(
        self, models: ManyModels, model: _Model, *, keep_alive_s: float | None, runs: bool
    ) -> None:
        self._models = models
        self._model = model
        self._keep_alive_s = keep_alive_s
        self._runs = runs

    async def begin(self, context: RequestContext) -> None:
        """Makes the model ready for the request of this context."""
        models, model = self._models, self._model
        model.used += 1
        context.held.callback(partial(self._end_use, model))
        await models.prepare(model, context.services)
        if not self._runs:
            if self._keep_alive_s is not None:
                models.pool.keep(model.index, self._keep_alive_s)
            return
        ids = (context.request_id, context.external_id)
        deadline_s = context.deadline_s(None)
        try:
            async with asyncio.timeout(deadline_s):
                await models.pool.take(model.index, ids=ids, tenant=context.tenant)
                context.held.callback(self._give_back)
                await models.connect(model)
        except TimeoutError:
            context.deadline_s(None)  # raises
            raise

    def again(self, context: RequestContext) -> None:
        """The same use by another context, while this one lasts."""
        self._model.used += 1
        context.held.callback(partial(self._end_use, self._model))
        context.model_use = self
        if self._runs:
            self._models.pool.take_again(self._model.index)
            context.held.callback(self._give_back)

    def _give_back(self) -> None:
        self._models.pool.give_back(self._model.index, self._keep_alive_s)

    @staticmethod
    def _end_use(model: _Model) -> None:
        model.used -= 1


def _end_parts(services: Services) -> None:
    """Ends the processes of a model's own."""
    services.template.close()
    if services.media is not None:
        services.media.close()


def _named_in(document: object) -> tuple[str | None, float | None]:
    """The model and the keep_alive (taken out) of a body; what is wrong with it otherwise, its
    handler finds."""
    if not isinstance(document, dict):
        return None, None
    name = document.get("model")
    kept = document.pop("keep_alive", None)
    seconds = None
    if kept is not None:
        try:
            seconds = keep_alive_s(kept, field="keep_alive")
        except ConfigError as error:
            raise InvalidRequest(error.message, field="keep_alive") from None
    if name is not None and not isinstance(name, str):
        raise InvalidRequest(f"model: {name!r:.80} given; a name is wanted", field="model")
    return name or None, seconds

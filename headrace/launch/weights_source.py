"""Executors over other weights of the model an engine core was started with, and what the core that
replaces it must know."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from headrace.back.executor.choose import make_executor
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import ModelOptions
from headrace.base.errors import ConfigError
from headrace.base.wire.step import WorkerFacts
from headrace.core.ports import Executor, WeightWorkers
from headrace.core.weights import Weights, no_weights
from headrace.launch.locate import locate
from headrace.launch.model_facts import read_model_facts


class WeightsSource:
    """Implements `core.ports.ExecutorSource`: executors over other weights of the model the engine
    was started with.

    The spec of the last executor is written back to the spec file, so that a core restarted after a
    crash loads the same weights. The facts of a sleeping core are written beside it, so that one
    that died asleep is replaced without loading the weights it had freed.
    """

    def __init__(self, spec: EngineSpec, spec_path: Path) -> None:
        self._spec = spec
        self._spec_path = spec_path
        self._before: EngineSpec | None = None

    def check(self, model: str) -> None:
        """See ExecutorSource."""
        self._for(model)

    def make(self, model: str) -> Executor:
        """See ExecutorSource."""
        spec, before, self._before = self._for(model), self._before, None
        try:
            executor = make_executor(spec)
        except BaseException:
            if before is not None:
                self._set(before)
            raise
        if spec is not self._spec:
            self._set(spec)
        return executor

    def turn_to(self, model: str) -> None:
        """See ExecutorSource."""
        before = self._before or self._spec
        self._set(self._for(model))
        self._before = before

    def _set(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._write(self._spec_path, spec)

    def rests(self, facts: WorkerFacts) -> None:
        """See ExecutorSource."""
        self._write(self._facts_path(), facts)

    def keep_adapters(self, modules: tuple[tuple[str, str], ...]) -> None:
        """These adapters (name, folder) are loaded now: a core restarted after a crash loads them
        too."""
        adapters = self._spec.model.adapters
        assert adapters is not None
        loaded = tuple(module for module in modules if module not in adapters.modules)
        adapters = msgspec.structs.replace(adapters, loaded=loaded)
        model = msgspec.structs.replace(self._spec.model, adapters=adapters)
        self._spec = msgspec.structs.replace(self._spec, model=model)
        self._write(self._spec_path, self._spec)

    def resting(self) -> WorkerFacts:
        """The facts of the core that slept last."""
        return msgspec.json.decode(self._facts_path().read_bytes(), type=WorkerFacts)

    def _facts_path(self) -> Path:
        return self._spec_path.with_suffix(".facts")

    def _write(self, path: Path, what: msgspec.Struct) -> None:
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(what))
        draft.replace(path)

    def _for(self, model: str) -> EngineSpec:
        if not model:
            return self._spec
        current = self._spec.model
        if current.manifest is not None:
            raise ConfigError(
                "model: --manifest verifies the weights the server was started with; restart it to "
                "load others",
                field="model",
            )
        if current.format == "dummy":
            raise ConfigError("--load-format dummy: there are no weights to reload", field="model")
        facts = read_model_facts(locate(ModelOptions(model=model)), family=current.family)
        config = facts.config
        differs = [name for name in _SAME if config.get(name) != current.config.get(name)]
        if differs or facts.logits_width != current.logits_width:
            named = differs[0] if differs else "vocab_size"
            raise ConfigError(
                f"model: {named} is {config.get(named)!r} there and {current.config.get(named)!r} here; "
                "only weights of the same architecture and sizes can be swapped in",
                field="model",
            )
        swapped = msgspec.structs.replace(
            current, path=facts.path, format=facts.format, config=facts.config
        )
        return msgspec.structs.replace(self._spec, model=swapped)


def weights_of(spec: EngineSpec, executor: Callable[[], Executor]) -> Weights:
    """The weights of an engine; `executor`: the one that is installed."""
    if spec.device.executor == "null" or spec.device.expert_group is not None:
        return Weights(no_weights)
    return Weights(lambda order: cast(WeightWorkers, executor()).weigh(order))


_SAME = (
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "eos_token_id"),
)

"""Hidden states of requests in files, decided: of which layers, and in which folder. What does not
go with them: kind_modes.py."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.base.config.residual import HiddenStatesSpec
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.launch.chooser import Chooser
from headrace.launch.drafters import EXTRACT, refused
from headrace.launch.model_facts import ModelFacts

PATH = "hidden_states_path"


def hidden_states_spec(options: Options, model: ModelFacts) -> HiddenStatesSpec | None:
    """What is written; ConfigError with the option, its value and what is allowed."""
    requested, path = options.scheduler.speculative_config, options.model.hidden_states_path
    if requested is None or requested.method != EXTRACT:
        if path is not None:
            why = f"goes with --speculative-config's method {EXTRACT!r} alone"
            raise ConfigError(f"--hidden-states-path {path}: {why}", field=PATH)
        return None
    if path is None:
        raise refused(f"method {EXTRACT!r} needs --hidden-states-path: the folder of the files")
    config = requested.draft_model_config
    layers = () if config is None else config.hf_config.eagle_aux_hidden_state_layer_ids
    if not layers or len(set(layers)) < len(layers) or max(layers) > model.num_layers:
        ids = ", ".join(map(str, layers)) or "none"
        raise refused(
            "draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids: different ones of 0 "
            f"to {model.num_layers} are wanted ({model.num_layers}: behind the last layer), "
            f"{ids} given"
        )
    if model.head != "lm" or model.has_encoder:
        raise refused(f"method {EXTRACT!r} needs a decoder that generates")
    return HiddenStatesSpec(layers=layers, path=str(Path(path).expanduser().resolve()))


def computing_all(engine: EngineSpec, choose: Chooser) -> EngineSpec:
    """The engine, whose prompts are computed from their first token on: states that lie nowhere
    are not found in a prefix cache."""
    kv = engine.kv
    if engine.model.hidden_states is None:
        return engine
    if kv.prefix_caching:
        choose.note("--prefix-caching", "on", "off", "hidden states of all tokens are wanted")
    return msgspec.structs.replace(engine, kv=msgspec.structs.replace(kv, prefix_caching=False))

"""Which weights draft for a model: the checkpoint that `--speculative-config` names, or the heads
that the model's own carries; and what method they are of. Configs and file headers are read here,
no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.back.models.families import FALLBACK
from headrace.base import extensions
from headrace.base.config.hf import read_json
from headrace.base.config.resolved import Decision
from headrace.base.config.safetensors_header import read_safetensors_header
from headrace.base.config.tree import ModelOptions, Options, SpeculationOptions
from headrace.base.config.weight_files import find_weight_files
from headrace.base.errors import ConfigError
from headrace.launch.locate import LocatedModel, locate
from headrace.launch.model_facts import ModelFacts, read_model_facts

NETWORK_METHODS: Final = (
    "draft_model",
    "eagle",
    "eagle3",
    "mtp",
    "medusa",
    "mlp_speculator",
    "dflash",
    "dspark",
)
"""Those that have weights."""
CUSTOM: Final = "custom_class"
"""vLLM's name of a method that is a class of somebody's."""
EXTRACT: Final = "extract_hidden_states"
"""The method that drafts nothing (hidden_states.py)."""
ALIASES: Final = {
    "ngram_gpu": "ngram",
    "pard": "draft_model",
    "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "mimo_mtp": "mtp",
    "ernie_mtp": "mtp",
    "exaone_moe_mtp": "mtp",
    "longcat_flash_mtp": "mtp",
    "pangu_ultra_moe_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
    "qwen3_5_mtp": "mtp",
    "step3p5_mtp": "mtp",
    "nextn": "mtp",
}
"""Other servers' names of methods that are the same here."""
INSTEAD: Final = {
    "lookahead": "ngram",
}
"""Methods of other servers that are not here -> what to take."""
MTP_MARKS: Final = (".eh_proj.weight", "mtp_layers.0.input_proj.weight", "mtp.fc.weight")
"""How the names of tensors end that make a head for multi-token prediction."""


class DraftCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that draft. `model`: facts of a draft model; None: it is a head. `parallel`: it
    drafts all tokens in one pass."""

    method: str
    path: str
    format: str
    config: dict[str, Any]
    model: ModelFacts | None = None
    parallel: bool = False
    decisions: tuple[Decision, ...] = ()


def find_draft(options: Options, model: ModelFacts) -> DraftCheckpoint | None:
    """What drafts, where that has weights; ConfigError for a method that is not known and a
    checkpoint that there is not."""
    requested = requested_of(options)
    if requested is None:
        return None
    method = method_of(requested.method)
    if method not in (*NETWORK_METHODS, "auto"):
        if requested.model is not None:
            raise refused(f'method {method!r} has no weights, but "model" is {requested.model}')
        return None
    if requested.model is None:
        return _carried(method, model)
    try:
        located = locate(_model_options(options.model, requested))
    except ConfigError as error:
        raise refused(error.message.removeprefix("--")) from error
    config = _config(located)
    kind = _kind(config) if method == "auto" else method
    if requested.parallel_drafting and kind != "draft_model":
        raise refused(f"parallel_drafting is for draft models, not for method {kind!r}")
    draft = DraftCheckpoint(
        method=kind,
        path=str(located.path),
        format=located.format,
        config=config,
        parallel=requested.parallel_drafting or requested.method == "pard",
        model=read_model_facts(located) if kind == "draft_model" else None,
        decisions=located.decisions,
    )
    if draft.model is not None and draft.model.family == FALLBACK:
        raise refused(f"a draft model of {draft.model.architecture} cannot run inside a step")
    return draft


def requested_of(options: Options) -> SpeculationOptions | None:
    """The options, in which an installed drafter that is named as vLLM's users name a class is a
    method; ConfigError for one that is not installed."""
    requested = options.scheduler.speculative_config
    if requested is None:
        return None
    if requested.method != CUSTOM:
        return requested
    installed = extensions.allowed(extensions.DRAFTERS)
    if requested.model not in installed:
        known = ", ".join(installed) or "none"
        raise refused(
            f'method {CUSTOM!r}: "model" is {requested.model!r}, no drafter that is installed and '
            f"allowed by --extensions (there are: {known}; docs/EXTENDING.md)"
        )
    return msgspec.structs.replace(requested, method=requested.model, model=None)


def method_of(name: str) -> str:
    """The method that a name stands for; ConfigError, with what to use, for one we do not have."""
    method = ALIASES.get(name, name)
    ours = "auto", "ngram", "suffix", EXTRACT, *NETWORK_METHODS
    known = (*ours, *extensions.allowed(extensions.DRAFTERS))
    if method in known:
        return method
    if method in INSTEAD:
        raise refused(f"method {name!r} is not part of headrace; use {INSTEAD[method]}")
    raise refused(f"method {name!r} is not known (known: {', '.join(known)})")


def lacks_model(method: str) -> ConfigError:
    """Of a method whose weights lie in no model's checkpoint."""
    return refused(f'method {method!r} needs "model": the folder or hub id of what drafts')


def refused(reason: str) -> ConfigError:
    """The error of the option."""
    return ConfigError(f"--speculative-config: {reason}", field="speculative_config")


def _carried(method: str, model: ModelFacts) -> DraftCheckpoint | None:
    """The heads of the model's own checkpoint, for those who want them or whatever there is."""
    if method == "auto":
        if model.format != "safetensors" or not _carries_mtp(Path(model.path)):
            return None
    elif method != "mtp":
        raise lacks_model(method)
    elif model.format == "gguf":
        raise refused("a GGUF file carries no head for multi-token prediction; use ngram")
    elif model.format == "safetensors" and not _carries_mtp(Path(model.path)):
        raise refused(f"{model.path} carries no head for multi-token prediction; use ngram")
    return DraftCheckpoint(method="mtp", path=model.path, format=model.format, config=model.config)


def _model_options(options: ModelOptions, requested: SpeculationOptions) -> ModelOptions:
    return ModelOptions(
        model=requested.model or "",
        revision=requested.revision,
        allow_download=options.allow_download,
    )


def _config(located: LocatedModel) -> dict[str, Any]:
    if located.path.is_file():
        return {}
    return read_json(located.path / "config.json")


def _kind(config: Mapping[str, Any]) -> str:
    """The method that a checkpoint is made for, by what its config calls it."""
    names = [str(one).lower() for one in config.get("architectures") or []]
    named = " ".join([*names, str(config.get("speculators_model_type", "")).lower()])
    if "eagle3" in named:
        return "eagle3"
    if "eagle" in named:
        return "eagle"
    if "mlp_speculator" in f"{config.get('model_type', '')}" or "mlpspeculator" in named:
        return "mlp_speculator"
    for kind in ("mtp", "dflash", "dspark", "medusa"):
        if kind in f"{named} {config.get('model_type', '')}".lower():
            return kind
    return "draft_model"


def _carries_mtp(folder: Path) -> bool:
    names = (
        name for file in find_weight_files(folder).files for name in read_safetensors_header(file)
    )
    return any(name.endswith(MTP_MARKS) for name in names)

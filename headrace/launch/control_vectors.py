"""The options of control vectors, decided: files that are there, finite factors, and layers that
the model has. What the files hold is read with the weights (back/models/control_layer.py)."""

from __future__ import annotations

import math
import re
from pathlib import Path

from headrace.back.models.families import FALLBACK
from headrace.base.config.residual import ControlSpec
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.launch.model_facts import ModelFacts

MOST_SCALE = 1e6
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def control_spec(options: Options, model: ModelFacts, rows: int = 0) -> ControlSpec | None:
    """What is added behind layers, of all or of `rows` rows; ConfigError with the option, its value
    and what is allowed."""
    files, layers = options.model.control_vectors, options.model.control_vector_layers
    modules = options.model.control_vector_modules
    if not files and not modules:
        if layers is not None:
            raise _bad("control_vector_layers", f"{layers}: there is no --control-vectors")
        return None
    reason = _refusal(model)
    if reason is not None:
        raise _bad("control_vectors", reason)
    first, last = _range(layers, model.num_layers - 1)
    named = tuple(map(_named, modules))
    if len({name for name, _ in named}) < len(named):
        raise _bad("control_vector_modules", f"{', '.join(modules)}: a name comes twice")
    return ControlSpec(
        files=tuple(map(_scaled, files)), first=first, last=last, named=named, rows=rows
    )


def _refusal(model: ModelFacts) -> str | None:
    if model.family == FALLBACK:
        return f"{model.architecture} runs by the transformers fallback"
    if model.encodes or model.has_encoder:
        return f"{model.architecture} is no plain decoder"
    return None


def _scaled(text: str) -> tuple[str, float]:
    """A file and its factor: FILE, or FILE:SCALE."""
    name, colon, number = text.rpartition(":")
    try:
        scale = float(number) if colon else 1.0
    except ValueError:
        name, scale = text, 1.0
    path = Path(name if colon and name else text).expanduser()
    if not abs(scale) <= MOST_SCALE or math.isnan(scale):
        raise _bad("control_vectors", f"{text}: a scale of at most {MOST_SCALE:g} is allowed")
    if not path.is_file():
        raise _bad("control_vectors", f"{path}: no such file")
    return str(path.resolve()), scale


def _named(text: str) -> tuple[str, str]:
    """NAME=FILE."""
    name, equals, file = text.partition("=")
    path = Path(file).expanduser()
    if not equals or not NAME.fullmatch(name):
        raise _bad(
            "control_vector_modules", f"{text}: NAME=FILE is wanted, a name of {NAME.pattern}"
        )
    if not path.is_file():
        raise _bad("control_vector_modules", f"{path}: no such file")
    return name, str(path.resolve())


def _range(text: str | None, most: int) -> tuple[int, int]:
    """The first and the last layer."""
    if text is None:
        return 1, most
    match = re.fullmatch(r"(\d{1,6})-(\d{1,6})", text)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= most:
        raise _bad(
            "control_vector_layers", f"{text!r:.40}: FIRST-LAST within 1-{most} is wanted, as 10-20"
        )
    return first, last


def _bad(field: str, what: str) -> ConfigError:
    return ConfigError(f"--{field.replace('_', '-')} {what}", field=field)

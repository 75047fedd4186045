"""Gathers the facts `resolve` needs, then calls it: the one place that joins finding a model and asking the machine."""

from __future__ import annotations

from headrace.base.config.resolved import Resolved
from headrace.base.config.tree import Options
from headrace.launch.resolve import ModelFacts, resolve
from headrace.launch.topology import device_facts


def resolve_options(options: Options) -> Resolved:
    """Finds the model, asks the machine, resolves; StartError for whatever the user must mend."""
    return resolve(options, model_facts(options), device_facts(options.device.device))


def model_facts(options: Options) -> ModelFacts:
    """Facts about the model the options name."""
    raise NotImplementedError

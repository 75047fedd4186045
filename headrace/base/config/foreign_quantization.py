"""Formats of quantized checkpoints that installed packages read (base/extensions.py). The name of
one is the `quant_method` of config.json, and the arrangement of its weights."""

from __future__ import annotations

from typing import Protocol, cast

from headrace.base import extensions
from headrace.base.config.arrangement import Arrangement
from headrace.base.config.hf import ConfigReader
from headrace.base.config.quantization import StoredQuantization
from headrace.base.errors import CheckpointError, HeadraceError


class QuantizationFormat(Protocol):
    """A format. Beside this it has `groups(tensor, read, rows, columns) -> Groups`, which the back
    asks for (back/quant/formats): the numbers of a rectangle of a weight.

    arrangement   which tensors stand for a weight whose `Numbers.arrangement` is the format's name
    """

    arrangement: Arrangement

    def read(self, config: ConfigReader) -> StoredQuantization:
        """What `quantization_config` says."""
        ...


def foreign_format(name: str) -> QuantizationFormat:
    """That of a package; ConfigError if it cannot be imported."""
    return cast(QuantizationFormat, extensions.load(extensions.QUANTIZATIONS, name))


def read_foreign(name: str, config: ConfigReader) -> StoredQuantization:
    """What a package's format says of the config; CheckpointError, with its name, if it fails."""
    try:
        return foreign_format(name).read(config)
    except HeadraceError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{config.where}: extension {name} cannot read quantization_config "
            f"({type(error).__name__}: {error})"
        ) from error

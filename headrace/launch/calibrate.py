"""What the linear layers of a model see of a calibration text: for each, the sum of x x^T over its
inputs, and what a weight that is rounded by it loses of its outputs.

The sums of a large model are larger than the model: layers are taken in parts, and the text is run
once for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from headrace.back.layers.observed import ObservedLinears
from headrace.back.models.load import load_model
from headrace.back.models.registry import DTYPES
from headrace.back.parallel.mesh import Mesh
from headrace.back.runner.whole_text import WholeTexts
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import ConfigError
from headrace.front.text.tokenizer_files import load_tokenizer

BUDGET_BYTES = 4 << 30
"""Sums that are held at once."""
BLOCK_TOKENS = 16
TEXT_TOKENS = 512
Texts = Sequence[Sequence[int]]


def calibration_texts(path: Path, tokenizer: str, *, tokens: int) -> Texts:
    """The first `tokens` of a UTF-8 file, in texts of at most TEXT_TOKENS; ConfigError if it cannot
    be read or holds less than one such text."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--calibration {path}: cannot be read as UTF-8 text ({error})", field="--calibration"
        ) from error
    ids = load_tokenizer(tokenizer).encode(text)[:tokens]
    if len(ids) < TEXT_TOKENS:
        raise ConfigError(
            f"--calibration {path}: {len(ids)} tokens; at least {TEXT_TOKENS} are needed",
            field="--calibration",
        )
    return [ids[start : start + TEXT_TOKENS] for start in range(0, len(ids), TEXT_TOKENS)]


@dataclass(kw_only=True)
class _Sums:
    """The sums of one part of the layers, by the names of the weights that share the inputs."""

    done: set[str]
    sums: dict[tuple[str, ...], torch.Tensor] = field(default_factory=dict)
    num_bytes: int = 0
    more: bool = False

    def see(self, names: tuple[str, ...], x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        if names[0] in self.done:
            return
        inputs = x_TI.shape[1]
        if names not in self.sums:
            size = 4 * inputs * inputs
            if self.sums and self.num_bytes + size > BUDGET_BYTES:
                self.more = True
                return
            self.num_bytes += size
            self.sums[names] = torch.zeros(inputs, inputs)
        x = x_TI.float()
        self.sums[names].addmm_(x.t(), x)


def hessians(spec: ModelSpec, texts: Texts) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """(weights with the same inputs by their checkpoint names, the sum of x x^T [I, I]), of all
    linear layers but experts. ConfigError for a family whose linear layers cannot be looked at."""
    current = _Sums(done=set())
    observed = ObservedLinears(lambda names, x, y: current.see(names, x, y))
    cpu = torch.device("cpu")
    model, _ = load_model(
        spec, mesh=Mesh(), device=cpu, block_tokens=BLOCK_TOKENS, adapters=observed
    )
    most = max(len(text) for text in texts)
    run = WholeTexts(model, most=most, block_tokens=BLOCK_TOKENS, dtype=DTYPES[spec.dtype])
    while True:
        for text in texts:
            run.forward(text)
        yield from current.sums.items()
        if not current.more:
            return
        done = current.done | {names[0] for names in current.sums}
        current = _Sums(done=done)

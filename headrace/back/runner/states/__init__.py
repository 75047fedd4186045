"""What differs between kinds of models, behind one protocol (state.py): the runner holds no `if`
about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from headrace.back.models.protocol import CausalModel
from headrace.back.runner.encoder_graphs import graphs_on, recorded_encoder
from headrace.back.runner.memory import KVMemory
from headrace.back.runner.states.encoder_cache import FilesFactory
from headrace.back.runner.states.encoder_inputs import EncoderInputs, Sounds, Spectrograms
from headrace.back.runner.states.media import Media
from headrace.back.runner.states.plain import PlainDecoder, PlainEncoder
from headrace.back.runner.states.pooled_whole import PooledWhole
from headrace.back.runner.states.recurrent import Recurrent
from headrace.back.runner.states.seen_inputs import SeenInputs
from headrace.back.runner.states.segments import Segments
from headrace.back.runner.states.state import ModelState
from headrace.back.runner.states.towers import TowersAlone

StateFactory: TypeAlias = Callable[[int, torch.device, KVMemory], ModelState]
"""Makes the state of a runner, from its number of rows, its device and its KV memory."""

STATES: dict[str, StateFactory] = {
    "plain": lambda max_rows, device, memory: PlainDecoder(),
    "texts": lambda max_rows, device, memory: PlainEncoder(),
    "segments": lambda max_rows, device, memory: Segments(max_rows, device),
    "encoder inputs": lambda max_rows, device, memory: EncoderInputs(
        memory, device, max_rows=max_rows
    ),
    "spectrograms": lambda max_rows, device, memory: Spectrograms(
        memory, device, max_rows=max_rows
    ),
    "sounds": lambda max_rows, device, memory: Sounds(memory, device, max_rows=max_rows),
    "pooled whole": lambda max_rows, device, memory: PooledWhole(max_rows),
    "recurrent": lambda max_rows, device, memory: Recurrent(memory),
    "towers": lambda max_rows, device, memory: PlainEncoder(),
}
"""By `CausalModel.state`."""
_SEEING: dict[str, type[Media]] = {"towers": TowersAlone}
"""By the same, what stands around it where that is not Media."""


def state_of(model: CausalModel, files: FilesFactory | None = None) -> StateFactory:
    """What makes the state of a model: that of its decoder, within that of its encoder of images or
    behind it. `files`: see EncoderCache."""
    base, media = STATES[model.state], model.media
    if media is None:
        return base
    if model.encoder_tokens:
        return lambda max_rows, device, memory: SeenInputs(
            memory,
            device,
            max_rows=max_rows,
            encoder=recorded_encoder(media, graphs_on(device)),
            files=files,
        )
    seeing = _SEEING.get(model.state, Media)
    return lambda max_rows, device, memory: seeing(
        base(max_rows, device, memory),
        recorded_encoder(media, graphs_on(device)),
        max_rows=max_rows,
        device=device,
        files=files,
    )

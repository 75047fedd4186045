"""What differs between kinds of models, behind one protocol (state.py): the runner holds no `if`
about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from headrace.back.runner.memory import KVMemory
from headrace.back.runner.states.plain import PlainDecoder, PlainEncoder
from headrace.back.runner.states.recurrent import Recurrent
from headrace.back.runner.states.segments import Segments
from headrace.back.runner.states.state import ModelState

StateFactory: TypeAlias = Callable[[int, torch.device, KVMemory], ModelState]
"""Makes the state of a runner, from its number of rows, its device and its KV memory."""

STATES: dict[str, StateFactory] = {
    "plain": lambda max_rows, device, memory: PlainDecoder(),
    "texts": lambda max_rows, device, memory: PlainEncoder(),
    "segments": lambda max_rows, device, memory: Segments(max_rows, device),
    "recurrent": lambda max_rows, device, memory: Recurrent(memory),
}
"""By `CausalModel.state`."""

"""What differs between kinds of models, behind one protocol (state.py): the runner holds no `if`
about them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.back.runner.states.plain import PlainDecoder, PlainEncoder
from headrace.back.runner.states.recurrent import Recurrent
from headrace.back.runner.states.segments import Segments
from headrace.back.runner.states.state import ModelState

STATES: dict[str, Callable[[int, torch.device], ModelState]] = {
    "plain": lambda max_rows, device: PlainDecoder(),
    "texts": lambda max_rows, device: PlainEncoder(),
    "segments": Segments,
    "recurrent": lambda max_rows, device: Recurrent(),
}
"""`CausalModel.state` -> the state's maker, from the number of rows and the device."""

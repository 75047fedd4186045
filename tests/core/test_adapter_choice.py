"""Which adapter a request runs with: the one it names, or the one that its media stand for (MOD-08)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.base.config.resolved import AdapterSpec
from headrace.base.errors import ModelNotFound
from headrace.base.wire.media import MediaInput
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.adapter_choice import adapted
from headrace.core.adapters import BASE, Adapters

OF_SOUND = AdapterSpec(slots=1, max_rank=8, kept=1, of_kinds=(("audio", "of-sound"),))


def request(*kinds: str, adapter: str = "") -> EngineRequest:
    media = tuple(
        MediaInput(kind=kind, key=bytes(32), offset=0, num_tokens=1, grid=(1, 1, 1))
        for kind in kinds
    )
    return EngineRequest(
        id=1,
        prompt=np.zeros(1, "<i4").tobytes(),
        stop=StopRules(max_tokens=1, stop_ids=()),
        sampling=RowSampling(),
        media=media,
        adapter=adapter,
    )


def not_asked(order: Any) -> Any:
    raise AssertionError(order)


def test_sound_brings_its_adapter_and_nothing_else_does() -> None:
    adapters = Adapters(OF_SOUND, not_asked)
    adapters.know("of-sound", "/one")
    adapters.know("other", "/two")
    for one, name in (
        (request("image", "audio"), "of-sound"),
        (request("image"), ""),
        (request(), ""),
        (request("audio", adapter="other"), "other"),
    ):
        wire, adapter = adapted(adapters, one)
        assert (wire.adapter, adapter.name) == (name, name)


def test_without_adapters_sound_runs_with_the_base() -> None:
    assert adapted(None, request("audio"))[1] is BASE
    with pytest.raises(ModelNotFound):
        adapted(None, request(adapter="other"))

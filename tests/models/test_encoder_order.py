"""An encoder's weights are in its decoder's plan, so it is built first: behind the plan nothing would load them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from headrace.back.layers.mlp import FeedForwardPlace, GatedMLPSpec
from headrace.back.layers.scope import Ledger, Scope
from headrace.back.models.vision import text_decoder, with_media
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from tests.models.test_parity import tiny_config

PLACE = FeedForwardPlace(width=8, inner=12, activation="silu", adds=True)


@dataclass
class _Encoder:
    inside: Any
    forms: tuple[Any, ...] = ()


@pytest.mark.parametrize("first", ["encoder", "decoder"])
def test_an_encoder_that_is_built_behind_its_decoder_is_refused(first: str) -> None:
    scope = Scope(
        ledger=Ledger(), mesh=Mesh(), device=torch.device("meta"), dtype=torch.float32,
        block_tokens=16, max_positions=32,
    )  # fmt: skip

    def encoder() -> _Encoder:
        return _Encoder(GatedMLPSpec().build(scope / "vision_tower", PLACE))

    early = encoder() if first == "encoder" else None
    decoder = text_decoder(scope, ConfigReader(tiny_config("qwen2").to_dict(), "config.json"))
    if early is not None:
        assert with_media(scope, decoder, early).media is early
        return
    with pytest.raises(AssertionError, match=r"built behind the decoder.*vision_tower"):
        with_media(scope, decoder, encoder())

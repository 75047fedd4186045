"""Solar Pro (Upstage 2024): Llama's decoder, whose residual before some layers is mixed with what
it was before others (names and keys of the published checkpoint)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.kept_states import KeptStatesSpec, Skips
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder, LayerSpec
from headrace.back.models.llama import llama_decoder
from headrace.back.models.skipping_layer import SkippingLayerSpec
from headrace.base.config.hf import ConfigReader

KEPT, MIXED = ("bskcn_1", "bskcn_2"), ("bskcn_3", "bskcn_4")
"""Keys that list the layers before which the residual is kept, and those before which each is mixed
into it."""
SHARE = "bskcn_tv"
"""The kept state's share while training, and after."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """SolarForCausalLM. Windows are stated, but no layer has one."""
    spec = llama_decoder(scope, config)
    count = spec.sizes.layers
    kept = [_layers(config, key, count) for key in KEPT]
    mixed = [_layers(config, key, count) for key in MIXED]
    share = config.list(SHARE, (0.9, 0.8), of=float, length=2)[1]
    if not 0.0 <= share <= 1.0:
        raise config.wrong(SHARE, "two numbers from 0 to 1")
    for before, after, key in zip(kept, mixed, MIXED, strict=True):
        if after and (not before or min(before) > min(after)):
            raise config.wrong(key, f"layers behind the first of {KEPT[MIXED.index(key)]}")
    layers = []
    for index, layer in enumerate(spec.layers):
        assert isinstance(layer, LayerSpec), "Llama's layers are plain"
        skips = Skips(
            kept=tuple(slot for slot, listed in enumerate(kept) if index in listed),
            mixed=tuple(slot for slot, listed in enumerate(mixed) if index in listed),
            share=share,
        )
        layers.append(SkippingLayerSpec(layer=layer, before=skips))
    states = KeptStatesSpec(slots=len(KEPT))
    return Decoder(scope, replace(spec, layers=tuple(layers), streams=states))


def _layers(config: ConfigReader, key: str, count: int) -> tuple[int, ...]:
    """Numbers of layers, from 0; none where the key is absent."""
    listed = config.list(key, (), of=int) or ()
    if any(not 0 <= one < count for one in listed):
        raise config.wrong(key, f"numbers of layers, from 0 to {count - 1}")
    return listed

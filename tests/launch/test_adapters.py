"""Which adapter stands for which media, as the options say (MOD-08, ENG-20)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.base.config.tree import AdapterOptions, DeviceOptions, Options
from headrace.base.errors import ConfigError
from headrace.launch.facts import resolve_options
from tests.back.lora.adapters import write_adapter

ADAPTERS = Path(__file__).parents[2] / "demo" / "adapters"


def of_kinds(*asked: str) -> object:
    modules = tuple(f"{name}={ADAPTERS / name}" for name in ("shout", "quote"))
    adapters = AdapterOptions(lora_modules=modules, default_mm_loras=asked)
    spec = resolve_options(Options(device=DeviceOptions(device="cpu"), adapters=adapters)).engine
    assert spec.model.adapters is not None
    return spec.model.adapters.of_kinds


def test_media_of_a_kind_have_the_adapter_that_is_named_for_them() -> None:
    assert of_kinds() == ()
    assert of_kinds("audio=shout", "image=quote") == (("audio", "shout"), ("image", "quote"))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("audio=whisper",), r"NAME one of --lora-modules \(quote, shout\)"),
        (("smell=shout",), "KIND one of image, video, audio"),
        (("shout",), "KIND=NAME is wanted"),
        (("audio=shout", "audio=quote"), "audio has the adapter shout already"),
    ],
)
def test_others_are_refused_by_name(asked: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=f"--default-mm-loras: .*{why}"):
        of_kinds(*asked)


def kinds_of(*modules: str, kinds: Any = "auto") -> object:
    adapters = AdapterOptions(enable_lora=True, lora_modules=modules, lora_kinds=kinds)
    spec = resolve_options(Options(device=DeviceOptions(device="cpu"), adapters=adapters)).engine
    assert spec.model.adapters is not None
    return spec.model.adapters.kinds


def test_slots_have_room_for_what_adapters_of_the_start_hold(tmp_path: Path) -> None:
    write_adapter(tmp_path / "plain", {"model.layers.0.mlp.down_proj": (384, 640)})
    write_adapter(tmp_path / "dora", {"lm_head": (4096, 384)}, use_dora=True)
    named = [f"{name}={tmp_path / name}" for name in ("plain", "dora")]
    assert kinds_of(named[0]) == ()
    assert kinds_of(*named) == ("magnitudes", "tables")
    assert kinds_of(named[0], kinds=("experts", "magnitudes")) == ("magnitudes", "experts")

"""Towers loaded without their decoder (MUL-05): which bytes they take, what they give, and where that is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.back.runner.states.encoded_files import identity_of
from headrace.base.config.kv_options import KVOptions
from headrace.base.config.tree import DeviceOptions, ModelOptions, Options
from headrace.base.errors import ConfigError
from headrace.launch.facts import resolve_options
from tests.models.oracle import model_spec
from tests.models.test_qwen_vl import CASES, save_case


def stored_bytes(folder: Path, *, decoder: bool) -> int:
    tensors = load_file(folder / "model.safetensors")
    own = [one.nbytes for name, one in tensors.items() if ("visual" not in name) == decoder]
    assert own
    return sum(own)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_case(CASES["qwen3-vl-moe"], folder)  # features of layers, and experts
    return folder


def test_the_towers_alone_give_the_same_rows_without_the_decoder_s_bytes(folder: Path) -> None:
    spec, device = model_spec(folder), torch.device("cpu")
    alone = msgspec.structs.replace(spec, head="towers")
    assert identity_of(alone) == identity_of(spec)  # others find its files
    whole, every = load_model(spec, mesh=Mesh(), device=device, block_tokens=16)
    towers, few = load_model(alone, mesh=Mesh(), device=device, block_tokens=16)
    assert every.weight_bytes - few.weight_bytes == stored_bytes(folder, decoder=True)
    assert few.weight_bytes == stored_bytes(folder, decoder=False)
    assert towers.kv_forms == () and not towers.generates
    assert whole.media is not None and towers.media is not None
    (form, *_) = whole.media.forms
    rows_NB = torch.randint(0, 256, (24, form.row_bytes), dtype=torch.uint8)
    with torch.inference_mode():
        expected = whole.media.encode(form.kind, rows_NB, [(1, 4, 6)])
        assert torch.equal(towers.media.encode(form.kind, rows_NB, [(1, 4, 6)]), expected)


def asked(model: ModelOptions, kept: Path | None) -> Options:
    path = None if kept is None else str(kept)
    kv = KVOptions(mm_encoder_only=True, encoder_cache_path=path)
    return Options(model=model, kv=kv, device=DeviceOptions(device="cpu"))


def test_the_bundled_model_is_served_as_an_encoder(tmp_path: Path) -> None:
    resolved = resolve_options(asked(ModelOptions(demo="vision"), tmp_path))
    assert not resolved.text.generates and resolved.text.media is not None
    assert resolved.engine.model.head == "towers" and resolved.engine.kv.num_blocks == 1
    assert not resolved.engine.scheduler.chunked


@pytest.mark.parametrize(
    ("model", "has_folder", "why"),
    [
        (ModelOptions(demo="vision"), False, "no --encoder-cache-path is given"),
        (ModelOptions(demo="text"), True, "takes no images, video or sounds here"),
        (ModelOptions(demo="vision", language_model_only=True), True, "takes no images"),
        (ModelOptions(demo="speech"), True, "is no tower before a decoder"),
    ],
)
def test_what_has_no_towers_or_no_place_for_their_rows_is_refused(
    model: ModelOptions, has_folder: bool, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"--mm-encoder-only: .*{why}") as refusal:
        resolve_options(asked(model, tmp_path if has_folder else None))
    assert refusal.value.field == "mm_encoder_only"

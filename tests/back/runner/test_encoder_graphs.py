"""Encoders in graphs by size (KRN-25): what is recorded for some sizes gives what the plain pass gives, for each family
that sees or hears, and what cannot be recorded is told and runs plainly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

from headrace.back.kernels.op import Op
from headrace.back.kernels.upload import held, planned
from headrace.back.layers.vision.encoder import MediaEncoder
from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.back.runner import encoder_graphs
from headrace.back.runner.encoder_graphs import EncoderGraphs, RecordedEncoder, graphs_on
from headrace.back.runner.warmup_media import grid_of
from headrace.base.wire.media import MediaForm
from tests.models import hearing_cases, picture_cases, test_hearing, test_towers, vision_cases
from tests.models.media import save_media_oracle
from tests.models.oracle import model_spec

CPU = torch.device("cpu")


class Again:
    """Records nothing: a replay runs the pass once more, which has to find all it copied again."""

    def __init__(self) -> None:
        self.free = 1 << 40

    def record(self, work: Callable[[], torch.Tensor]) -> Any:
        self.free -= 1 << 20
        return _Again(work)

    def free_bytes(self) -> int:
        return self.free


class _Again:
    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self._work, self.output = work, work()

    def replay(self) -> None:
        self.output.copy_(self._work())


class Scaled:
    """Multiplies each row by its place and a number that its owner replaces."""

    def __init__(self) -> None:
        self.passes, self.factor = 0, torch.tensor(2.0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        place = planned(np.arange(len(x), dtype=np.float32), CPU)
        return x * place[:, None] * held(self.factor)


class Kept:
    """A replay multiplies by what was read when it was recorded."""

    def __init__(self) -> None:
        self.free = 1 << 40

    def record(self, work: Callable[[], torch.Tensor]) -> Any:
        return _KeptOutput(work())

    def free_bytes(self) -> int:
        return self.free


class _KeptOutput:
    def __init__(self, output: torch.Tensor) -> None:
        self.output = output

    def replay(self) -> None:
        pass


def test_a_size_is_recorded_when_it_comes_again_and_replayed_from_then_on() -> None:
    graphs, work = EncoderGraphs(Kept()), Scaled()
    x = torch.randn(3, 4)
    expected = x * torch.arange(3)[:, None] * 2
    counts = []
    for _ in range(4):
        assert torch.equal(graphs.run(("image", 3), 3, x, work), expected)
        counts.append((graphs.num_graphs, graphs.num_replays, work.passes))
    assert counts == [(0, 0, 1), (1, 0, 3), (1, 1, 3), (1, 2, 3)]
    other = torch.randn(5, 4)  # another size is none of these
    assert torch.equal(
        graphs.run(("image", 5), 5, other, work), other * torch.arange(5)[:, None] * 2
    )
    assert graphs.num_graphs == 1


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size of a pass, the number of graphs and the bytes that the device has less."""
    monkeypatch.setattr(encoder_graphs, "MOST_GRAPHS", 2)
    graphs, work = EncoderGraphs(Kept()), Scaled()
    for size in (1, 2, 3, 1):
        for _ in range(2):
            graphs.run(("image", size), size, torch.ones(size, 4), work)
    assert graphs.num_graphs == 2
    for _ in range(3):
        graphs.run(("image", 9), encoder_graphs.MOST_ROWS + 1, torch.ones(9, 4), work)
    assert (graphs.num_graphs, graphs.num_replays) == (2, 1)
    monkeypatch.setattr(encoder_graphs, "MOST_BYTES", 100)
    graphs = EncoderGraphs(Again())
    for size in (1, 1, 2, 2):
        graphs.run(("image", size), size, torch.ones(size, 4), work)
    assert (graphs.num_graphs, graphs.num_bytes) == (1, 1 << 20)


@pytest.mark.parametrize("why", ["waits", "differs"])
def test_what_cannot_be_recorded_is_told_once_and_runs(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Kept):
        def record(self, work: Callable[[], torch.Tensor]) -> Any:
            if why == "waits":
                raise RuntimeError("operation not permitted when stream is capturing")
            work()
            return _KeptOutput(torch.full((3, 4), 7.0))

    graphs, work, x = EncoderGraphs(Failing()), Scaled(), torch.ones(3, 4)
    if why == "waits":
        work.factor = torch.tensor(3.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            y = graphs.run(("audio", 3), 3, x, work)
            assert torch.equal(y, x * torch.arange(3)[:, None] * work.factor)
    assert graphs.num_graphs == 0
    (record,) = caplog.records
    assert "the encoder of audio is launched kernel by kernel" in record.getMessage()


def rows_of(form: MediaForm, rows: int, seed: int) -> torch.Tensor:
    """Random pixels, or samples and frames as loud as speech."""
    rng = np.random.default_rng(seed)
    if form.sound is None:
        return torch.from_numpy(rng.integers(0, 256, (rows, form.row_bytes), np.uint8))
    values = rng.normal(0.0, 0.5, (rows, form.row_bytes // 4)).astype(np.float32)
    return torch.from_numpy(values).view(torch.uint8)


def check_encoder(encoder: MediaEncoder, graphs: EncoderGraphs, device: torch.device) -> None:
    """Each kind alone, and two inputs at once, of other values than those that were recorded."""
    recorded = RecordedEncoder(encoder, graphs)
    for form in encoder.forms:
        grid = grid_of(form, 24)
        for count in (1, 2):
            size = count * int(np.prod(grid))
            before = graphs.num_replays
            for seed in range(4):
                rows = rows_of(form, size, seed).to(device)
                expected = encoder.encode(form.kind, rows, [grid] * count).clone()
                found = recorded.encode(form.kind, rows, [grid] * count)
                off = (found.float() - expected.float()).abs().max()
                assert off <= 1e-4 * max(1.0, expected.abs().max().item()), (form.kind, seed, off)
            assert graphs.num_replays - before == 2, (form.kind, count)


def saved(name: str, folder: Path) -> str:
    """A tiny model, of pictures its config alone; returns how its weights are loaded."""
    if name in HEARING:
        heard = HEARING[name]
        kind = heard.oracle or getattr(transformers, f"{heard.model}ForConditionalGeneration")
        save_media_oracle(kind, heard.config(), folder)
        return "safetensors"
    if name in VISION:
        case = VISION[name]
        config = getattr(transformers, f"{case.name}Config")(
            vision_config=case.vision,
            text_config=case.text,
            tie_word_embeddings=False,
            **case.config,
        )
        config.architectures = [f"{case.name}ForConditionalGeneration"]
    else:
        config, oracle_class = picture_cases.CASES[name].build(folder)
        config.architectures = [oracle_class.__name__]
    config.save_pretrained(folder)
    return "dummy"


HEARING = {**test_hearing.CASES, **hearing_cases.CASES}
VISION = {**test_towers.CASES, **vision_cases.CASES}
NAMES = [*HEARING, *VISION, *picture_cases.CASES]


def encoder_of(name: str, folder: Path, device: torch.device) -> MediaEncoder:
    """With random weights."""
    loaded_as = saved(name, folder)
    spec = msgspec.structs.replace(model_spec(folder), format=loaded_as)
    model, _ = load_model(spec, mesh=Mesh(), device=device, block_tokens=8)
    assert model.media is not None
    return model.media


def test_images_of_other_sizes_need_no_other_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KRN-25, REG-044: what a tower runs is chosen once, whatever it is shown, and is none of the decoder's."""
    encoder = encoder_of("pixtral", tmp_path, CPU)

    def choose(*problem: Any, **more: Any) -> Any:
        raise AssertionError(f"another kernel is chosen: {problem}")

    monkeypatch.setattr(Op, "choose", choose)
    (form,) = encoder.forms
    grids = {grid_of(form, tokens) for tokens in (4, 9, 16, 30, 60)}
    for grid in grids:
        encoder.encode(form.kind, rows_of(form, int(np.prod(grid)), 1), [grid])
    assert len(grids) > 2


@pytest.mark.parametrize(
    "name",
    [name if name == "llava" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_an_encoder_gives_a_row_for_each_placeholder(name: str, tmp_path: Path) -> None:
    """REG-087: as many as the form says, which the core asks of every prompt (core/media_checks.py), and once what it
    has learned to put between. Of one input and of several unequal ones."""
    encoder = encoder_of(name, tmp_path, CPU)
    for form in encoder.forms:
        grids = list(dict.fromkeys(grid_of(form, tokens) for tokens in (1, 6, 24, 60)))
        for several in ([grids[0]], grids):
            size = sum(int(np.prod(grid)) for grid in several)
            given = encoder.encode(form.kind, rows_of(form, size, 1), several)
            learned = 0 if form.packing is None else form.packing.num_learned
            expected = sum(form.num_rows(grid) for grid in several) + learned
            assert len(given) == expected, (form, several)
            assert given.shape[1] == encoder.width * (1 + encoder.layers)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_family_finds_all_it_copies_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_graphs, "MOST_ROWS", 1 << 20)
    check_encoder(encoder_of(name, tmp_path, CPU), EncoderGraphs(Again()), CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", NAMES)
def test_a_family_in_graphs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_graphs, "MOST_ROWS", 1 << 20)
    device = torch.device("cuda", torch.cuda.current_device())
    graphs = graphs_on(device)
    assert graphs is not None
    encoder = encoder_of(name, tmp_path, device)
    with torch.inference_mode():
        check_encoder(encoder, graphs, device)

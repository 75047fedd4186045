"""Video of which tokens are left out (MUL-05, KRN-12): those that stay have the rows and the positions that they have
among all, and the model sees these alone; how many stay follows the floor rule, all of the first step among them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.back.layers.vision.grids import kept_windows
from headrace.base.config.media import MediaSpec, ProcessorSettings
from headrace.base.config.tree import ModelOptions, Options
from headrace.base.errors import ConfigError, InvalidRequest
from headrace.base.wire.media import MediaCut, MediaForm, MediaInput
from headrace.core.media_checks import _check_shape
from headrace.front.media.processing import TowerInput
from headrace.front.media.processors.pruning import with_kept
from headrace.launch.media_spec import media_spec
from tests.models.media import Answer, Prompt, SeeingEngine, compare_answers
from tests.models.test_qwen_vl import CASES, Seen, save_case, with_video

SETTINGS = ProcessorSettings(patch=4, merge=2, temporal=2, pruned=0.5)


@dataclass(frozen=True)
class Pruned:
    ids: list[int]
    media: tuple[MediaInput, ...]


def without_some(prompt: Prompt) -> tuple[Pruned, torch.Tensor]:
    """The prompt with half of its video's tokens, and which of its ids these are."""
    videos = [i for i, one in enumerate(prompt.inputs) if one.kind == "video"]
    towers = [
        TowerInput(kind="video", grid=prompt.inputs[i].grid, rows=prompt.inputs[i].rows)
        for i in videos
    ]
    kept = dict(zip(videos, with_kept(towers, SETTINGS), strict=True))
    stays = torch.ones(len(prompt.ids), dtype=torch.bool)
    media = list(prompt.media)
    for i, one in kept.items():
        assert one.cut is not None
        first, count = prompt.offsets[i], prompt.inputs[i].num_tokens
        stays[first : first + count] = False
        stays[first + torch.from_numpy(kept_windows(one.cut, count))] = True
    for i, one in enumerate(media):
        offset = int(stays[: one.offset].sum())
        changes = {"num_tokens": kept[i].num_tokens, "cut": kept[i].cut} if i in kept else {}
        media[i] = msgspec.structs.replace(one, offset=offset, **changes)
    ids = torch.tensor(prompt.ids)[stays].tolist()
    return Pruned(ids, tuple(media)), stays


def leave_out(oracle: Any, stays: torch.Tensor) -> None:
    """The decoder of transformers' model sees these tokens alone, at the positions they have among all."""
    decoder = oracle.model.language_model
    forward = decoder.forward

    def some(inputs_embeds: torch.Tensor, position_ids: torch.Tensor, **more: Any) -> Any:
        masks, deep = more.get("visual_pos_masks"), more.get("deepstack_visual_embeds")
        if masks is not None and deep is not None:
            more["deepstack_visual_embeds"] = [each[stays[masks[0]]] for each in deep]
            more["visual_pos_masks"] = masks[:, stays]
        more["attention_mask"] = None
        return forward(
            inputs_embeds=inputs_embeds[:, stays], position_ids=position_ids[..., stays], **more
        )

    decoder.forward = some


@pytest.mark.parametrize("name", ["qwen2.5-vl", pytest.param("qwen3-vl", marks=pytest.mark.slow)])
def test_what_stays_is_seen_at_its_place(name: str, tmp_path: Path) -> None:
    oracle, engine = save_case(CASES[name], tmp_path), SeeingEngine(tmp_path)
    seen = Seen(case=CASES[name], folder=tmp_path, oracle=oracle, engine=engine)
    prompt = with_video(seen)
    pruned, stays = without_some(prompt)
    assert len(pruned.ids) < len(prompt.ids)
    inputs = seen.inputs(prompt)
    leave_out(oracle, stays)
    with torch.inference_mode():
        logprobs = oracle(**inputs).logits[0].float().log_softmax(-1)
    *before, last = list(logprobs.numpy())
    expected = Answer(tokens=[int(last.argmax())], prompt_logprobs=before, logprobs=[last])
    compare_answers(engine.run(pruned, max_tokens=1)[0], expected)
    cut = engine.with_steps(tmp_path, max_step_tokens=7)
    compare_answers(cut.run(pruned, max_tokens=1)[0], expected)
    engine.close()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.75, 0.99])
@pytest.mark.parametrize("grids", [[(5, 4, 6)], [(1, 4, 6)] * 5], ids=["one", "pairs"])
def test_how_many_stay(grids: list[tuple[int, int, int]], share: float) -> None:
    settings = msgspec.structs.replace(SETTINGS, pruned=share)
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 256, (t * h * w, 96), np.uint8) for t, h, w in grids]
    inputs = [
        TowerInput(kind="video", grid=grid, rows=one) for grid, one in zip(grids, rows, strict=True)
    ]
    kept = with_kept(inputs, settings)
    total, first = 30, 6
    least = first + (len(grids) - 1)
    assert sum(one.num_tokens for one in kept) == max(least, int(total * (1 - share)))
    assert all(one.num_tokens for one in kept) and kept[0].cut is not None
    assert set(range(first)) <= set(kept_windows(kept[0].cut, 30 // len(grids)))


def test_windows_that_do_not_change_go_first() -> None:
    rows = np.zeros((3, 4, 4, 96), np.uint8)  # 3 steps of 4 windows of 4 patches
    rows[1:, 2] = 9
    rows[2:, 3] = 200
    (one,) = with_kept(
        [TowerInput(kind="video", grid=(3, 4, 4), rows=rows.reshape(-1, 96))], SETTINGS
    )
    assert one.cut is not None and one.num_tokens == 6
    assert kept_windows(one.cut, 12).tolist() == [0, 1, 2, 3, 6, 11]


def test_what_is_wrong_is_named() -> None:
    form = MediaForm(kind="video", row_bytes=1, merge=2, prunes=True)
    one = MediaInput(
        kind="video", key=bytes(32), offset=0, num_tokens=2, grid=(2, 2, 4), rows=bytes(16),
        cut=MediaCut(kept=b"\x90"),
    )  # fmt: skip
    _check_shape("media[0]", one, form)
    for wrong in (b"\x00", b"\x91", b"\x90\x00"):
        with pytest.raises(InvalidRequest, match="4 bits are needed"):
            bad = msgspec.structs.replace(one, cut=MediaCut(kept=wrong))
            _check_shape("media[0]", bad, form)
    with pytest.raises(InvalidRequest, match="shows all of an input"):
        _check_shape("media[0]", one, msgspec.structs.replace(form, prunes=False))
    options = Options(model=ModelOptions(video_pruning_rate=0.5))
    spec = MediaSpec(processor="qwen_vl", settings=SETTINGS, image_token=1, video_token=2)
    known = media_spec(options, spec)
    assert known is not None and known.settings.pruned == 0.5
    with pytest.raises(ConfigError, match="is not pruned"):
        media_spec(options, msgspec.structs.replace(spec, processor="square"))

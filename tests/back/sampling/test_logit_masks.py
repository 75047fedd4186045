"""Grammar masks against the oracle that is there already: a row under a mask draws what it would draw if only the ids
of the mask were allowed to it; rows without one draw the same bits as without any mask in the step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.back.sampling.features import FeatureRows, failures
from headrace.back.sampling.logit_masks import GrammarMask
from headrace.back.sampling.sampler import Sampler
from headrace.base.wire.grammar import NOTHING, MaskBuffer, pack_masks, unpack_masks
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import RowStart

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.3, "top_k": 7, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.6, "repetition_penalty": 1.4},
    {"temperature": 0.0, "logprobs": 3, "presence_penalty": 1.5},
    {"temperature": 1.0, "logprobs": 2, "logprobs_mode": "processed"},
]


def mask_of(ids: list[int], width: int) -> np.ndarray:
    bits = np.zeros(-(-width // 32) * 32, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def sample_random(
    settings: list[RowSampling], logits: torch.Tensor, device: str, payload: memoryview
) -> tuple[list[int], list[tuple[list[int], list[float]]], set[int]]:
    where = torch.device(device)
    width = logits.shape[1]
    sampler = Sampler(max_rows=len(settings) + 3, logits_width=width, device=where)
    prompt = np.arange(4, dtype=np.int32)
    for i, setting in enumerate(settings):
        sampler.start(
            RowStart(row=i + 2, request=i, tokens=prompt, num_prompt=4, num_computed=0,
                     sampling=setting)
        )  # fmt: skip
    tokens = torch.zeros((len(settings) + 3, 8), dtype=torch.int32, device=where)
    tokens[:, :4] = torch.arange(4)
    rows = np.arange(len(settings)) + 2
    moved = logits.clone().to(where)
    result = sampler.sample(
        moved, sampler.greedy(moved), rows=rows, positions=np.full(len(settings), 4),
        tokens=tokens, masks=payload,
    )  # fmt: skip
    if device == "cuda":
        torch.cuda.synchronize()
    chosen_logit = None if result.chosen_logit_N is None else result.chosen_logit_N.cpu().numpy()
    failed = set(failures(result.max_logit_N.cpu().numpy(), chosen_logit))
    logprobs = [] if result.logprobs is None else list(result.logprobs.rows())
    return (
        result.token_N.cpu().tolist(),
        [(row.ids.tolist(), row.values.tolist()) for row in logprobs if row.index not in failed],
        failed,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [97, 2048, 5003])
def test_a_mask_is_what_allowed_ids_would_be_and_others_do_not_notice(
    device: str, width: int
) -> None:
    random = np.random.default_rng(width)
    logits = torch.from_numpy(random.normal(size=(12, width)).astype(np.float32) * 3)
    settings = [RowSampling(seed=i, **OPTIONS[i % len(OPTIONS)]) for i in range(12)]
    masked = [1, 2, 5, 7, 8, 9]
    allowed = {i: sorted(random.choice(width, 9, replace=False).tolist()) for i in masked}
    payload = pack_masks(
        np.array([i + 2 for i in masked], np.int32),
        np.stack([mask_of(allowed[i], width) for i in masked]),
    )
    import msgspec

    twins = [
        msgspec.structs.replace(one, allowed_ids=tuple(allowed[i])) if i in allowed else one
        for i, one in enumerate(settings)
    ]
    found = sample_random(settings, logits, device, payload)
    assert found == sample_random(twins, logits, device, NOTHING)
    free = sample_random(settings, logits, device, NOTHING)
    for i in set(range(12)) - set(masked):
        assert found[0][i] == free[0][i]
    assert all(found[0][i] in allowed[i] for i in masked)


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_counts_for_its_step_alone_and_an_empty_one_fails_its_row(device: str) -> None:
    logits = torch.linspace(0, 1, 64).repeat(3, 1)
    settings = [RowSampling(temperature=0.0) for _ in range(3)]
    payload = pack_masks(np.array([2, 4], np.int32), np.stack([mask_of([5], 64), mask_of([], 64)]))
    tokens, _, failed = sample_random(settings, logits, device, payload)
    assert tokens[:2] == [5, 63] and failed == {2}
    assert sample_random(settings, logits, device, NOTHING)[0] == [63, 63, 63]


def test_ids_beyond_the_mask_are_not_allowed() -> None:
    """A vocabulary that is smaller than the logits (P26)."""
    logits = torch.zeros(1, 100)
    logits[0, 90] = 9.0
    payload = pack_masks(np.array([2], np.int32), np.full((1, 2), -1, np.int32))
    assert sample_random([RowSampling(temperature=0.0)], logits, "cpu", payload)[0][0] < 64


def test_the_payload_comes_back_as_it_was() -> None:
    rows, masks = np.array([3, 1], np.int32), np.arange(6, dtype=np.int32).reshape(2, 3)
    back = unpack_masks(pack_masks(rows, masks))
    assert (back[0] == rows).all() and (back[1] == masks).all()
    assert pack_masks(rows[:0], masks[:0]) == b"" and len(unpack_masks(b"")[0]) == 0


def test_tokens_behind_drafts_have_masks_of_their_own() -> None:
    """Row 2 samples at positions 7 to 9, row 0 at 4 and 5: keyed by row and how far behind the first."""
    grammar = GrammarMask(max_rows=3, width=64, device=torch.device("cpu"))
    buffer = MaskBuffer(2)
    buffer.begin(np.array([2, 0], np.int32))[:] = [mask_of([5], 64), mask_of([9], 64)]
    buffer.add(np.array([2], np.int32), offset=1)[:] = mask_of([6, 40], 64)
    rows, positions = np.array([2, 2, 2, 0, 0]), np.array([7, 8, 9, 4, 5])
    masked_N = grammar.take(buffer.payload(), rows, positions)
    assert masked_N.tolist() == [True, True, False, True, False]
    at = np.flatnonzero(masked_N)
    asked = FeatureRows(
        rows=rows[at], positions=positions[at], num_output=at, tokens=torch.zeros(0)
    )
    logits_KV = torch.zeros((3, 64))
    grammar.apply(logits_KV, asked)
    left = [torch.isfinite(logits_V).nonzero().flatten().tolist() for logits_V in logits_KV]
    assert left == [[5], [6, 40], [9]]
    assert unpack_masks(buffer.payload()).of_newest().rows.tolist() == [2, 0]


def test_masks_are_filled_in_the_memory_that_travels() -> None:
    """No copy between the library that makes a mask and the frame; the next step has the same memory."""
    buffer = MaskBuffer(3)
    masks = buffer.begin(np.array([4, 2], np.int32))
    payload = buffer.payload()
    masks[:] = [[1, 2, 3], [4, 5, 6]]
    rows, seen, offsets = unpack_masks(payload)
    assert offsets.tolist() == [0, 0]
    assert rows.tolist() == [4, 2] and np.shares_memory(seen, masks)
    fewer = buffer.begin(np.array([7], np.int32))
    fewer[:] = 9
    assert np.shares_memory(fewer, masks)
    assert unpack_masks(buffer.payload())[1].tolist() == [[9, 9, 9]]
    more = buffer.begin(np.arange(9, dtype=np.int32))
    more[:] = 8
    assert unpack_masks(buffer.payload())[1].shape == (9, 3)

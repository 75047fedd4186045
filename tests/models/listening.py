"""Encoder-decoders that read sounds of any length: a core over a real worker that answers to several at once, beside
what a reference says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from headrace.back.executor.inline import InlineExecutor
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, SchedulerSpec
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from tests.models.encoder_decoder_rank import spec_of

BOUND = 1e-4
Answer = tuple[list[int], list[np.ndarray]]


def answers_to(
    folder: Path, sounds: Sequence[np.ndarray], begins: Sequence[int], *, width: int, count: int
) -> list[Answer]:
    """Greedy tokens with all log-probabilities, of sounds (float32 frames) that are heard beside each other."""
    spec = EngineSpec(
        model=spec_of(folder),
        kv=KVSpec(block_tokens=8, prefix_caching=False, num_blocks=400),
        scheduler=SchedulerSpec(max_step_tokens=64, max_running=3),
        device=DeviceSpec(device="cpu", executor="inline", threads=1),
    )
    core = EngineCore(spec, InlineExecutor(spec))
    answers: list[Answer] = [([], []) for _ in sounds]
    try:
        for number, one in enumerate(sounds):
            request = EngineRequest(
                id=number,
                prompt=np.array(begins, "<i4").tobytes(),
                stop=StopRules(max_tokens=count, stop_ids=()),
                sampling=RowSampling(temperature=0.0, logprobs=-1),
                encoder=one.tobytes(),
            )
            core.add(request)
        while core.has_work:
            batch = core.step(wait=True).tokens
            if batch is None:
                continue
            told = zip(batch.ids.tolist(), batch.tokens.tolist(), batch.logprobs or [], strict=True)
            for id, token, score in told:
                row = np.zeros(width, np.float32)
                row[score.ids] = score.values
                answers[id][0].append(token)
                answers[id][1].append(row)
            assert all(end.error is None for end in batch.finished), batch.finished
    finally:
        core.close()
    return answers


def check_answer(
    answer: Answer, begins: Sequence[int], logits_of: Callable[[list[int]], torch.Tensor]
) -> None:
    """`logits_of`: the reference's, of the token behind these."""
    ids = list(begins)
    for place, found in enumerate(answer[1]):
        with torch.inference_mode():
            expected = logits_of(ids).log_softmax(-1).numpy()
        assert np.abs(found - expected).max() < BOUND, place
        ids.append(int(expected.argmax()))
    assert answer[0] == ids[len(begins) :] and answer[0]

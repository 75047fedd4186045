"""Moonshine: an encoder over samples of any length. Logits of every position and greedy tokens are transformers', of
sounds of unequal lengths beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from headrace.back.executor.inline import InlineExecutor
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, SchedulerSpec
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from tests.front.media.test_log_mel import sound
from tests.models.encoder_decoder_rank import spec_of
from tests.models.media import save_media_oracle

BOUND, START, NUM_TOKENS = 1e-4, 1, 10


def config(**more: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 90,
        "hidden_size": 40,
        "intermediate_size": 48,
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2,
        "encoder_num_attention_heads": 2,
        "decoder_num_attention_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    return transformers.MoonshineConfig(**{**sizes, **more})


def wave(seconds: float) -> np.ndarray:
    return (sound(seconds) / 32768.0).astype(np.float32)


def test_sounds_of_unequal_lengths(tmp_path: Path) -> None:
    cls = transformers.MoonshineForConditionalGeneration
    oracle = save_media_oracle(cls, config(), tmp_path)
    spec = EngineSpec(
        model=spec_of(tmp_path),
        kv=KVSpec(block_tokens=8, prefix_caching=False, num_blocks=400),
        scheduler=SchedulerSpec(max_step_tokens=64, max_running=3),
        device=DeviceSpec(device="cpu", executor="inline", threads=1),
    )
    executor = InlineExecutor(spec)
    core = EngineCore(spec, executor)
    waves = [wave(seconds) for seconds in (0.3, 1.7, 0.9, 2.345)]
    answers: dict[int, tuple[list[int], list[np.ndarray]]] = {}
    try:
        for number, one in enumerate(waves):
            answers[number] = ([], [])
            request = EngineRequest(
                id=number,
                prompt=np.array([START], "<i4").tobytes(),
                stop=StopRules(max_tokens=NUM_TOKENS, stop_ids=()),
                sampling=RowSampling(temperature=0.0, logprobs=-1),
                encoder=one.tobytes(),
            )
            core.add(request)
        while core.has_work:
            batch = core.step(wait=True).tokens
            if batch is None:
                continue
            scores = batch.logprobs or []
            for id, token, score in zip(
                batch.ids.tolist(), batch.tokens.tolist(), scores, strict=True
            ):
                row = np.zeros(90, np.float32)
                row[score.ids] = score.values
                answers[id][0].append(token)
                answers[id][1].append(row)
            assert all(end.error is None for end in batch.finished), batch.finished
    finally:
        core.close()
    for number, one in enumerate(waves):
        ids, found = [START], answers[number]
        for place in range(NUM_TOKENS):
            with torch.inference_mode():
                logits = oracle(
                    input_values=torch.from_numpy(one)[None],
                    decoder_input_ids=torch.tensor([ids]),
                ).logits[0, -1]
            expected = logits.log_softmax(-1).numpy()
            assert np.abs(found[1][place] - expected).max() < BOUND, (number, place)
            ids.append(int(expected.argmax()))
        assert found[0] == ids[1:]

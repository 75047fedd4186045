"""Decoders behind audio towers hear as transformers does: Qwen2-Audio, Voxtral, Qwen3-ASR (MOD-03). Whole, in chunks
that cut a sound, behind a prefix hit, beside text."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from headrace.base.wire.media import MediaInput, SoundSteps
from tests.models.media import (
    Answer,
    Prompt,
    SeeingEngine,
    answer_of,
    compare_answers,
    save_media_oracle,
)

SOUND, BANDS = 100, 16
TEXT: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ENCODER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "num_mel_bins": BANDS,
}
LINES = ((3, 1, 1), (3, 2, 1))
PLANES = ((3, 2, 1),) * 3


@dataclass(frozen=True, kw_only=True)
class Sound:
    """One input: float32 [N, bands] frames, of which the last `margin` belong to no token."""

    frames: np.ndarray
    num_tokens: int
    kind: str = "audio"
    merge: int = 1
    breaks: int = 0
    marks: bytes = b""

    @property
    def grid(self) -> tuple[int, int, int]:
        return (1, 1, len(self.frames))

    def at(self, offset: int) -> MediaInput:
        content = self.frames.tobytes()
        key = hashlib.sha256(content).digest()
        return MediaInput(
            kind="audio",
            key=key,
            offset=offset,
            num_tokens=self.num_tokens,
            grid=self.grid,
            rows=content,
            marks=self.marks,
        )


@dataclass(frozen=True, kw_only=True)
class Case:
    """`inputs`: what the reference's processor gives, of sounds. `typed`: it tells the kinds of tokens apart too."""

    config: Callable[[], Any]
    model: str
    steps: SoundSteps
    lengths: tuple[int, int]
    inputs: Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]
    bands: int = BANDS
    typed: bool = False
    silent: int = 0
    """Frames of zeros behind a sound, which are masked."""
    oracle: Callable[[Any], Any] | None = None
    """What makes the reference's model of a config, where its class alone does not."""


def filled(frames: list[torch.Tensor], length: int) -> torch.Tensor:
    """[B, bands, length]"""
    return torch.stack([F.pad(one.T, (0, length - len(one))) for one in frames])


def masks(lengths: list[int], length: int) -> torch.Tensor:
    return (torch.arange(length) < torch.tensor(lengths)[:, None]).long()


def qwen2_audio_inputs(sounds: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The margin is silence as the extractor sees it, which goes on to the end of the window."""
    last = [torch.cat([one, one[-1:].expand(100 - len(one), -1)]) for one in sounds]
    own = [len(one) - 2 for one in sounds]
    return {"input_features": filled(last, 100), "feature_attention_mask": masks(own, 100)}


def voxtral_inputs(sounds: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"input_features": filled([part for one in sounds for part in one.split(48)], 48)}


def qwen3_asr_inputs(sounds: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    length = -(-max(map(len, sounds)) // 100) * 100
    own = [len(one) for one in sounds]
    return {"input_features": filled(sounds, length), "input_features_mask": masks(own, length)}


CASES = {
    "qwen2-audio": Case(
        config=lambda: transformers.Qwen2AudioConfig(
            audio_config={
                **ENCODER,
                "model_type": "qwen2_audio_encoder",
                "max_source_positions": 50,
            },
            text_config={**TEXT, "model_type": "qwen2"},
            audio_token_index=SOUND,
        ),
        model="Qwen2Audio",
        steps=SoundSteps(strides=LINES, pool=2, margin=2),
        lengths=(39, 62),
        inputs=qwen2_audio_inputs,
    ),
    "voxtral": Case(
        config=lambda: transformers.VoxtralConfig(
            audio_config={
                "model_type": "voxtral_encoder",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 128,
                "num_mel_bins": BANDS,
                "max_source_positions": 24,
            },
            text_config={**TEXT, "model_type": "llama", "head_dim": 12},
            audio_token_id=SOUND,
        ),
        model="Voxtral",
        steps=SoundSteps(strides=LINES, chunk=48, per_chunk=6),
        lengths=(48, 96),
        inputs=voxtral_inputs,
    ),
    "qwen3-asr": Case(
        config=lambda: transformers.Qwen3ASRConfig(
            audio_config={
                **ENCODER,
                "model_type": "qwen3_asr_encoder",
                "n_window": 50,  # the reference counts 13 tokens a chunk, whatever this says
                "n_window_infer": 200,
                "downsample_hidden_size": 8,
                "output_dim": 48,
            },
            text_config={**TEXT, "model_type": "qwen3", "head_dim": 12},
            audio_token_id=SOUND,
            tie_word_embeddings=False,
        ),
        model="Qwen3ASR",
        steps=SoundSteps(strides=PLANES, chunk=100),
        lengths=(137, 250),
        inputs=qwen3_asr_inputs,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A family's oracle and our engine over the same checkpoint."""

    case: Case
    folder: Path
    oracle: Any
    engine: SeeingEngine
    sounds: dict[int, Sound] = field(default_factory=dict)

    def sound(self, seed: int, index: int) -> Any:
        frames = np.random.default_rng(seed).normal(
            size=(self.case.lengths[index], self.case.bands)
        )
        frames = frames.astype(np.float32)
        if margin := self.case.steps.margin:
            frames[-margin:] = -0.5
        if self.case.silent:
            frames[-self.case.silent :] = 0.0
        return Sound(frames=frames, num_tokens=self.case.steps.tokens(len(frames)))

    def expected(self, prompt: Prompt, max_tokens: int = 5) -> Answer:
        inputs: dict[str, Any] = {"input_ids": torch.tensor([prompt.ids])}
        sounds: list[Any] = list(prompt.inputs)
        if sounds:
            inputs |= self.case.inputs([torch.from_numpy(one.frames) for one in sounds])
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if self.case.typed:
            inputs["mm_token_type_ids"] = 3 * (inputs["input_ids"] == SOUND).long()
        return answer_of(self.oracle, prompt, inputs, max_tokens)


@pytest.fixture(scope="module", params=CASES)
def heard(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Heard]:
    with opened(CASES[request.param], tmp_path_factory.mktemp("model")) as heard:
        yield heard


@contextlib.contextmanager
def opened(case: Case, folder: Path) -> Iterator[Heard]:
    named = f"{case.model}ForConditionalGeneration"
    oracle_class = case.oracle or getattr(transformers, named)
    oracle = save_media_oracle(oracle_class, case.config(), folder)
    engine = SeeingEngine(folder)
    try:
        yield Heard(case=case, folder=folder, oracle=oracle, engine=engine)
    finally:
        engine.close()


def two_sounds(heard: Heard) -> Prompt:
    prompt = Prompt().text(5, 6, 7).put(heard.sound(1, 0), SOUND).text(8, 9)
    return prompt.put(heard.sound(2, 1), SOUND).text(10, 11, 12)


def test_sounds(heard: Heard) -> None:
    prompt = two_sounds(heard)
    compare_answers(heard.engine.run(prompt)[0], heard.expected(prompt))


def test_text_alone(heard: Heard) -> None:
    prompt = Prompt().text(*range(3, 40))
    compare_answers(heard.engine.run(prompt)[0], heard.expected(prompt))


@pytest.mark.parametrize("step_tokens", [3, 7])
def test_chunks_cut_sounds(heard: Heard, step_tokens: int) -> None:
    engine = heard.engine.with_steps(heard.folder, max_step_tokens=step_tokens)
    prompt = two_sounds(heard)
    compare_answers(engine.run(prompt)[0], heard.expected(prompt))


def test_a_prefix_hit_gives_the_same_and_another_sound_does_not(heard: Heard) -> None:
    engine = heard.engine.with_steps(heard.folder)
    prompt, expected = two_sounds(heard), heard.expected(two_sounds(heard), 6)
    for hit in (0, (len(prompt.ids) - 1) // 8 * 8):
        (answer,) = engine.run(prompt, max_tokens=6, scored=False)
        assert (answer.tokens, answer.num_cached) == (expected.tokens, hit)
    other = two_sounds(heard)
    other.inputs[1] = heard.sound(9, 1)
    (answer,) = engine.run(other, max_tokens=6, scored=False)
    assert answer.tokens == heard.expected(other, 6).tokens
    assert answer.num_cached == other.offsets[1] // 8 * 8


def test_beside_text_and_each_other_with_recorded_decodes(heard: Heard) -> None:
    """Answers of 12 tokens, most of them by steps that are replayed."""
    engine = heard.engine.with_steps(heard.folder, max_step_tokens=32)
    prompts = [two_sounds(heard), Prompt().text(*range(3, 30)), two_sounds(heard)]
    prompts[2].text(13, 14)
    answers = engine.run(*prompts, max_tokens=12, scored=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == heard.expected(prompt, 12).tokens

"""Models that see: tiny random ones made by transformers, their inputs as rows of pixels, and a core over a real
worker that answers requests with images and video."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headrace.back.executor.inline import InlineExecutor
from headrace.back.layers.vision.shared_encoder import SharedEncoder
from headrace.back.parallel.mesh import Mesh
from headrace.back.runner.start import start_runner
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, SchedulerSpec
from headrace.base.wire.media import MediaInput
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules, TokenBatch
from headrace.core.core import EngineCore
from headrace.core.encoder_cache import EncoderCacheHook
from tests.back.driver import Driver
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, randomize

STEP_TOKENS = 256
IMAGE, VIDEO, BREAK = 100, 101, 104


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """One input: uint8 [N, 3, frames, p, p] in the order of base/wire/media.py."""

    kind: str
    grid: tuple[int, int, int]
    values: np.ndarray
    num_tokens: int
    step_s: float = 0.0
    merge: int = 1
    breaks: int = 0

    def pictures(self) -> torch.Tensor:
        """uint8 [t, 3, height, width]: its pixels where they are seen, of inputs of one frame."""
        (t, h, w), merge, patch = self.grid, self.merge, self.values.shape[-1]
        values = torch.from_numpy(self.values)[:, :, 0]
        values = values.view(t, h // merge, w // merge, merge, merge, 3, patch, patch)
        return values.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(t, 3, h * patch, w * patch)

    @property
    def rows(self) -> np.ndarray:
        return self.values.reshape(self.values.shape[0], -1)

    def normalized(self, mean: Sequence[float], std: Sequence[float], frames: int) -> torch.Tensor:
        """What the reference's processor would give: float32 [N, 3 * frames * p * p]."""
        values = torch.from_numpy(self.values).float() / 255
        shape = (1, 3, 1, 1, 1)
        values = (values - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)
        return values.expand(-1, -1, frames, -1, -1).flatten(1)

    def at(self, offset: int) -> MediaInput:
        """It as an input whose tokens begin at `offset`."""
        content = self.rows.tobytes()
        key = hashlib.sha256(f"{self.kind} {self.grid}".encode() + content).digest()
        return MediaInput(
            kind=self.kind,
            key=key,
            offset=offset,
            num_tokens=self.num_tokens,
            grid=self.grid,
            step_s=self.step_s,
            rows=content,
        )


def image(
    seed: int,
    grid: tuple[int, int, int],
    *,
    patch: int,
    merge: int = 1,
    frames: int = 1,
    **more: Any,
) -> Pixels:
    """Random pixels; with `frames` > 1 a video."""
    t, h, w = grid
    shape = (t * h * w, 3, frames, patch, patch)
    values = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    kind = "image" if frames == 1 else "video"
    breaks = more.get("breaks", 0)
    tokens = t * h * w // merge**2 + breaks * (t * h // merge - 1)
    return Pixels(kind=kind, grid=grid, values=values, num_tokens=tokens, merge=merge, **more)


@dataclass(kw_only=True)
class Prompt:
    """Token ids with inputs; a text of one token per number."""

    ids: list[int] = field(default_factory=list)
    inputs: list[Pixels] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def text(self, *ids: int) -> Prompt:
        self.ids += ids
        return self

    def put(self, pixels: Pixels, placeholder: int | None = None) -> Prompt:
        self.inputs.append(pixels)
        self.offsets.append(len(self.ids))
        mark = placeholder or (IMAGE if pixels.kind == "image" else VIDEO)
        width = pixels.grid[2] // pixels.merge
        if pixels.breaks:
            rows = pixels.grid[1] // pixels.merge
            self.ids += ([mark] * width + [BREAK]) * (rows - 1) + [mark] * width
        else:
            self.ids += [mark] * pixels.num_tokens
        return self

    @property
    def media(self) -> tuple[MediaInput, ...]:
        return tuple(one.at(at) for one, at in zip(self.inputs, self.offsets, strict=True))


def save_media_oracle(oracle_class: Any, config: Any, folder: Path, *, seed: int = 11) -> Any:
    """A randomly initialised model in float32, saved under `folder`."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    oracle = oracle_class(config).eval()
    randomize(oracle, seed=seed)
    stored = oracle.state_dict()
    for name, buffer in oracle.named_buffers():
        if name not in stored or not buffer.is_floating_point():
            continue
        if buffer.isinf().all():  # a bound that is not set
            buffer.copy_(buffer.sign() * 1.5)
        else:
            buffer.normal_(1.0, 0.2)
    oracle.save_pretrained(folder)
    return oracle


def engine_spec(folder: Path, *, longest: int = 512, **scheduler: Any) -> EngineSpec:
    """An engine of toy size over the checkpoint in `folder`."""
    settings: dict[str, Any] = {"max_step_tokens": STEP_TOKENS, "max_running": 4, **scheduler}
    return EngineSpec(
        model=model_spec(folder, max_model_len=longest),
        kv=KVSpec(block_tokens=BLOCK_TOKENS, prefix_caching=True, num_blocks=300),
        scheduler=SchedulerSpec(**settings),
        device=DeviceSpec(device="cpu", executor="inline", threads=1),
    )


@dataclass(kw_only=True)
class Answer:
    """What one request got: log-probabilities [positions, V] of its prompt from the second token on and of its
    tokens."""

    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    num_cached: int = 0


class SeeingEngine:
    """A core over the real worker; `step_tokens` cuts prompts into chunks, `media_rows` passes of the encoder beside
    other requests' steps."""

    def __init__(
        self,
        folder: Path,
        executor: InlineExecutor | None = None,
        *,
        longest: int = 512,
        media_rows: dict[str, int] | None = None,
        **scheduler: Any,
    ) -> None:
        self._longest = longest
        spec = engine_spec(folder, longest=longest)
        self.executor = executor or InlineExecutor(spec)
        facts = self.executor.facts
        self.hook = EncoderCacheHook(
            capacity=facts.media_tokens, step_tokens=STEP_TOKENS, rows=media_rows
        )
        scheduler_spec = msgspec.structs.replace(spec.scheduler, **scheduler)
        spec = msgspec.structs.replace(spec, scheduler=scheduler_spec)
        self.core = EngineCore(spec, self.executor, hooks=(self.hook,))
        self._ids = 0

    def with_steps(self, folder: Path, **scheduler: Any) -> SeeingEngine:
        """Another core over the same worker."""
        return SeeingEngine(folder, self.executor, longest=self._longest, **scheduler)

    def add(self, prompt: Prompt, max_tokens: int) -> int:
        """A greedy request; its number."""
        self._ids += 1
        request = EngineRequest(
            id=self._ids,
            prompt=np.asarray(prompt.ids, "<i4").tobytes(),
            stop=StopRules(max_tokens=max_tokens, stop_ids=()),
            sampling=RowSampling(temperature=0.0),
            media=prompt.media,
        )
        self.core.add(request)
        return self._ids

    def step(self, tokens: dict[int, list[int]]) -> None:
        """A step; what it gives is added to the requests' tokens."""
        batch = self.core.step(wait=True).tokens
        if batch is not None:
            for number, token in zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True):
                tokens.setdefault(number, []).append(token)

    def run(
        self, *prompts: Prompt, max_tokens: int = 5, scored: bool = True, salt: str = ""
    ) -> list[Answer]:
        """All at once, greedy; `scored`: with all log-probabilities."""
        sampling = RowSampling(temperature=0.0)
        if scored:
            sampling = RowSampling(temperature=0.0, logprobs=-1, prompt_logprobs=-1)
        answers: dict[int, Answer] = defaultdict(Answer)
        ids = []
        for prompt in prompts:
            self._ids += 1
            ids.append(self._ids)
            request = EngineRequest(
                id=self._ids,
                prompt=np.asarray(prompt.ids, "<i4").tobytes(),
                stop=StopRules(max_tokens=max_tokens, stop_ids=()),
                sampling=sampling,
                media=prompt.media,
                cache_salt=salt,
            )
            self.core.add(request)
        while self.core.has_work:
            batch = self.core.step(wait=True).tokens
            if batch is not None:
                _take(batch, answers)
        return [answers[id] for id in ids]

    def close(self) -> None:
        self.core.close()


def _take(batch: TokenBatch, answers: dict[int, Answer]) -> None:
    scores = batch.logprobs or [None] * len(batch.tokens)
    for id, token, score in zip(batch.ids.tolist(), batch.tokens.tolist(), scores, strict=True):
        answers[id].tokens.append(token)
        if score is not None:
            answers[id].logprobs.append(_in_order(score.ids, score.values))
    for id, part in batch.prompt_logprobs:
        answers[id].prompt_logprobs += [
            _in_order(ids, values) for ids, values in zip(part.ids, part.values, strict=True)
        ]
    for id, count in batch.cached:
        answers[id].num_cached = count
    for end in batch.finished:
        assert end.error is None, end.error


def _in_order(ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """By token id; entry 0 is the token itself, which comes again among all."""
    row = np.zeros(int(ids.max()) + 1, np.float32)
    row[ids] = values
    return row


def answer_of(oracle: Any, prompt: Prompt, inputs: dict[str, Any], max_tokens: int) -> Answer:
    """What transformers says to the inputs of its processor."""
    oracle.generation_config.eos_token_id = None
    with torch.inference_mode():
        logits = oracle(**inputs).logits[0].float().log_softmax(-1)
        answer = oracle.generate(
            **inputs,
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return Answer(
        tokens=answer.sequences[0, len(prompt.ids) :].tolist(),
        prompt_logprobs=list(logits[:-1].numpy()),
        logprobs=[one[0].float().log_softmax(-1).numpy() for one in answer.logits],
    )


def compare_answers(ours: Answer, oracle: Answer, bound: float = 1e-4) -> None:
    """Teacher-forced log-probabilities of the prompt, and the tokens that follow with theirs."""
    assert len(ours.prompt_logprobs) == len(oracle.prompt_logprobs)
    for got, want in (
        (ours.prompt_logprobs, oracle.prompt_logprobs),
        (ours.logprobs, oracle.logprobs),
    ):
        if got:
            error = np.abs(np.stack(got) - np.stack(want)).max()
            assert error < bound, error
    assert ours.tokens == oracle.tokens


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's oracle and our engine over one checkpoint; patches have 4 pixels a side, windows 2 patches."""

    folder: Path
    oracle: Any
    engine: SeeingEngine

    def pixels(self, seed: int, grid: tuple[int, int, int], **more: Any) -> Pixels:
        return image(seed, grid, patch=4, merge=2, **more)

    def inputs(self, prompt: Prompt) -> dict[str, Any]:
        """What transformers' processor would give."""
        raise NotImplementedError

    def expected(self, prompt: Prompt, max_tokens: int = 5) -> Answer:
        return answer_of(self.oracle, prompt, self.inputs(prompt), max_tokens)


def patches_of(
    prompt: Prompt, norm: tuple[Sequence[float], Sequence[float]], *, apart: bool = False
) -> dict[str, Any]:
    """The patches and grids of a prompt's images and video as Qwen2-VL's processor gives them; `apart`: each step of
    a video is an input of its own."""
    given: dict[str, Any] = {}
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        inputs = [one for one in prompt.inputs if one.kind == kind]
        if inputs:
            given[pixels] = torch.cat([one.normalized(*norm, 2) for one in inputs])
            grids = [one.grid for one in inputs]
            if kind == "video" and apart:
                grids = [(len(grids), *grids[0][1:])]
            given[grid] = torch.tensor(grids)
    return given


def scored_by_runner(
    folder: Path,
    prompts: Sequence[Prompt],
    *,
    mesh: Mesh,
    chunk: int,
    max_tokens: int = 4,
    **changes: Any,
) -> list[list[np.ndarray]]:
    """The log-probabilities of each prompt, in chunks, and of greedy tokens, by one rank's runner; `changes` of the
    model's spec."""
    spec = engine_spec(folder)
    model = load_ours(msgspec.structs.replace(spec.model, **changes), mesh=mesh)
    shares = bool(changes.get("shares_encoder")) and mesh.tp.size > 1
    assert isinstance(model.media, SharedEncoder) == shares
    runner = start_runner(spec, model, device=torch.device("cpu")).runner
    driver, scores = Driver(runner.facts), []
    sampling = RowSampling(temperature=0.0, logprobs=-1, prompt_logprobs=-1)
    for prompt in prompts:
        one = driver.add(prompt.ids, sampling, media=prompt.media)
        while len(one.outputs) < max_tokens:
            count = min(chunk, one.length - one.num_computed)
            driver.read(runner.launch(driver.plan([(one, count)])).result())
        driver.release(one)
        rows = [
            _in_order(ids, values)
            for part in one.prompt_logprobs
            for ids, values in zip(part.ids, part.values, strict=True)
        ]
        scores.append([*rows, *(_in_order(part.ids, part.values) for part in one.logprobs)])
    return scores

"""Models with experts through the whole engine: the greedy tokens of transformers, in chunks, beside other
requests, and from a prefix that is cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from headrace.back.executor.inline import InlineExecutor
from headrace.back.models.registry import build_model
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.resolved import DeviceSpec, EngineSpec, KVSpec, SchedulerSpec
from headrace.base.errors import CheckpointError
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.core import EngineCore
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, save_oracle
from tests.models.test_parity import tiny_config

FAMILIES = (
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "olmoe",
    "granite-moe",
    "deepseek-v3",
    "deepseek-v3.2",
    "glm-dsa",
    "glm4-moe",
    "llama4",
    "mistral4",
    "mimo-v2-flash",
    "gemma4-experts",
)
NUM_TOKENS = 6


def greedy(oracle: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            tokens.append(int(oracle(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def answers(
    core: EngineCore,
    prompts: dict[int, list[int]],
    count: int = NUM_TOKENS,
    *,
    allowed: tuple[int, ...] | None = None,
) -> tuple[dict[int, list[int]], int]:
    """The tokens of each request, and how many of their prompts' tokens were cached."""
    for id, prompt in prompts.items():
        core.add(
            EngineRequest(
                id=id,
                prompt=np.asarray(prompt, "<i4").tobytes(),
                stop=StopRules(max_tokens=count),
                sampling=RowSampling(temperature=0.0, allowed_ids=allowed),
            )
        )
    tokens: dict[int, list[int]] = {id: [] for id in prompts}
    cached = 0
    while core.has_work:
        batch = core.step(wait=True).tokens
        if batch is not None:
            for id, token in zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True):
                tokens[id].append(token)
            cached += sum(end.num_cached for end in batch.finished)
    return tokens, cached


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers_in_chunks_and_from_a_cached_prefix(
    name: str, tmp_path: Path
) -> None:
    oracle = save_oracle(tiny_config(name), tmp_path)
    spec = EngineSpec(
        model=model_spec(tmp_path),
        kv=KVSpec(block_tokens=16, prefix_caching=True, num_blocks=64),
        scheduler=SchedulerSpec(max_step_tokens=16, max_running=4),
        device=DeviceSpec(device="cpu", executor="inline", threads=1),
    )
    core = EngineCore(spec, InlineExecutor(spec))
    generator = torch.Generator().manual_seed(5)
    first, second = (
        torch.randint(0, 97, (length,), generator=generator).tolist() for length in (41, 23)
    )
    prompts = {1: first, 2: second}
    expected = {id: greedy(oracle, prompt) for id, prompt in prompts.items()}
    assert answers(core, prompts) == (expected, 0)
    follow_up = [*first, *second[:5]]
    assert answers(core, {3: follow_up}) == ({3: greedy(oracle, follow_up)}, 32)
    core.executor.close()


def test_more_choices_than_experts_are_refused_by_key(tmp_path: Path) -> None:
    save_oracle(tiny_config("mixtral"), tmp_path)
    with pytest.raises(CheckpointError, match="num_experts_per_tok"):
        load_ours(model_spec(tmp_path, num_experts_per_tok=6))


def built(name: str, folder: Path, **changes: Any) -> None:
    """An empty model of the case."""
    config = tiny_config(name)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    spec = model_spec(folder, **changes)
    build_model(spec, mesh=Mesh(), device=torch.device("meta"), block_tokens=BLOCK_TOKENS)


@pytest.mark.parametrize(
    ("name", "key", "value", "known"),
    [
        ("deepseek-v3", "scoring_func", "softmax", "sigmoid"),
        ("glm4-moe", "topk_method", "greedy", "noaux_tc"),
        ("minimax-m2", "scoring_func", "softmax", "sigmoid"),
        ("kimi-linear", "moe_router_activation_func", "softmax", "sigmoid"),
        ("deepseek-v2", "scoring_func", "sigmoid", "softmax"),
    ],
)
def test_scores_that_a_router_does_not_have_are_refused_by_key(
    name: str, key: str, value: str, known: str, tmp_path: Path
) -> None:
    """Published configs state them; transformers' classes do not read them."""
    with pytest.raises(CheckpointError, match=rf"{key} is '{value}'.*{known}"):
        built(name, tmp_path, **{key: value})


@pytest.mark.parametrize("name", ["deepseek-v3", "axk1"])
def test_a_router_may_state_what_it_is(name: str, tmp_path: Path) -> None:
    method = "noaux_tc" if name == "deepseek-v3" else "greedy"
    built(name, tmp_path, scoring_func="sigmoid", topk_method=method)

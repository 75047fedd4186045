"""Hidden states in files against transformers' (SPC-06: extract_hidden_states)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.back.executor.inline import InlineExecutor
from headrace.back.runner.hidden_states import HEADER_BYTES, RowFile
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.speculation_options import DraftConfig, DraftLayers
from headrace.base.config.tree import (
    DeviceOptions,
    KVOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
    SpeculationOptions,
)
from headrace.base.errors import ConfigError, InvalidRequest
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.base.wire.transfer import HIDDEN_STATES
from headrace.core.admission import check_request
from headrace.core.core import EngineCore
from headrace.launch.facts import resolve_options

MODEL = Path(__file__).parents[3] / "demo" / "model"
LAYERS = 8
PROMPT = list(range(300, 337))
OTHER = list(range(900, 922))


def spec_of(folder: Path | None, layers: tuple[int, ...] = (0, 3, LAYERS), **kv: Any) -> EngineSpec:
    config = DraftConfig(hf_config=DraftLayers(eagle_aux_hidden_state_layer_ids=layers))
    speculation = SpeculationOptions(
        method="extract_hidden_states", num_speculative_tokens=1, draft_model_config=config
    )
    return resolve_options(
        Options(
            device=DeviceOptions(device="cpu"),
            model=ModelOptions(
                max_model_len=64,
                dtype="float32",
                hidden_states_path=None if folder is None else str(folder),
            ),
            scheduler=SchedulerOptions(
                speculative_config=speculation, max_step_tokens=16, max_running=2
            ),
            kv=KVOptions(**{"kv_blocks": 8, **kv}),
        )
    ).engine


def request(number: int, prompt: list[int], **sampling: Any) -> EngineRequest:
    return EngineRequest(
        id=number,
        prompt=np.asarray(prompt, "<i4").tobytes(),
        stop=StopRules(max_tokens=7, min_tokens=7),
        sampling=RowSampling(temperature=0.0, **sampling),
    )


def run(
    spec: EngineSpec, *requests: EngineRequest
) -> tuple[dict[int, list[int]], dict[int, str], int]:
    """The answers' tokens, the paths that were told, and how often a request was preempted."""
    executor = InlineExecutor(spec)
    core = EngineCore(spec, executor)
    said, paths, preempted = defaultdict[int, list[int]](list), {}, 0
    for one in requests:
        core.add(one)
    while core.has_work:
        batch = core.step(wait=True).tokens
        if batch is None:
            continue
        for number, token in zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True):
            said[number].append(token)
        for number, captured in batch.captured:
            assert captured.layer == HIDDEN_STATES
            paths[number] = captured.values.tobytes().decode()
        preempted += sum(one.num_preemptions for one in batch.finished)
    executor.close()
    return said, paths, preempted


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def states_of(model: Any, text: list[int]) -> torch.Tensor:
    """In front of layers 0 and 3, and behind the last one, without the norm: [T, 3, E]."""
    seen: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    hook.remove()
    return torch.stack([states[0][0], states[3][0], seen[0][0]], dim=1)


def test_files_hold_the_states_of_prompts(model: Any, tmp_path: Path) -> None:
    """Two prompts beside each other, in chunks; nothing is drafted."""
    spec = spec_of(tmp_path)
    assert spec.speculation is None and not spec.kv.prefix_caching
    _, paths, _ = run(spec, request(1, PROMPT), request(2, OTHER))
    for number, text in ((1, PROMPT), (2, OTHER)):
        assert Path(paths[number]).parent == tmp_path and Path(f"{paths[number]}.lock").exists()
        file = load_file(paths[number])
        assert file["token_ids"].tolist() == text
        torch.testing.assert_close(
            file["hidden_states"], states_of(model, text), atol=1e-4, rtol=1e-4
        )


def test_a_preempted_request_has_all_of_its_answer_too(model: Any, tmp_path: Path) -> None:
    """A token that was sampled last may be there, or not: it was an input of no step whose result
    counts."""
    prompts = {1: PROMPT[:30], 2: OTHER[:21] + PROMPT[:9]}
    wanted = [request(n, prompt, capture_layers=(HIDDEN_STATES,)) for n, prompt in prompts.items()]
    said, paths, preempted = run(spec_of(tmp_path, kv_blocks=6), *wanted)
    assert preempted
    for number, prompt in prompts.items():
        file, text = load_file(paths[number]), prompt + said[number]
        count = len(file["token_ids"])
        assert count in (len(text) - 1, len(text)) and file["token_ids"].tolist() == text[:count]
        expected = states_of(model, text[:count])
        torch.testing.assert_close(file["hidden_states"], expected, atol=1e-4, rtol=1e-4)


def test_ids_are_written_once_the_prompt_is_there(tmp_path: Path) -> None:
    """Before that the file has its header and states alone: each chunk adds what is new."""
    path, states = tmp_path / "states", torch.arange(24.0).view(6, 2, 2)
    row = RowFile(path=path, num_prompt=5, answers=True)
    begin = 8 + HEADER_BYTES
    for start, stop in ((0, 2), (2, 4)):
        row.write(start, np.arange(start, stop), states[start:stop])
        assert path.stat().st_size == begin + stop * 16 and not row.whole
    for start, stop in ((4, 5), (5, 6)):
        row.write(start, np.arange(start, stop), states[start:stop])
        file = load_file(path)
        assert file["token_ids"].tolist() == list(range(stop)) and row.whole
        assert torch.equal(file["hidden_states"], states[:stop])


def test_a_folder_that_cannot_be_written_costs_the_file_alone(tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "states")
    executor = InlineExecutor(spec)
    core = EngineCore(spec, executor)
    (tmp_path / "states").rmdir()
    core.add(request(3, OTHER))
    told = []
    while core.has_work:
        batch = core.step(wait=True).tokens
        told += [] if batch is None else batch.captured
        assert batch is None or all(one.error is None for one in batch.finished)
    executor.close()
    assert {one.values.tobytes() for _, one in told} == {b""}


def test_what_goes_not_with_it_is_refused_by_name(tmp_path: Path) -> None:
    for arguments, said in (
        ({"folder": None}, "needs --hidden-states-path"),
        ({"layers": ()}, "different ones of 0 to 8 are wanted .8: behind the last layer., none"),
        ({"layers": (9,)}, "wanted .8: behind the last layer., 9 given"),
        (
            {"kv_store_path": str(tmp_path)},
            "--kv-store-path does not go|--hidden-states-path does not go with --kv-store-path",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            spec_of(**{"folder": tmp_path, **arguments})
    spec = spec_of(tmp_path)
    plain = msgspec.structs.replace(
        spec, model=msgspec.structs.replace(spec.model, hidden_states=None)
    )
    executor = InlineExecutor(plain)
    kv, told = EngineCore(plain, executor).kv, executor.facts
    executor.close()
    asks = request(1, OTHER, capture_layers=(HIDDEN_STATES,))
    with pytest.raises(InvalidRequest, match="this engine writes no hidden states"):
        check_request(asks, told, kv)
    check_request(asks, msgspec.structs.replace(told, tells_states=True), kv)

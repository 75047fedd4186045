"""Control vectors that requests name, rows of one batch differing, against transformers with the
same added behind its layers (BEY-42)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.back.executor.inline import InlineExecutor
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import DeviceOptions, ModelOptions, Options, SchedulerOptions
from headrace.base.config.tree import SpeculationOptions as Speculation
from headrace.base.errors import ConfigError, InvalidRequest
from headrace.base.wire.request import EngineRequest, RowSampling, SamplingParams, StopRules
from headrace.core.admission import check_request
from headrace.core.core import EngineCore
from headrace.front.client.llm import LLM
from headrace.launch.facts import resolve_options

MODEL = Path(__file__).parents[3] / "demo" / "model"
WIDTH, COUNT = 384, 6
PROMPT = list(range(300, 337))
WANTED = ({}, {"one": 1.5}, {"one": -2.0, "two": 1.0}, {"two": 3.0})


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vectors")
    for seed, (name, layers) in enumerate({"one": (2, 5), "two": (5, 7)}.items()):
        writer = gguf.GGUFWriter(folder / f"{name}.gguf", "controlvector")
        rng = np.random.default_rng(seed)
        for layer in layers:
            writer.add_tensor(f"direction.{layer}", 3 * rng.standard_normal(WIDTH).astype("<f4"))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return {name: folder / f"{name}.gguf" for name in ("one", "two")}


def spec_of(files: dict[str, Path], speculation: Speculation | None = None) -> EngineSpec:
    modules = tuple(f"{name}={path}" for name, path in files.items())
    return resolve_options(
        Options(
            device=DeviceOptions(device="cpu"),
            model=ModelOptions(max_model_len=64, dtype="float32", control_vector_modules=modules),
            scheduler=SchedulerOptions(
                max_step_tokens=32, max_running=4, speculative_config=speculation
            ),
        )
    ).engine


def request(number: int, vectors: dict[str, float]) -> EngineRequest:
    return EngineRequest(
        id=number,
        prompt=np.asarray(PROMPT, "<i4").tobytes(),
        stop=StopRules(max_tokens=COUNT, min_tokens=COUNT),
        sampling=RowSampling(temperature=0.0, control_vectors=vectors),
    )


def answers(core: EngineCore, requests: list[EngineRequest]) -> list[list[int]]:
    said: dict[int, list[int]] = {one.id: [] for one in requests}
    for one in requests:
        core.add(one)
    while core.has_work:
        batch = core.step(wait=True).tokens
        if batch is None:
            continue
        assert all(one.error is None for one in batch.finished), batch.finished
        for number, token in zip(batch.ids.tolist(), batch.tokens.tolist(), strict=True):
            said[number].append(token)
    return list(said.values())


def expected(model: Any, files: dict[str, Path], wanted: dict[str, float]) -> list[int]:
    hooks = []
    for name, scale in wanted.items():
        for tensor in gguf.GGUFReader(files[name]).tensors:
            add_E = scale * torch.from_numpy(np.array(tensor.data))
            layer = model.model.layers[int(tensor.name.partition(".")[2])]
            hooks.append(layer.register_forward_hook(lambda _, __, out, add_E=add_E: out + add_E))
    text = list(PROMPT)
    with torch.inference_mode():
        for _ in range(COUNT):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    for hook in hooks:
        hook.remove()
    return text[len(PROMPT) :]


@pytest.mark.parametrize(
    "speculation",
    [
        pytest.param(None, id="plain"),
        pytest.param(
            Speculation(method="ngram", prompt_lookup_min=1, adaptive=False),
            id="ngram",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rows_of_a_batch_are_steered_each_by_its_own(
    model: Any, files: dict[str, Path], speculation: Speculation | None
) -> None:
    """Twice, so that steps are replayed, and what is cached of one is not taken for another."""
    spec = spec_of(files, speculation)
    executor = InlineExecutor(spec)
    core = EngineCore(spec, executor)
    theirs = [expected(model, files, wanted) for wanted in WANTED]
    assert len({tuple(one) for one in theirs}) == len(WANTED)
    for turn in range(3):
        order = [*WANTED[turn:], *WANTED[:turn]]
        ours = answers(core, [request(10 * turn + i, one) for i, one in enumerate(order)])
        assert ours == [*theirs[turn:], *theirs[:turn]], turn
    executor.close()


def test_vectors_that_there_are_not_are_refused_by_name(files: dict[str, Path]) -> None:
    executor = InlineExecutor(spec := spec_of(files))
    kv, told = EngineCore(spec, executor).kv, executor.facts
    executor.close()
    assert told.control_vectors == ("one", "two")
    for wanted, said in (
        ({"three": 1.0}, r"control_vectors: 'three' is not loaded \(one, two\)"),
        ({"one": float("nan")}, "one has the factor nan, at most 1e"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            check_request(request(1, wanted), told, kv)
    plain = msgspec.structs.replace(told, control_vectors=())
    with pytest.raises(InvalidRequest, match="none: see --control-vector-modules"):
        check_request(request(1, {"one": 1.0}), plain, kv)
    for changed, said in (
        ({"a b": files["one"]}, "a b=.*: NAME=FILE is wanted"),
        ({"one": Path("none.gguf")}, "none.gguf: no such file"),
    ):
        with pytest.raises(ConfigError, match=said):
            spec_of(changed)


@pytest.mark.slow
def test_two_ranks_steer_and_tell_as_one(files: dict[str, Path], tmp_path: Path) -> None:
    """And the hidden states of their requests are those of one rank."""
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 3, 8]}
    drafting = {
        "method": "extract_hidden_states",
        "draft_model_config": {"hf_config": layers},
    }
    params = [
        SamplingParams(temperature=0.0, max_tokens=COUNT, control_vectors=wanted)
        for wanted in WANTED
    ]
    said, states = [], []
    for ranks in (1, 2):
        with LLM(
            "",
            device="cpu",
            dtype="float32",
            tensor_parallel=ranks,
            hidden_states_path=str(tmp_path / str(ranks)),
            control_vector_modules=tuple(f"{name}={path}" for name, path in files.items()),
            speculative_config=drafting,
        ) as llm:
            outputs = llm.generate(["Once upon a time"] * len(params), params, progress=False)
        said.append([one.outputs[0].token_ids for one in outputs])
        paths = [(one.kv_transfer_params or {})["hidden_states_path"] for one in outputs]
        states.append([load_file(str(path))["hidden_states"] for path in paths])
    assert said[0] == said[1] and len({tuple(one) for one in said[0]}) == len(WANTED)
    for one, two in zip(*states, strict=True):
        torch.testing.assert_close(two, one, atol=1e-3, rtol=1e-3)

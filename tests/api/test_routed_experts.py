"""The experts that each token was routed to, told for replay (ENG-19): those of transformers' routers, over prompts in
chunks, decoding and prefixes that were cached; refused where there are none."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.config.tree import DeviceOptions, ModelOptions, Options
from headrace.base.errors import InvalidRequest
from headrace.base.wire.request import ROUTED_EXPERTS, EngineRequest, RowSampling, StopRules
from headrace.core.admission import check_request
from headrace.launch.facts import resolve_options
from tests.api.model_folder import write_model_folder
from tests.api.serving import Served, serving
from tests.e2e.test_speculation import Engine
from tests.models.oracle import save_oracle

PROMPT = [5, 9, 4, 17, 8, 30, 12, 7, 7, 21, 40, 3] * 4
ASK = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
LAYERS, EXPERTS, TOP = 3, 6, 2


class Mixture:
    """A tiny mixture of experts: its folder, and transformers' model of it."""

    def __init__(self, root: Path) -> None:
        from transformers import Qwen3MoeConfig

        self.folder = write_model_folder(root)
        kept = json.loads((self.folder / "config.json").read_text())
        config = Qwen3MoeConfig(
            vocab_size=kept["vocab_size"],
            hidden_size=48,
            intermediate_size=64,
            moe_intermediate_size=24,
            num_hidden_layers=LAYERS + 1,
            mlp_only_layers=[1],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP,
            norm_topk_prob=True,
            max_position_embeddings=2048,
        )
        self.oracle = save_oracle(config, self.folder, seed=21)

    def experts(self, ids: list[int]) -> np.ndarray:
        """[T, layers, K], sorted in each layer."""
        with torch.inference_mode():
            out = self.oracle(torch.tensor([ids]), output_router_logits=True)
        found = [logits.topk(TOP, dim=-1).indices.sort(-1).values for logits in out.router_logits]
        return torch.stack(found, dim=1).numpy()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return Mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def served(mixture: Mixture) -> Iterator[Served]:
    options = (
        *("--model", str(mixture.folder), "--served-model-name", "m", "--device", "cpu"),
        *(
            "--dtype",
            "float32",
            "--max-running",
            "4",
            "--max-step-tokens",
            "32",
            "--enable-return-routed-experts",
        ),
    )
    with serving(None, *options) as found:
        yield found


def told(document: dict[str, Any]) -> np.ndarray:
    data = base64.b64decode(document["data"])
    return np.frombuffer(data, document["dtype"]).reshape(document["shape"])


def test_the_experts_are_those_of_transformers_routers(served: Served, mixture: Mixture) -> None:
    asked = {**ASK, "return_routed_experts": True, "return_token_ids": True}
    plain = served.post("/v1/completions", {**ASK, "return_token_ids": True}).json()["choices"][0]
    assert "routed_experts" not in plain
    for _ in range(2):  # the second time the prompt is cached
        choice = served.post("/v1/completions", asked).json()["choices"][0]
        assert choice["token_ids"] == plain["token_ids"]
        experts = told(choice["routed_experts"])
        computed = PROMPT + choice["token_ids"][:-1]
        assert experts.shape == (len(computed), LAYERS, TOP)
        np.testing.assert_array_equal(np.sort(experts, axis=-1), mixture.experts(computed))
    assert served.at_rest()


def test_what_cannot_be_told_is_refused_by_name(served: Served) -> None:
    for wrong in ({"stream": True}, {"n": 2}):
        answer = served.post("/v1/completions", {**ASK, "return_routed_experts": True, **wrong})
        assert answer.status_code == 400 and "return_routed_experts" in answer.text


def test_a_dense_model_has_none(mixture: Mixture) -> None:
    request = EngineRequest(
        id=1,
        prompt=np.asarray(PROMPT, "<i4").tobytes(),
        stop=StopRules(max_tokens=3),
        sampling=RowSampling(capture_layers=(ROUTED_EXPERTS,)),
    )
    for model in (
        ModelOptions(enable_return_routed_experts=True),
        ModelOptions(model=str(mixture.folder)),
    ):
        engine = Engine(
            resolve_options(Options(device=DeviceOptions(device="cpu"), model=model)).engine
        )
        try:
            facts = engine.executor.facts
            assert facts.routed_experts == ()
            with pytest.raises(InvalidRequest, match="--enable-return-routed-experts, and a model"):
                check_request(request, facts, engine.core.kv)
        finally:
            engine.executor.close()

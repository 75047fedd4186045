"""Every drafter on a model with recurrent layers: its tokens are those without (SPC-06). The model and the heads have
random weights, so that of these hardly a draft stands, and the state goes back in every step."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.config.tree import (
    DeviceOptions,
    KVOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
    SpeculationOptions,
)
from headrace.launch.facts import resolve_options
from tests.back.speculative.checkpoints import save_head
from tests.back.speculative.test_blocks import pard_folder
from tests.e2e.test_speculation import Engine, assert_equal, requests_of, run

pytestmark = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
MODEL = Path(__file__).parents[2] / "demo" / "model"
SIZES: dict[str, Any] = {
    **{"vocab_size": 4096, "hidden_size": 384, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "max_position_embeddings": 512},
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
HEADS = {"eagle3": "eagle3", "eagle": "eagle", "medusa": "medusa", "dflash": "dflash"}
TEXTS = ("ngram", "suffix")
KINDS = (*TEXTS, "draft_model", "pard", *HEADS)
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(9)
    config = transformers.Qwen3_5TextConfig(**SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / file, folder / file)
    return folder


def drafting(kind: str, folder: Path) -> SpeculationOptions:
    more: dict[str, Any] = {"num_speculative_tokens": 3, "adaptive": False, "method": kind}
    if kind == "ngram":
        more |= {"prompt_lookup_min": 1}
    elif kind == "draft_model":
        more |= {"model": str(MODEL)}
    elif kind == "pard":
        more |= {"model": str(pard_folder(folder))}
    elif kind in HEADS:
        taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
        dflash = {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 4000}}
        save_head(folder, HEADS[kind], **{"eagle3": taps, "dflash": dflash}.get(kind, {}))
        more |= {"model": str(folder)}
    return SpeculationOptions(**more)


@pytest.fixture
def pair(hybrid: Path, tmp_path: Path) -> Iterator[Any]:
    """Makes two engines over the hybrid, without and with a drafter."""
    made: list[Engine] = []

    def make(kind: str, device: str = "cpu", **changes: Any) -> tuple[Engine, Engine]:
        kv = {
            name: changes.pop(name) for name in ("kv_memory", "prefix_caching") if name in changes
        }
        for speculation in (None, drafting(kind, tmp_path / "drafter")):
            tree = Options(
                device=DeviceOptions(device=device),
                model=ModelOptions(
                    model=str(hybrid), max_model_len=256, dtype="float32", deterministic=True
                ),
                kv=KVOptions(**kv),
                scheduler=SchedulerOptions(
                    speculative_config=speculation, **{"max_running": 8, **changes}
                ),
            )
            made.append(Engine(resolve_options(tree).engine))
        return made[-2], made[-1]

    yield make
    for engine in made:
        engine.executor.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["eagle3", *(pytest.param(kind, marks=SLOW) for kind in KINDS if kind != "eagle3")]
)
def test_a_hybrid_says_what_it_says_without_drafts(pair: Any, kind: str) -> None:
    """All ways to sample, in chunks, beside others and behind prefix hits; recorded steps."""
    plain, drafted = pair(kind, max_step_tokens=32)
    requests = requests_of(plain.spec, 13, lengths=(24,))
    assert_equal(run(plain.core, requests), run(drafted.core, requests))
    stats = drafted.core.scheduler.speculation.stats
    assert stats.num_draft_tokens > (100 if kind not in TEXTS else 10)
    assert stats.num_accepted_tokens < stats.num_draft_tokens
    assert drafted.replay.foreign == () and drafted.core.kv.num_hits > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("kind", ["ngram", "draft_model", *HEADS])
def test_a_hybrid_in_cuda_graphs_says_what_it_says_without_drafts(pair: Any, kind: str) -> None:
    plain, drafted = pair(kind, device="cuda", max_step_tokens=32)
    requests = requests_of(plain.spec, 13, lengths=(24,))
    for _ in range(3):  # launched, recorded, replayed
        assert_equal(run(plain.core, requests, 4), run(drafted.core, requests, 4))
    assert drafted.core.scheduler.speculation.stats.num_draft_tokens > 10

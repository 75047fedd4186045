"""Heads for multi-token prediction in the model's own checkpoint, by the names of each family (SPC-06)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.back.kernels.native.library import NativeLibrary, load
from headrace.base.config.tree import (
    DeviceOptions,
    ModelOptions,
    Options,
    SchedulerOptions,
    SpeculationOptions,
)
from headrace.launch.facts import resolve_options
from tests.e2e.test_speculation import Engine, assert_equal, requests_of, run

pytestmark = pytest.mark.skipif(
    not isinstance(load(), NativeLibrary), reason="the native kernels are not built"
)
MODEL = Path(__file__).parents[3] / "demo" / "model"
LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
ROUTED = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16},
    **{"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
}
LATENT = {
    **{"num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 24},
    **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4-moe": ("Glm4Moe", {**ROUTED, "head_dim": 8}),
    "deepseek-v3": ("DeepseekV3", {**ROUTED, **LATENT}),
    "mimo": ("Qwen2", {}),
    "qwen3-next": (
        "Qwen3Next",
        {
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"shared_expert_intermediate_size": 24, "head_dim": 16, "rms_norm_eps": 0.01},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
            **{"linear_value_head_dim": 12, "linear_conv_kernel_dim": 3},
            "layer_types": [*(["linear_attention"] * LAYERS), "full_attention"],
        },
    ),
}


def save_model(family: str, folder: Path) -> None:
    """A tiny model whose last layer is the head's."""
    import transformers

    name, changes = FAMILIES[family]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    stated = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    width = SIZES["hidden_size"]
    own: dict[str, tuple[int, ...]]
    if family == "mimo":
        stated["architectures"] = ["MiMoForCausalLM"]
        last, head = f"model.layers.{LAYERS}.", "model.mtp_layers.0."
        tensors = {name.replace(last, head): value for name, value in tensors.items()}
        own = {"input_proj": (width, 2 * width), "token_layernorm": (width,)}
        own |= {"hidden_layernorm": (width,), "final_layernorm": (width,)}
    elif family == "qwen3-next":
        last, head = f"model.layers.{LAYERS}.", "mtp."
        tensors = {name.replace(last, f"{head}layers.0."): one for name, one in tensors.items()}
        own = {"fc": (width, 2 * width), "norm": (width,)}
        own |= {"pre_fc_norm_embedding": (width,), "pre_fc_norm_hidden": (width,)}
    else:
        head = f"model.layers.{LAYERS}."
        stated["num_nextn_predict_layers"] = 1
        own = {"eh_proj": (width, 2 * width), "enorm": (width,), "hnorm": (width,)}
        own |= {"shared_head.norm": (width,), "shared_head.head": (4096, width)}
        own |= {"embed_tokens": (4096, width)}
    tensors |= {f"{head}{name}.weight": torch.rand(shape) * 0.3 for name, shape in own.items()}
    stated["num_hidden_layers"] = LAYERS
    if "layer_types" in stated:
        stated["layer_types"] = stated["layer_types"][:LAYERS]
    (folder / "config.json").write_text(json.dumps(stated))
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / file, folder / file)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.executor.close()


@pytest.mark.parametrize(
    "family",
    [
        "qwen3-next",
        *(pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES if one != "qwen3-next"),
    ],
)
def test_auto_drafts_with_the_head_that_the_checkpoint_carries(
    family: str, tmp_path: Path, engines: list[Engine]
) -> None:
    save_model(family, tmp_path)
    how = SpeculationOptions(method="auto", num_speculative_tokens=3, adaptive=False)
    for speculation in (None, how):
        tree = Options(
            device=DeviceOptions(device="cpu"),
            model=ModelOptions(model=str(tmp_path), max_model_len=256, dtype="float32"),
            scheduler=SchedulerOptions(
                speculative_config=speculation, max_running=8, max_step_tokens=16
            ),
        )
        engines.append(Engine(resolve_options(tree).engine))
    plain, drafted = engines
    assert drafted.spec.speculation is not None and drafted.spec.speculation.method == "mtp"
    requests = requests_of(plain.spec, 6, lengths=(30,))
    assert_equal(run(plain.core, requests), run(drafted.core, requests))
    stats = drafted.core.scheduler.speculation.stats
    assert stats.num_draft_tokens > 50

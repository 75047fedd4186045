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


SLIDING, FULL = "sliding_attention", "full_attention"
STEP: dict[str, Any] = {
    **{"pad_token_id": 1, "head_dim": 8, "layer_types": [SLIDING, FULL, SLIDING, SLIDING]},
    **{"sliding_window": 12, "num_sliding_attention_heads": 8, "query_pre_attn_scalar": 8},
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    **{"share_expert_dim": 20, "moe_router_scaling_factor": 1.5},
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": base}
        for kind, base in ((FULL, 500.0), (SLIDING, 100.0))
    },
}
PUBLISHED_STEP: dict[str, Any] = {
    **{"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "vocab_size": 4096},
    **{"hidden_size": 48, "intermediate_size": 40, "max_position_embeddings": 512, "head_dim": 8},
    **{"num_attention_heads": 6, "num_attention_groups": 2, "rms_norm_eps": 1e-5},
    "attention_other_setting": {"attention_type": SLIDING, "num_attention_heads": 8},
    **{"rope_theta": [100.0, 500.0, 100.0, 100.0], "sliding_window": 12},
    **{"layer_types": STEP["layer_types"], "moe_layers_enum": "1,2", "moe_num_experts": 6},
    **{"moe_top_k": 2, "moe_router_scaling_factor": 1.5, "moe_intermediate_size": 24},
    **{"share_expert_dim": 20, "num_nextn_predict_layers": 1, "num_hidden_layers": LAYERS},
}


def save_step(folder: Path) -> None:
    """Step 3.5 as it is published: heads are layers behind the last, with output heads of their own."""
    import transformers

    torch.manual_seed(3)
    vision = {"width": 32, "layers": 1, "heads": 2, "patch_size": 14, "image_size": 28}
    text = transformers.Step3p7TextConfig(**(SIZES | STEP))
    config = transformers.Step3p7Config(vision_config=vision, text_config=text)
    transformers.Step3p7ForConditionalGeneration(config).save_pretrained(folder)
    tensors, width = load_file(folder / "model.safetensors"), SIZES["hidden_size"]
    own = {"eh_proj": (width, 2 * width), "enorm": (width,), "hnorm": (width,)}
    own |= {"transformer.shared_head.norm": (width,), "embed_tokens": (4096, width)}
    own |= {"transformer.shared_head.output": (4096, width)}
    head = f"model.layers.{LAYERS}."
    tensors |= {f"{head}{name}.weight": torch.rand(shape) * 0.3 for name, shape in own.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(PUBLISHED_STEP))


def save_model(family: str, folder: Path) -> None:
    """A tiny model whose last layer is the head's."""
    import transformers

    if family == "step3p5":
        save_step(folder)
        return
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
        pytest.param("step3p5", marks=pytest.mark.slow),
        *(pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES if one != "qwen3-next"),
    ],
)
def test_auto_drafts_with_the_head_that_the_checkpoint_carries(
    family: str, tmp_path: Path, engines: list[Engine]
) -> None:
    save_model(family, tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / file, tmp_path / file)
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

"""Models with several parts (vision, audio) serve their text part: its logits equal those of transformers for
text alone, and the other parts' tensors are left where they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.base.errors import HeadraceError
from tests.models.oracle import (
    BLOCK_TOKENS,
    load_ours,
    model_spec,
    oracle_logits,
    randomize,
    save_oracle,
)
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import (
    GEMMA4,
    LENGTHS,
    LLAMA3,
    MIXED,
    ROUTED,
    SIZES,
    UNIFIED,
    both_models,
    compare,
    compare_last_tokens,
    rope,
    tiny_config,
)

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 16,
}
STEP_VISION = {**VISION, "width": 32, "layers": 1, "heads": 2}
PIXTRAL = {**VISION, "model_type": "pixtral", "hidden_act": "silu"}
OTHER_VISION = {"Step3p7": STEP_VISION, "MistralLarge4": PIXTRAL}
OWN_VISION: dict[str, dict[str, Any]] = {
    "Llama4": {
        **{"intermediate_size": 128, "projector_input_dim": 28, "projector_output_dim": 28},
        "vision_output_dim": 28,
    }
}
SEES: dict[str, dict[str, Any]] = {
    "Gemma3": {"mm_tokens_per_image": 4},
    "Gemma4": {},
    "Gemma4Unified": {},
    "Glm5Next": {},
    "Llama4": {},
    "MistralLarge4": {},
    "Step3p7": {},
}
"""Those whose images are served too, and what that asks of their configs."""
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Step3p7": (
        "",
        "Step3p7Text",
        {
            **{"pad_token_id": 1, "head_dim": 8, "layer_types": MIXED, "sliding_window": 12},
            **{"num_sliding_attention_heads": 8, "query_pre_attn_scalar": 8},
            **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            **{"share_expert_dim": 20, "moe_router_scaling_factor": 1.5},
            **{"mlp_layer_types": ["dense", "sparse", "sparse"], "swiglu_limits": [0, 0, 0.3]},
            "swiglu_limits_shared": [0, 0.2, 0],
            "rope_parameters": {
                "full_attention": {**LLAMA3, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "Llama4": (
        "Llama4",
        "Llama4Text",
        {"head_dim": 8, "num_local_experts": 4, "attention_chunk_size": 16, **rope(**LLAMA3)},
    ),
    "Gemma4": (
        "Gemma4",
        "Gemma4Text",
        {**GEMMA4, "attention_k_eq_v": True, "pad_token_id": 1},
    ),
    "Gemma4Unified": (
        "Gemma4Unified",
        "Gemma4UnifiedText",
        {**UNIFIED, "attention_k_eq_v": True, "pad_token_id": 1},
    ),
    "Glm5Next": (
        "Glm5Next",
        "Glm5NextText",
        {
            **{**ROUTED, "n_group": 1, "topk_group": 1, "pad_token_id": 1, "num_hidden_layers": 4},
            **{"num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 24, "v_head_dim": 12},
            **{"qk_nope_head_dim": 10, "linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 3},
            **{"index_n_heads": 16, "index_head_dim": 12, "index_topk": 12, "index_kpool": 4},
            **{"swiglu_limit": 0.9, "rms_norm_eps": 0.01, "linear_conv_kernel_dim": 3},
            "layer_types": ["linear_attention", *["indexed_attention"] * 3],
            "indexer_types": ["full", "full", "shared", "full"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "MistralLarge4": (
        "",
        "MistralLarge4Text",
        {
            **{"num_key_value_heads": 6, "kv_lora_rank": 24, "v_head_dim": 12, "pad_token_id": 1},
            **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "n_routed_experts": 8},
            **{"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "num_hidden_layers": 6},
            **{"moe_intermediate_size": 24, "index_n_heads": 16, "index_head_dim": 12},
            **{"index_topk": 12, "rms_norm_eps": 0.01, "routed_scaling_factor": 1.3},
            "no_rope_layers": [1, 0, 1, 0, 1, 1],
            "kv_source_layers": [0, 1, 2, 1, 2, 2],
            "indexer_types": ["full", "full", "shared", "full", "shared", "shared"],
            "final_logit_softcapping": 5.0,
        },
    ),
    "Gemma3": (
        "Siglip",
        "Gemma3Text",
        {"head_dim": 8, "sliding_window": 9, "layer_types": MIXED},
    ),
}


def whole_oracle(name: str, folder: Path) -> Any:
    """A tiny random model with all its parts, saved in the folder."""
    vision, text, changes = CASES[name]
    config = getattr(transformers, f"{name}Config")(
        vision_config=getattr(transformers, f"{vision}VisionConfig")(
            **VISION | OWN_VISION.get(name, {})
        )
        if vision
        else OTHER_VISION[name],
        text_config=getattr(transformers, f"{text}Config")(**(SIZES | changes)),
        tie_word_embeddings=False,
        **SEES.get(name, {}),
    )
    config._attn_implementation = "eager"
    oracle = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    randomize(oracle)
    oracle.save_pretrained(folder)
    return oracle


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "Glm5Next" else name for name in CASES],
)
def test_text_has_the_logits_of_the_whole_model(name: str, tmp_path: Path) -> None:
    oracle = whole_oracle(name, tmp_path)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    ours = load_ours(model_spec(tmp_path))
    parts = [one.chosen for one in ours.decisions if one.field == "model.parts"]
    assert parts == ["text, image" if name in SEES else "text"]
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(oracle, rows), 1e-4)


@pytest.mark.parametrize(
    "name", ["MistralLarge4", pytest.param("Glm5Next", marks=pytest.mark.slow)]
)
def test_last_tokens_alone_have_the_logits_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """Layers behind the last that writes a cache read a choice that was made for fewer tokens."""
    oracle = whole_oracle(name, tmp_path)
    compare_last_tokens(both_models(tmp_path, oracle))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kv_source_layers": [0, 1, 2, 1, 0, 4]}, "kv_source_layers .* for layer 5"),
        ({"kv_source_layers": [0, 1, 2, 2, 2, 2]}, "kv_source_layers .* that rotates as it does"),
        ({"kv_source_layers": [0, 1]}, "kv_source_layers"),
        ({"no_rope_layers": [1, 2, 1, 1, 1, 1]}, "no_rope_layers .* 6 of 0, 1"),
    ],
)
def test_what_mistral_large_4_cannot_be_is_said(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole_oracle("MistralLarge4", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadraceError, match=message):
        load_ours(model_spec(tmp_path))


def test_step_3_5_reads_the_keys_of_its_published_config(tmp_path: Path) -> None:
    """MOD-01: lists by layer, heads of their own for windows, layers with experts in one text."""
    changes = CASES["Step3p7"][2]
    config = transformers.Step3p7Config(
        vision_config=STEP_VISION, text_config=transformers.Step3p7TextConfig(**(SIZES | changes))
    )
    config._attn_implementation = "eager"
    oracle = transformers.Step3p7ForConditionalGeneration(config).eval()
    randomize(oracle)
    oracle.save_pretrained(tmp_path)
    full = {key: changes["rope_parameters"]["full_attention"][key] for key in LLAMA3}
    kept = {key: changes[key] for key in ("head_dim", "layer_types", "sliding_window")}
    kept |= {key: changes[key] for key in ("moe_intermediate_size", "share_expert_dim")}
    kept |= {key: changes[key] for key in ("swiglu_limits", "swiglu_limits_shared")}
    published = {
        **{**SIZES, **kept, "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5"},
        **{"num_attention_groups": 2, "num_key_value_heads": None, "rms_norm_eps": 1e-5},
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 8,
        },
        **{"rope_theta": [100.0, 500.0, 100.0], "partial_rotary_factors": [1.0, 0.5, 1.0]},
        **{"rope_scaling": full, "yarn_only_types": ["full_attention"]},
        **{"moe_layers_enum": "1,2", "moe_num_experts": 6, "moe_top_k": 2},
        "moe_router_scaling_factor": 1.5,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    ours = load_ours(model_spec(tmp_path))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(oracle, rows), 1e-4)


def test_kimi_k25_has_the_logits_of_its_deepseek_text_model(tmp_path: Path) -> None:
    """MOD-02. The names are those of the published checkpoint, which transformers does not write."""
    oracle = save_oracle(tiny_config("deepseek-v3"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "kimi_k2"}
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    got = teacher_forced(
        load_ours(model_spec(tmp_path)), rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32
    )
    compare(got, oracle_logits(oracle, rows), 1e-4)


def test_llama_3_2_vision_has_the_logits_of_its_text_model(tmp_path: Path) -> None:
    """As it is published: its layers of cross-attention are there, and read nothing without an image."""
    oracle = save_oracle(tiny_config("mllama"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(".layers.1.cross_attn." in name for name in tensors)
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors["vision_model.patch_embedding.weight"] = torch.zeros(2, 2)
    tensors["multi_modal_projector.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["MllamaForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    got = teacher_forced(
        load_ours(model_spec(tmp_path)), rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32
    )
    compare(got, oracle_logits(oracle, rows), 1e-4)


def test_rows_of_inkling_s_head_behind_its_tokens_are_never_chosen(tmp_path: Path) -> None:
    oracle = save_oracle(tiny_config("inkling"), tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    whole["text_config"]["unpadded_vocab_size"] = 90
    (tmp_path / "config.json").write_text(json.dumps(whole))
    rows, ours = random_rows(90, (7,)), load_ours(model_spec(tmp_path))
    assert ours.argmax is None and ours.top_candidates is None
    (got,) = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    assert torch.isneginf(got[:, 90:]).all()
    compare([got[:, :90]], [oracle_logits(oracle, rows)[0][:, :90]], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scales", [torch.uint8, torch.float8_e8m0fnu])
def test_inkling_2_s_experts_may_be_e4m3_though_its_config_does_not_say_it(
    scales: torch.dtype, tmp_path: Path
) -> None:
    config = tiny_config("inkling-2")
    config.hidden_size = config.moe_intermediate_size = 32
    save_oracle(config, tmp_path)
    rows = random_rows(97, LENGTHS)
    plain, stored = load_file(tmp_path / "model.safetensors"), {}
    for name, tensor in plain.items():
        if not name.endswith(("w13_weight", "w2_weight")):
            continue
        groups = tensor.unflatten(-1, (-1, 32))
        exponent = (groups.abs().amax(-1) / 448).log2().ceil()
        values = (groups / exponent.exp2()[..., None]).to(torch.float8_e4m3fn)
        stored[name] = values.flatten(-2)
        byte = (exponent + 127).to(torch.uint8)
        stored[f"{name}_scale"] = byte if scales == torch.uint8 else byte.view(scales)
        plain[name] = (values.float() * exponent.exp2()[..., None]).flatten(-2)
    logits = []
    for tensors in (plain, plain | stored):
        save_file(tensors, tmp_path / "model.safetensors")
        ours, _ = load_model(
            model_spec(tmp_path),
            mesh=Mesh(),
            device=torch.device("cpu"),
            block_tokens=BLOCK_TOKENS,
        )
        logits.append(teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32))
    compare(*logits, 1e-5)


def test_emu3_has_the_logits_of_its_text_model(tmp_path: Path) -> None:
    """Beside the coder of images, which is not read."""
    oracle = save_oracle(tiny_config("emu3"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {
        name.replace("model.", "model.text_model.", 1): tensor for name, tensor in tensors.items()
    }
    tensors["model.vqmodel.encoder.conv_in.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Emu3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    got = teacher_forced(
        load_ours(model_spec(tmp_path)), rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32
    )
    compare(got, oracle_logits(oracle, rows), 1e-4)


def test_gemma_3n_has_the_logits_of_its_text_model(tmp_path: Path) -> None:
    """As it is published: beside vision and audio, with keys and values that upper layers do not
    read, in the older spelling of ropes."""
    oracle = save_oracle(tiny_config("gemma3n"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    keys = tensors["model.language_model.layers.0.self_attn.k_proj.weight"]
    tensors["model.language_model.layers.4.self_attn.k_proj.weight"] = torch.zeros_like(keys)
    for part in ("vision_tower", "audio_tower", "embed_vision"):
        tensors[f"model.{part}.proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "gemma3n_text"}
    ropes = text.pop("rope_parameters")
    text |= {"rope_theta": ropes["full_attention"]["rope_theta"], "rope_scaling": None}
    text |= {"rope_local_base_freq": ropes["sliding_attention"]["rope_theta"]}
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    got = teacher_forced(
        load_ours(model_spec(tmp_path)), rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32
    )
    compare(got, oracle_logits(oracle, rows), 1e-4)

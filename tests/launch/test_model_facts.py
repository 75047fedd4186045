"""Facts follow from config.json, generation_config.json and file headers alone, and wrong ones are refused by key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.base.errors import CheckpointError
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import (
    ModelFacts,
    describe,
    read_model_facts,
)
from headrace.launch.stored_weights import Stored, safetensors_stored
from tests.back.models.load.checkpoints import MODELS, save, tiny_model, write_gguf

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
    "eos_token_id": 7,
}
LOCATED = LocatedModel(path=Path("/m"), name="m", format="safetensors")


def facts(generation: dict[str, Any] | None = None, /, **changes: Any) -> ModelFacts:
    return describe(LOCATED, {**CONFIG, **changes}, generation or {}, None)


def test_sizes_are_read() -> None:
    found = facts()
    assert (found.hidden_size, found.num_layers, found.num_heads) == (64, 3, 8)
    assert (found.num_kv_heads, found.head_dim, found.logits_width) == (2, 8, 100)
    assert (found.dtype, found.family, found.architecture) == (
        "float16",
        "llama",
        "LlamaForCausalLM",
    )
    assert found.kv_bytes_per_token == 2 * 3 * 2 * 8 * 2


def test_the_heads_of_whole_caches_are_known_or_left_to_the_family() -> None:
    assert facts().cache_heads == (2,)
    assert facts(num_key_value_heads=None).cache_heads == (8,)
    latents = facts(architectures=["DeepseekV3ForCausalLM"], kv_lora_rank=24, qk_rope_head_dim=6)
    assert latents.cache_heads == (1,)
    assert facts(num_key_value_heads_per_layer=[2, 0, 4]).cache_heads == (2, 4)
    assert facts(num_global_key_value_heads=1).cache_heads == ()
    assert facts(architectures=["XlmRobertaModel"]).cache_heads == ()


def test_kv_bytes_are_those_of_what_the_family_keeps() -> None:
    falcon = {"architectures": ["FalconForCausalLM"], "num_key_value_heads": None}
    assert facts(**falcon).kv_bytes_per_token == 2 * 3 * 1 * 8 * 2
    assert facts(**falcon, multi_query=False).kv_bytes_per_token == 2 * 3 * 8 * 8 * 2
    grouped = facts(**falcon, new_decoder_architecture=True, num_kv_heads=4)
    assert (grouped.num_kv_heads, grouped.kv_bytes_per_token) == (4, 2 * 3 * 4 * 8 * 2)
    latent = {"kv_lora_rank": 24, "qk_rope_head_dim": 6, "num_key_value_heads": 8}
    deepseek = facts(**latent, architectures=["DeepseekV3ForCausalLM"])
    assert deepseek.kv_bytes_per_token == 3 * (24 + 6) * 2
    sparse = facts(**latent, index_head_dim=10, architectures=["DeepseekV32ForCausalLM"])
    assert sparse.kv_bytes_per_token == 3 * (24 + 6 + 10) * 2
    glm = {**latent, "index_head_dim": 10, "architectures": ["GlmMoeDsaForCausalLM"]}
    types = ["full", "shared", "shared"]
    assert facts(**glm, indexer_types=types).kv_bytes_per_token == (3 * (24 + 6) + 10) * 2
    assert facts(**glm, index_topk_freq=2).kv_bytes_per_token == (3 * (24 + 6) + 2 * 10) * 2
    twice = facts(**latent, architectures=["LongcatFlashForCausalLM"])
    assert twice.kv_bytes_per_token == 2 * 3 * (24 + 6) * 2


def test_models_without_attention_state_neither_heads_nor_a_longest_text() -> None:
    changes = {"num_attention_heads": None, "max_position_embeddings": None}
    found = facts(**changes, architectures=["MambaForCausalLM"])
    assert (found.max_model_len, found.windows) == (131_072, (0, 0, 0))
    with pytest.raises(CheckpointError, match="num_attention_heads"):
        facts(**changes)


def test_layers_that_keep_a_state_have_no_cache_per_token() -> None:
    kinds = ["mamba", "attention", "linear_attention"]
    hybrid = facts(architectures=["GraniteMoeHybridForCausalLM"], layer_types=kinds)
    assert hybrid.windows == (0, None, 0)
    bamba = facts(architectures=["BambaForCausalLM"], attn_layer_indices=[2])
    assert bamba.windows == (0, 0, None)
    listed = facts(num_hidden_layers=None, layers_block_type=kinds)
    assert listed.num_layers == 3


def test_generation_config_decides_the_end_of_text_where_it_names_one() -> None:
    assert facts().eos_ids == (7,)
    assert facts({"eos_token_id": [8, 9]}).eos_ids == (8, 9)
    assert facts(eos_token_id=None).eos_ids == ()
    assert facts({"temperature": 0.6}).generation_defaults == {"temperature": 0.6}


def test_an_end_of_text_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"eos_token_id is 100 .*less than 100"):
        facts(eos_token_id=100)


def test_yarn_extends_the_context_and_other_scalings_state_it_themselves() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert facts(rope_scaling=yarn).max_model_len == 2048
    assert facts(rope_scaling=yarn, max_position_embeddings=4096).max_model_len == 4096
    assert facts(rope_scaling={"rope_type": "llama3", "factor": 8.0}).max_model_len == 512
    assert facts(rope_parameters={"rope_theta": 1e4}).max_model_len == 512


def test_windows_are_listed_layer_by_layer() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert facts(layer_types=kinds, sliding_window=8).windows == (8, None, 8)
    assert facts(sliding_window=8).windows == (None, None, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("num_hidden_layers", 10**9),
        ("vocab_size", None),
        ("torch_dtype", "float8"),
        ("architectures", None),
        ("architectures", [3]),
        ("rope_scaling", "yarn"),
    ],
)
def test_a_wrong_key_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json.*{key}|/m: {key}"):
        facts(**{key: value})


def test_code_in_the_checkpoint_is_refused_only_if_the_model_would_need_it() -> None:
    remote = {"AutoModelForCausalLM": "modeling_evil.Evil"}  # P13
    assert facts(auto_map=remote).family == "llama"
    with pytest.raises(CheckpointError, match=r"auto_map.*never run"):
        facts(architectures=["EvilForCausalLM"], auto_map=remote)
    assert facts(architectures=["OtherForCausalLM"]).family == "transformers"


@pytest.mark.parametrize("inside", [None, "text_config"])
def test_weights_in_a_format_that_is_not_read_are_refused_by_key(inside: str | None) -> None:
    quantized = {"quantization_config": {"quant_method": "quip", "bits": 4}}
    with pytest.raises(
        CheckpointError, match=r"quantization_config: quant_method is 'quip'"
    ) as seen:
        facts(**({inside: {**CONFIG, **quantized}} if inside else quantized))
    assert seen.value.field == "quant_method"
    facts(quantization_config=None)
    dummy = LocatedModel(path=Path("/m"), name="m", format="dummy")
    assert describe(dummy, {**CONFIG, **quantized}, {}, None).num_layers == 3


def test_stored_tensors_count_where_they_are_known() -> None:
    stored = Stored(num_params=5, num_bytes=20, dtype="float32")
    found = describe(LOCATED, {**CONFIG, "torch_dtype": None}, {}, stored)
    assert (found.num_params, found.weight_bytes, found.dtype) == (5, 20, "float32")


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3"])
def test_counting_by_sizes_comes_close_to_counting_tensors(
    architecture: str, tmp_path: Path
) -> None:
    folder = save(tiny_model(architecture), tmp_path)
    real = read_model_facts(LocatedModel(path=folder, name="m", format="safetensors"))
    guess = read_model_facts(LocatedModel(path=folder, name="m", format="dummy"))
    assert real.weight_bytes == 4 * real.num_params
    assert abs(guess.num_params - real.num_params) < 0.01 * real.num_params


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_a_gguf_file_has_the_facts_of_its_safetensors(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    folder = save(model, tmp_path / "hf")
    one = read_model_facts(LocatedModel(path=folder, name="m", format="safetensors"))
    path = write_gguf(tmp_path / "m.gguf", architecture, model)
    two = read_model_facts(LocatedModel(path=path, name="m", format="gguf"))
    for field in ("family", "dtype", "max_model_len", "logits_width", "eos_ids", "num_params"):
        assert getattr(one, field) == getattr(two, field), field
    for field in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "kv_bytes_per_token"):
        assert getattr(one, field) == getattr(two, field), field


def test_a_gguf_file_brings_its_template_and_sampling_defaults(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        writer.add_chat_template("{{ messages }}")
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), extra=extra)
    found = read_model_facts(LocatedModel(path=path, name="m", format="gguf"))
    assert found.chat_template == "{{ messages }}"
    assert found.generation_defaults == {"temperature": 0.5, "top_k": 20}


def test_no_torch_is_needed() -> None:
    script = (
        "import sys\nimport headrace.launch.model_facts\nassert 'torch' not in sys.modules\n"
        "assert 'huggingface_hub' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_weights_that_stay_quantized_count_as_they_are_stored(tmp_path: Path) -> None:
    """gpt-oss's experts, and what kernels' scales take more; a format without kernels counts as floats."""
    shape = 2, 64, 2
    tensors = {
        "m.experts.down_proj_blocks": torch.zeros(*shape, 16, dtype=torch.uint8),
        "m.experts.down_proj_scales": torch.zeros(shape, dtype=torch.uint8),
        "m.norm.weight": torch.zeros(8, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = safetensors_stored(tmp_path, {"quantization_config": {"quant_method": "mxfp4"}})
    assert found.num_params == 2 * 64 * 64 + 8
    assert found.num_bytes == 16 + int(2 * 64 * 2 * 17 * 1.07)

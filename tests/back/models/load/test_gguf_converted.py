"""GGUF files whose names the `gguf` library's table lacks, or whose converter changes what checkpoints hold: the logits
of the oracles of their checkpoints. QNT-15."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from headrace.base.errors import CheckpointError
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import ModelFacts, read_model_facts
from tests.back.models.load.checkpoints import _finish, spec_of
from tests.back.models.load.test_gguf_mixtures import load
from tests.back.models.load.test_gguf_published import SHAPE, stacked
from tests.models.oracle import oracle_logits, randomize, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import LENGTHS, SIZES, compare, tiny_config
from tests.models.test_published_names import publish
from tests.models.test_wrappers import CASES, STEP_VISION
from tests.references.small_decoders import SMALL

Tensors = dict[str, torch.Tensor]
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
BLOCK = {
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    **{"self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm"},
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
}


def of_experts(experts: str, shared: str) -> dict[str, str]:
    names = {f"{experts}.{one}_proj": f"ffn_{one}_exps" for one in ("gate", "up", "down")}
    return names | {f"{shared}.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")}


def named(tensors: Tensors, names: Mapping[str, str], layers: str = "model.layers") -> Tensors:
    """Under the names of the file; `names` of what a layer has, without the ending unless it is said."""
    found = {}
    for name, tensor in stacked(tensors).items():
        match = re.fullmatch(rf"{layers}\.(\d+)\.(.*)", name)
        if match is None:
            found[TOP.get(name, name)] = tensor
            continue
        whole, (stem, _, ending) = match[2], match[2].rpartition(".")
        stored = names.get(whole) or f"{names[stem]}.{ending}"
        found[f"blk.{match[1]}.{stored}"] = tensor
    return found


def write(
    path: Path, architecture: str, tensors: Tensors, metadata: Mapping[str, Any]
) -> ModelFacts:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"block_count": 3, **metadata}.items():
        add = {list: writer.add_array, float: writer.add_float32, int: writer.add_uint32}
        add |= {bool: writer.add_bool, str: writer.add_string}
        add[type(value)](f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        wide = tensor.int() if tensor.dtype == torch.int64 else tensor.float()
        writer.add_tensor(name, np.ascontiguousarray(wide.numpy()))
    _finish(writer)
    return read_model_facts(LocatedModel(path=path, name="m", format="gguf"))


def logits_of(path: Path, facts: ModelFacts) -> tuple[list[list[int]], list[torch.Tensor]]:
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    model, _ = load(spec_of(path, facts.config, family=facts.family, format="gguf"))
    return rows, teacher_forced(model, rows, block_tokens=16, dtype=torch.float32)


HUNYUAN: dict[str, Any] = {
    **SHAPE,
    **{"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 24},
    **{"expert_shared_feed_forward_length": 48, "expert_weights_scale": 1.4},
    **{"attention.key_length": 8, "attention.value_length": 8, "nextn_predict_layers": 1},
    **{"attention.layer_norm_rms_epsilon": 1e-5, "block_count": 4, "expert_weights_norm": True},
}


def hunyuan(folder: Path) -> tuple[Any, Tensors]:
    """The oracle and its tensors, with one of a layer that only drafts; the bias has no ending."""
    config = tiny_config("hy-v3")
    config.update(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "num_experts": 6}
    )
    config.update({"num_experts_per_tok": 2, "moe_intermediate_size": 24, "rms_norm_eps": 1e-5})
    oracle = save_oracle(config, folder)
    names = BLOCK | of_experts("mlp.experts", "mlp.shared_mlp")
    names |= {"mlp.router.gate": "ffn_gate_inp", "mlp.expert_bias": "exp_probs_b"}
    tensors = named(load_file(folder / "model.safetensors"), names)
    return oracle, tensors | {"blk.3.nextn.enorm.weight": torch.ones(48)}


def test_hunyuan_3_answers_as_its_oracle(tmp_path: Path) -> None:
    oracle, tensors = hunyuan(tmp_path)
    facts = write(tmp_path / "m.gguf", "hy_v3", tensors, HUNYUAN)
    rows, got = logits_of(tmp_path / "m.gguf", facts)
    compare(got, oracle_logits(oracle, rows), 1e-4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_gating_func", 1),
        ("expert_weights_norm", False),
        ("expert_shared_feed_forward_length", 30),
    ],
)
def test_another_router_of_hunyuan_3_is_refused_by_key(
    key: str, value: Any, tmp_path: Path
) -> None:
    _, tensors = hunyuan(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path / "m.gguf", "hy_v3", tensors, HUNYUAN | {key: value})
    assert caught.value.field == f"hy_v3.{key}"


def step_names() -> dict[str, str]:
    names = BLOCK | of_experts("moe", "share_expert") | {"moe.gate": "ffn_gate_inp"}
    return names | {"moe.router_bias": "exp_probs_b.bias", "self_attn.g_proj": "attn_gate"}


def divisors(rope: Mapping[str, Any], turned: int) -> Iterator[float]:
    """Of llama 3's scaling (Grattafiori et al. 2024), frequency by frequency."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for pair in range(turned // 2):
        length = 2 * np.pi * rope["rope_theta"] ** (2 * pair / turned)
        turns = rope["original_max_position_embeddings"] / length
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        yield 1 / ((1 - smooth) / rope["factor"] + smooth)


def test_step_3_5_answers_as_its_oracle(tmp_path: Path) -> None:
    """Norms are stored with 1, divisors of frequencies beside the weights, lists go on with a layer that drafts."""
    changes = CASES["Step3p7"][2]
    config = transformers.Step3p7Config(
        vision_config=STEP_VISION, text_config=transformers.Step3p7TextConfig(**(SIZES | changes))
    )
    config._attn_implementation = "eager"
    oracle = transformers.Step3p7ForConditionalGeneration(config).eval()
    randomize(oracle)
    oracle.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    texts = {name: one for name, one in tensors.items() if name.startswith(("model.", "lm_head"))}
    stored = {
        name: one + float(name.endswith("norm.weight"))
        for name, one in named(texts, step_names()).items()
    }
    rope = changes["rope_parameters"]["full_attention"]
    factors = torch.tensor([*divisors(rope, 4), 1.0, 1.0])
    slides = [kind == "sliding_attention" for kind in changes["layer_types"]]
    heads = [8 if one else 6 for one in slides]
    stated = {
        **SHAPE,
        **{"attention.head_count": [*heads, 8], "attention.head_count_kv": [2, 2, 2, 2]},
        **{"attention.sliding_window": 12, "attention.sliding_window_pattern": [*slides, True]},
        **{"attention.key_length": 8, "attention.value_length": 8, "rope.freq_base_swa": 100.0},
        **{"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 24},
        **{"expert_shared_feed_forward_length": 20, "expert_weights_scale": 1.5},
        **{"swiglu_clamp_exp": [0.0, 0.0, 0.3, 0.0], "swiglu_clamp_shexp": [0.0, 0.2, 0.0, 0.0]},
        **{"attention.layer_norm_rms_epsilon": 1e-5, "block_count": 4, "nextn_predict_layers": 1},
    }
    stored |= {"rope_freqs.weight": factors, "blk.3.nextn.enorm.weight": torch.ones(48)}
    facts = write(tmp_path / "m.gguf", "step35", stored, stated)
    rows, got = logits_of(tmp_path / "m.gguf", facts)
    compare(got, oracle_logits(oracle, rows), 1e-4)


def test_the_text_part_of_deepseek_ocr_answers_as_its_oracle(tmp_path: Path) -> None:
    """Its rows are not permuted, as those of the first DeepSeek-MoE are; it states that nothing is rotated apart."""
    oracle = publish("deepseek-moe", tmp_path)
    names = BLOCK | of_experts("mlp.experts", "mlp.shared_experts") | {"mlp.gate": "ffn_gate_inp"}
    stated = {
        **{**SHAPE, "expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 80},
        **{"expert_shared_count": 0, "leading_dense_block_count": 0, "expert_weights_norm": True},
        **{"attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 0},
    }
    tensors = named(load_file(tmp_path / "model.safetensors"), names)
    facts = write(tmp_path / "m.gguf", "deepseek2-ocr", tensors, stated)
    rows, got = logits_of(tmp_path / "m.gguf", facts)
    compare(got, oracle_logits(oracle, rows), 1e-4)
    with pytest.raises(CheckpointError) as caught:
        more = {"attention.sliding_window": 7}
        write(tmp_path / "windows.gguf", "deepseek2-ocr", tensors, stated | more)
    assert caught.value.field == "deepseek2-ocr.attention.sliding_window"


def test_talkie_answers_as_its_reference(tmp_path: Path) -> None:
    """Halves of queries and keys change their signs, so that rotations go forward; the factor of the head is stated."""
    reference, config = SMALL["talkie"]
    weights = reference.tensors(config)
    names = {f"attn.attn_{one}": f"attn_{one[0]}" for one in ("query", "key", "value")}
    names |= {"attn.attn_resid": "attn_output", "attn.head_gain.head_g": "attn_q_norm.weight"}
    names |= {"attn_gain.a_g": "attn_output.scale", "mlp_gain.a_g": "ffn_down.scale"}
    names |= {"mlp.mlp_gate": "ffn_gate", "mlp.mlp_linear": "ffn_up", "mlp.mlp_resid": "ffn_down"}
    names["embed_skip.a_g"] = "layer_output_scale.weight"
    scale = float(weights["lm_head_gain.w_g"])
    kept = {name: one for name, one in weights.items() if name != "lm_head_gain.w_g"}
    stored = {}
    for name, one in named(kept, names, layers="blocks").items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            first, second = one.unflatten(0, (-1, 8)).chunk(2, 1)
            one = torch.cat((first, -second), 1).flatten(0, 1)
        stored[name] = one[:, None] if name.endswith("attn_q_norm.weight") else one
    stored["token_embd.weight"] = stored.pop("embed.weight")
    stored["output.weight"] = stored.pop("lm_head")
    heads = config["n_head"]
    stated = {
        **{"context_length": 128, "embedding_length": 48, "feed_forward_length": 128},
        **{"attention.head_count": heads, "attention.head_count_kv": heads, "logit_scale": scale},
        **{"attention.key_length": 8, "attention.value_length": 8, "rope.freq_base": 500.0},
        "attention.layer_norm_rms_epsilon": float(torch.finfo(torch.float32).eps),
    }
    facts = write(tmp_path / "m.gguf", "talkie", stored, stated)
    rows, got = logits_of(tmp_path / "m.gguf", facts)
    compare(got, [reference.logits(config, weights, row) for row in rows], 1e-4)


V4 = {
    **{"attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "attn.attn_sink": "attn_sinks.weight"},
    **{"attn.wq_a": "attn_q_a", "attn.wq_b": "attn_q_b", "attn.q_norm": "attn_q_a_norm"},
    **{"attn.wkv": "attn_kv", "attn.norm": "attn_kv_a_norm"},
    **{"attn.wo_a": "attn_output_a", "attn.wo_b": "attn_output_b"},
    **{
        f"attn.{place}compressor.{one}": f"{name}_compressor_{stored}"
        for place, name in (("", "attn"), ("indexer.", "indexer"))
        for one, stored in (
            *(("wkv", "kv"), ("wgate", "gate"), ("norm", "norm"), ("ape", "ape.weight")),
        )
    },
    "attn.indexer.weights_proj": "indexer.proj",
    "attn.indexer.wq_b": "indexer.attn_q_b",
    **{
        f"hc_{part}_{one}": f"hc_{part}_{one}.weight"
        for part in ("attn", "ffn")
        for one in ("fn", "base", "scale")
    },
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate": "ffn_gate_inp",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    **{
        f"ffn.{place}.{one}": f"ffn_{part}_{ending}"
        for place, ending in (("experts", "exps"), ("shared_experts", "shexp"))
        for one, part in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    },
}


def test_deepseek_4_answers_as_its_oracle(tmp_path: Path) -> None:
    """The table of experts by token lies as whole numbers; lists of ratios may go on behind the last layer."""
    config = tiny_config("deepseek-v4")
    config.update(
        {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}}
    )
    oracle = save_oracle(config, tmp_path)
    stored = named(load_file(tmp_path / "model.safetensors"), V4)
    stored["output.weight"] = stored.pop("head.weight")
    for one in ("fn", "base", "scale"):
        stored[f"output_hc_{one}.weight"] = stored.pop(f"model.hc_head.hc_{one}")
    rope = config.rope_parameters["compress"]
    stated = {
        **{"block_count": 4, "context_length": 128, "embedding_length": 64},
        **{"attention.head_count": 8, "attention.head_count_kv": 1, "feed_forward_length": 80},
        **{"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 8},
        **{"attention.q_lora_rank": 64, "attention.sliding_window": 12, "rope.freq_base": 500.0},
        **{"attention.output_group_count": 2, "attention.output_lora_rank": 64},
        **{"attention.compress_ratios": [0, 4, 128, 4, 0], "attention.indexer.head_count": 16},
        **{"attention.compress_rope_freq_base": 300.0, "attention.indexer.key_length": 12},
        **{"attention.indexer.top_k": 3, "hyper_connection.count": 3, "hash_layer_count": 1},
        **{"hyper_connection.sinkhorn_iterations": 4, "hyper_connection.epsilon": 1e-6},
        **{"attention.layer_norm_rms_epsilon": 1e-6, "expert_count": 6, "expert_used_count": 2},
        **{"expert_feed_forward_length": config.moe_intermediate_size, "expert_shared_count": 1},
        **{"expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": 4},
        **{"swiglu_clamp_exp": [0.9] * 4, "swiglu_clamp_shexp": [0.9] * 4},
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }
    stated["rope.scaling.type"] = "yarn"
    facts = write(tmp_path / "m.gguf", "deepseek4", stored, stated)
    rows, got = logits_of(tmp_path / "m.gguf", facts)
    compare(got, oracle_logits(oracle, rows), 1e-4)
    with pytest.raises(CheckpointError) as caught:
        more = {"swiglu_clamp_shexp": [0.5] * 4}
        write(tmp_path / "unlike.gguf", "deepseek4", stored, stated | more)
    assert caught.value.field == "deepseek4.swiglu_clamp_exp"

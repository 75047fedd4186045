"""Families that transformers has no class for, but whose layers are those of one it has: under the names and keys of
their published checkpoints they give its logits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.back.models.published_keys import in_common_keys
from headrace.base.errors import CheckpointError
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import describe
from tests.models.oracle import BLOCK_TOKENS, load_ours, model_spec, oracle_logits, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_parity import (
    CASES,
    LATENT,
    LENGTHS,
    ROUTED,
    SIZES,
    YARN,
    compare,
    rope,
)
from tests.references import jais

Tensors = dict[str, torch.Tensor]
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8


def renamed(tensors: Tensors, *rules: tuple[str, str]) -> Tensors:
    """By the patterns, one after the other."""
    found = {}
    for name, tensor in tensors.items():
        for pattern, other in rules:
            name = re.sub(pattern, other, name)
        found[name] = tensor
    return found


def merged(
    tensors: Tensors, module: str, name: str, *, by_group: bool, biased: bool = False
) -> Tensors:
    """Query, key and value of each attention in one tensor, one after the other or KV head by KV head."""
    kept = dict(tensors)
    for query in [one for one in tensors if one.endswith(f"{module}.q_proj.bias") and biased]:
        parts = [kept.pop(query.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        kept[query.replace("q_proj", name)] = torch.cat(parts)
    for query in [one for one in tensors if one.endswith(f"{module}.q_proj.weight")]:
        parts = [kept.pop(query.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        if by_group:
            parts = [part.view(KV_HEADS, -1, part.shape[1]) for part in parts]
        joined = torch.cat(parts, dim=1 if by_group else 0).flatten(0, -2)
        kept[query.replace("q_proj", name)] = joined.contiguous()
    return kept


def internlm2(tensors: Tensors) -> Tensors:
    return renamed(
        merged(tensors, "self_attn", "wqkv", by_group=True),
        ("self_attn", "attention"),
        ("o_proj", "wo"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("embed_tokens", "tok_embeddings"),
        ("lm_head", "output"),
    )


def exaone(tensors: Tensors) -> Tensors:
    return renamed(
        tensors,
        (r"model\.layers", "transformer.h"),
        (r"model\.norm", "transformer.ln_f"),
        (r"model\.embed_tokens", "transformer.wte"),
        ("self_attn", "attn.attention"),
        ("o_proj", "out_proj"),
        ("gate_proj", "c_fc_0"),
        ("up_proj", "c_fc_1"),
        ("down_proj", "c_proj"),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
    )


def bailing(tensors: Tensors) -> Tensors:
    return renamed(
        merged(tensors, "self_attn", "query_key_value", by_group=False),
        ("self_attn", "attention"),
        ("o_proj", "dense"),
        ("q_norm", "query_layernorm"),
        ("k_norm", "key_layernorm"),
        ("e_score_correction_bias", "expert_bias"),
        ("block_sparse_moe", "mlp"),
        (r"experts\.(\d+)\.w1", r"experts.\1.gate_proj"),
        (r"experts\.(\d+)\.w3", r"experts.\1.up_proj"),
        (r"experts\.(\d+)\.w2", r"experts.\1.down_proj"),
        ("embed_tokens", "word_embeddings"),
    )


def first_experts(tensors: Tensors) -> Tensors:
    return renamed(
        tensors,
        ("block_sparse_moe", "mlp"),
        (r"experts\.(\d+)\.w1", r"experts.\1.gate_proj"),
        (r"experts\.(\d+)\.w3", r"experts.\1.up_proj"),
        (r"experts\.(\d+)\.w2", r"experts.\1.down_proj"),
    )


def chatglm(tensors: Tensors) -> Tensors:
    joined = merged(tensors, "self_attn", "query_key_value", by_group=False, biased=True)
    return renamed(
        joined,
        ("lm_head", "transformer.output_layer"),
        (r"model\.norm", "transformer.encoder.final_layernorm"),
        (r"model\.layers", "transformer.encoder.layers"),
        (r"model\.embed_tokens", "transformer.embedding.word_embeddings"),
        ("self_attn", "self_attention"),
        ("o_proj", "dense"),
        (r"mlp\.gate_up_proj", "mlp.dense_h_to_4h"),
        (r"mlp\.down_proj", "mlp.dense_4h_to_h"),
    )


def qwen(tensors: Tensors) -> Tensors:
    return renamed(
        merged(tensors, "self_attn", "c_attn", by_group=False, biased=True),
        (r"model\.layers", "transformer.h"),
        (r"model\.norm", "transformer.ln_f"),
        (r"model\.embed_tokens", "transformer.wte"),
        (r"mlp\.gate_proj", "mlp.w2"),
        (r"mlp\.up_proj", "mlp.w1"),
        (r"mlp\.down_proj", "mlp.c_proj"),
        ("o_proj", "c_proj"),
        ("self_attn", "attn"),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
    )


def kormo(tensors: Tensors) -> Tensors:
    return renamed(
        tensors,
        ("input_layernorm", "pre_attention_layernorm"),
        ("post_attention_layernorm", "pre_mlp_layernorm"),
    )


def with_image_experts(tensors: Tensors) -> Tensors:
    """InternLM 2's tensors beside MLPs of images."""
    kept = internlm2(tensors)
    further = {
        name.replace("feed_forward", "feed_forward_ve"): tensor + 1
        for name, tensor in kept.items()
        if "feed_forward" in name
    }
    return kept | further


def codeshell(tensors: Tensors) -> Tensors:
    return renamed(
        merged(tensors, "self_attn", "c_attn", by_group=False, biased=True),
        (r"model\.layers", "transformer.h"),
        (r"model\.norm", "transformer.ln_f"),
        (r"model\.embed_tokens", "transformer.wte"),
        ("o_proj", "c_proj"),
        ("self_attn", "attn"),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
    )


def hf_olmo(tensors: Tensors) -> Tensors:
    """Up and gate projections in one tensor, in this order."""
    kept = merged(tensors, "self_attn", "att_proj", by_group=False)
    for up in [name for name in kept if "up_proj" in name]:
        pair = kept.pop(up), kept.pop(up.replace("up_proj", "gate_proj"))
        kept[up.replace("up_proj", "ff_proj")] = torch.cat(pair)
    return renamed(
        kept,
        (r"model\.layers", "model.transformer.blocks"),
        (r"model\.embed_tokens", "model.transformer.wte"),
        (r"self_attn\.", ""),
        ("o_proj", "attn_out"),
        (r"mlp\.(ff_proj|down_proj)", r"\1"),
        ("down_proj", "ff_out"),
        ("lm_head", "model.transformer.ff_out"),
    )


def bitnet(tensors: Tensors) -> Tensors:
    return renamed(tensors, ("attn_sub_norm", "inner_attn_ln"), ("ffn_sub_norm", "ffn_layernorm"))


def fairseq2(tensors: Tensors) -> Tensors:
    """Rows of queries and keys such that neighbours turn."""
    turned = {}
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = tensor.view(-1, 2, HEAD_DIM // 2, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        turned[name] = tensor.contiguous()
    return renamed(
        turned,
        (r"model\.embed_tokens", "decoder_frontend.embed"),
        (r"model\.norm", "decoder.layer_norm"),
        (r"model\.", "decoder."),
        ("lm_head", "final_proj"),
        ("input_layernorm", "self_attn_layer_norm"),
        ("post_attention_layernorm", "ffn_layer_norm"),
        ("o_proj", "output_proj"),
        (r"mlp\.up_proj", "ffn.inner_proj"),
        (r"mlp\.down_proj", "ffn.output_proj"),
        (r"mlp\.gate_proj", "ffn.gate_proj"),
    )


UNBIASED = tuple(f"{part}_proj.bias" for part in ("q", "k", "v", "gate", "up"))
"""Of TeleChat, where what leads back has biases."""


def telechat(tensors: Tensors) -> Tensors:
    kept = {}
    for name, tensor in tensors.items():
        if name.endswith((*UNBIASED, "v_proj.weight")):
            continue
        if name.endswith("k_proj.weight"):
            halves = (tensor, tensors[name.replace("k_proj", "v_proj")])
            heads = [half.view(KV_HEADS, HEAD_DIM, -1) for half in halves]
            tensor = torch.cat(heads, dim=1).flatten(0, 1)
        kept[name] = tensor
    return renamed(
        kept,
        (r"^model\.", "transformer."),
        (r"\.layers\.", ".h."),
        ("self_attn", "self_attention"),
        (r"\.q_proj", ".query"),
        (r"\.k_proj", ".key_value"),
        (r"\.o_proj", ".dense"),
        ("embed_tokens", "word_embeddings"),
        (r"transformer\.norm", "transformer.ln_f"),
    )


def yi(tensors: Tensors) -> Tensors:
    return renamed(tensors, ("input_layernorm", "ln1"), ("post_attention_layernorm", "ln2"))


def with_drafter(tensors: Tensors) -> Tensors:
    return {**tensors, "model.mtp_layers.0.input_proj.weight": torch.zeros(2, 2)}


def as_they_are(tensors: Tensors) -> Tensors:
    return tensors


SHAPE = {key: SIZES[key] for key in SIZES if not key.endswith("_id")}
THETA = {"rope_theta": 500.0, "rms_norm_eps": 1e-6}
V2 = {
    **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_group": 4},
    **{"num_shared_experts": 2, "topk_group": 2, "routed_scaling_factor": 1.5},
    **{"first_k_dense_replace": 1, "score_function": "sigmoid", "use_qk_norm": True},
    **{"partial_rotary_factor": 0.5, "head_dim": 8, "rms_norm_eps": 1e-5},
}
PUBLISHED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], Callable]] = {
    "internlm2": ("InternLM2", "llama", rope(), {**THETA, "bias": False}, internlm2),
    "internlm3": (
        "InternLM3",
        "llama",
        {"attention_bias": True, "mlp_bias": True, **rope()},
        {**THETA, "bias": True, "qkv_bias": True},
        as_they_are,
    ),
    "exaone": (
        "Exaone",
        "llama",
        rope(),
        {"rope_theta": 500.0, "layer_norm_epsilon": 1e-6, "activation_function": "silu"},
        exaone,
    ),
    "minicpm": (
        "MiniCPM",
        "granite",
        {
            **{"embedding_multiplier": 3.0, "attention_multiplier": HEAD_DIM**-0.5},
            **{"residual_multiplier": 1.4 / 3**0.5, "logits_scaling": 3.0, **rope()},
        },
        {
            **{**THETA, "scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 16},
            "tie_word_embeddings": False,
        },
        as_they_are,
    ),
    "orion": (
        "Orion",
        "stablelm",
        {"use_qkv_bias": False, "qk_layernorm": False, **rope(partial_rotary_factor=1.0)},
        {"rope_theta": 500.0, "rms_norm_eps": 1e-5},
        as_they_are,
    ),
    "mimo": ("MiMo", "qwen2", rope(), THETA, with_drafter),
    "ling": (
        "BailingMoe",
        "mixtral",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": None, **rope()},
        {
            **{"rope_theta": 500.0, "rms_norm_eps": 1e-5, "num_experts": 6},
            **{"num_experts_per_tok": 3, "moe_intermediate_size": 80, "norm_topk_prob": True},
        },
        bailing,
    ),
    "internlm": (
        "InternLM",
        "llama",
        {"attention_bias": True, **rope()},
        {**THETA, "bias": True},
        as_they_are,
    ),
    "deepseek-moe": (
        "Deepseek",
        "mixtral",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": None, **rope()},
        {
            **{"rope_theta": 500.0, "rms_norm_eps": 1e-5, "n_routed_experts": 6},
            **{"num_experts_per_tok": 3, "moe_intermediate_size": 80, "norm_topk_prob": True},
        },
        first_experts,
    ),
    "chatglm": (
        "ChatGLMModel",
        "glm",
        {"head_dim": 8, "rms_norm_eps": 1e-5, **rope(partial_rotary_factor=0.5)},
        {
            **{"num_layers": 3, "ffn_hidden_size": 80, "layernorm_epsilon": 1e-5},
            **{"padded_vocab_size": 97, "seq_length": 128, "rope_ratio": 0.05},
            **{"multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 8},
            **{"add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True},
            **dict.fromkeys(("vocab_size", "intermediate_size", "num_key_value_heads")),
        },
        chatglm,
    ),
    "qwen": (
        "QWenLMHeadModel",
        "qwen2",
        {"num_key_value_heads": 6, "use_sliding_window": False, **rope()},
        {
            **{"intermediate_size": 160, "kv_channels": 8, "layer_norm_epsilon": 1e-6},
            **{"rotary_emb_base": 500.0, "rotary_pct": 1.0, "seq_length": 128, "no_bias": True},
            **{"use_logn_attn": True, "use_dynamic_ntk": True, "num_key_value_heads": None},
        },
        qwen,
    ),
    "yi": ("Yi", "llama", rope(), THETA, yi),
    "pangu": (
        "PanguEmbedded",
        "llama",
        {"attention_bias": True, **rope()},
        {**THETA, "bias": True},
        as_they_are,
    ),
    "stablelm-epoch": (
        "StableLMEpoch",
        "stablelm",
        {"use_qkv_bias": True, "qk_layernorm": False, **rope(partial_rotary_factor=0.5)},
        {"rope_theta": 500.0, "rope_pct": 0.5, "norm_eps": 1e-5, "use_qkv_bias": True},
        as_they_are,
    ),
    "refined-web": (
        "RW",
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False, "alibi": False},
        {
            **{"model_type": "RefinedWeb", "n_layer": 3, "n_head": 6, "n_head_kv": 2},
            **{"layer_norm_epsilon": 1e-5, "bias": False, "alibi": False, "parallel_attn": True},
        },
        as_they_are,
    ),
    "kormo": ("KORMo", "llama", rope(), THETA, kormo),
    "mimo-v2": (
        "MiMoV2",
        "mimo-v2-flash",
        {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
                for kind, theta in (("full_attention", 500.0), ("sliding_attention", 50.0))
            },
            "attention_value_scale": 0.6,
        },
        {
            **{"head_dim": 12, "v_head_dim": 8, "num_attention_heads": 8, "swa_head_dim": 12},
            **{"swa_num_key_value_heads": 4, "hybrid_layer_pattern": [1, 0, 1]},
            **{"moe_layer_freq": [0, 1, 1], "sliding_window": 11, "sliding_window_size": 11},
            **{"rope_theta": 500.0, "swa_rope_theta": 50.0, "partial_rotary_factor": 0.5},
            **{"layernorm_epsilon": 1e-5, "attention_value_scale": 0.6, "n_shared_experts": None},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16},
            **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
        },
        as_they_are,
    ),
    "param-2": (
        "Param2MoE",
        "glm4-moe",
        {},
        {
            **{key: value for key, value in V2.items() if key != "score_function"},
            **{"moe_shared_expert_intermediate_size": 32, "rope_theta": 500.0},
        },
        bailing,
    ),
    "ling-2": ("BailingMoeV2", "glm4-moe", {}, {**V2, "rope_theta": 500.0}, bailing),
    "internlm2-ve": ("InternLM2VE", "llama", rope(), {**THETA, "bias": False}, with_image_experts),
    "tele-flm": (
        "TeleFLM",
        "granite",
        {
            **{"embedding_multiplier": 3.0, "attention_multiplier": HEAD_DIM**-0.5},
            **{"residual_multiplier": 1.0, "logits_scaling": 2.5, **rope()},
        },
        {
            **{**THETA, "use_mup": True, "input_mult": 3.0, "output_mult": 2.0},
            "mup_scale_factor": 5.0,
        },
        as_they_are,
    ),
    "codeshell": (
        "CodeShell",
        "starcoder2",
        {"sliding_window": None, "tie_word_embeddings": False, **rope(rope_theta=1e4)},
        {
            **{"n_embd": 48, "n_layer": 3, "n_head": HEADS, "n_inner": 80, "n_positions": 128},
            **{"num_query_groups": KV_HEADS, "group_query_attention": True},
            **{"activation_function": "gelu_pytorch_tanh", "position_embedding_type": "rope"},
            **dict.fromkeys(("num_key_value_heads", "intermediate_size", "hidden_size")),
            **{"num_hidden_layers": 3, "num_attention_heads": HEADS, "hidden_size": 48},
        },
        codeshell,
    ),
    "hf-olmo": (
        "OLMo",
        "olmo",
        {"clip_qkv": 0.4, **rope(rope_theta=1e4)},
        {
            **{"d_model": 48, "n_layers": 3, "n_heads": HEADS, "n_kv_heads": KV_HEADS},
            **{"mlp_hidden_size": 160, "max_sequence_length": 128, "embedding_size": 97},
            **{"vocab_size": 90, "weight_tying": False, "rope": True, "include_bias": False},
            **{"layer_norm_with_affine": False, "clip_qkv": 0.4, "hidden_size": None},
            **dict.fromkeys(("intermediate_size", "num_hidden_layers", "num_attention_heads")),
        },
        hf_olmo,
    ),
    "bitnet-first": (
        "Bitnet",
        "bitnet",
        {"hidden_act": "silu", "rms_norm_eps": 1e-6, **rope()},
        {**THETA, "hidden_act": "silu", "tie_word_embeddings": False},
        bitnet,
    ),
    "fairseq2": ("Fairseq2Llama", "llama", rope(), THETA, fairseq2),
    "mistral-large-3": (
        "MistralLarge3",
        "deepseek-v3",
        {},
        {
            **{**LATENT, **ROUTED, "norm_topk_prob": True, "rms_norm_eps": 1e-6},
            **{"rope_theta": 500.0, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        },
        as_they_are,
    ),
}


def publish(name: str, folder: Path, **changes: Any) -> Any:
    """The oracle, whose checkpoint in `folder` has the names and keys of the family."""
    architecture, base, of_base, keys, rename = PUBLISHED[name]
    copied, keys_of_case = CASES[base]
    config = getattr(transformers, f"{copied}Config")
    oracle = save_oracle(config(**(SIZES | keys_of_case | of_base)), folder)
    save_file(rename(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    whole = architecture if architecture.endswith("Model") else f"{architecture}ForCausalLM"
    published = {**SHAPE, "architectures": [whole], **keys, **changes}
    (folder / "config.json").write_text(json.dumps(published))
    return oracle


SLOW = ("internlm2-ve", "bitnet-first", "mistral-large-3")
"""They differ by names alone from others here."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in PUBLISHED],
)
def test_a_published_checkpoint_has_the_logits_of_the_class_it_copies(
    name: str, tmp_path: Path
) -> None:
    oracle = publish(name, tmp_path)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    got = teacher_forced(
        load_ours(model_spec(tmp_path)), rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32
    )
    compare(got, oracle_logits(oracle, rows), 1e-4)


def with_alibi(oracle: Any, row: list[int]) -> torch.Tensor:
    """The logits of a Llama that does not rotate, its mask with the slopes of six heads (Press et al. 2022)."""
    oracle.model.rotary_emb.inv_freq.zero_()
    slopes_H11 = torch.tensor([2.0**-i for i in (2, 4, 6, 8, 1, 3)])[:, None, None]
    place = torch.arange(len(row))
    distance = (place[None] - place[:, None]).float()
    mask = (slopes_H11 * distance).masked_fill(distance > 0, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        return oracle(torch.tensor([row]), attention_mask=mask[None]).logits[0]


def test_telechat_has_the_logits_of_a_llama_with_few_biases(tmp_path: Path) -> None:
    """Its base is that of texts four times as long as those it was made for."""
    biased = {"attention_bias": True, "mlp_bias": True}
    theta = rope(rope_theta=1e4 * 7.0 ** (HEAD_DIM / (HEAD_DIM - 2)))
    oracle = save_oracle(transformers.LlamaConfig(**(SIZES | biased | theta)), tmp_path)
    for name, parameter in oracle.named_parameters():
        if name.endswith(UNBIASED):
            parameter.data.zero_()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(telechat(tensors), tmp_path / "model.safetensors")
    published = {
        **{"architectures": ["TeleChat2ForCausalLM"], "model_type": "telechat", "vocab_size": 97},
        **{"hidden_size": 48, "n_layer": 3, "n_head": HEADS, "num_key_value_heads": KV_HEADS},
        **{"ffn_hidden_size": 80, "n_inner": None, "layer_norm_epsilon": 1e-6, "logn": False},
        **{"base_seqlen": 32, "training_seqlen": 128, "tie_word_embeddings": False},
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    got = teacher_forced(
        load_ours(model_spec(tmp_path)), rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32
    )
    compare(got, oracle_logits(oracle, rows), 1e-4)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("size", ["7B", "13B"])
def test_baichuan_has_the_logits_of_a_llama_with_its_positions(
    version: int, size: str, tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(**(SIZES | {"num_key_value_heads": HEADS} | rope()))
    oracle = save_oracle(config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = merged(tensors, "self_attn", "W_pack", by_group=False)
    if version == 2:
        head = oracle.lm_head.weight
        head.data = torch.nn.functional.normalize(head.data)
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1.7
    save_file(tensors, tmp_path / "model.safetensors")
    published = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
    published |= {"architectures": ["BaichuanForCausalLM"], **THETA}
    published |= {"z_loss_weight": 0} if version == 2 else {}
    if size == "13B":
        published["model_max_length"] = published.pop("max_position_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(published))
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    got = teacher_forced(
        load_ours(model_spec(tmp_path)), rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32
    )
    if size == "7B":
        compare(got, oracle_logits(oracle, rows), 1e-4)
    else:
        compare(got, [with_alibi(oracle, row) for row in rows], 1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("minicpm", {"num_experts": 8}, "num_experts"),
        ("ling", {"norm_head": True}, "norm_head"),
        ("ling-2", {"score_function": "tanh"}, "score_function"),
        ("chatglm", {"vision_config": {"image_size": 224}}, "vision_config"),
        ("qwen", {"no_bias": False}, "no_bias"),
        ("qwen", {"intermediate_size": 161}, "intermediate_size"),
    ],
)
def test_what_is_not_built_is_refused_by_key(
    name: str, changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    publish(name, tmp_path, **changes)
    with pytest.raises(CheckpointError) as caught:
        load_ours(model_spec(tmp_path))
    assert caught.value.field == field


def test_jais_has_the_logits_of_its_reference(tmp_path: Path) -> None:
    tensors = jais.tiny()
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    save_file(tensors | masks, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(jais.CONFIG))
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    ours = load_ours(model_spec(tmp_path))
    got = teacher_forced(ours, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, [jais.logits(tensors, row) for row in rows], 1e-4)


@pytest.mark.parametrize(
    ("architecture", "keys", "longest"),
    [
        ("Cohere", {"max_position_embeddings": 8192, "model_max_length": 131_072}, 131_072),
        (
            "Qwen2",
            {
                "max_position_embeddings": 1_010_000,
                "dual_chunk_attention_config": {"chunk_size": 262_144, "local_size": 8192},
            },
            253_952,
        ),
    ],
)
def test_texts_are_as_long_as_the_family_says_in_its_own_keys(
    architecture: str, keys: dict[str, Any], longest: int
) -> None:
    config = {**SHAPE, "architectures": [f"{architecture}ForCausalLM"], **keys}
    located = LocatedModel(path=Path("none"), name="m", format="dummy")
    assert describe(located, in_common_keys(config), {}, None).max_model_len == longest


def test_diffusion_decoders_are_refused_with_the_reason() -> None:
    """Not for the code that their checkpoints bring: no setting makes them run."""
    named = "DiffusionGemmaForBlockDiffusion"
    config = {**SHAPE, "architectures": [named], "auto_map": {"AutoModel": "a.B"}}
    located = LocatedModel(path=Path("none"), name="m", format="dummy")
    with pytest.raises(CheckpointError, match=f"{named} is not built: it needs blocks written"):
        describe(located, config, {}, None)


def test_every_class_copied_is_among_those_compared() -> None:
    assert {base for _, base, *_ in PUBLISHED.values()} <= set(CASES)

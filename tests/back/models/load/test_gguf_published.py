"""GGUF files of models that were published with code of their own, and of embedders that are decoders: logits and
hidden states of the oracles of their checkpoints, under the names of the `gguf` library's table. QNT-15."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
from tests.back.models.load.checkpoints import _finish, name_table, spec_of
from tests.back.models.load.test_gguf_families import permuted
from tests.back.models.load.test_gguf_mixtures import load
from tests.models.oracle import BLOCK_TOKENS, oracle_logits, save_oracle
from tests.models.paged import random_rows, teacher_forced
from tests.models.test_encoders import SIZES as SMALL
from tests.models.test_encoders import TEXTS, batch_of, embedding_gemma, saved
from tests.models.test_parity import LENGTHS, SIZES, compare, rope
from tests.models.test_published_names import HEAD_DIM, HEADS, KV_HEADS, publish, with_alibi
from tests.models.test_unlike_layers import BLOCKS, MATRIX, deci, openelm
from tests.references import jais, nomic_experts
from tests.references.small_decoders import REFACT_INNER
from tests.references.small_decoders import SMALL as SMALL_DECODERS

Tensors = dict[str, torch.Tensor]
INNER = 80


def stacked(tensors: Tensors) -> Tensors:
    """The experts of a layer in one tensor."""
    kept, experts = {}, {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name):
            experts.setdefault(found[1] + found[3], {})[int(found[2])] = tensor
        else:
            kept[name] = tensor
    return kept | {
        name: torch.stack([each[i] for i in sorted(each)]) for name, each in experts.items()
    }


def write(
    path: Path,
    architecture: str,
    tensors: Tensors,
    *,
    layers: int,
    metadata: Mapping[str, Any],
    heads: Mapping[str, int] | None = None,
) -> ModelFacts:
    """`heads`: of the query and key projections whose rows are permuted, by the tensor's name."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    for key, value in {"attention.layer_norm_rms_epsilon": 1e-6, **metadata}.items():
        add = {list: writer.add_array, float: writer.add_float32, int: writer.add_uint32}
        add[bool] = writer.add_bool
        add[type(value)](f"{architecture}.{key}", value)
    table = name_table(architecture, layers)
    for name, tensor in stacked(tensors).items():
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        values = tensor.contiguous().numpy()
        if heads and name in heads:
            values = permuted(values, heads[name])
        writer.add_tensor(stored, np.ascontiguousarray(values))
    _finish(writer)
    return read_model_facts(LocatedModel(path=path, name="m", format="gguf"))


def apart(tensors: Tensors, parts: Mapping[str, tuple[str, str]]) -> Tensors:
    """Tensors of which two halves lie in one, each by itself: by the last name of the module."""
    stored = {}
    for name, tensor in tensors.items():
        stem, _, last = name.removesuffix(".weight").rpartition(".")
        for part, half in zip(parts.get(last, ()), tensor.chunk(2), strict=False):
            stored[f"{stem}.{part}.weight"] = half
        if last not in parts:
            stored[name] = tensor
    return stored


def in_table(name: str) -> str:
    """Names that converters give apart, as the library's table knows them of other models."""
    if match := re.match(
        r"transformer\.(?:h|layers)\.(\d+)\.(attn|ffn|mlp)\.(q|k|v|gate_proj|up_proj)\.", name
    ):
        layer, last = match[1], match[3]
        own = f"mlp.{last}" if "_" in last else f"self_attn.{last}_proj"
        return f"model.layers.{layer}.{own}.weight"
    return (
        name.replace("ln_f.weight", "transformer.ln_f.weight", 1)
        if name.startswith("ln_f")
        else name
    )


def compare_logits(path: Path, facts: ModelFacts, oracle: Any) -> None:
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    model, _ = load(spec_of(path, facts.config, family=facts.family, format="gguf"))
    got = teacher_forced(model, rows, block_tokens=BLOCK_TOKENS, dtype=torch.float32)
    compare(got, oracle_logits(oracle, rows), 1e-4)


SHAPE = {
    **{"context_length": 128, "embedding_length": SIZES["hidden_size"]},
    **{"feed_forward_length": INNER, "attention.head_count": HEADS},
    **{"attention.head_count_kv": KV_HEADS, "rope.freq_base": 500.0},
}
FIRST_EXPERTS = {
    **{"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": INNER},
    **{"expert_shared_count": 0, "leading_dense_block_count": 0},
    "expert_weights_norm": True,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.mark.parametrize(
    ("architecture", "name", "metadata"),
    [
        (
            "chatglm",
            "chatglm",
            {"rope.dimension_count": HEAD_DIM // 2, "attention.layer_norm_rms_epsilon": 1e-5},
        ),
        ("qwen", "qwen", {"feed_forward_length": 2 * INNER, "attention.head_count_kv": HEADS}),
        ("deepseek", "deepseek-moe", FIRST_EXPERTS),
        pytest.param("bailingmoe", "deepseek-moe", FIRST_EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_files_of_published_models_answer_as_their_oracles(
    architecture: str, name: str, metadata: dict[str, Any], tmp_path: Path
) -> None:
    oracle = publish(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if architecture == "chatglm":
        tensors = {key.removeprefix("transformer."): one for key, one in tensors.items()}
    heads = {
        one: HEADS if "q_proj" in one else KV_HEADS
        for one in tensors
        if re.search("[qk]_proj", one)
    }
    facts = write(
        tmp_path / "m.gguf", architecture, tensors, layers=3, metadata=SHAPE | metadata, heads=heads
    )
    compare_logits(tmp_path / "m.gguf", facts, oracle)


PLAIN = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500.0}
LATENT = {
    **{"attention.key_length": 16, "attention.value_length": 12, "attention.kv_lora_rank": 24},
    **{"attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": 6},
    "attention.head_count_kv": HEADS,
}


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        ("maincoder", PLAIN),
        ("plamo", {**PLAIN, "attention.head_count_kv": 2, "rope.freq_base": 1e4}),
        ("plm", LATENT),
        ("refact", {**PLAIN, "feed_forward_length": REFACT_INNER, "attention.head_count_kv": 1}),
    ],
)
def test_files_answer_as_the_reference_of_their_model(
    name: str, metadata: dict[str, Any], tmp_path: Path
) -> None:
    reference, config = SMALL_DECODERS[name]
    weights = reference.tensors(config)
    stored = dict(weights)
    if name == "refact":
        stored = apart(stored, {"kv": ("k", "v"), "gate_up_proj": ("gate_proj", "up_proj")})
        stored = {in_table(key): one for key, one in stored.items()}
    if name == "plamo":  # query heads that share a KV head lie side by side
        for key, one in weights.items():
            if key.endswith("q_proj.weight"):
                stored[key] = one.unflatten(0, (3, 2, 8)).transpose(0, 1).flatten(0, 2)
            if key.endswith("o_proj.weight"):
                stored[key] = one.unflatten(1, (3, 2, 8)).transpose(1, 2).flatten(1)
    facts = write(tmp_path / "m.gguf", name, stored, layers=3, metadata=SHAPE | metadata)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    model, _ = load(spec_of(tmp_path / "m.gguf", facts.config, family=facts.family, format="gguf"))
    got = teacher_forced(model, rows, block_tokens=16, dtype=torch.float32)
    exact = {key: one.double() for key, one in weights.items()}
    compare(got, [reference.logits(config, exact, row).float() for row in rows], 1e-4)


def test_codeshell_answers_as_its_oracle(tmp_path: Path) -> None:
    oracle = publish("codeshell", tmp_path)
    more = {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": 1e-5}
    tensors = load_file(tmp_path / "model.safetensors")
    stated = SHAPE | more | {"rope.freq_base": 1e4}
    facts = write(tmp_path / "m.gguf", "codeshell", tensors, layers=3, metadata=stated)
    compare_logits(tmp_path / "m.gguf", facts, oracle)


def test_jais_answers_as_its_reference(tmp_path: Path) -> None:
    """Converters turn matrices, and multiply the embeddings and the head."""
    weights = jais.tiny()
    words = weights["transformer.wte.weight"]
    stored = {
        name: one.t() if one.ndim == 2 and "wte" not in name else one
        for name, one in weights.items()
    }
    stored |= {"transformer.wte.weight": words * 3.5, "lm_head.weight": words * 0.4}
    stated = {
        **{"attention.layer_norm_rms_epsilon": 1e-5, "attention.max_alibi_bias": 8.0},
        "attention.head_count_kv": HEADS,
    }
    facts = write(tmp_path / "m.gguf", "jais", stored, layers=3, metadata=SHAPE | stated)
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    model, _ = load(spec_of(tmp_path / "m.gguf", facts.config, family=facts.family, format="gguf"))
    got = teacher_forced(model, rows, block_tokens=16, dtype=torch.float32)
    compare(got, [jais.logits(weights, row) for row in rows], 1e-4)
    stored.pop("lm_head.weight")
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path / "tied.gguf", "jais", stored, layers=3, metadata=SHAPE | stated)
    assert caught.value.field == "output.weight"


@pytest.mark.parametrize("layers", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_baichuan_rotates_or_has_alibi_by_its_layers(layers: int, tmp_path: Path) -> None:
    sizes = {"num_key_value_heads": HEADS, "num_hidden_layers": layers}
    oracle = save_oracle(transformers.LlamaConfig(**(SIZES | sizes | rope())), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    heads = {one: HEADS for one in tensors if re.search("[qk]_proj", one)}
    stated = SHAPE | {"attention.head_count_kv": HEADS}
    facts = write(
        tmp_path / "m.gguf", "baichuan", tensors, layers=layers, metadata=stated, heads=heads
    )
    if layers == 3:
        compare_logits(tmp_path / "m.gguf", facts, oracle)
        return
    rows = random_rows(SIZES["vocab_size"], LENGTHS)
    model, _ = load(spec_of(tmp_path / "m.gguf", facts.config, family=facts.family, format="gguf"))
    got = teacher_forced(model, rows, block_tokens=16, dtype=torch.float32)
    compare(got, [with_alibi(oracle, row) for row in rows], 1e-4)


def of_blocks(blocks: list[dict[str, Any]]) -> dict[str, list[int]]:
    shared = [one["attention"]["n_heads_in_group"] for one in blocks]
    return {
        "attention.head_count": [HEADS if one else 0 for one in shared],
        "attention.head_count_kv": [HEADS // one if one else 0 for one in shared],
        "feed_forward_length": [0 if one["ffn"]["no_op"] else 256 for one in blocks],
    }


def test_layers_without_a_branch_are_those_of_no_heads_or_no_inner_size(tmp_path: Path) -> None:
    oracle, lists = deci(tmp_path, BLOCKS), of_blocks(BLOCKS)
    tensors = load_file(tmp_path / "model.safetensors")
    kv_heads = lists["attention.head_count_kv"]
    heads = {
        name: HEADS if found[2] == "q" else kv_heads[int(found[1])]
        for name in tensors
        if (found := re.search(r"layers\.(\d+)\.self_attn\.([qk])_proj", name))
    }
    more = SHAPE | lists | {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
    facts = write(tmp_path / "m.gguf", "deci", tensors, layers=3, metadata=more, heads=heads)
    assert facts.windows == (None, 0, None)
    compare_logits(tmp_path / "m.gguf", facts, oracle)


def test_kv_heads_that_do_not_share_the_heads_are_refused(tmp_path: Path) -> None:
    deci(tmp_path, BLOCKS)
    tensors = load_file(tmp_path / "model.safetensors")
    lists = of_blocks(BLOCKS) | {"attention.head_count_kv": [4, 0, 1]}
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path / "m.gguf", "deci", tensors, layers=3, metadata=SHAPE | lists)
    assert caught.value.field == "deci.attention.head_count_kv"


@pytest.mark.slow
def test_a_matrix_in_place_of_attention_is_called_as_its_last_one(tmp_path: Path) -> None:
    blocks = [BLOCKS[0], MATRIX, BLOCKS[2]]
    oracle, lists = deci(tmp_path, blocks), of_blocks(blocks)
    lists["attention.head_count"][1] = HEADS
    tensors = {
        name.replace("linear_attn", "o_proj"): one
        for name, one in load_file(tmp_path / "model.safetensors").items()
    }
    kv_heads = lists["attention.head_count_kv"]
    heads = {
        name: HEADS if found[2] == "q" else kv_heads[int(found[1])]
        for name in tensors
        if (found := re.search(r"layers\.(\d+)\.self_attn\.([qk])_proj", name))
    }
    more = SHAPE | lists | {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
    facts = write(tmp_path / "m.gguf", "deci", tensors, layers=3, metadata=more, heads=heads)
    compare_logits(tmp_path / "m.gguf", facts, oracle)


def states(path: Path, facts: ModelFacts) -> torch.Tensor:
    spec = spec_of(path, facts.config, head="none", bare=True, family=facts.family, format="gguf")
    model, _ = load(spec)
    with torch.inference_mode():
        return model.forward(batch_of(TEXTS))


EMBEDDER = {
    **{"context_length": 40, "embedding_length": SMALL["hidden_size"]},
    **{"feed_forward_length": SMALL["intermediate_size"], "pooling_type": 1},
    **{"attention.head_count": SMALL["num_attention_heads"], "attention.head_count_kv": 2},
}


def test_a_llama_that_embeds_sees_both_sides(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, attn_implementation="eager")
    oracle, _ = saved(tmp_path, "LlamaModel", config)
    tensors = {
        f"model.{name}": one for name, one in load_file(tmp_path / "model.safetensors").items()
    }
    heads = {one: 4 if "q_proj" in one else 2 for one in tensors if re.search("[qk]_proj", one)}
    facts = write(
        tmp_path / "m.gguf", "llama-embed", tensors, layers=3, metadata=EMBEDDER, heads=heads
    )
    assert facts.encodes and facts.pooling.how == "mean"
    with torch.inference_mode():
        wanted = torch.cat(
            [
                oracle(
                    torch.tensor([text]), attention_mask=torch.zeros(1, 1, len(text), len(text))
                ).last_hidden_state[0]
                for text in TEXTS
            ]
        )
    torch.testing.assert_close(states(tmp_path / "m.gguf", facts), wanted, atol=1e-4, rtol=1e-4)


def test_embedding_gemma_gives_the_states_of_its_oracle(tmp_path: Path) -> None:
    oracle, _ = saved(tmp_path, "Gemma3TextModel", embedding_gemma())
    tensors = {
        f"model.{name}": one + 1 if name.endswith("norm.weight") else one
        for name, one in load_file(tmp_path / "model.safetensors").items()
    }
    window = oracle.config.to_dict()["sliding_window"]
    stated = {
        **{"attention.key_length": 6, "attention.value_length": 6, "rope.freq_base": 1e6},
        **{"attention.sliding_window": window, "rope.freq_base_swa": 1e4},
    }
    facts = write(
        tmp_path / "m.gguf", "gemma-embedding", tensors, layers=3, metadata=EMBEDDER | stated
    )
    assert facts.encodes and facts.config["sliding_window"] == window
    facts.config["layer_types"] = list(oracle.config.layer_types)
    facts.config["query_pre_attn_scalar"] = 12
    with torch.inference_mode():
        wanted = torch.cat([oracle(torch.tensor([text])).last_hidden_state[0] for text in TEXTS])
    torch.testing.assert_close(states(tmp_path / "m.gguf", facts), wanted, atol=1e-4, rtol=1e-4)


def test_nomics_experts_have_no_bias_in_files(tmp_path: Path) -> None:
    tensors = nomic_experts.tiny()
    tensors["encoder.layers.1.mlp.experts.bias"].zero_()
    given = {name: one for name, one in tensors.items() if not name.endswith("experts.bias")}
    for name in ("w1", "w2"):
        experts = given.pop(f"encoder.layers.1.mlp.experts.mlp.{name}").view(4, INNER, 48)
        given[f"encoder.layers.1.mlp.experts.mlp.{name}.weight"] = (
            experts if name == "w1" else experts.transpose(1, 2)
        )
    stated = {
        **{"context_length": 40, "embedding_length": 48, "feed_forward_length": INNER},
        **{"attention.head_count": 6, "attention.layer_norm_epsilon": 1e-5, "pooling_type": 1},
        **{"rope.freq_base": 500.0, "expert_count": 4, "expert_used_count": 2},
        "moe_every_n_layers": 2,
    }
    facts = write(tmp_path / "m.gguf", "nomic-bert-moe", given, layers=2, metadata=stated)
    facts.config["layer_norm_eps"] = 1e-5  # the file states that of root mean squares, too
    wanted = torch.cat([nomic_experts.hidden_states(tensors, text) for text in TEXTS])
    torch.testing.assert_close(states(tmp_path / "m.gguf", facts), wanted, atol=1e-4, rtol=1e-4)


def test_layers_with_heads_and_inner_sizes_of_their_own(tmp_path: Path) -> None:
    """OpenELM's files list both for each layer, and have its gates apart."""
    oracle = openelm(tmp_path)
    tensors = apart(load_file(tmp_path / "model.safetensors"), {"proj_1": ("gate_proj", "up_proj")})
    renamed = {in_table(name): tensor for name, tensor in tensors.items()}
    metadata = {
        **{"context_length": 128, "embedding_length": 48, "rope.freq_base": 500.0},
        **{"feed_forward_length": [32, 64, 80], "attention.head_count": [4, 6, 8]},
        **{"attention.head_count_kv": [2, 3, 2], "attention.key_length": 8},
        "attention.value_length": 8,
    }
    facts = write(tmp_path / "m.gguf", "openelm", renamed, layers=3, metadata=metadata)
    compare_logits(tmp_path / "m.gguf", facts, oracle)

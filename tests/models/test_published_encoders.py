"""Encoders as their authors publish them: keys and tensors under names of their own, against transformers' class where
it has one, else against references in plain PyTorch (MUL-09: several texts in one step)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.base.config.hf import read_json
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import CheckpointError
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import ModelFacts, read_model_facts
from tests.models.oracle import save_oracle
from tests.models.test_encoders import TEXTS, batch_of, jina, loaded, nomic, saved, xlm
from tests.models.test_parity import SIZES, rope
from tests.models.test_published_names import KV_HEADS, SHAPE, internlm2
from tests.references import jina_bert, neobert, nomic_experts

Tensors = dict[str, torch.Tensor]


def stored(folder: Path, config: dict[str, Any], tensors: Tensors) -> tuple[ModelFacts, ModelSpec]:
    """A checkpoint, what is known of it, and how it is built."""
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    facts = read_model_facts(LocatedModel(path=folder, name="m", format="safetensors"))
    return facts, ModelSpec(
        path=str(folder),
        name="tiny",
        format="safetensors",
        family=facts.family,
        dtype="float32",
        max_model_len=32,
        logits_width=96,
        eos_ids=(),
        config=facts.config,
        head=facts.head,
        bare=facts.bare,
        num_labels=facts.num_labels,
        dense=facts.dense,
    )


def states_of(spec: ModelSpec) -> torch.Tensor:
    with torch.inference_mode():
        return loaded(spec).forward(batch_of(TEXTS))


def compare_states(spec: ModelSpec, states: Callable[[list[int]], torch.Tensor]) -> None:
    with torch.inference_mode():
        wanted = torch.cat([states(text) for text in TEXTS])
    torch.testing.assert_close(states_of(spec), wanted, atol=1e-4, rtol=1e-4)


def test_nomic_reads_the_keys_of_its_first_checkpoints(tmp_path: Path) -> None:
    oracle, _ = saved(tmp_path, "NomicBertModel", nomic())
    config = {
        **{"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 96},
        **{"n_embd": 32, "n_inner": 48, "n_layer": 3, "n_head": 4, "n_positions": 64},
        **{"layer_norm_epsilon": 1e-12, "activation_function": "swiglu", "rotary_emb_base": 1000},
        **{"rotary_scaling_factor": 2.0, "max_trained_positions": 40, "qkv_proj_bias": False},
        **{"mlp_fc1_bias": False, "mlp_fc2_bias": False, "rotary_emb_fraction": 1.0},
    }
    facts, spec = stored(tmp_path, config, load_file(tmp_path / "model.safetensors"))
    assert facts.max_model_len == 40 and facts.hidden_size == 32
    compare_states(spec, lambda text: oracle(torch.tensor([text])).last_hidden_state[0])


def test_nomic_with_experts_gives_the_states_of_its_reference(tmp_path: Path) -> None:
    tensors = nomic_experts.tiny()
    _, spec = stored(tmp_path, nomic_experts.CONFIG, tensors)
    compare_states(spec, lambda text: nomic_experts.hidden_states(tensors, text))


@pytest.mark.parametrize("key", ["prenorm", "expert_choice_router"])
def test_what_nomic_does_not_have_is_refused_by_key(key: str, tmp_path: Path) -> None:
    _, spec = stored(tmp_path, nomic_experts.CONFIG | {key: True}, nomic_experts.tiny())
    with pytest.raises(CheckpointError) as caught:
        loaded(spec)
    assert caught.value.field == key


@pytest.mark.parametrize("name", ["NeoBERTLMHead", "NeoBERT"])
def test_neobert_gives_the_states_of_its_reference(name: str, tmp_path: Path) -> None:
    tensors, prefix = neobert.tiny(), "model." if name == "NeoBERTLMHead" else ""
    given = {prefix + key: tensor for key, tensor in tensors.items()}
    head = {"decoder.weight": torch.zeros(96, 48), "decoder.bias": torch.zeros(96)}
    config = neobert.CONFIG | {"architectures": [name]}
    facts, spec = stored(tmp_path, config, given | (head if prefix else {}))
    assert facts.encodes and facts.max_model_len == 40
    compare_states(spec, lambda text: neobert.hidden_states(tensors, text))


def test_jina_v2_for_code_gives_the_states_of_its_reference(tmp_path: Path) -> None:
    tensors = jina_bert.tiny(code=True)
    _, spec = stored(tmp_path, jina_bert.CODE, tensors)
    compare_states(spec, lambda text: jina_bert.hidden_states(tensors, jina_bert.CODE, text))


def test_jinas_first_reranker_judges_by_the_first_token(tmp_path: Path) -> None:
    tensors, made = jina_bert.tiny(), torch.Generator().manual_seed(5)
    shapes = {"bert.pooler.dense.weight": (48, 48), "bert.pooler.dense.bias": (48,)}
    shapes |= {"classifier.weight": (1, 48), "classifier.bias": (1,)}
    head = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    config = jina_bert.CONFIG | {"architectures": ["JinaBertForSequenceClassification"]}
    config |= {"id2label": {"0": "LABEL_0"}}
    facts, spec = stored(
        tmp_path, config, {f"bert.{name}": one for name, one in tensors.items()} | head
    )
    assert facts.pooling.how == "cls" and facts.pooling.activation == "sigmoid"
    first = jina_bert.hidden_states(tensors, config, TEXTS[0])[0]
    pooled = torch.tanh(head["bert.pooler.dense.weight"] @ first + head["bert.pooler.dense.bias"])
    wanted = head["classifier.weight"] @ pooled + head["classifier.bias"]
    model = loaded(spec)
    with torch.inference_mode():
        got = model.classify(model.forward(batch_of(TEXTS[:1]))[:1])[0]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("named", "pooled"),
    [("XLMRobertaModel", "mean"), pytest.param("HF_ColBERT", "tokens", marks=pytest.mark.slow)],
)
def test_jina_v3_is_read_as_it_is_published(named: str, pooled: str, tmp_path: Path) -> None:
    """Under XLM-RoBERTa's name, with adapters beside the weights that they change; and below a projection of every
    token (Jina ColBERT 2)."""
    oracle, _ = saved(tmp_path, "JinaEmbeddingsV3Model", jina())
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        base = f"roberta.{name.removesuffix('.weight')}"
        if tensor.ndim == 1:
            tensors[f"roberta.{name}"] = tensor
            continue
        tensors[f"{base}.parametrizations.weight.original"] = tensor
        for one in ("A", "B"):
            tensors[f"{base}.parametrizations.weight.0.lora_{one}"] = torch.ones(5, 4, 8)
    config = read_json(tmp_path / "config.json")
    config |= {"architectures": [named], "model_type": "xlm-roberta"}
    if named == "HF_ColBERT":
        tensors["linear.weight"] = torch.ones(8, 32)
    config |= {"position_embedding_type": "rotary", "rotary_emb_base": 20_000.0}
    config |= {"use_flash_attn": False, "rope_parameters": None}
    facts, spec = stored(tmp_path, config, tensors)
    assert facts.family == "jina_embeddings_v3" and facts.pooling.how == pooled
    compare_states(spec, lambda text: oracle(torch.tensor([text])).last_hidden_state[0])


FLASH = (
    ("encoder.layer.", "encoder.layers."),
    ("embeddings.LayerNorm", "emb_ln"),
    ("attention.output.dense", "mixer.out_proj"),
    ("attention.output.LayerNorm", "norm1"),
    ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
    ("output.LayerNorm", "norm2"),
)


def test_jinas_second_reranker_is_a_roberta_under_other_names(tmp_path: Path) -> None:
    oracle, _ = saved(tmp_path, "XLMRobertaForSequenceClassification", xlm(num_labels=1))
    tensors = load_file(tmp_path / "model.safetensors")
    for query in [name for name in tensors if ".self.query." in name]:
        parts = [tensors.pop(query.replace("query", one)) for one in ("query", "key", "value")]
        tensors[query.replace("attention.self.query", "mixer.Wqkv")] = torch.cat(parts)
    for ours, theirs in FLASH:
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    config = read_json(tmp_path / "config.json") | {"use_flash_attn": True}
    config |= {"position_embedding_type": "absolute"}
    facts, spec = stored(tmp_path, config, tensors)
    assert facts.family == "jina_embeddings_v3" and facts.max_model_len == 38
    model = loaded(spec)
    with torch.inference_mode():
        got = model.classify(model.forward(batch_of(TEXTS[:1]))[:1])
        wanted = oracle(torch.tensor(TEXTS[:1])).logits
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_nvidias_reranker_judges_by_the_mean_of_a_llama_that_sees_both_sides(
    tmp_path: Path,
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
        num_labels=1,
    )
    oracle, _ = saved(tmp_path, "LlamaForSequenceClassification", config)
    raw = read_json(tmp_path / "config.json") | {"pooling": "avg"}
    raw |= {"architectures": ["LlamaBidirectionalForSequenceClassification"]}
    facts, spec = stored(tmp_path, raw, load_file(tmp_path / "model.safetensors"))
    assert facts.encodes and facts.pooling.how == "mean" and facts.num_labels == 1
    assert facts.pooling.pair == ("question:", " \n \n passage:")
    text, model = TEXTS[0], loaded(spec)
    sees_all = torch.zeros(1, 1, len(text), len(text))
    with torch.inference_mode():
        got = model.classify(model.forward(batch_of([text])).mean(0, keepdim=True))
        states = oracle.model(torch.tensor([text]), attention_mask=sees_all).last_hidden_state
        wanted = oracle.score(states.mean(1))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "labels", "how"),
    [
        ("Qwen2ForRewardModel", 1, "last"),
        ("Qwen2ForProcessRewardModel", 2, "all"),
    ],
)
def test_rewards_come_from_a_head_of_two_layers(
    name: str, labels: int, how: str, tmp_path: Path
) -> None:
    config = transformers.Qwen2Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    _, _ = saved(tmp_path, "Qwen2Model", config)
    made = torch.Generator().manual_seed(5)
    shapes = {"score.0.weight": (32, 32), "score.0.bias": (32,)}
    shapes |= {"score.2.weight": (labels, 32), "score.2.bias": (labels,)}
    head = {key: torch.randn(shape, generator=made) for key, shape in shapes.items()}
    raw = read_json(tmp_path / "config.json") | {"architectures": [name]}
    base = {f"model.{key}": one for key, one in load_file(tmp_path / "model.safetensors").items()}
    facts, spec = stored(tmp_path, raw, base | head)
    assert facts.num_labels == labels and not facts.encodes
    assert facts.head == ("token" if how == "all" else "sequence")
    assert facts.pooling.activation == ("softmax" if how == "all" else "none")
    hidden = torch.randn(3, 32, generator=made)
    inner = torch.relu(hidden @ head["score.0.weight"].T + head["score.0.bias"])
    wanted = inner @ head["score.2.weight"].T + head["score.2.bias"]
    with torch.inference_mode():
        got = loaded(spec).classify(hidden)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_internlm2s_reward_is_one_row_behind_the_last_token(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES | {"num_key_value_heads": KV_HEADS} | rope())
    save_oracle(config, tmp_path)
    tensors = internlm2(load_file(tmp_path / "model.safetensors"))
    tensors["v_head.weight"] = tensors.pop("output.weight")[:1]
    raw = {**SHAPE, "architectures": ["InternLM2ForRewardModel"], "bias": False}
    facts, spec = stored(tmp_path, raw, tensors)
    assert (facts.family, facts.head, facts.num_labels) == ("internlm2", "sequence", 1)
    hidden = torch.randn(3, SIZES["hidden_size"], generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        got = loaded(spec).classify(hidden)
    torch.testing.assert_close(got, hidden @ tensors["v_head.weight"].T, atol=1e-4, rtol=1e-4)

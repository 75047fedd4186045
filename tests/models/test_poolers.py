"""Embedders and rerankers under names that say their head (MUL-08, MUL-09): each against transformers' layers with the
head written out, fp32 1e-4."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.back.layers.pooling import projected
from headrace.back.models.load import load_model, open_source
from headrace.back.models.load.dense import load_projection
from headrace.back.parallel.mesh import Mesh
from headrace.back.runner.batch import StepShape
from headrace.back.runner.pooler import Pooler
from headrace.base.config.hf import ConfigReader, read_json
from headrace.base.config.resolved import ModelSpec
from headrace.base.errors import CheckpointError
from headrace.base.wire.pooling import RowPooling
from headrace.base.wire.request import RowSampling
from headrace.base.wire.step import RowStart
from headrace.front.server.pooling.listwise import _Block, list_scores
from headrace.launch.model_facts import ModelFacts
from headrace.launch.published_pooling import modules_of
from tests.models.test_encoders import TEXTS, batch_of, bert, gte, loaded, modern, saved, xlm
from tests.models.test_published_encoders import compare_states, stored

CPU = torch.device("cpu")
LLAMA = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"attn_implementation": "eager", "max_position_embeddings": 40},
}
Tensors = dict[str, torch.Tensor]


def published(
    folder: Path, name: str, more: Tensors, *, prefix: str = "", **keys: Any
) -> tuple[ModelFacts, ModelSpec]:
    """What `saved` wrote, under the name of an architecture and with tensors besides."""
    tensors = load_file(folder / "model.safetensors")
    config = read_json(folder / "config.json") | {"architectures": [name], **keys}
    return stored(folder, config, {prefix + key: one for key, one in tensors.items()} | more)


def matrices(**shapes: tuple[int, ...]) -> Tensors:
    made = torch.Generator().manual_seed(5)
    return {
        name.replace("__", "."): torch.randn(shape, generator=made) * 0.3
        for name, shape in shapes.items()
    }


def row_start(row: int, length: int, asked: RowPooling) -> RowStart:
    return RowStart(
        **{"row": row, "request": row, "num_prompt": length, "num_computed": 0},
        tokens=np.zeros(length, dtype=np.int32),
        sampling=RowSampling(seed=0),
        pooling=asked,
    )


def pooled(spec: ModelSpec, asked: RowPooling) -> list[np.ndarray]:
    """What each of TEXTS gives, all in one step."""
    model = loaded(spec)
    pooler = Pooler(model.classify, load_projection(spec, CPU))
    lengths = [len(text) for text in TEXTS]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    none = np.empty(0, dtype=np.int64)
    for row, length in enumerate(lengths):
        pooler.start(row_start(row, length, asked))
    shape = StepShape(
        rows=np.arange(len(TEXTS)),
        query_start=starts,
        kv_len=np.asarray(lengths, dtype=np.int32),
        row_T=np.repeat(np.arange(len(TEXTS)), lengths),
        position_T=np.concatenate([np.arange(length) for length in lengths]),
        **{"sampled": none, "sampled_row": none, "sampled_position": none, "place": none},
        **{"num_decodes": 0, "max_query_len": max(lengths), "max_kv_len": max(lengths)},
    )
    with torch.inference_mode():
        sent = pooler.pool(shape, model.forward(batch_of(TEXTS)))
    by_row = {index: part.values for one in sent for index, part in one.read({})}
    return [by_row[row] for row in range(len(TEXTS))]


def close(got: list[np.ndarray], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(one), other, atol=1e-4, rtol=1e-4)


def test_splade_weighs_each_word_by_the_token_that_says_most_of_it(tmp_path: Path) -> None:
    oracle, _ = saved(tmp_path, "BertForMaskedLM", bert())
    facts, spec = published(tmp_path, "BertSpladeSparseEmbeddingModel", {})
    assert facts.pooling.how == "lexical" and not facts.pooling.normalize
    with torch.inference_mode():
        logits = [oracle(torch.tensor([text])).logits[0] for text in TEXTS]
    wanted = [torch.log1p(torch.relu(one)).amax(0, keepdim=True) for one in logits]
    close(pooled(spec, RowPooling(how="lexical")), wanted)


def test_modules_of_a_sparse_encoder_say_that_words_are_weighed(tmp_path: Path) -> None:
    saved(tmp_path, "BertForMaskedLM", bert())
    kinds = [("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling")]
    module = tmp_path / "1_SpladePooling"
    module.mkdir()
    (module / "config.json").write_text('{"pooling_strategy": "max"}')
    listed = [{"path": path, "type": f"s.{kind}"} for path, kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    facts, _ = published(tmp_path, "BertForMaskedLM", {})
    assert (facts.pooling.how, facts.head) == ("lexical", "words")
    (module / "config.json").write_text('{"pooling_strategy": "sum"}')
    with pytest.raises(CheckpointError) as caught:
        published(tmp_path, "BertForMaskedLM", {})
    assert caught.value.field == "pooling_strategy"


def test_bge_m3_gives_a_vector_of_a_text_vectors_of_tokens_and_weights(tmp_path: Path) -> None:
    oracle, _ = saved(tmp_path, "XLMRobertaModel", xlm())
    heads = matrices(colbert_linear__weight=(24, 32), colbert_linear__bias=(24,))
    heads |= matrices(sparse_linear__weight=(1, 32), sparse_linear__bias=(1,))
    facts, spec = published(tmp_path, "BgeM3EmbeddingModel", heads)
    assert facts.pooling.how == "cls" and facts.pooling.ends == (0, 2)
    with torch.inference_mode():
        states = [oracle(torch.tensor([text])).last_hidden_state[0] for text in TEXTS]
    linear = torch.nn.functional.linear
    close(pooled(spec, RowPooling(how="cls")), [one[:1] for one in states])
    colbert = heads["colbert_linear.weight"], heads["colbert_linear.bias"]
    close(pooled(spec, RowPooling(how="tokens")), [linear(one, *colbert) for one in states])
    sparse = heads["sparse_linear.weight"], heads["sparse_linear.bias"]
    weights = [torch.relu(linear(one, *sparse)) for one in states]
    close(pooled(spec, RowPooling(how="tokens", head=True)), weights)


def test_voyage_projects_the_mean_of_a_qwen_that_sees_both_sides(tmp_path: Path) -> None:
    oracle, _ = saved(tmp_path, "Qwen3Model", transformers.Qwen3Config(**LLAMA))
    head = matrices(linear__weight=(12, 32))
    name = "VoyageQwen3BidirectionalEmbedModel"
    facts, spec = published(tmp_path, name, head, prefix="model.")
    assert facts.encodes and facts.pooling.how == "mean" and facts.pooling.projected
    wanted = []
    for text in TEXTS:
        mask = {"full_attention": torch.zeros(1, 1, len(text), len(text))}
        with torch.inference_mode():
            states = oracle(torch.tensor([text]), attention_mask=mask).last_hidden_state[0]
        wanted.append((states @ head["linear.weight"].T).mean(0, keepdim=True))
    close(pooled(spec, RowPooling(how="mean")), wanted)


def test_jinas_third_reranker_projects_tokens_twice(tmp_path: Path) -> None:
    saved(tmp_path, "Qwen3Model", transformers.Qwen3Config(**LLAMA))
    head = matrices(projector__0__weight=(16, 32), projector__2__weight=(8, 16))
    facts, spec = published(tmp_path, "JinaForRanking", head, prefix="model.")
    assert facts.pooling.how == "tokens" and facts.pooling.listwise and not facts.encodes
    loaded(spec)
    projection = load_projection(spec, CPU)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    inner = torch.relu(hidden @ head["projector.0.weight"].T)
    assert projection is not None
    got = projected(projection.of(tokens=True), hidden)
    torch.testing.assert_close(got, inner @ head["projector.2.weight"].T, atol=1e-4, rtol=1e-4)


def test_lists_of_several_blocks_are_compared_with_one_query() -> None:
    """The blocks' queries, each weighed by its best document's (1 + cosine) / 2."""
    rows = np.random.default_rng(3).normal(size=(2, 4, 6)).astype(np.float32)
    blocks = [_Block([], [0, 2], 3), _Block([], [1], 0)]

    def cosine(one: np.ndarray, other: np.ndarray) -> float:
        return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))

    first, second = rows
    weights = [
        max(1 + cosine(first[3], first[i]) for i in (0, 2)) / 2,
        (1 + cosine(second[0], second[1])) / 2,
    ]
    query = (weights[0] * first[3] + weights[1] * second[0]) / sum(weights)
    wanted = [cosine(query, first[0]), cosine(query, first[2]), cosine(query, second[1])]
    assert list_scores(blocks, [first, second]) == pytest.approx(wanted, abs=1e-5)


def jina_v5(folder: Path, rank: int = 4) -> tuple[ModelSpec, Tensors, Tensors]:
    saved(folder, "Qwen3Model", transformers.Qwen3Config(**LLAMA))
    name = "layers.1.self_attn.q_proj"
    pair = matrices(a=(rank, 32), b=(32, rank))
    adapter = folder / "adapters" / "retrieval"
    adapter.mkdir(parents=True)
    at = f"base_model.model.{name}.lora_"
    save_file(
        {f"{at}A.weight": pair["a"], f"{at}B.weight": pair["b"]},
        adapter / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    before = load_file(folder / "model.safetensors")
    merged = before | {f"{name}.weight": before[f"{name}.weight"] + 1.5 * pair["b"] @ pair["a"]}
    facts, spec = published(folder, "JinaEmbeddingsV5Model", {})
    assert facts.pooling.how == "last"
    return spec, before, merged


def test_jinas_fifth_embedder_is_read_with_the_adapter_of_its_task(tmp_path: Path) -> None:
    spec, _, merged = jina_v5(tmp_path / "one")
    _, report = load_model(spec, mesh=Mesh(), device=CPU, block_tokens=16)
    assert ("adapter", "retrieval") in [(one.field, one.chosen) for one in report.decisions]
    with closing(open_source(spec)) as source:
        for name, wanted in merged.items():
            whole = torch.empty(wanted.shape)
            source.copy(name, tuple(wanted.shape), (slice(None),) * wanted.ndim, whole)
            torch.testing.assert_close(whole, wanted, atol=1e-6, rtol=1e-6)
        part = torch.empty(6, 10)
        name = "layers.1.self_attn.q_proj.weight"
        source.copy(name, (32, 32), (slice(4, 10), slice(8, 18)), part)
        torch.testing.assert_close(part, merged[name][4:10, 8:18], atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_an_adapter_of_another_rank_or_task_is_refused(tmp_path: Path) -> None:
    spec, _, _ = jina_v5(tmp_path, rank=5)
    with pytest.raises(CheckpointError, match="r is 4"):
        loaded(spec)
    spec.config["jina_task"] = "clustering"
    with pytest.raises(CheckpointError, match="missing"):
        loaded(spec)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("GteNewModel", ""),
        pytest.param("GteNewForSequenceClassification", "new.", marks=pytest.mark.slow),
    ],
)
def test_gte_goes_by_its_other_name(name: str, head: str, tmp_path: Path) -> None:
    oracle, _ = saved(tmp_path, "GteModel", gte())
    more = matrices(classifier__weight=(2, 32), classifier__bias=(2,)) if head else {}
    more |= (
        matrices(new__pooler__dense__weight=(32, 32), new__pooler__dense__bias=(32,))
        if head
        else {}
    )
    facts, spec = published(tmp_path, name, more, prefix=head)
    assert facts.family == "gte" and facts.encodes
    compare_states(spec, lambda text: oracle(torch.tensor([text])).last_hidden_state[0])


@pytest.mark.slow
def test_colbert_goes_by_the_names_of_what_is_inside(tmp_path: Path) -> None:
    oracle, _ = saved(tmp_path, "ModernBertModel", modern())
    head = matrices(linear__weight=(8, 32))
    facts, spec = published(tmp_path, "ColBERTModernBertModel", head)
    assert facts.pooling.how == "tokens" and facts.pooling.late is not None
    with torch.inference_mode():
        states = [oracle(torch.tensor([text])).last_hidden_state[0] for text in TEXTS]
    close(pooled(spec, RowPooling(how="tokens")), [one @ head["linear.weight"].T for one in states])


@pytest.mark.slow
def test_sglangs_classifier_judges_by_its_own_head(tmp_path: Path) -> None:
    saved(tmp_path, "LlamaModel", transformers.LlamaConfig(**LLAMA))
    head = matrices(classification_head__weight=(3, 32))
    name, keys = "LlamaForClassification", {"classification_out_size": 3}
    facts, spec = published(tmp_path, name, head, prefix="model.", **keys)
    assert facts.num_labels == 3 and facts.head == "sequence" and facts.pooling.how == "last"
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        got = loaded(spec).classify(hidden)
    wanted = hidden @ head["classification_head.weight"].T
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("named", [{}, {"architectures": None}])
def test_a_part_of_a_model_names_no_architecture(named: dict[str, Any], tmp_path: Path) -> None:
    """As the text parts of models that see are saved."""
    part = ConfigReader(named, "config.json")
    whole = ConfigReader({"architectures": ["Qwen2VLForConditionalGeneration"]}, "config.json")
    assert modules_of(tmp_path, part, whole) is None

"""Embeddings, scoring and classification over real sockets: a tiny random cross-encoder, a tiny embedding model with
sentence-transformers' files, and the bundled decoder, each against transformers."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.api.clients import openai_client
from tests.api.serving import Served, serving

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
LATE = ["[MASK]", "[Q] ", "[D] ", "."]
WORDS = [*SPECIAL, *LATE, "the", "mill", "wheel", "turns", "in", "a", "fox", "jumps", "over", "dog"]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
QUERY = "the mill wheel turns"
DOCUMENTS = ["a fox jumps over the dog", "the mill turns", "in a wheel"]


def write_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens([*SPECIAL, *LATE[:3]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"pad_token": "[PAD]"}')
    return tokenizer


def write_bert(folder: Path, name: str, **more: object) -> tuple[torch.nn.Module, Tokenizer]:
    torch.manual_seed(5)
    config = transformers.BertConfig(**SIZES, **more)
    oracle = getattr(transformers, name)(config).eval()
    for parameter in oracle.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    oracle.save_pretrained(folder)
    return oracle, write_tokenizer(folder)


@pytest.fixture(scope="module")
def cross(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Served, torch.nn.Module, Tokenizer]]:
    folder = tmp_path_factory.mktemp("cross")
    oracle, tokenizer = write_bert(folder, "BertForSequenceClassification", num_labels=1)
    with serving(None, str(folder), "--threads", "1", "--max-running", "4") as served:
        yield served, oracle, tokenizer


@pytest.fixture(scope="module")
def embedder(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Served, torch.nn.Module, Tokenizer]]:
    folder = tmp_path_factory.mktemp("embedder")
    oracle, tokenizer = write_bert(folder, "BertModel", matryoshka_dimensions=[8, 16])
    write_modules(folder, ["Transformer", "Pooling", "Normalize"])
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})
    )
    options = ("--threads", "1", "--max-embed-tokens", "75")
    with serving(None, str(folder), *options) as served:
        yield served, oracle, tokenizer


def write_modules(folder: Path, modules: list[str]) -> None:
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{m}" if i else "", "type": f"st.models.{m}"}
        for i, m in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))


def write_dense(
    folder: Path, outputs: int, *, bias: bool, activation: str, inputs: int = SIZES["hidden_size"]
) -> torch.nn.Module:
    folder.mkdir()
    layer = torch.nn.Linear(inputs, outputs, bias=bias)
    torch.nn.init.normal_(layer.weight, std=0.4)
    tensors = {f"linear.{name}": value for name, value in layer.state_dict().items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    config = {
        "in_features": inputs,
        "out_features": outputs,
        "bias": bias,
        "activation_function": f"torch.nn.modules.activation.{activation}",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return layer.eval()


def test_embedding_gemma_with_its_two_dense_modules(tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(
        **SIZES,
        num_key_value_heads=1,
        head_dim=6,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention=True,
        attn_implementation="eager",
    )
    torch.manual_seed(5)
    oracle = transformers.Gemma3TextModel(config).eval()
    for parameter in oracle.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    oracle.save_pretrained(tmp_path)
    ids = write_tokenizer(tmp_path).encode(DOCUMENTS[0]).ids
    write_modules(tmp_path, ["Transformer", "Pooling", "Dense", "Dense", "Normalize"])
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    wide = write_dense(tmp_path / "2_Dense", 48, bias=False, activation="Identity")
    back = write_dense(tmp_path / "3_Dense", 32, bias=False, activation="Identity", inputs=48)
    with torch.inference_mode():
        pooled = oracle(torch.tensor([ids])).last_hidden_state[0].mean(0)
        wanted = back(wide(pooled)).numpy()
    with serving(None, str(tmp_path), "--threads", "1") as served:
        found = served_vector(served, {"input": DOCUMENTS[0]})
    np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted), atol=1e-4)


@pytest.mark.parametrize(
    "mode", ["mean", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("cls", "lasttoken"))]
)
def test_a_dense_module_follows_the_pooling(mode: str, tmp_path: Path) -> None:
    """sentence-transformers' order: pooling, dense, norm; the vectors of single tokens stay what they are."""
    oracle, tokenizer = write_bert(tmp_path, "BertModel")
    write_modules(tmp_path, ["Transformer", "Pooling", "Dense", "Normalize"])
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    dense = write_dense(tmp_path / "2_Dense", 12, bias=True, activation="Tanh")
    ids = tokenizer.encode(QUERY).ids
    with torch.inference_mode():
        hidden = oracle(torch.tensor([ids])).last_hidden_state[0]
        pooled = {"cls": hidden[0], "mean": hidden.mean(0), "lasttoken": hidden[-1]}[mode]
        wanted = torch.tanh(dense(pooled)).numpy()
    with serving(None, str(tmp_path), "--threads", "1") as served:
        found = served_vector(served, {"input": QUERY})
        np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted), atol=1e-4)
        body = {"input": QUERY, "task": "token_embed", "normalize": False}
        tokens = served.post("/pooling", body).json()["data"][0]["data"]
        np.testing.assert_allclose(tokens, hidden.numpy(), atol=1e-4)


def write_late(
    folder: Path, layout: str, *, attends: bool
) -> tuple[torch.nn.Module, Tokenizer, torch.nn.Module]:
    """A late-interaction checkpoint, stored as sentence-transformers does or as ColBERT's authors do."""
    oracle, tokenizer = write_bert(folder, "BertModel")
    if layout == "modules":
        write_modules(folder, ["Transformer", "Dense"])
        said: dict[str, object] = {
            "query_prefix": "[Q] ",
            "document_prefix": "[D] ",
            "query_length": 10,
            "document_length": 7,
            "do_query_expansion": True,
            "attend_to_expansion_tokens": attends,
            "skiplist_words": [".", "!"],
        }
        (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
        dense = write_dense(folder / "1_Dense", 8, bias=False, activation="Identity")
        return oracle, tokenizer, dense
    dense = write_dense(folder / "dense", 8, bias=False, activation="Identity")
    shutil.rmtree(folder / "dense")
    tensors = {f"bert.{name}": value for name, value in oracle.state_dict().items()}
    tensors["linear.weight"] = dense.state_dict()["weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    said = {
        "query_token_id": "[Q] ",
        "doc_token_id": "[D] ",
        "query_maxlen": 10,
        "doc_maxlen": 7,
        "attend_to_mask_tokens": attends,
        "mask_punctuation": True,
        "similarity": "cosine",
        "dim": 8,
    }
    (folder / "artifact.metadata").write_text(json.dumps(said))
    return oracle, tokenizer, dense


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["modules", "authors"])
@pytest.mark.parametrize("attends", [True, False])
def test_a_colbert_checkpoint_scores_as_it_was_trained(
    attends: bool, layout: str, tmp_path: Path
) -> None:
    """Prefixes, expansion by mask tokens, skipped punctuation, a projection of every token, MaxSim (MUL-09)."""
    oracle, tokenizer, dense = write_late(tmp_path, layout, attends=attends)

    def vectors(ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            found = dense(oracle(torch.tensor([ids])).last_hidden_state[0]).numpy()
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    def ids_of(text: str, prefix: str, most: int) -> list[int]:
        ids = tokenizer.encode(text).ids
        ids = ids if len(ids) < most else [*ids[: most - 2], ids[-1]]
        return [ids[0], WORDS.index(prefix), *ids[1:]]

    query = ids_of(QUERY, "[Q] ", 10)
    if attends:
        query += [WORDS.index("[MASK]")] * (10 - len(query))
    texts = [*DOCUMENTS, "the mill . turns . ."]
    wanted = []
    for text in texts:
        ids = ids_of(text, "[D] ", 7)
        kept = [i for i, token in enumerate(ids) if token != WORDS.index(".")]
        wanted.append((vectors(query) @ vectors(ids)[kept].T).max(1).sum())
    with serving(None, str(tmp_path), "--threads", "1") as served:
        answer = served.post("/score", {"text_1": QUERY, "text_2": texts}).json()
        np.testing.assert_allclose([d["score"] for d in answer["data"]], wanted, atol=1e-3)
        ranked = served.post("/rerank", {"query": QUERY, "documents": texts}).json()["results"]
        assert [r["index"] for r in ranked] == np.argsort(-np.array(wanted)).tolist()
        tokens = served.post("/pooling", {"input": [query]}).json()["data"][0]["data"]
        np.testing.assert_allclose(tokens, vectors(query), atol=1e-4)
        refused = served.post("/v1/embeddings", {"input": QUERY})
        assert refused.status_code == 400 and "every token" in refused.json()["error"]["message"]


def expected(oracle: torch.nn.Module, ids: list[int], how: str) -> np.ndarray:
    with torch.inference_mode():
        hidden = oracle(torch.tensor([ids])).last_hidden_state[0]
    vector = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[how].numpy()
    return vector / np.linalg.norm(vector)


def test_embeddings_through_the_openai_client(
    embedder: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    served, oracle, tokenizer = embedder
    with openai_client(served.url) as client:
        answer = client.embeddings.create(model=client.models.list().data[0].id, input=DOCUMENTS)
    for text, entry in zip(DOCUMENTS, answer.data, strict=True):
        wanted = expected(oracle, tokenizer.encode(text).ids, "mean")
        np.testing.assert_allclose(entry.embedding, wanted, atol=1e-4)
    assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(t).ids) for t in DOCUMENTS)


def test_a_text_longer_than_the_context_is_embedded_in_chunks(
    embedder: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    """The mean of the chunks' vectors, weighted by their tokens, each chunk between [CLS] and [SEP] (contract 6)."""
    served, oracle, tokenizer = embedder
    text = " ".join([QUERY, *DOCUMENTS] * 4)
    ids = tokenizer.encode(text).ids
    assert 38 < len(ids) - 2 < 2 * 38
    inside = ids[1:-1]
    chunks = [[2, *inside[i : i + 38], 3] for i in range(0, len(inside), 38)]
    with torch.inference_mode():
        means = [oracle(torch.tensor([c])).last_hidden_state[0].mean(0).numpy() for c in chunks]
    wanted = np.average(means, axis=0, weights=[len(c) for c in chunks])
    wanted /= np.linalg.norm(wanted)
    answer = served.post("/v1/embeddings", {"input": [QUERY, text]}).json()
    np.testing.assert_allclose(answer["data"][1]["embedding"], wanted, atol=1e-4)
    short = served.post("/v1/embeddings", {"input": QUERY}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(answer["data"][0]["embedding"], short, atol=1e-5)
    num_tokens = len(tokenizer.encode(QUERY).ids) + sum(map(len, chunks))
    assert answer["usage"]["prompt_tokens"] == num_tokens
    body = {"texts": [text], "input_type": "search_document", "truncate": "NONE"}
    cohere_s = served.post("/v2/embed", body).json()["embeddings"]["float"][0]
    np.testing.assert_allclose(cohere_s, wanted, atol=1e-4)
    sent = served.post("/v1/embeddings", {"input": inside}).json()["data"][0]["embedding"]
    assert np.abs(np.array(sent) - wanted).max() > 1e-3, "ids are cut as they were sent"
    refused = served.post("/v1/embeddings", {"input": " ".join([text] * 2)})
    assert refused.status_code == 400
    assert "is 75 tokens" in refused.json()["error"]["message"]
    classified = served.post("/pooling", {"input": text})
    assert classified.status_code == 400 and "is 40 tokens" in classified.json()["error"]["message"]


def test_parts_of_a_text_are_embedded_together_by_late_chunking(
    embedder: tuple[Served, torch.nn.Module, Tokenizer], demo: Served
) -> None:
    """Each part is the mean of its own tokens among those of all."""
    served, oracle, tokenizer = embedder
    parts = [tokenizer.encode(text, add_special_tokens=False).ids for text in DOCUMENTS]
    ids = [2, *(token for part in parts for token in part), 3]
    with torch.inference_mode():
        hidden = oracle(torch.tensor([ids])).last_hidden_state[0].numpy()
    answer = served.post("/v1/embeddings", {"input": DOCUMENTS, "late_chunking": True}).json()
    at = 1
    for part, entry in zip(parts, answer["data"], strict=True):
        wanted = hidden[at : at + len(part)].mean(0)
        at += len(part)
        np.testing.assert_allclose(entry["embedding"], wanted / np.linalg.norm(wanted), atol=1e-4)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    for server, texts in ((served, QUERY), (demo, DOCUMENTS)):
        refused = server.post("/v1/embeddings", {"input": texts, "late_chunking": True})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "late_chunking", refused.text


def test_forms_and_lengths_of_an_embedding(
    embedder: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    served, _, tokenizer = embedder
    ids = tokenizer.encode(QUERY).ids
    whole = served.post("/v1/embeddings", {"input": ids}).json()["data"][0]["embedding"]
    coded = served.post("/v1/embeddings", {"input": [QUERY], "encoding_format": "base64"}).json()
    raw = base64.b64decode(coded["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), np.float32(whole))
    short = served.post("/v1/embeddings", {"input": QUERY, "dimensions": 8}).json()
    cut = np.array(whole[:8]) / np.linalg.norm(whole[:8])
    np.testing.assert_allclose(short["data"][0]["embedding"], cut, atol=1e-5)
    wrong = served.post("/v1/embeddings", {"input": QUERY, "dimensions": 9})
    assert wrong.status_code == 400 and "allowed: 8, 16" in wrong.json()["error"]["message"]


def test_the_official_client_of_cohere_embeds_and_reranks(
    embedder: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    served, oracle, tokenizer = embedder
    with cohere.ClientV2(api_key="none", base_url=served.url) as client:
        name = served.get("/v1/models").json()["data"][0]["id"]
        asked: Any = {"model": name, "input_type": "search_document", "truncate": "END"}
        told = client.embed(texts=DOCUMENTS, embedding_types=["float", "int8"], **asked)
        parts: Any = [{"content": [{"type": "text", "text": text}]} for text in DOCUMENTS]
        same = client.embed(inputs=parts, embedding_types=["float"], **asked)
        assert told.embeddings.float_ == same.embeddings.float_ and told.embeddings.int8
        for text, vector in zip(DOCUMENTS, told.embeddings.float_ or [], strict=True):
            wanted = expected(oracle, tokenizer.encode(text).ids, "mean")
            np.testing.assert_allclose(vector, wanted, atol=1e-4)
        ranked = client.rerank(model=name, query=QUERY, documents=DOCUMENTS, top_n=2)
        scores = [result.relevance_score for result in ranked.results]
        assert len(scores) == 2 and scores == sorted(scores, reverse=True)
        assert ranked.meta is not None and ranked.meta.billed_units is not None
        with pytest.raises(cohere.NotFoundError):
            client.rerank(model="other", query=QUERY, documents=DOCUMENTS)
        with pytest.raises(cohere.BadRequestError):
            client.rerank(model=name, query=QUERY, documents=[])


def test_cohere_forms(embedder: tuple[Served, torch.nn.Module, Tokenizer]) -> None:
    served, _, _ = embedder
    body = {
        "texts": DOCUMENTS,
        "input_type": "search_document",
        "embedding_types": ["float", "int8", "ubinary"],
    }
    answer = served.post("/v2/embed", body).json()
    floats = np.array(answer["embeddings"]["float"])
    assert answer["response_type"] == "embeddings_by_type" and floats.shape == (3, 32)
    np.testing.assert_array_equal(answer["embeddings"]["int8"], np.rint(floats * 127))
    signs = np.unpackbits(np.array(answer["embeddings"]["ubinary"], np.uint8), axis=1)
    np.testing.assert_array_equal(signs, floats > 0)


def test_numbers_of_base64_come_as_asked_for(
    embedder: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    served, _, _ = embedder
    whole = served.post("/v1/embeddings", {"input": QUERY}).json()["data"][0]["embedding"]
    asked = {"input": QUERY, "encoding_format": "base64", "embed_dtype": "float16"}
    for path, key in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        for endianness, dtype in (("big", ">f2"), ("little", "<f2"), ("native", "<f2")):
            told = served.post(path, {**asked, "endianness": endianness}).json()
            raw = base64.b64decode(told["data"][0][key])
            np.testing.assert_array_equal(np.frombuffer(raw, dtype), np.float16(whole))


def numbers_of(raw: bytes, number: str, *, big: bool) -> np.ndarray:
    """PyTorch reads them."""
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(number, 1)
    if big:
        raw = np.frombuffer(raw, f">u{width}").astype(f"<u{width}").tobytes()
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(number)
    found = torch.frombuffer(bytearray(raw), dtype=dtype or getattr(torch, number))
    return found.to(torch.float32).numpy()


NUMBERS = ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]


@pytest.mark.parametrize("number", NUMBERS)
def test_vectors_come_as_bytes_in_any_number(
    number: str, embedder: tuple[Served, torch.nn.Module, Tokenizer]
) -> None:
    served, _, _ = embedder
    plain = served.post("/v1/embeddings", {"input": DOCUMENTS}).json()
    whole = np.float32([entry["embedding"] for entry in plain["data"]])
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(number)
    rounded = torch.from_numpy(whole).to(dtype or getattr(torch, number)).to(torch.float32).numpy()
    for path in ("/v1/embeddings", "/pooling"):
        for endianness in ("big", "little", "native"):
            asked = {"input": DOCUMENTS, "embed_dtype": number, "endianness": endianness}
            answer = served.post(path, {**asked, "encoding_format": "bytes"})
            assert answer.headers["content-type"] == "application/octet-stream"
            told = json.loads(answer.headers["metadata"])
            assert told["usage"] == plain["usage"] and told["model"] == plain["model"]
            big = endianness == "big"
            for i, entry in enumerate(told["data"]):
                assert (entry["index"], entry["embed_dtype"], entry["shape"]) == (i, number, [32])
                assert entry["endianness"] == ("big" if big else "little")
                part = answer.content[entry["start"] : entry["end"]]
                np.testing.assert_array_equal(numbers_of(part, number, big=big), rounded[i])
            bare = served.post(path, {**asked, "encoding_format": "bytes_only"})
            assert bare.content == answer.content and "metadata" not in bare.headers


def test_a_header_tells_of_512_vectors_and_more_are_refused_before_the_work(
    embedder: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    served, _, _ = embedder
    asked = {"input": ["a"] * 512, "encoding_format": "bytes"}
    answer = served.post("/v1/embeddings", asked)
    assert len(json.loads(answer.headers["metadata"])["data"]) == 512
    refused = served.post("/v1/embeddings", {**asked, "input": ["a"] * 513})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "encoding_format", error
    assert "bytes_only" in error["message"]
    bare = served.post("/v1/embeddings", {"input": ["a"] * 513, "encoding_format": "bytes_only"})
    assert len(bare.content) == 513 * 32 * 4


def test_length_one_is_asked_for_by_two_names(
    embedder: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    served, _, _ = embedder

    def length(path: str, **more: object) -> float:
        entry = served.post(path, {"input": QUERY, **more}).json()["data"][0]
        return float(np.linalg.norm(entry["embedding" if path == "/v1/embeddings" else "data"]))

    for path in ("/v1/embeddings", "/pooling"):
        assert length(path) == pytest.approx(1, abs=1e-4)
        bare = length(path, normalize=False)
        assert bare != pytest.approx(1, abs=1e-2)
        assert length(path, use_activation=False) == pytest.approx(bare, rel=1e-5)
        answer = served.post(path, {"input": QUERY, "use_activation": False, "normalize": True})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "use_activation"


def test_several_conversations_are_embedded_at_once(demo: Served) -> None:
    talks = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
        for text in DOCUMENTS
    ]
    for path, key in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        together = served_rows(demo, path, key, messages=talks)
        alone = [served_rows(demo, path, key, messages=talk)[0] for talk in talks]
        np.testing.assert_allclose(together, alone, atol=1e-5)
        opened = served_rows(demo, path, key, messages=talks[0], add_generation_prompt=True)
        assert np.abs(np.array(opened[0]) - alone[0]).max() > 1e-3
    for given, field in (
        ([talks[0], talks[0][0]], "messages"),
        ([talks[0], []], "messages[1]"),
        ([talks[0], [{"role": "robot", "content": "x"}]], "messages[1][0].role"),
    ):
        answer = demo.post("/v1/embeddings", {"messages": given})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field, answer.text


def served_rows(served: Served, path: str, key: str, **body: object) -> list[list[float]]:
    """The vectors of an answer."""
    answer = served.post(path, body)
    assert answer.status_code == 200, answer.text
    return [entry[key] for entry in answer.json()["data"]]


def test_a_text_is_cut_at_the_end_that_is_asked_for(
    embedder: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    served, _, tokenizer = embedder
    ids = tokenizer.encode(DOCUMENTS[0]).ids
    assert len(ids) > 4

    def vector(**more: object) -> list[float]:
        found = served.post("/v1/embeddings", {"input": ids, **more})
        return list(found.json()["data"][0]["embedding"])

    for side, kept in (("right", [*ids[:3], ids[-1]]), ("left", [ids[0], *ids[-3:]])):
        cut = vector(truncate_prompt_tokens=4, truncation_side=side)
        np.testing.assert_allclose(cut, vector(input=kept), atol=1e-6)
        cohere = {"texts": [DOCUMENTS[0]], "max_tokens": 4}
        truncate = "START" if side == "left" else "END"
        told = served.post("/v2/embed", {**cohere, "truncate": truncate}).json()
        np.testing.assert_allclose(told["embeddings"]["float"][0], cut, atol=1e-6)


def test_what_dialects_cut_unasked_is_told(
    embedder: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    """BEY-23: Cohere's and Ollama's routes cut by default, and say what they read."""
    served, _, tokenizer = embedder
    text, most = f"{DOCUMENTS[0]} " * 40, SIZES["max_position_embeddings"]
    count = len(tokenizer.encode(text).ids)
    texts = [DOCUMENTS[0], text]
    for side, which in (("START", "last"), ("END", "first")):
        told = served.post("/v2/embed", {"texts": texts, "truncate": side}).json()["meta"]
        assert told["warnings"] == [f"texts: of {count} tokens only the {which} {most} were read"]
    told = served.post("/api/embed", {"input": texts}).json()
    assert told["warnings"] == [f"input[1]: of {count} tokens only the first {most} were read"]
    told = served.post("/api/embeddings", {"prompt": text}).json()
    assert told["warnings"] == [f"input: of {count} tokens only the first {most} were read"]
    refused = served.post("/api/embed", {"input": text, "truncate": False})
    assert refused.status_code == 400 and f"{most} maximum" in refused.text
    for path, body in (("/v2/embed", {"texts": texts[:1]}), ("/api/embed", {"input": "a"})):
        assert "warnings" not in served.post(path, body).text


def test_padding_fills_up_behind_what_was_cut(
    embedder: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    """contract.md 5: vLLM's field; tokens of padding are seen, and what is masked is not added."""
    served, _, tokenizer = embedder
    ids, most = tokenizer.encode(DOCUMENTS[0]).ids, SIZES["max_position_embeddings"]
    cut = {"truncate_prompt_tokens": 4, "truncation_side": "left"}

    def answer(**more: object) -> Any:
        answer = served.post("/v1/embeddings", {"input": DOCUMENTS[:1], **more})
        assert answer.status_code == 200, answer.text
        return answer.json()["data"][0]["embedding"], answer.json()["usage"]["prompt_tokens"]

    for kept, more in ((ids, {}), ([ids[0], *ids[-3:]], cut)):
        filled = answer(input=kept + [0] * (most - len(kept)))
        assert answer(padding="max_length", **more) == filled
        for padding in (True, "longest", "do_not_pad"):
            assert answer(padding=padding, **more) == answer(input=kept)
    many = ["fox"] * (2**20 // most + 1)
    for body in ({"input": "fox", "padding": "half"}, {"input": many, "padding": "max_length"}):
        refused = served.post("/v1/embeddings", body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "padding", refused.text


def test_inputs_of_cohere_are_texts_in_parts(
    embedder: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    served, _, _ = embedder
    plain = served.post("/v2/embed", {"texts": DOCUMENTS}).json()
    inputs = [{"content": [{"type": "text", "text": text}]} for text in DOCUMENTS]
    parts = served.post("/v2/embed", {"inputs": inputs}).json()
    assert (parts["texts"], parts["embeddings"]) == (plain["texts"], plain["embeddings"])


def test_every_token_of_a_prompt(embedder: tuple[Served, torch.nn.Module, Tokenizer]) -> None:
    served, oracle, tokenizer = embedder
    ids = tokenizer.encode(QUERY).ids
    answer = served.post("/pooling", {"input": QUERY, "task": "token_embed", "normalize": False})
    with torch.inference_mode():
        wanted = oracle(torch.tensor([ids])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(answer.json()["data"][0]["data"], wanted, atol=1e-4)
    step = {"input": QUERY, "pooling": "step", "step_tag_id": ids[2], "normalize": False}
    marked = served.post("/pooling", step).json()["data"][0]["data"]
    np.testing.assert_allclose(
        marked, wanted[[i for i, t in enumerate(ids) if t == ids[2]]], atol=1e-4
    )


def test_a_bi_encoder_scores_by_cosine_and_by_token_vectors(
    embedder: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    served, oracle, tokenizer = embedder
    body = {"text_1": QUERY, "text_2": DOCUMENTS}
    scores = [d["score"] for d in served.post("/score", body).json()["data"]]
    query = expected(oracle, tokenizer.encode(QUERY).ids, "mean")
    wanted = [query @ expected(oracle, tokenizer.encode(t).ids, "mean") for t in DOCUMENTS]
    np.testing.assert_allclose(scores, wanted, atol=1e-4)
    late = served.post("/v1/score", {**body, "late_interaction": True}).json()["data"]

    def tokens(text: str) -> np.ndarray:
        with torch.inference_mode():
            hidden = oracle(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0].numpy()
        return hidden / np.linalg.norm(hidden, axis=1, keepdims=True)

    sims = [(tokens(QUERY) @ tokens(t).T).max(1).sum() for t in DOCUMENTS]
    np.testing.assert_allclose([d["score"] for d in late], sims, atol=1e-3)


def pair_scores(oracle: torch.nn.Module, tokenizer: Tokenizer) -> list[float]:
    scores = []
    for text in DOCUMENTS:
        pair = tokenizer.encode(QUERY, text)
        with torch.inference_mode():
            logits = oracle(
                torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])
            ).logits
        scores.append(float(torch.sigmoid(logits[0, 0])))
    return scores


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_a_cross_encoder_reranks_pairs(
    path: str, cross: tuple[Served, torch.nn.Module, Tokenizer]
) -> None:
    served, oracle, tokenizer = cross
    wanted = pair_scores(oracle, tokenizer)
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    answer = served.post(path, {"query": QUERY, "documents": documents, "top_n": 2}).json()
    best = sorted(range(3), key=lambda i: -wanted[i])[:2]
    assert [entry["index"] for entry in answer["results"]] == best
    for entry in answer["results"]:
        assert abs(entry["relevance_score"] - wanted[entry["index"]]) < 1e-4
        assert entry["document"]["text"] == DOCUMENTS[entry["index"]]


def test_a_cross_encoder_scores_pairs_and_classifies_texts(
    cross: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    served, oracle, tokenizer = cross
    body = {"queries": [QUERY] * 3, "documents": DOCUMENTS}
    scores = [d["score"] for d in served.post("/score", body).json()["data"]]
    np.testing.assert_allclose(scores, pair_scores(oracle, tokenizer), atol=1e-4)
    answer = served.post("/classify", {"input": QUERY}).json()["data"][0]
    assert answer["num_classes"] == 1 and answer["label"] == "LABEL_0"
    refused = served.post("/classify", {"input": QUERY, "encoding_format": "base64"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "encoding_format"


def test_invocations_go_by_the_kind_of_the_model(
    cross: tuple[Served, torch.nn.Module, Tokenizer],
    embedder: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    """Classes of a classifier, embeddings of an embedding model; pairs are scored by both."""
    for served, path in ((cross[0], "/classify"), (embedder[0], "/v1/embeddings")):
        direct = served.post(path, {"input": QUERY}).json()
        assert served.post("/invocations", {"input": QUERY}).json()["data"] == direct["data"]
        pair = {"queries": QUERY, "documents": DOCUMENTS[0]}
        direct = served.post("/score", pair).json()
        assert served.post("/invocations", pair).json()["data"] == direct["data"]
    refused = cross[0].post("/invocations", {"prompt": QUERY})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("none of messages, query")


def test_an_encoder_does_not_generate(cross: tuple[Served, torch.nn.Module, Tokenizer]) -> None:
    served, _, _ = cross
    refused = served.post("/v1/completions", {"prompt": QUERY})
    assert refused.status_code == 400
    assert "does not generate" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"input": "the mill " * 40}, "input"),
        ("/v1/embeddings", {"input": [-1]}, "input"),
        ("/v1/embeddings", {"input": [99999]}, "input"),
        ("/v1/embeddings", {}, "input"),
        ("/score", {"text_1": [QUERY] * 2, "text_2": DOCUMENTS}, "text_1"),
        ("/score", {"text_1": QUERY}, "text_2"),
        ("/rerank", {"query": QUERY, "documents": []}, "documents"),
        ("/classify", {"input": QUERY}, "model"),
        ("/pooling", {"input": QUERY, "task": "token_embed", "pooling": "mean"}, "pooling"),
        ("/v1/embeddings", {"input": QUERY, "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": QUERY, "embed_dtype": "fp8"}, "embed_dtype"),
        ("/v2/embed", {}, "texts"),
        ("/v2/embed", {"texts": [QUERY], "inputs": [{"text": QUERY}]}, "texts"),
        ("/v2/embed", {"images": ["data:,"]}, "images"),
        ("/v2/embed", {"inputs": [{"image": "data:,"}]}, "inputs[0].image"),
    ],
)
def test_what_cannot_be_pooled_is_named(
    path: str,
    body: dict[str, object],
    field: str,
    embedder: tuple[Served, torch.nn.Module, Tokenizer],
) -> None:
    served, _, _ = embedder
    answer = served.post(path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(field)
    assert served.at_rest()


def test_a_decoder_embeds_chunk_by_chunk_and_keeps_generating(demo: Served) -> None:
    oracle = transformers.AutoModel.from_pretrained(MODEL, dtype=torch.float32).eval()
    ids = [int(i) for i in np.random.default_rng(1).integers(20, 2000, 300)]
    last = served_vector(demo, {"input": ids})
    np.testing.assert_allclose(last, expected(oracle, ids, "last"), atol=1e-4)
    mean = demo.post("/pooling", {"input": ids, "pooling": "mean"}).json()["data"][0]["data"]
    np.testing.assert_allclose(mean, expected(oracle, ids, "mean"), atol=1e-4)
    np.testing.assert_allclose(served_vector(demo, {"input": ids}), last, atol=1e-4)
    text = demo.post("/v1/completions", {"prompt": "Once", "max_tokens": 3, "temperature": 0})
    assert text.status_code == 200 and demo.at_rest()


def served_vector(served: Served, body: dict[str, object]) -> list[float]:
    found: list[float] = served.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    return found


def test_generative_scoring_equals_the_whole_softmax(demo: Served) -> None:
    """API-18, REG-106."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    query, items, labels = [50, 60, 70], [[80, 81], [90]], [100, 200, 300]
    body = {"query": query, "items": items, "label_token_ids": labels}
    scores = [d["score"] for d in demo.post("/generative_scoring", body).json()["data"]]
    plain = demo.post("/generative_scoring", {**body, "apply_softmax": False}).json()["data"]
    for item, score, chance in zip(items, scores, plain, strict=True):
        with torch.inference_mode():
            chances = oracle(torch.tensor([query + item])).logits[0, -1].softmax(-1)
        assert abs(score - float(chances[100] / chances[labels].sum())) < 1e-4
        assert abs(chance["score"] - float(chances[100])) < 1e-5
    for wrong in ([10**9], [-1], [], [1] * 129):
        refused = demo.post("/generative_scoring", {**body, "label_token_ids": wrong})
        assert refused.status_code == 400, wrong
        assert refused.json()["error"]["param"].startswith("label_token_ids")

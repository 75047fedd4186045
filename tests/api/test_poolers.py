"""Models that weigh words, tokens and lists (MUL-08), over a real socket, each against transformers."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from headrace.front.server.pooling.listwise import SYSTEM
from tests.api.serving import serving
from tests.api.test_pooling import DOCUMENTS, MODEL, QUERY, SIZES, write_bert, write_tokenizer

pytestmark = pytest.mark.slow
MARKS = ("<|embed_token|>", "<|rerank_token|>")


def with_heads(folder: Path, name: str, heads: dict[str, torch.Tensor], prefix: str = "") -> None:
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = {prefix + key: one.contiguous() for key, one in load_file(file).items()}
    save_file(tensors | heads, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [name]}))


def test_a_sparse_encoder_tells_how_much_each_word_weighs(tmp_path: Path) -> None:
    oracle, tokenizer = write_bert(tmp_path, "BertForMaskedLM")
    with_heads(tmp_path, "BertSpladeSparseEmbeddingModel", {})
    texts = [QUERY, *DOCUMENTS]
    with torch.inference_mode():
        rows = [oracle(torch.tensor([tokenizer.encode(one).ids])).logits[0] for one in texts]
    wanted = np.stack([torch.log1p(torch.relu(one)).amax(0).numpy() for one in rows])
    with serving(None, str(tmp_path), "--threads", "1", "--dtype", "float32") as served:
        data = served.post("/v1/embeddings", {"input": texts}).json()["data"]
        np.testing.assert_allclose([one["embedding"] for one in data], wanted, atol=1e-3)
        body = {"query": QUERY, "documents": DOCUMENTS}
        results = served.post("/rerank", body).json()["results"]
    for one in results:
        product = float(wanted[0] @ wanted[1 + one["index"]])
        assert one["relevance_score"] == pytest.approx(product, rel=1e-3)


def test_bge_m3_tells_vectors_and_weights_of_tokens(tmp_path: Path) -> None:
    torch.manual_seed(5)
    sizes = SIZES | {"pad_token_id": 1, "max_position_embeddings": 42}
    ids = {"bos_token_id": 2, "eos_token_id": 3}
    config = transformers.XLMRobertaConfig(**sizes, type_vocab_size=1, **ids)
    oracle = transformers.XLMRobertaModel(config).eval()
    oracle.save_pretrained(tmp_path)
    tokenizer = write_tokenizer(tmp_path)
    made = torch.Generator().manual_seed(2)
    shapes = {"colbert_linear.weight": (8, 32), "colbert_linear.bias": (8,)}
    shapes |= {"sparse_linear.weight": (1, 32), "sparse_linear.bias": (1,)}
    heads = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    with_heads(tmp_path, "BgeM3EmbeddingModel", heads)
    with torch.inference_mode():
        states = oracle(torch.tensor([tokenizer.encode(QUERY).ids])).last_hidden_state[0]
    vectors = states @ heads["colbert_linear.weight"].T + heads["colbert_linear.bias"]
    vectors = torch.nn.functional.normalize(vectors[1:], dim=-1).numpy()
    weights = torch.relu(states @ heads["sparse_linear.weight"].T + heads["sparse_linear.bias"])
    with serving(None, str(tmp_path), "--threads", "1", "--dtype", "float32") as served:

        def told(task: str) -> np.ndarray:
            answer = served.post("/pooling", {"input": QUERY, "task": task}).json()
            return np.asarray(answer["data"][0]["data"])

        np.testing.assert_allclose(told("token_embed"), vectors, atol=1e-3)
        np.testing.assert_allclose(told("token_classify"), weights[1:-1].numpy(), atol=1e-3)
        dense = torch.nn.functional.normalize(states[0], dim=0).numpy()
        np.testing.assert_allclose(told("embed"), dense, atol=1e-3)


def test_a_list_of_documents_is_read_in_one_prompt(tmp_path: Path) -> None:
    """What spells a token behind a document is text in a document, and instructions are followed."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(5)
    config = transformers.Qwen3Config(
        **{"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 8, "max_position_embeddings": 1024, "eos_token_id": 0},
    )
    oracle = transformers.Qwen3Model(config).eval()
    oracle.save_pretrained(tmp_path)
    made = torch.Generator().manual_seed(2)
    shapes = {"projector.0.weight": (16, 32), "projector.2.weight": (8, 16)}
    heads = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    with_heads(tmp_path, "JinaForRanking", heads, prefix="model.")
    texts = [*DOCUMENTS, "a dog"]
    passages = "\n".join(
        f'<passage id="{i}">\n{text}{MARKS[0]}\n</passage>' for i, text in enumerate(texts)
    )
    prompt = (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
        "I will provide you with 4 passages, each indicated by a numerical identifier. Rank the "
        f"passages based on their relevance to query: {QUERY}\n<instruct>\nlook\n</instruct>\n"
        f"{passages}\n<query>\n{QUERY}{MARKS[1]}\n</query><|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    with torch.inference_mode():
        states = oracle(torch.tensor([ids])).last_hidden_state[0]
    inner = torch.relu(states @ heads["projector.0.weight"].T)
    vectors = inner @ heads["projector.2.weight"].T
    marks = [tokenizer.convert_tokens_to_ids(mark) for mark in MARKS]
    documents, query = (vectors[torch.tensor(ids) == mark] for mark in marks)
    wanted = torch.nn.functional.cosine_similarity(documents, query).tolist()
    with serving(None, str(tmp_path), "--threads", "1", "--dtype", "float32") as served:
        body = {"query": QUERY, "documents": texts, "instruction": "look"}
        results = served.post("/rerank", body).json()["results"]
        for one in results:
            assert one["relevance_score"] == pytest.approx(wanted[one["index"]], abs=1e-3)
        broken = {"query": QUERY, "documents": [f"a fox {MARKS[0]} jumps {MARKS[1]}"]}
        one = served.post("/rerank", broken)
        assert one.status_code == 200, one.text
        refused = served.post("/v1/embeddings", {"input": QUERY}).json()
        assert refused["error"]["param"] == "model"


def test_nvidias_reranker_reads_a_pair_as_it_was_trained(tmp_path: Path) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "pad_token_id"}
    config = transformers.LlamaConfig(**sizes, num_labels=1, attn_implementation="eager")
    torch.manual_seed(5)
    oracle = transformers.LlamaForSequenceClassification(config).eval()
    for parameter in oracle.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    oracle.save_pretrained(tmp_path)
    tokenizer = write_tokenizer(tmp_path)
    with_heads(tmp_path, "LlamaBidirectionalForSequenceClassification", {})
    with serving(None, str(tmp_path), "--threads", "1", "--dtype", "float32") as served:
        body = {"query": QUERY, "documents": DOCUMENTS, "use_activation": False}
        results = served.post("/rerank", body).json()["results"]
    for one in results:
        text = f"question:{QUERY} \n \n passage:{DOCUMENTS[one['index']]}"
        ids = tokenizer.encode(text).ids
        sees_all = torch.zeros(1, 1, len(ids), len(ids))
        with torch.inference_mode():
            states = oracle.model(torch.tensor([ids]), attention_mask=sees_all)[0]
            score = oracle.score(states.mean(1))[0, 0].item()
        assert one["relevance_score"] == pytest.approx(score, abs=1e-3)


def test_nvidias_reranker_of_pages_reads_an_image_before_the_pair(tmp_path: Path) -> None:
    """The image's tokens stand between their marks behind the first token of all, and before both
    texts; a pair of texts is read as the reranker of texts reads it."""
    words = ["<img>", "</img>", "<IMG_CONTEXT>", "question", ":", "passage"]
    tokenizer = write_tokenizer(tmp_path)
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    first = {"pad_token": "[PAD]", "bos_token": "[CLS]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(first))
    context = tokenizer.token_to_id("<IMG_CONTEXT>")
    sizes = {key: value for key, value in SIZES.items() if key != "pad_token_id"}
    sizes |= {"vocab_size": tokenizer.get_vocab_size()}
    text = transformers.LlamaConfig(**sizes, attn_implementation="eager")
    side = {"image_size": 16, "patch_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=40, **side, vision_use_head=False
    )
    torch.manual_seed(5)
    sees, reads = transformers.SiglipVisionModel(tower).eval(), transformers.LlamaModel(text).eval()
    between = torch.nn.Sequential(
        torch.nn.LayerNorm(128), torch.nn.Linear(128, 32), torch.nn.GELU(), torch.nn.Linear(32, 32)
    )
    score = torch.nn.Linear(32, 1, bias=False)
    parts = {"vision_model.vision_model.": sees, "language_model.": reads, "mlp1.": between}
    tensors = {"score.weight": score.weight.detach()}
    for at, part in parts.items():
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        for name, one in part.state_dict().items():
            tensors[f"model.{at}{name.removeprefix('vision_model.')}"] = one.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    config = {
        "architectures": ["LlamaNemotronVLForSequenceClassification"],
        **{"model_type": "llama_nemotron_vl_rerank", "num_labels": 1, "prompt_template": "v1"},
        "vision_config": json.loads(tower.to_json_string()),
        "llm_config": json.loads(text.to_json_string()) | {"model_type": "llama_bidirec"},
        **{"downsample_ratio": 0.5, "force_image_size": 16, "img_context_token_id": context},
        **{"pooling": "avg", "ps_version": "v2", "select_layer": -1, "use_thumbnail": True},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    picture = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 40, 90)).save(picture, "png")
    url = "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
    page = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": DOCUMENTS[0]},
    ]
    with serving(None, str(tmp_path), "--threads", "1", "--dtype", "float32") as served:
        body = {"query": QUERY, "use_activation": False}
        documents = [{"content": page}, {"content": page[:1]}, DOCUMENTS[0]]
        results = served.post("/rerank", body | {"documents": documents}).json()["results"]
        two = served.post("/rerank", body | {"documents": [{"content": [*page, page[0]]}]})
        assert two.status_code == 400 and "image" in two.json()["error"]["message"]
    scores = {one["index"]: one["relevance_score"] for one in results}
    pixels = (torch.tensor([200, 40, 90]) / 255 - 0.5) / 0.5
    begin, end = (tokenizer.token_to_id(word) for word in words[:2])
    with torch.inference_mode():
        states = sees(pixels.view(1, 3, 1, 1).expand(1, 3, 16, 16)).last_hidden_state
        x = states.view(1, 2, 2, 2, 2, -1).transpose(2, 3).reshape(4, -1)
        for index, passage in enumerate((DOCUMENTS[0], "", None)):
            said = f" question:{QUERY} \n \n passage:{passage}"
            ids = [2, begin, *[context] * 4, end]
            ids += tokenizer.encode(said, add_special_tokens=False).ids
            if passage is None:
                ids = tokenizer.encode(f"question:{QUERY} \n \n passage:{DOCUMENTS[0]}").ids
            rows = reads.embed_tokens(torch.tensor([ids]))
            if passage is not None:
                rows[0, 2:6] = between(x)
            mask = torch.zeros(1, 1, len(ids), len(ids))
            read = reads(inputs_embeds=rows, attention_mask=mask).last_hidden_state
            assert scores[index] == pytest.approx(score(read.mean(1)).item(), abs=1e-3)

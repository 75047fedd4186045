"""GGUF files of encoders and of T5: hidden states, class logits and answers of the safetensors checkpoint that they
were written from, under the names of the `gguf` library's table. QNT-15."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from headrace.back.models.families import architecture_of
from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.gguf import read_gguf
from headrace.base.config.gguf_config import gguf_config
from headrace.base.errors import CheckpointError
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import read_model_facts
from tests.back.models.load.checkpoints import _finish, name_table, spec_of
from tests.back.models.load.test_gguf_mixtures import CPU, load
from tests.models.encoder_decoder_rank import forced_logits
from tests.models.encoder_decoder_rank import saved as saved_seq2seq
from tests.models.encoder_decoder_rank import spec_of as seq2seq_spec
from tests.models.oracle import BLOCK_TOKENS
from tests.models.test_encoder_decoders import t5_like
from tests.models.test_encoders import (
    TEXTS,
    batch_of,
    bert,
    eurobert,
    jina,
    loaded,
    modern,
    nomic,
    saved,
    xlm,
)
from tests.references import jina_bert, neobert


def encoder(writer: gguf.GGUFWriter, config: Any) -> None:
    known = config.to_dict()
    writer.add_context_length(
        config.max_position_embeddings - 2 * (known["model_type"] == "xlm-roberta")
    )
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(known.get("num_key_value_heads") or config.num_attention_heads)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.CLS)
    if "rms_norm_eps" in known:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(known.get("layer_norm_eps") or known["norm_eps"])
    ropes = known.get("rope_parameters")
    if ropes is None:
        return
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config.local_attention)
        writer.add_sliding_window_pattern(3)


def names_of(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
    """What the converters make of a tensor; None: it is left out."""
    for prefix in ("bert.", "roberta.", "model."):
        name = name.removeprefix(prefix)
    if name.startswith(("cls.", "lm_head", "pooler.", "embeddings.position_ids")):
        return None
    classifiers = {"classifier.weight", "classifier.bias"}
    return (
        (name.replace("classifier.", "classifier.out_proj."), tensor)
        if name in classifiers
        else (name, tensor)
    )


def write(path: Path, architecture: str, folder: Path, config: Any, *, cut: int = 0) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    layers = getattr(config, "num_hidden_layers", 0)
    writer.add_block_count(layers)
    encoder(writer, config)
    table = name_table(architecture, layers)
    for own, tensor in load_file(folder / "model.safetensors").items():
        named = names_of(own, tensor)
        if named is None:
            continue
        name, values = named
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(
            stored, np.ascontiguousarray(values[cut if "position" in name else 0 :].numpy())
        )
    _finish(writer)
    return path


CASES: list[tuple[str, str, Callable[..., Any], int]] = [
    ("bert", "BertModel", bert, 0),
    ("bert", "XLMRobertaForSequenceClassification", xlm, 2),
    ("nomic-bert", "NomicBertModel", nomic, 0),
    ("modern-bert", "ModernBertModel", modern, 0),
    ("modern-bert", "ModernBertForSequenceClassification", modern, 0),
    ("eurobert", "EuroBertModel", eurobert, 0),
    ("jina-bert-v3", "JinaEmbeddingsV3Model", jina, 0),
]


def gguf_spec(path: Path, like: Any) -> Any:
    config = gguf_config(read_gguf(path))
    named = architecture_of(config)
    return msgspec.structs.replace(
        like,
        path=str(path),
        format="gguf",
        family=named.family,
        config=config,
        head=named.head,
        bare=named.bare,
        num_labels=len(config.get("id2label", ())),
    )


@pytest.mark.parametrize(
    ("architecture", "name", "make", "cut"), CASES, ids=[one[1] for one in CASES]
)
def test_encoders_give_the_states_of_their_checkpoint(
    architecture: str, name: str, make: Callable[..., Any], cut: int, tmp_path: Path
) -> None:
    judges = "Classification" in name
    config = make(**({"num_labels": 1} if judges else {}))
    _, spec = saved(tmp_path / "a", name, config)
    path = write(tmp_path / "m.gguf", architecture, tmp_path / "a", config, cut=cut)
    facts = read_model_facts(LocatedModel(path=path, name="m", format="gguf"))
    assert facts.encodes and facts.pooling.how == "cls" and facts.num_layers == 3
    ours, _ = load(gguf_spec(path, spec))
    with torch.inference_mode():
        mine, theirs = (model.forward(batch_of(TEXTS)) for model in (ours, loaded(spec)))
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        if judges:
            scores = [model.classify(mine[:1]) for model in (ours, loaded(spec))]
            torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("apart", [False, True])
def test_jina_v2_gives_the_states_of_its_reference(apart: bool, tmp_path: Path) -> None:
    """Gate and up in one tensor, as newer files have them, or apart."""
    tensors, sizes = jina_bert.tiny(), jina_bert.CONFIG
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "jina-bert-v2")
    writer.add_block_count(2)
    encoder(writer, transformers.BertConfig(**sizes))
    table = name_table("jina-bert-v2", 2)
    for name, tensor in tensors.items():
        parts = {name: tensor}
        if apart and "gated_layers" in name:
            halves = zip(("w", "v"), tensor.chunk(2), strict=True)
            parts = {name.replace(".weight", f"_{one}.weight"): half for one, half in halves}
        for own, part in parts.items():
            stored = table.get_name(own, try_suffixes=(".weight", ".bias"))
            assert stored is not None, own
            writer.add_tensor(stored, np.ascontiguousarray(part.numpy()))
    _finish(writer)
    facts = read_model_facts(LocatedModel(path=tmp_path / "m.gguf", name="m", format="gguf"))
    spec = spec_of(tmp_path / "m.gguf", facts.config, head="none", bare=True)
    ours, _ = load(msgspec.structs.replace(spec, family=facts.family))
    with torch.inference_mode():
        mine = ours.forward(batch_of(TEXTS))
    wanted = torch.cat([jina_bert.hidden_states(tensors, sizes, text) for text in TEXTS])
    torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("judges", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_neobert_gives_the_states_of_its_reference(judges: bool, tmp_path: Path) -> None:
    """Its inner size stands there without what fills it up."""
    tensors = neobert.tiny()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "neo-bert")
    for add, value in (
        *((writer.add_block_count, 2), (writer.add_context_length, 40)),
        *((writer.add_embedding_length, 48), (writer.add_head_count, 6)),
        *((writer.add_feed_forward_length, 37), (writer.add_rope_freq_base, 10000.0)),
        *((writer.add_layer_norm_rms_eps, 1e-6), (writer.add_causal_attention, False)),
        (writer.add_pooling_type, gguf.PoolingType.CLS),
    ):
        add(value)
    made, shapes = torch.Generator().manual_seed(5), {"dense": 48, "classifier": 1}
    heads = {
        f"{name}.{kind}": torch.randn(shape, generator=made)
        for name, count in shapes.items()
        for kind, shape in (("weight", (count, 48)), ("bias", (count,)))
    }
    table = name_table("neo-bert", 2)
    for name, tensor in (tensors | (heads if judges else {})).items():
        named = name.replace("classifier.", "classifier.out_proj.")
        stored = table.get_name(named, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(tensor.numpy()))
    _finish(writer)
    facts = read_model_facts(LocatedModel(path=tmp_path / "m.gguf", name="m", format="gguf"))
    assert facts.encodes and facts.max_model_len == 40
    spec = spec_of(tmp_path / "m.gguf", facts.config, head=facts.head, bare=facts.bare)
    ours, _ = load(msgspec.structs.replace(spec, family=facts.family, num_labels=facts.num_labels))
    with torch.inference_mode():
        mine = ours.forward(batch_of(TEXTS))
        scores = ours.classify(mine[:1]) if judges else None
    wanted = torch.cat([neobert.hidden_states(tensors, text) for text in TEXTS])
    torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-4)
    if judges:
        first = torch.tanh(heads["dense.weight"] @ wanted[0] + heads["dense.bias"])
        score = heads["classifier.weight"] @ first + heads["classifier.bias"]
        torch.testing.assert_close(scores, score[None], atol=1e-3, rtol=1e-3)


def test_a_classifier_without_its_pooler_is_refused(tmp_path: Path) -> None:
    """Converters leave BERT's out."""
    config = bert(num_labels=1)
    saved(tmp_path / "a", "BertModel", config)
    file = read_gguf(write(tmp_path / "m.gguf", "bert", tmp_path / "a", config))
    tensors = {**file.tensors, "cls.output.weight": file.tensors["token_embd.weight"]}
    with pytest.raises(
        CheckpointError, match=r"cls\.weight is missing: a classifier without its pooler"
    ):
        gguf_config(replace(file, tensors=tensors))


T5 = {
    "t5": (transformers.T5Config, {}),
    "flan-t5": (
        transformers.T5Config,
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "umt5": (transformers.UMT5Config, {"tie_word_embeddings": False}),
}


def write_t5(path: Path, folder: Path, config: Any) -> Path:
    writer = gguf.GGUFWriter(path, "t5")
    writer.add_context_length(64)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_block_count(config.num_layers)
    writer.add_decoder_block_count(config.num_decoder_layers)
    writer.add_head_count(config.num_heads)
    writer.add_key_length(config.d_kv)
    writer.add_value_length(config.d_kv)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
    writer.add_decoder_start_token_id(config.decoder_start_token_id)
    table = name_table("t5", 3)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("embed_tokens.weight"):
            continue
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(tensor.numpy()))
    _finish(writer)
    return path


@pytest.mark.parametrize(
    "case", ["flan-t5", *(pytest.param(n, marks=pytest.mark.slow) for n in ("t5", "umt5"))]
)
def test_t5_answers_as_its_checkpoint(case: str, tmp_path: Path) -> None:
    kind, more = T5[case]
    config = t5_like(kind, relative_attention_max_distance=128, **more)
    saved_seq2seq(config, tmp_path / "a")
    spec = seq2seq_spec(tmp_path / "a")
    path = write_t5(tmp_path / "m.gguf", tmp_path / "a", config)
    read = gguf_config(read_gguf(path))
    named = architecture_of(read)
    facts = read_model_facts(LocatedModel(path=path, name="m", format="gguf"))
    assert facts.has_encoder and facts.decoder_start == (config.decoder_start_token_id,)
    written = {"path": str(path), "format": "gguf", "family": named.family, "config": read}
    ours, theirs = (
        forced_logits(load_model(one, mesh=Mesh(), device=CPU, block_tokens=BLOCK_TOKENS)[0])
        for one in (msgspec.structs.replace(spec, **written), spec)
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)

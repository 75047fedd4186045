"""Encoders and classifiers against transformers on tiny random configurations: hidden states and class logits, fp32
1e-4, several texts in one step (MUL-09: batch == alone)."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from headrace.back.attention.plan import Batch
from headrace.back.models.encoder_families import ENCODERS, reserved_positions
from headrace.back.models.families import architecture_of
from headrace.back.models.load import load_model
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader, read_json
from headrace.base.config.resolved import ModelSpec
from headrace.launch.locate import LocatedModel
from headrace.launch.model_facts import read_model_facts
from headrace.launch.pooling_facts import read_pooling
from tests.models.encoder_decoder_rank import attend_in_blocks
from tests.references import jina_bert

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
TEXTS = [[5, 6, 7, 8, 9, 10, 11], [3], [90, 2, 44, 17, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69]]


def bert(**more: Any) -> transformers.BertConfig:
    return transformers.BertConfig(**SIZES, max_position_embeddings=40, **more)


def roberta(**more: Any) -> transformers.RobertaConfig:
    return transformers.RobertaConfig(
        **SIZES, max_position_embeddings=40, pad_token_id=1, type_vocab_size=1, **more
    )


def xlm(**more: Any) -> transformers.XLMRobertaConfig:
    return transformers.XLMRobertaConfig(
        **SIZES, max_position_embeddings=40, pad_token_id=1, type_vocab_size=1, **more
    )


def modern(**more: Any) -> transformers.ModernBertConfig:
    return transformers.ModernBertConfig(
        **SIZES,
        max_position_embeddings=64,
        local_attention=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        attn_implementation="eager",
        **more,
    )


def nomic(**more: Any) -> transformers.NomicBertConfig:
    return transformers.NomicBertConfig(**SIZES, max_position_embeddings=40, **more)


def jina(**more: Any) -> transformers.JinaEmbeddingsV3Config:
    return transformers.JinaEmbeddingsV3Config(**SIZES, max_position_embeddings=40, **more)


def embedding_gemma(**more: Any) -> transformers.Gemma3TextConfig:
    return transformers.Gemma3TextConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=6,
        query_pre_attn_scalar=12,
        sliding_window=6,
        sliding_window_pattern=2,
        max_position_embeddings=40,
        use_bidirectional_attention=True,
        attn_implementation="eager",
        **more,
    )


def camembert(**more: Any) -> transformers.CamembertConfig:
    return transformers.CamembertConfig(
        **SIZES, max_position_embeddings=40, pad_token_id=1, type_vocab_size=1, **more
    )


def mpnet(**more: Any) -> transformers.MPNetConfig:
    return transformers.MPNetConfig(**SIZES, max_position_embeddings=40, **more)


def distilbert(**more: Any) -> transformers.DistilBertConfig:
    return transformers.DistilBertConfig(
        vocab_size=96, dim=32, hidden_dim=48, n_layers=3, n_heads=4, **more
    )


def electra(**more: Any) -> transformers.ElectraConfig:
    return transformers.ElectraConfig(
        **SIZES, embedding_size=24, max_position_embeddings=40, **more
    )


def gte(**more: Any) -> transformers.GteConfig:
    return transformers.GteConfig(**SIZES, max_position_embeddings=40, **more)


def eurobert(**more: Any) -> transformers.EuroBertConfig:
    return transformers.EuroBertConfig(
        **SIZES,
        num_key_value_heads=2,
        max_position_embeddings=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        classifier_pooling="bos",
        **more,
    )


def deberta(**more: Any) -> transformers.DebertaV2Config:
    return transformers.DebertaV2Config(
        **SIZES,
        max_position_embeddings=40,
        relative_attention=True,
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type="p2c|c2p",
        position_biased_input=False,
        **more,
    )


T5_SIZES = {
    **{"vocab_size": 96, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 3, "num_heads": 4},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
}


def t5(**more: Any) -> transformers.T5Config:
    return transformers.T5Config(**T5_SIZES, feed_forward_proj="gated-gelu", **more)


def xlnet(**more: Any) -> transformers.XLNetConfig:
    sizes = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "summary_type": "last"}
    return transformers.XLNetConfig(vocab_size=SIZES["vocab_size"], **sizes, **more)


def umt5(**more: Any) -> transformers.UMT5Config:
    return transformers.UMT5Config(**T5_SIZES | {"relative_attention_max_distance": 128}, **more)


def narrow(kind: str, **own: Any) -> Callable[..., Any]:
    """A config class of transformers with the sizes of these tests."""
    config = getattr(transformers, f"{kind}Config")
    sizes = {**SIZES, "max_position_embeddings": 40, "pad_token_id": 1, **own}
    return lambda **more: config(**sizes, **more)


ESM = {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 9}


DEBERTA = {"relative_attention": True, "pos_att_type": "c2p|p2c", "max_relative_positions": 6}
MOBILE = {"intra_bottleneck_size": 24, "embedding_size": 12, "num_feedforward_networks": 2}
XLM = {"emb_dim": 32, "n_layers": 3, "n_heads": 4}
XMOD = {"languages": ["en_XX", "de_DE"], "default_language": "de_DE"}
CONV = {"embedding_size": 24, "conv_kernel_size": 5}


def fnet(**more: Any) -> transformers.FNetConfig:
    sizes = {key: value for key, value in SIZES.items() if key != "num_attention_heads"}
    return transformers.FNetConfig(**sizes, max_position_embeddings=40, **more)


def xlm_first(**more: Any) -> transformers.XLMConfig:
    return transformers.XLMConfig(
        vocab_size=96, **XLM, max_position_embeddings=40, n_langs=2, pad_token_id=1, **more
    )


def embedding_gemma2_text(**more: Any) -> transformers.EmbeddingGemma2TextConfig:
    return transformers.EmbeddingGemma2TextConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        sliding_window=4,
        sliding_window_pattern=2,
        hidden_size_per_layer_input=16,
        embedding_dim=24,
        max_position_embeddings=40,
        attn_implementation="eager",
        **more,
    )


def embedding_gemma2(**more: Any) -> transformers.EmbeddingGemma2Config:
    text = embedding_gemma2_text().to_dict()
    return transformers.EmbeddingGemma2Config(
        text_config=text,
        vision_config=None,
        audio_config=None,
        attn_implementation="eager",
        **more,
    )


def qwen3(**more: Any) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=0,
        **more,
    )


ULTRA = {"sliding_window": 3, "rms_norm_eps": 0.01, "num_key_value_heads": 2}
FILTER: dict[str, Any] = {
    **{"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 3, "num_local_experts": 6},
    **{"num_experts_per_tok": 3, "attn_implementation": "eager", "swiglu_limit": 1.5},
}
ESMC = {"bos_token_id": 2, "eos_token_id": 3, "attn_implementation": "eager"}


ENCODER_CASES: list[tuple[str, Callable[..., Any]]] = [
    ("BertModel", bert),
    ("BertForMaskedLM", bert),
    ("BertForSequenceClassification", bert),
    ("BertForTokenClassification", bert),
    ("RobertaModel", roberta),
    ("RobertaForSequenceClassification", roberta),
    ("RobertaForTokenClassification", roberta),
    ("XLMRobertaForSequenceClassification", xlm),
    ("ModernBertModel", modern),
    ("ModernBertForSequenceClassification", modern),
    ("ModernBertForTokenClassification", modern),
    ("Gemma3TextModel", embedding_gemma),
    ("NomicBertModel", nomic),
    ("NomicBertForMaskedLM", nomic),
    ("NomicBertForSequenceClassification", nomic),
    ("NomicBertForTokenClassification", nomic),
    ("JinaEmbeddingsV3Model", jina),
    ("JinaEmbeddingsV3ForMaskedLM", jina),
    ("JinaEmbeddingsV3ForSequenceClassification", jina),
    ("JinaEmbeddingsV3ForTokenClassification", jina),
    ("CamembertModel", camembert),
    ("MPNetForMaskedLM", mpnet),
    ("MPNetForSequenceClassification", mpnet),
    ("DistilBertModel", distilbert),
    ("DistilBertForSequenceClassification", distilbert),
    ("ElectraForMaskedLM", electra),
    ("ElectraForSequenceClassification", electra),
    ("GteModel", gte),
    ("GteForSequenceClassification", gte),
    ("EuroBertForMaskedLM", eurobert),
    ("EuroBertForSequenceClassification", eurobert),
    ("DebertaV2Model", deberta),
    ("DebertaV2ForSequenceClassification", deberta),
    ("AlbertModel", narrow("Albert", embedding_size=24, num_hidden_groups=2)),
    ("AlbertForSequenceClassification", narrow("Albert", embedding_size=24, inner_group_num=2)),
    ("ErnieForSequenceClassification", narrow("Ernie", use_task_id=True)),
    ("EsmModel", narrow("Esm", **ESM)),
    ("EsmForSequenceClassification", narrow("Esm", emb_layer_norm_before=True)),
    ("MegatronBertForSequenceClassification", narrow("MegatronBert")),
    ("RemBertForSequenceClassification", narrow("RemBert", input_embedding_size=24)),
    ("RoFormerForSequenceClassification", narrow("RoFormer", embedding_size=24)),
    ("XLMRobertaXLForSequenceClassification", narrow("XLMRobertaXL")),
    ("RobertaPreLayerNormForTokenClassification", narrow("RobertaPreLayerNorm")),
    ("Data2VecTextForSequenceClassification", narrow("Data2VecText")),
    ("LongformerModel", narrow("Longformer", attention_window=[4, 8, 4])),
    ("LongformerForSequenceClassification", narrow("Longformer", attention_window=4)),
    ("DebertaForSequenceClassification", narrow("Deberta", **DEBERTA)),
    ("DebertaForTokenClassification", narrow("Deberta", **DEBERTA, position_biased_input=False)),
    ("MobileBertForSequenceClassification", narrow("MobileBert", **MOBILE)),
    ("MobileBertForTokenClassification", narrow("MobileBert", **MOBILE, trigram_input=False)),
    ("SqueezeBertForSequenceClassification", narrow("SqueezeBert", embedding_size=32, v_groups=2)),
    ("FNetForSequenceClassification", fnet),
    ("XLMForSequenceClassification", xlm_first),
    ("FlaubertForTokenClassification", narrow("Flaubert", **XLM, gelu_activation=False)),
    ("LukeForSequenceClassification", narrow("Luke", entity_vocab_size=5, entity_emb_size=8)),
    ("XmodForSequenceClassification", narrow("Xmod", **XMOD, adapter_reuse_layer_norm=True)),
    ("XmodForTokenClassification", narrow("Xmod", **XMOD, ln_before_adapter=False)),
    ("BigBirdForSequenceClassification", narrow("BigBird", attention_type="original_full")),
    ("BigBirdForTokenClassification", narrow("BigBird", block_size=1, num_random_blocks=1)),
    ("ConvBertForSequenceClassification", narrow("ConvBert", **CONV, num_groups=2)),
    ("ConvBertForTokenClassification", narrow("ConvBert", **CONV, head_ratio=4)),
    ("UltrabertModel", narrow("Ultrabert", **ULTRA)),
    ("UltrabertForMaskedLM", narrow("Ultrabert", **ULTRA)),
    ("UltrabertForSequenceClassification", narrow("Ultrabert", **ULTRA)),
    ("UltrabertForTokenClassification", narrow("Ultrabert", **ULTRA)),
    ("EsmcForSequenceClassification", narrow("Esmc", **ESMC)),
    ("OpenAIPrivacyFilterForTokenClassification", narrow("OpenAIPrivacyFilter", **FILTER)),
    ("T5EncoderModel", t5),
    ("UMT5EncoderModel", umt5),
    ("XLNetModel", xlnet),
    ("XLNetForTokenClassification", xlnet),
    ("T5ForTokenClassification", t5),
    ("MT5ForTokenClassification", t5),
    ("UMT5ForTokenClassification", umt5),
    ("EmbeddingGemma2TextModel", embedding_gemma2_text),
    ("EmbeddingGemma2Model", embedding_gemma2),
]


def saved(folder: Path, name: str, config: Any) -> tuple[Any, ModelSpec]:
    torch.manual_seed(3)
    oracle = getattr(transformers, name)(config).eval()
    for parameter in oracle.parameters():  # biases and norms as made would hide a missing one
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    oracle.save_pretrained(folder)
    if isinstance(config, transformers.BigBirdConfig):
        attend_in_blocks(oracle.bert)
    raw = read_json(folder / "config.json")
    named = architecture_of(raw)
    spec = ModelSpec(
        path=str(folder),
        name="tiny",
        format="safetensors",
        family=named.family,
        dtype="float32",
        max_model_len=32,
        logits_width=SIZES["vocab_size"],
        eos_ids=(),
        config=raw,
        head=named.head,
        bare=named.bare,
        num_labels=getattr(config, "num_labels", 0),
    )
    return oracle, spec


def loaded(spec: ModelSpec) -> Any:
    model, _ = load_model(spec, mesh=Mesh(), device=torch.device("cpu"), block_tokens=16)
    return model


def batch_of(texts: list[list[int]], segments: list[int] | None = None) -> Batch:
    starts = np.cumsum([0, *(len(text) for text in texts)]).astype(np.int32)
    return Batch(
        token_ids_T=torch.tensor([token for text in texts for token in text]),
        positions_T=torch.cat([torch.arange(len(text)) for text in texts]),
        plans=(),
        group_of_layer=(),
        kv=(),
        logits_at_N=torch.empty(0, dtype=torch.int64),
        query_start=starts,
        segments_T=None if segments is None else torch.tensor(segments),
    )


@pytest.mark.parametrize(("name", "make"), ENCODER_CASES, ids=[name for name, _ in ENCODER_CASES])
def test_hidden_states_and_logits_equal_transformers(
    name: str, make: Callable[..., Any], tmp_path: Path
) -> None:
    heads = {"num_labels": 3} if "Classification" in name else {}
    oracle, spec = saved(tmp_path, name, make(**heads))
    assert spec.family in ENCODERS
    model = loaded(spec)
    with torch.inference_mode():
        hidden_TE = model.forward(batch_of(TEXTS))
        parts = [hidden_TE[a:b] for a, b in pairwise(batch_of(TEXTS).query_start.tolist())]
        for text, ours in zip(TEXTS, parts, strict=True):
            answer = oracle(torch.tensor([text]), output_hidden_states=True)
            wanted = (
                answer.last_hidden_state
                if "last_hidden_state" in answer
                else answer.hidden_states[-1]
            )
            torch.testing.assert_close(ours, wanted[0][: len(text)], atol=1e-4, rtol=1e-4)
            if "SequenceClassification" in name:
                torch.testing.assert_close(
                    model.classify(ours[:1]), answer.logits, atol=1e-4, rtol=1e-4
                )
            if "TokenClassification" in name:
                torch.testing.assert_close(
                    model.classify(ours), answer.logits[0], atol=1e-4, rtol=1e-4
                )


def test_xlnet_judges_by_the_last_token_which_is_a_segment_of_its_own(tmp_path: Path) -> None:
    config = xlnet(num_labels=3)
    oracle, spec = saved(tmp_path, "XLNetForSequenceClassification", config)
    text, segments = [5, 6, 7, 4, 9, 4, 3], [0, 0, 0, 0, 1, 1, 1]
    model = loaded(spec)
    with torch.inference_mode():
        ours = model.forward(batch_of([text, [8, 9]], [*segments, 0, 0]))
        types = torch.tensor([[*segments[:-1], 2]])
        wanted = oracle(torch.tensor([text]), token_type_ids=types).logits
    torch.testing.assert_close(model.classify(ours[6:7]), wanted, atol=1e-4, rtol=1e-4)
    reader = ConfigReader(config.to_dict(), "config.json")
    facts = {"encodes": True, "whole": reader}
    assert read_pooling(None, reader, "sequence", ("a", "b", "c"), **facts).how == "last"


def test_token_types_of_a_pair_reach_bert(tmp_path: Path) -> None:
    oracle, spec = saved(tmp_path, "BertModel", bert())
    segments = [0, 0, 0, 1, 1, 1, 1]
    model = loaded(spec)
    with torch.inference_mode():
        ours = model.forward(batch_of(TEXTS[:1], segments))
        types = torch.tensor([segments])
        wanted = oracle(torch.tensor(TEXTS[:1]), token_type_ids=types).last_hidden_state[0]
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("base", ["Bart", "Mvp", "PLBart"])
def test_an_encoder_decoder_judges_by_its_last_state(base: str, tmp_path: Path) -> None:
    """As bart-large-mnli does: texts end with one token of their end."""
    sizes = {"encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40}
    sizes |= {"vocab_size": 96, "d_model": 32, "max_position_embeddings": 40, "num_labels": 3}
    config = getattr(transformers, f"{base}Config")(
        **sizes, decoder_start_token_id=2, scale_embedding=True
    )
    oracle, spec = saved(tmp_path, f"{base}ForSequenceClassification", config)
    assert spec.family in ENCODERS and spec.head == "sequence"
    facts = {"encodes": True, "whole": ConfigReader(spec.config, "config.json")}
    reader = ConfigReader(spec.config, "config.json")
    assert read_pooling(None, reader, "sequence", ("a", "b", "c"), **facts).how == "last"
    told = read_model_facts(LocatedModel(path=tmp_path, name="m", format="safetensors"))
    assert told.encodes and told.pooling.how == "last" and told.max_model_len == 40
    texts = [[*text[1:], 2] for text in TEXTS if 2 not in text] + [[7, 8, 9, 2]]
    model = loaded(spec)
    with torch.inference_mode():
        hidden_TE = model.forward(batch_of(texts))
        ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
        ours = model.classify(hidden_TE[ends])
        for text, logits in zip(texts, ours, strict=True):
            wanted = oracle(torch.tensor([text])).logits[0]
            torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


def test_norms_of_the_first_checkpoints_have_other_names(tmp_path: Path) -> None:
    """BERT's own files say gamma and beta."""
    oracle, spec = saved(tmp_path, "BertModel", bert())
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(file)
    for new, name in old.items():
        tensors = {key.replace(new, name): tensor for key, tensor in tensors.items()}
    save_file(tensors, file)
    with torch.inference_mode():
        wanted = oracle(torch.tensor(TEXTS[:1])).last_hidden_state[0]
        ours = loaded(spec).forward(batch_of(TEXTS[:1]))
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("base", "named"),
    [("Llama", "LlamaBidirectionalModel"), ("Qwen2", "Qwen2Model"), ("Qwen3", "Qwen3Model")],
)
def test_a_decoder_that_sees_both_sides_is_an_encoder(
    base: str, named: str, tmp_path: Path
) -> None:
    """NVIDIA's embedders, gte-Qwen2: decoders whose mask lets every token see all."""
    config = getattr(transformers, f"{base}Config")(
        **SIZES, num_key_value_heads=2, attn_implementation="eager"
    )
    oracle, _ = saved(tmp_path, f"{base}Model", config)
    raw = read_json(tmp_path / "config.json") | {"architectures": [named], "is_causal": False}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    facts = read_model_facts(LocatedModel(path=tmp_path, name="m", format="safetensors"))
    assert facts.encodes and facts.pooling.how == "mean"
    spec = ModelSpec(
        path=str(tmp_path),
        name="tiny",
        format="safetensors",
        family=facts.family,
        dtype="float32",
        max_model_len=32,
        logits_width=96,
        eos_ids=(),
        config=raw,
        head="none",
        bare=True,
    )
    text = TEXTS[0]
    sees_all = torch.zeros(1, 1, len(text), len(text))
    with torch.inference_mode():
        ours = loaded(spec).forward(batch_of([text]))
        wanted = oracle(torch.tensor([text]), attention_mask=sees_all).last_hidden_state[0]
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_jina_v2_gives_the_states_of_its_reference(prefix: str, tmp_path: Path) -> None:
    """Scores fall with distance; tensors of either class."""
    tensors, config = jina_bert.tiny(), jina_bert.CONFIG
    stored = {prefix + name: tensor for name, tensor in tensors.items()}
    unread = {f"{prefix}pooler.dense.bias": torch.zeros(48)}
    save_file(stored | unread, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_model_facts(LocatedModel(path=tmp_path, name="m", format="safetensors"))
    assert facts.encodes and facts.pooling.how == "mean" and facts.max_model_len == 40
    spec = ModelSpec(
        path=str(tmp_path),
        name="tiny",
        format="safetensors",
        family=facts.family,
        dtype="float32",
        max_model_len=40,
        logits_width=96,
        eos_ids=(),
        config=config,
        head="none",
        bare=True,
    )
    with torch.inference_mode():
        ours = loaded(spec).forward(batch_of(TEXTS))
    wanted = torch.cat([jina_bert.hidden_states(tensors, config, text) for text in TEXTS])
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


def test_gte_as_its_authors_store_it(tmp_path: Path) -> None:
    """NewModel, whose "ntk" is a base as many times as great, and frequencies divided by factor^(2 / head_dim)."""
    oracle, spec = saved(tmp_path, "GteModel", gte())
    raw = {key: value for key, value in spec.config.items() if key != "rope_parameters"}
    raw |= {"architectures": ["NewModel"], "model_type": "new", "rope_theta": 20.0}
    raw |= {"rope_scaling": {"type": "ntk", "factor": 8.0}}
    speed = (20.0 * 8.0) ** (-torch.arange(0, 8, 2) / 8) / 8.0 ** (2 / 8)
    oracle.rotary_emb.inv_freq = speed
    model = loaded(replace(spec, config=raw, family=architecture_of(raw).family))
    with torch.inference_mode():
        wanted = oracle(torch.tensor(TEXTS[:1])).last_hidden_state[0]
        torch.testing.assert_close(model.forward(batch_of(TEXTS[:1])), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("stated", "how"), [("bos", "cls"), ("mean", "mean"), (None, "cls")])
def test_classifiers_read_the_token_that_the_config_names(stated: str | None, how: str) -> None:
    config = ConfigReader({"classifier_pooling": stated}, "config.json")
    facts = {"encodes": True, "whole": config}
    assert read_pooling(None, config, "sequence", ("a", "b"), **facts).how == how


def test_the_context_of_roberta_leaves_out_what_lies_before_its_first_position() -> None:
    config = roberta().to_dict()
    assert reserved_positions("roberta", config) == 2
    assert reserved_positions("bert", config) == 0


@pytest.mark.parametrize(
    ("name", "make", "context"),
    [
        ("FNetForPreTraining", fnet, 40),
        ("XLMWithLMHeadModel", xlm_first, 40),
        ("FlaubertWithLMHeadModel", narrow("Flaubert", **XLM, vocab_size=96), 40),
        ("BigBirdForPreTraining", narrow("BigBird", block_size=2, num_random_blocks=1), 40),
    ],
)
def test_encoders_are_read_as_they_are_published(
    name: str, make: Callable[..., Any], context: int, tmp_path: Path
) -> None:
    """With heads that nobody asks for, keys of their own, and texts no longer than are seen whole."""
    oracle, spec = saved(tmp_path, name, make())
    if "XLM" in name or "Flaubert" in name:
        spec.config["n_words"] = spec.config.pop("vocab_size")
        (tmp_path / "config.json").write_text(json.dumps(spec.config))
    told = read_model_facts(LocatedModel(path=tmp_path, name="m", format="safetensors"))
    assert told.encodes and told.max_model_len == context and told.logits_width == 96
    inner = getattr(oracle, oracle.base_model_prefix)
    with torch.inference_mode():
        wanted = inner(torch.tensor(TEXTS[:1])).last_hidden_state[0]
        ours = loaded(spec).forward(batch_of(TEXTS[:1]))
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["Qwen3Model", "Qwen3ForSequenceClassification"])
def test_decoders_without_a_language_head_load(name: str, tmp_path: Path) -> None:
    heads = {"num_labels": 3} if "Classification" in name else {}
    oracle, spec = saved(tmp_path, name, qwen3(**heads))
    model = loaded(spec)
    assert not model.generates
    if heads:
        weight = oracle.score.weight
        hidden = torch.randn(4, SIZES["hidden_size"])
        torch.testing.assert_close(model.classify(hidden), hidden @ weight.T, atol=1e-4, rtol=1e-4)

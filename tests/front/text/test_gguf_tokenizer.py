"""The tokenizer of a GGUF file gives the ids of the tokenizer the file was made from."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, pre_tokenizers, trainers

from headrace.base.errors import CheckpointError
from headrace.front.text.gguf_tokenizer import gguf_tokenizer
from headrace.front.text.gguf_tokenizer_patterns import NFC, PATTERNS, WHOLE_WORDS

TEXTS = [
    "",
    "Hello, world!  Two  spaces and a tab\tand\n\nnew lines.",
    "I'LL we're 1234567 x=3.14; naïve café — «ταБ» 日本語 🙂👩‍👩‍👧",
    "   leading and trailing   ",
    "def f(x):\n    return x ** 2\n",
]
CORPUS = [*TEXTS, *(f"number {n} squared is {n * n}; the word is word{n}" for n in range(200))]


def write(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> str:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", np.zeros((1, 4), np.float32))
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


OWN = (None, "digits", "falcon")


def byte_level(pattern: str | tuple[str, ...] | None) -> tokenizers.Tokenizer:
    """A byte-level BPE trained with the pattern, with a control token and a user-defined one at the end."""
    made = tokenizers.Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern in OWN)]
    if pattern == "digits":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif pattern == "falcon":
        steps.insert(0, pre_tokenizers.Punctuation("contiguous"))
        steps.append(pre_tokenizers.Digits(individual_digits=False))
        steps.append(pre_tokenizers.Split(tokenizers.Regex("[0-9]{3}"), "isolated"))
    elif pattern is not None:
        every = (pattern,) if isinstance(pattern, str) else pattern
        steps[:0] = [pre_tokenizers.Split(tokenizers.Regex(one), "isolated") for one in every]
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True)])
    made.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    return made


def write_byte_level(path: Path, made: tokenizers.Tokenizer, pre: str, **flags: bool) -> str:
    merges = [
        m if isinstance(m, str) else " ".join(m)
        for m in json.loads(made.to_str())["model"]["merges"]
    ]
    vocabulary = made.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    kinds = [3 if token == "<|end|>" else 4 if token == "<tool>" else 1 for token in tokens]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
        writer.add_eos_token_id(vocabulary["<|end|>"])
        writer.add_chat_template("{{ messages }}")
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    return write(path, fill)


DISTINCT = {(PATTERNS[name], name in NFC, name in WHOLE_WORDS): name for name in sorted(PATTERNS)}


@pytest.mark.parametrize("pre", sorted(DISTINCT.values()))
def test_byte_level_ids_are_those_of_the_original(pre: str, tmp_path: Path) -> None:
    made = byte_level(PATTERNS[pre])
    found = gguf_tokenizer(write_byte_level(tmp_path / "m.gguf", made, pre))
    for text in [*TEXTS, "a<|end|>b<tool> c"]:
        bare = found.encode(text, add_special_tokens=False)
        assert bare == made.encode(text, add_special_tokens=False).ids, text
        assert found.decode(bare, skip_special_tokens=False) == text
    assert found.num_ids == made.get_vocab_size()


DIGITS = [*"12345"]
PIECES = {
    "deepseek-v3": ["123", "45", " ", "中文かな", "abc", " x", "/path", " ++\n", "'s", "  ", " y"],
    "seed-coder": [*DIGITS, " 中文かなabc", " x", "/path", " ++", "\n", "'s", "  ", " y"],
    "bailingmoe": [*DIGITS, " 中文かなabc", " x", "/path", " ++\n", "'s", "  ", " y"],
    "qwen35": [*DIGITS, " 中文かなabc", " x", "/path", " ++\n", "'s", "  ", " y"],
    "kimi-k2": ["123", "45", " ", "中文", "かなabc", " x", "/path", " ++\n", "'s", "  ", " y"],
    "deepseek-llm": [
        *DIGITS,
        " ",
        "中文かな",
        "abc",
        " x",
        "/",
        "path",
        " ++",
        "\n",
        "'",
        "s",
        "  ",
        " y",
    ],
    "afmoe": ["12", "345", " ", "中文かな", "abc", " x", "/path", " ++\n", "'s", "  ", " y"],
    "tiny_aya": ["12", "345", " 中文かなabc", " x", "/path", " ++\n", "'s", "  ", " y"],
    "laguna": [*DIGITS, " 中文かなabc", " x", "/path", " ++", "\n", "'s", "  ", " y"],
    "exaone-moe": [*DIGITS, " 中文かなabc x", "/path", " ++\n", "'s", "  ", " y"],
    "falcon": [
        "123",
        "45",
        " 中文かなabc",
        " x",
        "/",
        "path",
        " ",
        "++",
        "\n",
        "'",
        "s",
        "  ",
        " y",
    ],
}
"""Of one text, split by hand as the models' own patterns say."""


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_split_as_the_model_splits_it(pre: str) -> None:
    split = byte_level(PATTERNS[pre]).pre_tokenizer.pre_tokenize_str
    text = "12345 中文かなabc x/path ++\n's   y"
    assert [text[begin:end] for _, (begin, end) in split(text)] == PIECES[pre]


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    made = byte_level(None)
    found = gguf_tokenizer(write_byte_level(tmp_path / "m.gguf", made, "gpt-2"))
    ids = found.encode("a<tool>b<|end|>", add_special_tokens=False)
    assert found.decode(ids) == "a<tool>b"
    assert found.special_ids == {made.token_to_id("<|end|>")}
    assert found.facts.special_tokens == {"eos_token": "<|end|>"}
    assert found.facts.chat_template == "{{ messages }}"


def test_the_file_says_whether_eos_is_added(tmp_path: Path) -> None:
    made = byte_level(None)
    end = made.token_to_id("<|end|>")
    plain = gguf_tokenizer(write_byte_level(tmp_path / "a.gguf", made, "gpt-2"))
    added = gguf_tokenizer(write_byte_level(tmp_path / "b.gguf", made, "gpt-2", add_eos_token=True))
    assert plain.encode("hello")[-1] != end and added.encode("hello")[-1] == end


def piece_model() -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE model with byte fallback, as Llama 2's."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.replace("\n", " ") for text in CORPUS if text),
        model_writer=written,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def write_pieces(path: Path, made: Any, *, space_prefix: bool = True, count: int = 0) -> str:
    def kind(number: int) -> int:
        return (
            2
            if made.is_unknown(number)
            else 3
            if made.is_control(number)
            else 6
            if made.is_byte(number)
            else 1
        )

    def fill(writer: gguf.GGUFWriter) -> None:
        ids = range(made.get_piece_size())
        writer.add_tokenizer_model("llama")
        writer.add_token_list([made.id_to_piece(number) for number in ids])
        writer.add_token_scores([made.get_score(number) for number in ids][count:])
        writer.add_token_types([kind(number) for number in ids])
        writer.add_bos_token_id(made.bos_id())
        writer.add_eos_token_id(made.eos_id())
        writer.add_unk_token_id(made.unk_id())
        writer.add_bool("tokenizer.ggml.add_space_prefix", space_prefix)

    return write(path, fill)


def test_sentencepiece_ids_are_those_of_the_original(tmp_path: Path) -> None:
    made = piece_model()
    found = gguf_tokenizer(write_pieces(tmp_path / "m.gguf", made))
    for text in [*TEXTS[1:], "unseen: ψ ☃ \x07"]:
        assert found.encode(text) == [made.bos_id(), *made.encode(text)], text
        assert found.encode(text, add_special_tokens=False) == made.encode(text)
        assert found.decode(made.encode(text)) == made.decode(made.encode(text))


def test_without_the_space_prefix_text_starts_as_it_is(tmp_path: Path) -> None:
    made = piece_model()
    found = gguf_tokenizer(write_pieces(tmp_path / "m.gguf", made, space_prefix=False))
    ids = found.encode("number", add_special_tokens=False)
    assert ids != made.encode("number") and found.decode(ids) == "number"


def with_architecture(writer: gguf.GGUFWriter, name: str) -> None:
    writer.kv_data[0]["general.architecture"].value = name


def test_word_pieces_are_those_of_bert(tmp_path: Path) -> None:
    """Files mark the beginnings of words, BERT what continues them; pairs have types."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokens = sorted(made.get_vocab(), key=made.get_vocab().get)

    def fill(writer: gguf.GGUFWriter) -> None:
        with_architecture(writer, "bert")
        writer.add_tokenizer_model("bert")
        phantom = [one[2:] if one.startswith("##") else f"▁{one}" for one in tokens]
        writer.add_token_list(special + phantom[len(special) :])
        writer.add_token_types([3] * len(special) + [1] * (len(tokens) - len(special)))
        writer.add_uint32("tokenizer.ggml.cls_token_id", 2)
        writer.add_sep_token_id(3)
        writer.add_unk_token_id(1)

    found = gguf_tokenizer(write(tmp_path / "m.gguf", fill))
    for text in [*TEXTS, "unseen: ψ ☃", "a [MASK] b"]:
        assert found.encode(text) == made.encode(text).ids, text
    pair = made.encode("number one", "the word")
    assert found.encode_pair("number one", "the word") == (pair.ids, pair.type_ids.index(1))


@pytest.mark.parametrize("architecture", ["t5", "bert"])
def test_unigrams_are_those_of_the_original(architecture: str, tmp_path: Path) -> None:
    """T5's texts have an end, those of encoders (XLM-RoBERTa) a beginning too."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.replace("\n", " ") for text in CORPUS if text),
        model_writer=written,
        model_type="unigram",
        vocab_size=120,
        character_coverage=0.98,
        minloglevel=2,
    )
    made = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    proto = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())

    def fill(writer: gguf.GGUFWriter) -> None:
        with_architecture(writer, architecture)
        ids = range(made.get_piece_size())
        writer.add_tokenizer_model("t5")
        writer.add_token_list([made.id_to_piece(number) for number in ids])
        writer.add_token_scores([made.get_score(number) for number in ids])
        writer.add_token_types([2 if n == made.unk_id() else 3 if n < 3 else 1 for n in ids])
        writer.add_remove_extra_whitespaces(True)
        writer.add_precompiled_charsmap(proto.normalizer_spec.precompiled_charsmap)
        writer.add_bos_token_id(made.bos_id())
        writer.add_eos_token_id(made.eos_id())

    found = gguf_tokenizer(write(tmp_path / "m.gguf", fill))
    begin = [made.bos_id()] if architecture == "bert" else []
    for text in [*TEXTS[1:], "ﬁne ① full－width"]:
        assert found.encode(text) == [*begin, *made.encode(text), made.eos_id()], text
    if begin:
        first, second = made.encode("number"), made.encode("word")
        ends = [made.eos_id()]
        joined = [*begin, *first, *ends, *ends, *second, *ends]
        assert found.encode_pair("number", "word") == (joined, 0)


def test_merges_of_characters_run_over_the_whole_text(tmp_path: Path) -> None:
    """As Gemma 4's files have them."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps)
    first = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=first, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    tokens = sorted(made.get_vocab(), key=made.get_vocab().get)
    document = json.loads(made.to_str())

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 3, 2, *[6] * 256, *[1] * (len(tokens) - 260)])
        writer.add_token_merges([" ".join(one) for one in document["model"]["merges"]])
        writer.add_bos_token_id(2)
        writer.add_unk_token_id(3)

    found = gguf_tokenizer(write(tmp_path / "m.gguf", fill))
    for text in [*TEXTS, "unseen: ψ ☃"]:
        ids = found.encode(text)
        assert ids == [2, *made.encode(text).ids], text
        assert found.decode(ids) == text


def test_a_pre_tokenizer_we_do_not_know_is_refused_with_the_list(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path / "m.gguf", byte_level(None), "superbpe")
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre is 'superbpe'.*qwen2"):
        gguf_tokenizer(path)


def test_other_kinds_of_vocabulary_and_none_are_refused(tmp_path: Path) -> None:
    def other(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("plamo")
        writer.add_token_list(["a"])

    with pytest.raises(CheckpointError, match="one of bert, gemma4, gpt2, llama, plamo2, rwkv, t5"):
        gguf_tokenizer(write(tmp_path / "a.gguf", other))
    with pytest.raises(CheckpointError, match="holds no vocabulary"):
        gguf_tokenizer(write(tmp_path / "b.gguf", lambda writer: None))


def test_lists_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"scores has 417 entries for 420 tokens"):
        gguf_tokenizer(write_pieces(tmp_path / "m.gguf", piece_model(), count=3))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("merges", ["a"], "left right"),
        ("merges", ["zz yy"], "tokenizer"),
        ("token_type", [1], "1 entries"),
    ],
)
def test_damaged_byte_level_vocabularies_are_refused(
    key: str, value: list[Any], message: str, tmp_path: Path
) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_array(f"tokenizer.ggml.{key}", value)

    with pytest.raises(CheckpointError, match=message):
        gguf_tokenizer(write(tmp_path / "m.gguf", fill))


def test_a_special_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_eos_token_id(2)

    with pytest.raises(CheckpointError, match=r"eos_token_id is 2; it must be an id below 2"):
        gguf_tokenizer(write(tmp_path / "m.gguf", fill))

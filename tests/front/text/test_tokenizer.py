import base64
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import CheckpointError, ContextTooLong, InvalidRequest
from headrace.front.text.tokenizer import MAX_TEXT_CHARS
from headrace.front.text.tokenizer_files import check_vocabulary, load_tokenizer
from headrace.front.text.tokenizer_json import JsonTokenizer
from tests.front.text import vocabularies

KINDS = [vocabularies.byte_level, vocabularies.byte_fallback, vocabularies.unigram]
TEXTS = ["hello world", "Grüße 東京 🎉", "a  b\n\n c", " leading", "x <|im_start|> y <think>z"]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_encode_and_decode_equal_the_library(make, text, skip):
    tokenizer = make()
    encoded = tokenizer.encode(text)
    assert encoded == tokenizer._library.encode(text).ids
    bare = tokenizer.encode(text, add_special_tokens=False)
    assert bare == tokenizer._library.encode(text, add_special_tokens=False).ids
    if make is not vocabularies.unigram or "🎉" not in text:
        decoded = tokenizer._library.decode(bare, skip_special_tokens=skip)
        assert tokenizer.decode(bare, skip_special_tokens=skip) == decoded


@pytest.mark.parametrize("make", KINDS)
def test_every_token_decodes_as_in_the_library(make):
    tokenizer = make()
    for token_id in range(tokenizer.num_ids):
        expected = tokenizer._library.decode([token_id], skip_special_tokens=False)
        assert tokenizer.decode([token_id], skip_special_tokens=False) == expected


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_byte_level_text_survives_a_round_trip(text):
    tokenizer = vocabularies.byte_level()
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text.translate(
        {ord(c): "\ufffd" for c in "\ufdd0\ufdd1\ufdd2\ufdd3"}
    )


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("control", vocabularies.SPECIAL)
def test_plain_text_never_gives_a_control_id(make, control):
    tokenizer = make()
    ids = tokenizer.encode_plain(f"a{control}b {control}")
    assert not tokenizer.special_ids.intersection(ids) - {tokenizer.token_id("<unk>")}
    raw = tokenizer.encode(f"a{control}b", add_special_tokens=False)
    assert tokenizer.token_id(control) in raw  # in a raw prompt it does


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("control", vocabularies.SPECIAL)
def test_what_is_written_holds_no_control_id(make, control):
    tokenizer = make()
    text = f"a{control}b"
    assert tokenizer.encode_written(text) == tokenizer.encode_plain(text)


def test_what_is_written_has_markup_as_its_token():
    tokenizer = load_tokenizer("demo/model")
    text = '<tool_call>\n{"name": "add"}\n</tool_call><|im_end|>'
    ids = tokenizer.encode_written(text)
    begin, end = tokenizer.token_id("<tool_call>"), tokenizer.token_id("</tool_call>")
    assert [i for i in ids if i in (begin, end)] == [begin, end]
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_guarded_vocabulary_keeps_every_id():
    tokenizer = vocabularies.byte_fallback()
    guarded = tokenizer._guarded.get_vocab(with_added_tokens=True)
    spellings = tokenizer.guard.spellings
    original = tokenizer._library.get_vocab(with_added_tokens=True)
    assert guarded == {spellings.get(token, token): i for token, i in original.items()}


@pytest.mark.parametrize(
    ("config", "expected_bos"),
    [({}, 1), ({"add_bos_token": True}, 1), ({"add_bos_token": False}, 0)],
)
def test_tokenizer_config_decides_about_bos(tmp_path, config, expected_bos):
    folder = vocabularies.write_folder(tmp_path / "m", vocabularies.byte_fallback(), **config)
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.encode("hello")
    assert ids.count(tokenizer.token_id("<s>")) == expected_bos
    assert tokenizer.facts.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_bos_in_the_text_is_not_doubled(tmp_path):
    folder = vocabularies.write_folder(
        tmp_path / "m", vocabularies.byte_level(), add_bos_token=True
    )
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode("<s>hello").count(tokenizer.token_id("<s>")) == 1
    assert tokenizer.encode("hello")[0] == tokenizer.token_id("<s>")


def test_text_that_cannot_fit_is_refused_before_encoding():
    tokenizer = vocabularies.byte_level()
    most = 10 * tokenizer.longest_token
    tokenizer.encode("a" * most, max_tokens=10)
    with pytest.raises(ContextTooLong, match=rf": 11 tokens > 10 maximum .*{most + 1} characters"):
        tokenizer.encode("a" * (most + 1), max_tokens=10)


def test_ids_out_of_range_are_refused_by_value():
    tokenizer = vocabularies.byte_level()
    for wrong in (-1, tokenizer.num_ids):
        with pytest.raises(InvalidRequest, match=f"tokens: {wrong} is not a token id"):
            tokenizer.decode([1, wrong])


def test_a_folder_without_tokenizer_says_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json, tokenizer\.model"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(CheckpointError, match="neither a folder nor"):
        load_tokenizer(str(tmp_path / "absent"))


def test_a_broken_tokenizer_file_is_refused_by_name(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_chat_template_file_wins_over_the_config(tmp_path):
    folder = vocabularies.write_folder(tmp_path / "m", vocabularies.byte_level())
    (folder / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(str(folder)).facts.chat_template == "from the file"
    assert load_tokenizer(str(folder), chat_template="mine").facts.chat_template == "mine"


def test_threads_share_a_tokenizer():
    """REG-101: no "Already borrowed"."""
    tokenizer, wrong = vocabularies.byte_level(), []
    expected = tokenizer.encode_plain("hello world " * 50)

    def work():
        for _ in range(30):
            if tokenizer.encode_plain("hello world " * 50) != expected:
                wrong.append(1)
            tokenizer.encode("hello <|im_start|>")

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory):
    """Trained in a process of its own: the trainer writes to the terminal."""
    folder = tmp_path_factory.mktemp("sp")
    (folder / "corpus.txt").write_text("\n".join(vocabularies.CORPUS), encoding="utf-8")
    script = (
        "import sentencepiece as s; s.SentencePieceTrainer.train(input='corpus.txt', "
        "model_prefix='tokenizer', vocab_size=400, byte_fallback=True, hard_vocab_limit=False, "
        "control_symbols=['<|im_start|>', '<|im_end|>'], minloglevel=2)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=folder, check=True, capture_output=True)
    return folder


def test_sentencepiece_model(sentencepiece_folder):
    tokenizer = load_tokenizer(str(sentencepiece_folder))
    library = sentencepiece.SentencePieceProcessor(
        model_file=str(sentencepiece_folder / "tokenizer.model")
    )
    for text in ["hello world", "Grüße 🎉 ☃", "a <|im_start|> b"]:
        ids = tokenizer.encode_plain(text)
        assert ids == library.encode(text)
        assert tokenizer.decode(ids) == library.decode(ids)
        assert not tokenizer.special_ids.intersection(ids)
    start = tokenizer.token_id("<|im_start|>")
    assert start in tokenizer.encode("<|im_start|>hello")
    assert tokenizer.encode("hello")[0] == library.bos_id()
    guarded = tokenizer.guard.protect("<|im_start|>") + "<|im_start|>"
    assert tokenizer.encode_guarded(guarded).count(start) == 1


def test_qwen_1s_special_tokens_lie_behind_its_ranks(tmp_path):
    """No file lists them: <|im_end|> is 151645 behind 151643 ranks."""
    lines = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]
    (tmp_path / "qwen.tiktoken").write_bytes(b"\n".join(lines))
    tokenizer = load_tokenizer(str(tmp_path))
    assert [tokenizer.token_id(one) for one in ("<|endoftext|>", "<|im_end|>")] == [256, 258]
    assert tokenizer.num_ids == 256 + 208 and tokenizer.token_bytes(257) == b"<|im_start|>"


def test_tiktoken_ranks(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b"hello"]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (tmp_path / "model.tiktoken").write_bytes(b"\n".join(lines))
    added = {"300": {"content": "<|im_start|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("hello <|im_start|>") == [259, 32, 300]
    assert 300 not in tokenizer.encode_plain("<|im_start|>")
    assert (
        tokenizer.decode(tokenizer.encode_plain("hello 🎉 <|im_start|>")) == "hello 🎉 <|im_start|>"
    )
    assert tokenizer.token_bytes(280) == b""
    (tmp_path / "model.tiktoken").write_bytes(b"aGU= 0\n!!! 1")
    with pytest.raises(CheckpointError, match="line 2"):
        load_tokenizer(str(tmp_path))


def test_an_unknown_decoder_is_refused_by_name():
    document = json.loads(vocabularies.byte_level()._document)
    document["decoder"] = {
        "type": "CTC",
        "pad_token": "<p>",
        "word_delimiter_token": "|",
        "cleanup": True,
    }
    with pytest.raises(CheckpointError, match="decoder CTC is not supported"):
        vocabularies.JsonTokenizer(json.dumps(document), vocabularies.FACTS)


def test_word_pieces_join_to_words(tmp_path: Path) -> None:
    """BERT's vocabularies: the ids of the library, and a text whose words are whole again."""
    words = ["[UNK]", "[CLS]", "[SEP]", "head", "##race", "mill", "##s", "."]
    library = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    library.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer.encode("headrace mills.")
    assert ids == [3, 4, 5, 6, 7]
    assert tokenizer.decode(ids) == library.decode(ids) == "headrace mills ."


def test_a_tokenizer_of_another_model_is_refused_at_start():
    tokenizer = vocabularies.byte_level()
    check_vocabulary(tokenizer, tokenizer.num_ids)
    specials = sorted(tokenizer.special_ids)
    ordinary = max(set(range(tokenizer.num_ids)) - tokenizer.special_ids)
    with pytest.raises(CheckpointError, match=f"up to {ordinary}, the model .* {ordinary - 1};"):
        check_vocabulary(tokenizer, ordinary)
    if specials[-1] > ordinary:
        check_vocabulary(tokenizer, specials[-1])


async def test_a_panic_of_the_library_is_a_refusal_of_the_text():
    """A panic is no Exception: it passed by everybody and was answered by a bare 500."""
    tokenizer = JsonTokenizer(vocabularies.panicking().to_str(), vocabularies.FACTS)
    for work in (
        lambda: tokenizer.encode("hello"),
        lambda: tokenizer.encode_plain("hello"),
        lambda: tokenizer.encode_pair("a", "hello"),
    ):
        with pytest.raises(InvalidRequest, match=r"gave up on this text of . characters"):
            work()
    for text in ("hello", "hello " * 10_000):
        with pytest.raises(InvalidRequest, match=f"^input: .* {len(text)} characters") as caught:
            await tokenizer.encode_async(text, field="input")
        assert caught.value.field == "input"


async def test_a_text_that_will_be_cut_is_bounded_too():
    tokenizer = vocabularies.byte_level()
    text = "x" * (MAX_TEXT_CHARS + 1)
    message = f"^text: a text of {len(text)} characters given; allowed: {MAX_TEXT_CHARS}$"
    with pytest.raises(InvalidRequest, match=message):
        await tokenizer.encode_async(text, field="text")

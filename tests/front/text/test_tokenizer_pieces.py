"""SentencePiece files whose pieces have ids of the checkpoint's own, against transformers' class of each name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers

from headrace.base.errors import CheckpointError, InvalidRequest
from headrace.front.text.languages import languages_of
from headrace.front.text.tokenizer_files import load_tokenizer
from headrace.front.text.tokenizer_pieces import PieceTokenizer
from tests.front.text import vocabularies

TEXTS = ["hello world", "Grüße aus Köln, 東京", "a  b</s>c", "1234 привет"]
ORDERS = {
    "fairseq": {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1},
    "t5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained in a process of its own: the trainer writes to the terminal."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "corpus.txt").write_text("\n".join(vocabularies.CORPUS), encoding="utf-8")
    calls = [
        f"s.SentencePieceTrainer.train(input='corpus.txt', model_prefix={name!r}, vocab_size=150,"
        f"hard_vocab_limit=False, minloglevel=2, **{order!r})"
        for name, order in ORDERS.items()
    ]
    script = "\n".join(("import sentencepiece as s", *calls))
    subprocess.run([sys.executable, "-c", script], cwd=folder, check=True, capture_output=True)
    return folder


def vocabulary(model: Path) -> dict[str, int]:
    """The ids of fairseq and its successors, in an order that is not the file's."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    names = [pieces.id_to_piece(i) for i in range(3, pieces.get_piece_size())]
    return {t: i for i, t in enumerate(("<s>", "<pad>", "</s>", "<unk>", *reversed(names)))}


def written(folder: Path, name: str, content: dict[str, Any]) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder / name


def marian(models: Path, folder: Path) -> Any:
    files = {name: str(folder / f"{name}.spm") for name in ("source", "target")}
    for file in files.values():
        shutil.copy(models / "fairseq.model", file)
    ids = {**vocabulary(models / "fairseq.model")}
    ids |= {">>fra<<": len(ids), ">>deu<<": len(ids) + 1}
    vocab = written(folder, "vocab.json", ids)
    return transformers.MarianTokenizer(files["source"], files["target"], str(vocab))


def m2m100(models: Path, folder: Path) -> Any:
    shutil.copy(models / "fairseq.model", folder / "sentencepiece.bpe.model")
    vocab = written(folder, "vocab.json", vocabulary(models / "fairseq.model"))
    written(
        folder, "tokenizer_config.json", {"tokenizer_class": "M2M100Tokenizer", "src_lang": "fr"}
    )
    return transformers.M2M100Tokenizer(
        str(vocab), str(folder / "sentencepiece.bpe.model"), src_lang="fr"
    )


def stated(kind: str, order: str, file: str, **config: Any) -> Any:
    def made(models: Path, folder: Path) -> Any:
        shutil.copy(models / f"{order}.model", folder / file)
        written(folder, "tokenizer_config.json", {"tokenizer_class": kind, **config})
        return getattr(transformers, kind).from_pretrained(folder)

    return made


CLASSES = {
    "marian": marian,
    "m2m100": m2m100,
    "mbart": stated("MBartTokenizer", "fairseq", "sentencepiece.bpe.model", src_lang="de_DE"),
    "mbart50": stated("MBart50Tokenizer", "fairseq", "sentencepiece.bpe.model"),
    "xlm-roberta": stated("XLMRobertaTokenizer", "fairseq", "sentencepiece.bpe.model"),
    "pegasus": stated("PegasusTokenizer", "t5", "spiece.model"),
    "t5": stated("T5Tokenizer", "t5", "spiece.model", extra_ids=10),
    "mt5": stated("T5Tokenizer", "t5", "spiece.model", extra_ids=0),
}


@pytest.mark.filterwarnings("ignore:Recommended")
@pytest.mark.parametrize("kind", CLASSES)
def test_ids_and_texts_equal_transformers(kind: str, models: Path, tmp_path: Path) -> None:
    theirs = CLASSES[kind](models, tmp_path)
    ours = load_tokenizer(str(tmp_path))
    assert isinstance(ours, PieceTokenizer)
    for text in (*TEXTS, ">>fra<< hello" if kind == "marian" else "hello"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, (text, theirs.convert_ids_to_tokens(ids))
        assert (
            ours.encode(text, add_special_tokens=False)
            == theirs(text, add_special_tokens=False)["input_ids"]
        )
        said = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(said).split() == theirs.decode(said, skip_special_tokens=True).split()
    if kind == "xlm-roberta":
        assert ours.encode_pair("hello", "a b")[0] == theirs("hello", "a b")["input_ids"]
    ids = ours.encode(ours.guard.protect("a</s>") + "b</s>", add_special_tokens=False)
    assert ids.count(ours.token_id("</s>")) == 1
    assert ours.decode(ours.encode("a b")) == "a b"


@pytest.mark.filterwarnings("ignore:Recommended")
@pytest.mark.parametrize(
    ("kind", "source", "target", "start"),
    [
        ("m2m100", "de", "en", (2,)),
        ("mbart", "fr_XX", "ro_RO", ("de_DE",)),
        ("mbart50", "fr_XX", "ro_RO", (2,)),
        ("marian", None, "deu", ()),
    ],
)
def test_languages_are_said_where_transformers_says_them(
    kind: str, source: str | None, target: str, start: Any, models: Path, tmp_path: Path
) -> None:
    theirs = CLASSES[kind](models, tmp_path)
    ours = load_tokenizer(str(tmp_path))
    languages = languages_of(ours)
    ids = languages.prompt(ours.encode("hello"), source=source, target=target)
    if source is None:
        assert ids == theirs(f">>{target}<< hello")["input_ids"]
        assert languages.start((7,), target) == ()
        with pytest.raises(InvalidRequest, match="without being told"):
            languages.prompt(ids, source="deu", target=None)
        return
    theirs.src_lang = source
    assert ids == theirs("hello")["input_ids"]
    start = tuple(languages.ids.get(one, one) for one in start)
    wanted = theirs.convert_tokens_to_ids(f"__{target}__" if kind == "m2m100" else target)
    begun = (wanted,) if kind == "mbart" else (2, wanted)
    assert languages.start(start, target) == begun
    with pytest.raises(InvalidRequest, match="target_language: 'xx' given; known: "):
        languages.start(start, "xx")
    with pytest.raises(InvalidRequest, match="neither begins nor ends"):
        languages.prompt([5], source=source, target=None)


def test_what_is_not_read_is_refused_by_name(models: Path, tmp_path: Path) -> None:
    shutil.copy(models / "fairseq.model", tmp_path / "source.spm")
    with pytest.raises(CheckpointError, match=r"vocab\.json: the ids of the pieces are needed"):
        load_tokenizer(str(tmp_path))
    written(tmp_path, "vocab.json", {"a": 0})
    with pytest.raises(CheckpointError, match="no </s>, <unk>"):
        load_tokenizer(str(tmp_path))
    written(tmp_path, "target_vocab.json", {"a": 0})
    with pytest.raises(CheckpointError, match="two languages are not read"):
        load_tokenizer(str(tmp_path))

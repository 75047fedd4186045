"""Vocabularies of before tokenizer.json: vocab.json with merges.txt (byte-level BPE of GPT-2, OPT,
RoBERTa, BART and theirs) and vocab.txt (BERT's word pieces; prophetnet.tokenizer of ProphetNet),
as documents of that kind.

What stands around a prompt, each class of transformers says (5.23, tokenization_gpt2.py,
tokenization_roberta.py, tokenization_blenderbot.py, tokenization_bert.py,
tokenization_prophetnet.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Library

from headrace.base.config.hf import read_json
from headrace.base.errors import CheckpointError
from headrace.front.text.tokenizer_classes import GPT2, PROPHETNET, ROBERTA, WORD_CLASSES
from headrace.front.text.tokenizer_files import read_facts
from headrace.front.text.tokenizer_json import JsonTokenizer

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True)
class WordKind:
    """`special`: control tokens by role, unless files beside say others; `prefix_space`: a prompt's
    first word begins as others do."""

    special: Mapping[str, str]
    prefix_space: bool = False


FAIRSEQ = {
    **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>"},
    **{"pad_token": "<pad>", "cls_token": "<s>", "mask_token": "<mask>"},
}
PIECES = {
    **{"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]"},
    "mask_token": "[MASK]",
}
END = "<|endoftext|>"
KINDS: Mapping[str, WordKind] = {
    GPT2: WordKind(special=dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)),
    ROBERTA: WordKind(special=FAIRSEQ),
    "BlenderbotTokenizer": WordKind(special=FAIRSEQ, prefix_space=True),
    "BertTokenizer": WordKind(special={**PIECES, "cls_token": "[CLS]"}),
    PROPHETNET: WordKind(special={**PIECES, "x_sep_token": "[X_SEP]"}),
}
"""By the name of transformers' class."""


def load_words(path: str) -> JsonTokenizer:
    """The vocabulary of a folder, of which `path` is vocab.json, or a list of word pieces."""
    file = Path(path)
    config = {
        **_json(file.parent / "special_tokens_map.json"),
        **_json(file.parent / "tokenizer_config.json"),
    }
    named = WORD_CLASSES.of(config, _json(file.parent / "config.json"))
    assert named is not None, "the file was chosen by its class"
    kind = KINDS[named]
    stated = {name: _token(config[name]) for name in NAMES if config.get(name) is not None}
    special = {**kind.special, **stated}
    if file.suffix != ".json":
        library = _word_pieces(file, config, special)
    else:
        library = _byte_level(file, config, special, kind)
    library.add_special_tokens(_added(library, config, special))
    more = _json(file.parent / "added_tokens.json")
    library.add_tokens(
        [AddedToken(t, normalized=False) for t in sorted(more, key=more.__getitem__)]
    )
    wrong = [token for token, token_id in more.items() if library.token_to_id(token) != token_id]
    if wrong:
        raise CheckpointError(f"{file.parent}: added_tokens.json: {wrong[0]!r} has another id")
    library.post_processor = _around(library, named, special)
    return JsonTokenizer(library.to_str(), read_facts(file.parent))


def _byte_level(
    file: Path, config: Mapping[str, Any], special: Mapping[str, str], kind: WordKind
) -> Library:
    vocabulary = _json(file)
    if not vocabulary or not all(isinstance(i, int) for i in vocabulary.values()):
        raise CheckpointError(f"{file}: a vocabulary of ids is needed")
    lines = (file.parent / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [(a, b) for a, _, b in (line.partition(" ") for line in lines) if b]
    merges = merges[1:] if lines[0].startswith("#version") else merges
    try:
        library = Library(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file.parent}: merges.txt: {error}") from error
    space = bool(config.get("add_prefix_space", kind.prefix_space))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    library.decoder = decoders.ByteLevel()
    return library


def _word_pieces(file: Path, config: Mapping[str, Any], special: Mapping[str, str]) -> Library:
    lines = file.read_text(encoding="utf-8").split("\n")
    vocabulary = {word.rstrip("\r"): i for i, word in enumerate(lines) if word}
    library = Library(models.WordPiece(vocab=vocabulary, unk_token=special["unk_token"]))
    library.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=bool(config.get("do_lower_case", True)),
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##")
    return library


def _added(
    library: Library, config: Mapping[str, Any], special: Mapping[str, str]
) -> list[AddedToken]:
    """Control tokens that the vocabulary has, and those that the config lists."""
    names = [token for token in special.values() if library.token_to_id(token) is not None]
    listed = config.get("additional_special_tokens") or []
    names += [_token(token) for token in listed if isinstance(token, str | dict)]
    mask = special.get("mask_token")
    return [
        AddedToken(token, special=True, normalized=False, lstrip=token == mask and token[0] == "<")
        for token in dict.fromkeys(names)
    ]


def _around(library: Library, named: str, special: Mapping[str, str]) -> Any:
    """What stands around a prompt."""
    if named == GPT2:
        return processors.ByteLevel(trim_offsets=False)
    if named == "BlenderbotTokenizer":
        end = special["eos_token"]
        return _template(f"$A:0 {end}", f"$A:0 $B:0 {end}", {end: _id(library, end)})
    if named == PROPHETNET:
        end = special["sep_token"]
        return _template(f"$A:0 {end}", f"$A:0 {end} $B:0 {end}", {end: _id(library, end)})
    first, last = special["cls_token"], special["sep_token"]
    ids = {token: _id(library, token) for token in (first, last)}
    single = f"{first}:0 $A:0 {last}:0"
    if named == ROBERTA:
        return _template(single, f"{single} {last}:0 $B:0 {last}:0", ids)
    return _template(single, f"{single} $B:1 {last}:1", ids)


def _id(library: Library, token: str) -> int:
    token_id: int | None = library.token_to_id(token)
    if token_id is None:
        raise CheckpointError(f"the vocabulary has no {token}")
    return token_id


def _template(single: str, pair: str, ids: Mapping[str, int]) -> Any:
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=[*ids.items()])


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)

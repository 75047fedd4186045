"""The tokenizer inside a GGUF file, rebuilt as a tokenizer.json document for the `tokenizers`
library.

Seven vocabularies are read: "gpt2" (byte-level BPE with merges), "gemma4" (the same of characters),
"llama" (SentencePiece BPE with scores), "t5" (SentencePiece unigrams), "bert" (WordPiece), "rwkv"
(tokenizer_world.py) and "plamo2" (tokenizer_plamo.py), which have tokenizers of their own. GGUF
names a pre-tokenizer instead of storing its pattern; gguf_tokenizer_patterns.py has them. A name
that is not there is refused: a wrong pattern would split text differently and quietly change every
answer.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.base.config.gguf import GGUFFile, read_gguf
from headrace.base.errors import CheckpointError
from headrace.front.text.gguf_tokenizer_patterns import ADDS_BOS, NFC, PATTERNS, WHOLE_WORDS
from headrace.front.text.tokenizer import Tokenizer, TokenizerFacts
from headrace.front.text.tokenizer_json import JsonTokenizer
from headrace.front.text.tokenizer_plamo import UNUSED, plamo_of_rows
from headrace.front.text.tokenizer_world import world_of_gguf

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of tokenizer.ggml.token_type that matter here (1 normal, 5 unused, 6 byte)."""

_FRAMED: Final = ("bert", "nomic-bert", "modern-bert", "jina-bert-v2")
"""Architectures that read a text between two tokens of their own."""
WORLD: Final = "rwkv"
PLAMO: Final = "plamo2"
_PLAMO_KINDS: Final = {UNKNOWN: "UNKNOWN", CONTROL: "CONTROL", 5: UNUSED, 6: "BYTE"}
_SPECIAL: Final = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def gguf_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a GGUF file; one that is absent or of another kind is refused by name."""
    file = read_gguf(Path(path))
    kind = file.text("tokenizer.ggml.model") or ""
    tokens = file.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{path}: it holds no vocabulary (tokenizer.ggml.tokens)")
    if kind == WORLD:
        return world_of_gguf(file, tokens, _types(file, tokens))
    if kind == PLAMO:
        return _plamo(file, tokens)
    if kind not in _VOCABULARIES:
        known = (*_VOCABULARIES, PLAMO, WORLD)
        raise file.wrong("tokenizer.ggml.model", f"one of {', '.join(sorted(known))}")
    if kind == "bert":
        tokens = word_pieces(tokens, _types(file, tokens))
    document = _VOCABULARIES[kind](file, tokens)
    document["added_tokens"] = _added_tokens(file, tokens)
    facts = _facts(file, tokens, kind)
    if file.text("general.architecture") in _FRAMED:
        document["post_processor"] = _frame(file, tokens, kind)
        facts = msgspec.structs.replace(facts, add_bos=None, add_eos=None)
    return JsonTokenizer(json.dumps(document), facts)


def _plamo(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    kinds = [_PLAMO_KINDS.get(one, "NORMAL") for one in _types(file, tokens)]
    rows = zip(tokens, _scores(file, tokens), kinds, strict=True)
    return plamo_of_rows(rows, str(file.paths[0]), _facts(file, tokens, PLAMO))


def _scores(file: GGUFFile, tokens: list[str]) -> list[float]:
    key = "tokenizer.ggml.scores"
    return _as_long(file, key, list(file.numbers(key) or []), len(tokens))


def _facts(file: GGUFFile, tokens: list[str], kind: str) -> TokenizerFacts:
    """Special tokens by role, the chat template, and whether a prompt gets bos and eos (llama.cpp's
    defaults)."""
    special = {
        role: tokens[number]
        for role, name in _SPECIAL.items()
        if (number := _token_id(file, name, tokens)) is not None
    }
    adds_bos = kind in ("llama", "gemma4") or (kind == "gpt2" and _pre_tokenizer(file) in ADDS_BOS)
    return TokenizerFacts(
        special_tokens=special,
        chat_template=file.text("tokenizer.chat_template"),
        add_bos=file.flag("tokenizer.ggml.add_bos_token", adds_bos),
        add_eos=file.flag("tokenizer.ggml.add_eos_token", kind == "t5"),
    )


def _token_id(file: GGUFFile, name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    number = file.whole(key)
    if number is not None and not 0 <= number < len(tokens):
        raise file.wrong(key, f"an id below {len(tokens)}, the size of the vocabulary")
    return number


def _types(file: GGUFFile, tokens: list[str]) -> list[int]:
    types = file.numbers("tokenizer.ggml.token_type")
    if types is None:
        return [1] * len(tokens)
    return _as_long(file, "tokenizer.ggml.token_type", list(types), len(tokens))


def _as_long(file: GGUFFile, key: str, values: list[Any], count: int) -> list[Any]:
    if len(values) != count:
        raise CheckpointError(
            f"{file.paths[0]}: {key} has {len(values)} entries for {count} tokens"
        )
    return values


def _added_tokens(file: GGUFFile, tokens: list[str]) -> list[dict[str, Any]]:
    """Control tokens (dropped from answers) and user-defined ones (kept); both are found in text as
    a whole."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": token, "special": kind != USER_DEFINED, **plain}
        for number, (token, kind) in enumerate(zip(tokens, _types(file, tokens), strict=True))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token
    ]


def _pre_tokenizer(file: GGUFFile) -> str:
    name = file.text("tokenizer.ggml.pre", "default") or "default"
    if name not in PATTERNS:
        raise file.wrong("tokenizer.ggml.pre", f"one of {', '.join(sorted(PATTERNS))}")
    return name


def _byte_level(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    name = _pre_tokenizer(file)
    pattern = PATTERNS[name]
    own = pattern in (None, "digits", "falcon")
    steps: list[dict[str, Any]] = []
    if pattern == "digits":
        steps.append({"type": "Digits", "individual_digits": True})
    elif pattern == "falcon":
        steps.append({"type": "Punctuation", "behavior": "Contiguous"})
    elif pattern is not None:
        steps += [_split(one) for one in ((pattern,) if isinstance(pattern, str) else pattern)]
    bytes_ = {"add_prefix_space": False, "trim_offsets": True, "use_regex": own}
    steps.append({"type": "ByteLevel", **bytes_})
    if pattern == "falcon":
        steps.append({"type": "Digits", "individual_digits": False})
        steps.append(_split("[0-9][0-9][0-9]"))
    model = _bpe(tokens, _merges(file), unknown=None, ignore_merges=name in WHOLE_WORDS)
    normalizer = {"type": "NFC"} if name in (*NFC, "qwen35", "modern-bert") else None
    return _document(
        model,
        normalizer,
        {"type": "Sequence", "pretokenizers": steps},
        {"type": "ByteLevel", **bytes_},
    )


def _split(pattern: str) -> dict[str, Any]:
    how = {"type": "Split", "behavior": "Isolated", "invert": False}
    return {**how, "pattern": {"Regex": pattern}}


def _characters(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    """Merges over a whole text, in which spaces are ▁."""
    number = _token_id(file, "unknown", tokens)
    unknown = None if number is None else tokens[number]
    model = _bpe(tokens, _merges(file), unknown=unknown, byte_fallback=True, fuse_unk=True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    steps = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return _document(model, spaces, None, {"type": "Sequence", "decoders": steps})


def word_pieces(tokens: list[str], kinds: list[int]) -> list[str]:
    """As BERT's vocabulary has them: files mark what begins a word, by ▁, and BERT what does not,
    by ##."""
    return [
        token if kind == CONTROL else token[1:] if token.startswith("▁") else f"##{token}"
        for token, kind in zip(tokens, kinds, strict=True)
    ]


def _wordpiece(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    """A vocabulary without capitals is of lower-cased text."""
    kinds = _types(file, tokens)
    cased = any(
        token != token.lower()
        for token, kind in zip(tokens, kinds, strict=True)
        if kind not in (CONTROL, UNKNOWN) and not token.startswith("[")
    )
    number = _token_id(file, "unknown", tokens)
    unknown = "[UNK]" if number is None else tokens[number]
    model = {
        "type": "WordPiece",
        "unk_token": unknown,
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": _numbered(tokens),
    }
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
    return _document(
        model,
        {**normalizer, "strip_accents": None, "lowercase": not cased},
        {"type": "BertPreTokenizer"},
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
    )


def _unigrams(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    scores = _scores(file, tokens)
    number = _token_id(file, "unknown", tokens)
    if number is None:
        number = next((i for i, one in enumerate(_types(file, tokens)) if one == UNKNOWN), None)
    pairs = [[token, score] for token, score in zip(tokens, scores, strict=True)]
    model = {"type": "Unigram", "unk_id": number, "vocab": pairs, "byte_fallback": False}
    begins = file.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = {
        **{"type": "Metaspace", "replacement": "▁", "split": True},
        "prepend_scheme": "always" if begins else "never",
    }
    charsmap = file.numbers("tokenizer.ggml.precompiled_charsmap")
    normalizer = None
    if charsmap is not None:
        packed = base64.b64encode(charsmap.tobytes()).decode()
        normalizer = {"type": "Precompiled", "precompiled_charsmap": packed}
    steps = [spaces]
    if file.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        steps.insert(0, {"type": "WhitespaceSplit"})
    return _document(model, normalizer, {"type": "Sequence", "pretokenizers": steps}, spaces)


def _frame(file: GGUFFile, tokens: list[str], kind: str) -> dict[str, Any]:
    """What encoders put around texts, and between the two of a pair: RoBERTa's kind two ends, and
    no types."""
    ids = [_named(file, tokens, ("cls", "bos"), 101), _named(file, tokens, _ENDS, 102)]
    first, last = ({"SpecialToken": {"id": tokens[number], "type_id": 0}} for number in ids)
    twice = kind == "t5" or (kind == "gpt2" and _pre_tokenizer(file) == "roberta-bpe")
    other = 0 if twice else 1
    end = {"SpecialToken": {"id": tokens[ids[1]], "type_id": other}}
    one = [first, {"Sequence": {"id": "A", "type_id": 0}}, last]
    two = [*([last] if twice else []), {"Sequence": {"id": "B", "type_id": other}}, end]
    named = {tokens[number]: number for number in ids}
    return {
        "type": "TemplateProcessing",
        "single": one,
        "pair": one + two,
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]}
            for token, number in named.items()
        },
    }


_ENDS: Final = ("seperator", "separator", "eos")


def _named(file: GGUFFile, tokens: list[str], names: tuple[str, ...], default: int) -> int:
    """The id of the first of these roles that the file states."""
    stated = (_token_id(file, name, tokens) for name in names)
    number = next((one for one in stated if one is not None), default)
    if number >= len(tokens):
        raise CheckpointError(
            f"{file.paths[0]}: tokenizer.ggml.{names[0]}_token_id is missing; it must be an id"
        )
    return number


def _merges(file: GGUFFile) -> list[list[str]]:
    merges = [line.split(" ") for line in file.texts("tokenizer.ggml.merges") or []]
    if any(len(merge) != 2 for merge in merges):
        raise file.wrong("tokenizer.ggml.merges", "a list of 'left right' pairs")
    return merges


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    """Scores become merges: a pair merges the earlier the higher its result scores (Kudo and
    Richardson 2018)."""
    scores = _scores(file, tokens)
    number = _token_id(file, "unknown", tokens)
    model = _bpe(
        tokens,
        merges_of_scores(tokens, scores),
        unknown=None if number is None else tokens[number],
        byte_fallback=True,
        fuse_unk=True,
    )
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizers = [spaces]
    if file.flag("tokenizer.ggml.add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _document(
        model,
        {"type": "Sequence", "normalizers": normalizers},
        None,
        {"type": "Sequence", "decoders": decoders},
    )


def merges_of_scores(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """All pairs of tokens that make a token, best result first, pairs of one result in the order of
    their ids."""
    ids = {token: number for number, token in enumerate(tokens)}
    ranked = []
    for number, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[number], number, left, right))
    return [[tokens[left], tokens[right]] for _, _, left, right in sorted(ranked)]


def _bpe(
    tokens: list[str], merges: list[list[str]], *, unknown: str | None, **options: bool
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "unk_token": unknown,
        "vocab": _numbered(tokens),
        "merges": merges,
        **{"byte_fallback": False, "fuse_unk": False, "ignore_merges": False, **options},
    }


def _numbered(tokens: list[str]) -> dict[str, int]:
    """By token its first id."""
    return {token: number for number, token in reversed(list(enumerate(tokens)))}


def _document(model: Any, normalizer: Any, pre_tokenizer: Any, decoder: Any) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


_VOCABULARIES: Final[Mapping[str, Callable[[GGUFFile, list[str]], dict[str, Any]]]] = {
    "gpt2": _byte_level,
    "gemma4": _characters,
    "llama": _sentencepiece,
    "t5": _unigrams,
    "bert": _wordpiece,
}
"""By tokenizer.ggml.model."""

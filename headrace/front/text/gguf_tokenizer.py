"""The tokenizer inside a GGUF file, rebuilt as a tokenizer.json document for the `tokenizers`
library.

Two vocabularies are read: "gpt2" (byte-level BPE with merges) and "llama" (SentencePiece BPE with
scores). GGUF names a pre-tokenizer instead of storing its pattern; the patterns are those of the
models' own tokenizer.json. A name that is not in the table is refused: a wrong pattern would split
text differently and quietly change every answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from headrace.base.config.gguf import GGUFFile, read_gguf
from headrace.base.errors import CheckpointError
from headrace.front.text.tokenizer import Tokenizer, TokenizerFacts
from headrace.front.text.tokenizer_json import JsonTokenizer

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of tokenizer.ggml.token_type that matter here (1 normal, 5 unused, 6 byte)."""

_TAIL: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED_TAIL: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START: Final = r"[^\r\n\p{L}\p{N}]?"
_THREE_DIGITS: Final = _SHORT + "|" + _START + r"\p{L}+|\p{N}{1,3}" + _TAIL
_ONE_DIGIT: Final = _SHORT + "|" + _START + r"\p{L}+|\p{N}" + _TAIL
_CASED: Final = f"{_START}{_UPPER}*{_LOWER}+{_SHORT}?|{_START}{_UPPER}+{_LOWER}*{_SHORT}?" + (
    r"|\p{N}{1,3}" + _CASED_TAIL
)
_TEKKEN: Final = f"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*" + r"|\p{N}" + _CASED_TAIL
_DEEPSEEK_3: Final = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SEED: Final = (
    f"{_SHORT}|{_START}" + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LING: Final = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)

_LLAMA_3: Final = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2")
PATTERNS: Final[dict[str, str | tuple[str, ...] | None]] = {
    **dict.fromkeys(("default", "gpt-2", "olmo", "phi-2", "exaone4"), None),
    **dict.fromkeys((*_LLAMA_3, "smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), _ONE_DIGIT),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _CASED),
    "tekken": _TEKKEN,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_3),
    "seed-coder": _SEED,
    "bailingmoe": _LING,
    **dict.fromkeys(("starcoder", "refact", "smollm", "command-r", "exaone"), "digits"),
}
"""Pattern of each pre-tokenizer, or several, one after another. None: GPT-2's own; "digits":
GPT-2's own after splitting off every digit."""
_WHOLE_WORDS: Final = (*_LLAMA_3, "tekken")
"""Pre-tokenizers whose models take a word that is a token as it is, without its merges."""
_NFC: Final = ("qwen2", "deepseek-r1-qwen")
_ADDS_BOS: Final = (*_LLAMA_3, "tekken")

_SPECIAL: Final = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def gguf_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a GGUF file; one that is absent or of another kind is refused by name."""
    file = read_gguf(Path(path))
    kind = file.text("tokenizer.ggml.model")
    tokens = file.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{path}: it holds no vocabulary (tokenizer.ggml.tokens)")
    if kind == "gpt2":
        document = _byte_level(file, tokens)
    elif kind == "llama":
        document = _sentencepiece(file, tokens)
    else:
        raise file.wrong("tokenizer.ggml.model", "one of gpt2, llama")
    document["added_tokens"] = _added_tokens(file, tokens)
    return JsonTokenizer(json.dumps(document), _facts(file, tokens, is_bpe=kind == "gpt2"))


def _facts(file: GGUFFile, tokens: list[str], *, is_bpe: bool) -> TokenizerFacts:
    """Special tokens by role, the chat template, and whether a prompt gets bos and eos (llama.cpp's
    defaults)."""
    special = {
        role: tokens[number]
        for role, name in _SPECIAL.items()
        if (number := _token_id(file, name, tokens)) is not None
    }
    adds_bos = not is_bpe or _pre_tokenizer(file) in _ADDS_BOS
    return TokenizerFacts(
        special_tokens=special,
        chat_template=file.text("tokenizer.chat_template"),
        add_bos=file.flag("tokenizer.ggml.add_bos_token", adds_bos),
        add_eos=file.flag("tokenizer.ggml.add_eos_token", False),
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
    own = pattern in (None, "digits")
    steps: list[dict[str, Any]] = []
    if pattern == "digits":
        steps.append({"type": "Digits", "individual_digits": True})
    elif pattern is not None:
        how = {"type": "Split", "behavior": "Isolated", "invert": False}
        every = (pattern,) if isinstance(pattern, str) else pattern
        steps += [{**how, "pattern": {"Regex": one}} for one in every]
    bytes_ = {"add_prefix_space": False, "trim_offsets": True, "use_regex": own}
    steps.append({"type": "ByteLevel", **bytes_})
    model = _bpe(tokens, _merges(file), unknown=None, ignore_merges=name in _WHOLE_WORDS)
    normalizer = {"type": "NFC"} if name in _NFC else None
    return _document(
        model,
        normalizer,
        {"type": "Sequence", "pretokenizers": steps},
        {"type": "ByteLevel", **bytes_},
    )


def _merges(file: GGUFFile) -> list[list[str]]:
    merges = [line.split(" ") for line in file.texts("tokenizer.ggml.merges") or []]
    if any(len(merge) != 2 for merge in merges):
        raise file.wrong("tokenizer.ggml.merges", "a list of 'left right' pairs")
    return merges


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    """Scores become merges: a pair merges the earlier the higher its result scores (Kudo and
    Richardson 2018)."""
    key = "tokenizer.ggml.scores"
    scores = _as_long(file, key, list(file.numbers(key) or []), len(tokens))
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
    vocabulary = {token: number for number, token in reversed(list(enumerate(tokens)))}
    return {
        "type": "BPE",
        "unk_token": unknown,
        "vocab": vocabulary,
        "merges": merges,
        **{"byte_fallback": False, "fuse_unk": False, "ignore_merges": False, **options},
    }


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

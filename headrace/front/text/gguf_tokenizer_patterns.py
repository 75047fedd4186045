"""How the pre-tokenizers that GGUF files name split text: the patterns of the models' own
tokenizer.json.

Names: llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

from typing import Final

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

_QWEN_35: Final = (
    f"{_SHORT}|{_START}"
    + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NOT_HAN: Final = r"&&[^\p{Han}]"
_KIMI: Final = (
    r"[\p{Han}]+|"
    + f"{_START}[{_UPPER[1:-1]}{_NOT_HAN}]*[{_LOWER[1:-1]}{_NOT_HAN}]+{_SHORT}?|"
    + f"{_START}[{_UPPER[1:-1]}{_NOT_HAN}]+[{_LOWER[1:-1]}{_NOT_HAN}]*{_SHORT}?"
    + r"|\p{N}{1,3}"
    + _TAIL
)
_CASED_LETTERS: Final = (
    r"µÀ-ÖØ-öø-ƺƼ-ƿǄ-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}"
    r"\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}"
    r"\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-"
    r"\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-"
    r"\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-"
    r"\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}"
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}"
    r"\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-"
    r"\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}"
    r"\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}"
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}"
    r"\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}"
    r"\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-"
    r"\x{118DF}\x{1E900}-\x{1E943}"
)
"""Of alphabets with two cases, as DeepSeek's first tokenizer lists them."""
_CJK: Final = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_1: Final = (
    r"[\r\n]",
    r"\s?[A-Za-z" + _CASED_LETTERS + "]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_EXAONE_MOE: Final = (
    f"{_SHORT}|{_START}" + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_YOUTU: Final = (
    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    _CASED.replace(r"\p{N}{1,3}", r"\p{N}"),
)
_JAIS_2: Final = _THREE_DIGITS.removesuffix(r"\s+(?!\S)|\s+") + (
    r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)"
    r"|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)
_BLOOM: Final = r" ?[^(\s|.,!?…。，、।۔،)]+"
_MINICPM_5: Final = (r"\p{N}{1,3}", _ONE_DIGIT.replace(r"|\p{N}|", r"|\p{N}+|"))

_AFMOE: Final = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}"
    r"\x{2F00}-\x{2FDF}\x{0E40}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+",
    _DEEPSEEK_3[-1],
)
"""Threes of digits from a number's end; Han, kana, Thai, Lao, Khmer, Burmese and Hangul."""
_TINY_AYA: Final = (r"\d{1,3}(?=(?:\d{3})*\b)", _CASED)
_LAGUNA: Final = (r"(?:\r?\n)+(?:(?!\r?\n)[\s\S])*", _ONE_DIGIT)
"""Line breaks stand with what is behind them."""

_LLAMA_3: Final = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
    *("midm-2.0", "jina-v5-nano"),
)
NFC: Final = ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez")
_GPT_2: Final = (
    *("default", "gpt-2", "olmo", "phi-2", "exaone4", "mpt", "jais", "trillion"),
    *("granite-docling", "gigachat", "a.x-4.0", "mellum", "modern-bert", "roberta-bpe"),
    *("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code"),
)
_DIGITS: Final = (
    *("starcoder", "refact", "smollm", "command-r", "exaone", "codeshell", "minerva-7b"),
    "mellum2",
)
PATTERNS: Final[dict[str, str | tuple[str, ...] | None]] = {
    **dict.fromkeys(_GPT_2, None),
    **dict.fromkeys((*_LLAMA_3, "smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), _THREE_DIGITS),
    **dict.fromkeys((*NFC, "stablelm2", "hunyuan", "solar-open", "grok-2"), _ONE_DIGIT),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"), _CASED),
    "tekken": _TEKKEN,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_3),
    "seed-coder": _SEED,
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _LING),
    **dict.fromkeys(_DIGITS, "digits"),
    "qwen35": _QWEN_35,
    "kimi-k2": _KIMI,
    "afmoe": _AFMOE,
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _TINY_AYA),
    "laguna": _LAGUNA,
    "deepseek-llm": _DEEPSEEK_1,
    "deepseek-coder": _DEEPSEEK_CODER,
    "exaone-moe": _EXAONE_MOE,
    "youtu": _YOUTU,
    "jais-2": _JAIS_2,
    "minicpm5": _MINICPM_5,
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
    "viking": (_BLOOM, r"\p{N}"),
    "falcon": "falcon",
}
"""Pattern of each pre-tokenizer, or several, one after another. None: GPT-2's own; "digits":
GPT-2's own after splitting off every digit; "falcon": GPT-2's own between punctuation and threes
of digits."""
WHOLE_WORDS: Final = (*_LLAMA_3, "tekken", "youtu", "minicpm5")
"""Pre-tokenizers whose models take a word that is a token as it is, without its merges."""
ADDS_BOS: Final = (*_LLAMA_3, "tekken")

"""Small real vocabularies of every kind, trained on the spot."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from headrace.front.text.tokenizer import TokenizerFacts
from headrace.front.text.tokenizer_json import JsonTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 1234567890",
    "def f(x):\n    return x + 1  # a comment\n\n\n",
    "Grüße aus Köln, 東京タワー, привет мир, 👩‍👩‍👧 emoji 🎉🎉",
    "hello hello world world <b>bold</b> a < b > c | d [x] im_start think system user",
] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]"]
MARKUP = ["<think>", "</think>", "<tool_call>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n"
    "{% endif %}{% endif %}{# <tool_call> #}"
)
FACTS = TokenizerFacts(
    special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, chat_template=TEMPLATE
)


def _finish(tokenizer: Tokenizer) -> str:
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    return tokenizer.to_str()


@cache
def byte_level() -> JsonTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return JsonTokenizer(_finish(tokenizer), FACTS)


@cache
def byte_fallback() -> JsonTokenizer:
    """As Llama 2: "▁" for spaces, <0xNN> for bytes, control tokens inside of the vocabulary."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    ascii_only = [text.encode("ascii", "ignore").decode() for text in CORPUS]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *SPECIAL, *bytes_], show_progress=False
    )
    tokenizer.train_from_iterator(ascii_only, trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [
        token for token in document["added_tokens"] if not token["content"].startswith("<0x")
    ]
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return JsonTokenizer(_finish(tokenizer), FACTS)


@cache
def unigram() -> JsonTokenizer:
    """A Unigram vocabulary whose control tokens are ordinary pieces too, so that plain text could hit them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return JsonTokenizer(_finish(tokenizer), FACTS)


def all_json() -> list[JsonTokenizer]:
    return [byte_level(), byte_fallback(), unigram()]


def write_folder(folder: Path, tokenizer: JsonTokenizer, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer._document, encoding="utf-8")
    beside = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**beside, **config}))
    return folder


def panicking() -> Tokenizer:
    """A tokenizer of the library whose Rust code panics over every text that is not empty."""
    library = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.FixedLength(0)
    return library

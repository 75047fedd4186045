"""Trains the byte-level BPE tokenizer and writes its two files.

Digits stay single, so numbers of any length are read the same way; the splitting rule is the one of
the Qwen family, which every engine knows. The corpus is the training conversations themselves plus
random text, so that what must be copied is not only made of known words.

    python -m demo.train_tokenizer --out demo/model
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.chat_format import MARKER_TOKENS, SPECIAL_TOKENS, pieces
from demo.tasks import training_conversation

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LONG_TEXT = 3000
"""Conversations of more characters would only repeat one notation; they are cut."""


def corpus(conversations: int, seed: int) -> Iterator[str]:
    """The texts to learn merges from, without the control tokens."""
    rng = Random(f"tokenizer {seed}")
    for _ in range(conversations):
        text = "".join(piece.text for piece in pieces(training_conversation(rng)))
        for token in (*SPECIAL_TOKENS, *MARKER_TOKENS):
            text = text.replace(token, "\n")
        yield text[:_LONG_TEXT]


def train(vocabulary: int, conversations: int, seed: int) -> Tokenizer:
    """A tokenizer of exactly `vocabulary` entries, the control tokens last."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marked = len(SPECIAL_TOKENS) + len(MARKER_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - marked,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(conversations, seed), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKER_TOKENS])
    assert tokenizer.get_vocab_size() == vocabulary, tokenizer.get_vocab_size()
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path, *, context: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (Path(__file__).parent / "chat_template.jinja").read_text()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Trains and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--conversations", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = train(arguments.vocabulary, arguments.conversations, arguments.seed)
    write(tokenizer, arguments.out, context=8192)


if __name__ == "__main__":
    main()

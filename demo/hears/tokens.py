"""The vocabulary of the model that hears: byte-level BPE over the phrases, and Whisper's control tokens behind it.

python -m demo.hears.tokens --out demo/models/speech
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.hears.phrases import phrase

TEXT_TOKENS = 640
SECONDS = 10
"""Of a window."""
STEP_S = 0.02
CONTROL = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
TIMES = tuple(f"<|{number * STEP_S:.2f}|>" for number in range(round(SECONDS / STEP_S) + 1))
ID = {name: TEXT_TOKENS + number for number, name in enumerate((*CONTROL, *TIMES))}
VOCABULARY = TEXT_TOKENS + len(ID)
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def time_token(seconds: float) -> int:
    """The token of the nearest time."""
    return ID[TIMES[0]] + min(max(round(seconds / STEP_S), 0), len(TIMES) - 1)


def train(phrases: int, seed: int) -> Tokenizer:
    """A tokenizer of exactly VOCABULARY entries."""
    rng = Random(f"speech tokens {seed}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f" {phrase(rng, rng.choice(('en', 'de'))).written}" for _ in range(phrases))
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == TEXT_TOKENS, tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in CONTROL])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in TIMES])
    assert all(tokenizer.token_to_id(name) == number for name, number in ID.items())
    return tokenizer


def main() -> None:
    """Trains and writes `tokenizer.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--phrases", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    train(arguments.phrases, arguments.seed).save(str(arguments.out / "tokenizer.json"))


if __name__ == "__main__":
    main()

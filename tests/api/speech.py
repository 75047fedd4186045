"""A tiny random Whisper that hears a second at a time, and sounds for it."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.front.media.log_mel import RATE
from tests.models.encoder_decoder_rank import saved

SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
]
SPECIAL += ["<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
TIMES = [f"<|{i * 0.02:.2f}|>" for i in range(51)]
WORDS = [f"w{i}" for i in range(60)]
VOCABULARY = [*WORDS, *SPECIAL, *TIMES]
ID = {word: i for i, word in enumerate(VOCABULARY)}
BANDS, FRAMES = 16, 100


def write_whisper(folder: Path) -> Any:
    """A checkpoint in `folder`; the reference's model of it."""
    config = transformers.WhisperConfig(
        vocab_size=len(VOCABULARY),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=BANDS,
        max_source_positions=FRAMES // 2,
        max_target_positions=24,
        decoder_start_token_id=ID["<|startoftranscript|>"],
        eos_token_id=ID["<|endoftext|>"],
        bos_token_id=ID["<|endoftext|>"],
        pad_token_id=ID["<|endoftext|>"],
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dtype="float32",
    )
    oracle = saved(config, folder)
    suppressed = [ID[word] for word in (*SPECIAL[1:], "w3")]
    generation = {
        "decoder_start_token_id": ID["<|startoftranscript|>"],
        "eos_token_id": ID["<|endoftext|>"],
        "suppress_tokens": suppressed,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = Tokenizer(models.WordLevel(ID, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    return oracle


def tone(seconds: float, hertz: float = 300.0) -> np.ndarray:
    at = np.arange(int(seconds * RATE)) / RATE
    return (8000 * np.sin(2 * np.pi * hertz * at)).astype(np.int16)


def wav(samples: np.ndarray) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    return data.getvalue()

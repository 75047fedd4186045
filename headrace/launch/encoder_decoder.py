"""What config.json says of an encoder-decoder: its decoder as the config of a decoder, how much its
encoder reads, and the tokens its decoder begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.back.models.encoder_families import ENCODER_DECODERS
from headrace.back.models.families import Architecture
from headrace.base.config.hf import ConfigReader
from headrace.base.config.speech import sound_shape
from headrace.base.wire.media import encoder_outputs
from headrace.front.media.processors.speech_families import SpeechInput

DECODER_KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("d_model",),
    "num_hidden_layers": (
        "decoder_num_hidden_layers",
        "decoder_layers",
        "num_decoder_layers",
        "num_layers",
    ),
    "num_attention_heads": (
        "decoder_num_attention_heads",
        "decoder_attention_heads",
        "num_decoder_attention_heads",
        "num_heads",
    ),
    "head_dim": ("d_kv",),
    "intermediate_size": ("decoder_ffn_dim", "d_ff"),
    "vocab_size": ("tgt_vocab_size",),
    "max_position_embeddings": ("max_target_positions", "max_decoder_position_embeddings"),
}
"""The plain keys of a decoder, and what encoder-decoders call them; the first that is there."""
MOST_POSITIONS = 4096
"""Tokens of either half where positions are relative and the config bounds none: the most that is
believed of a model trained on a few hundred."""


def is_encoder_decoder(named: Architecture) -> bool:
    """Whether the family has an encoder before its decoder."""
    return named.family in ENCODER_DECODERS.values()


def decoder_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the sizes of the decoder under the keys that decoders have."""
    inside = config.get("decoder_config")
    within = inside if isinstance(inside, Mapping) else {}
    view = {"max_position_embeddings": MOST_POSITIONS, **within, **config}
    decoder = config.get("decoder") or config.get("text_config")
    if isinstance(decoder, Mapping):
        own = {key: value for key, value in decoder.items() if value is not None}
        start = config.get("decoder_start_token_id")
        view |= {"decoder_start_token_id": own.get("bos_token_id"), **own}
        view |= {} if start is None else {"decoder_start_token_id": start}
        view["architectures"] = config.get("architectures")
    for key, names in DECODER_KEYS.items():
        stated = next((view[name] for name in names if view.get(name) is not None), None)
        if stated is not None:
            view[key] = stated
    return view


def spectrogram_of(config: ConfigReader, speech: SpeechInput | None) -> tuple[int, ...]:
    """The shape of what an encoder of speech reads (base/wire/media.py: encoder_outputs); empty of
    others."""
    if speech is not None:
        return sound_shape(speech.sound)
    if "num_mel_bins" not in config:
        return ()
    positions = config.int("max_source_positions", 1500, ge=1, le=1 << 16)
    return config.int("num_mel_bins", ge=1, le=1024), 2 * positions


def longest_heard(spectrogram: tuple[int, ...]) -> int:
    """The most outputs of such an encoder; 0: there is none."""
    return encoder_outputs(spectrogram, spectrogram[1]) if spectrogram else 0


def decoder_start(
    generation: Mapping[str, Any], config: ConfigReader, where: str
) -> tuple[int, ...]:
    """What the decoder begins with: its start token, and the first token of every answer where the
    checkpoint forces one (the language of a translation)."""
    name = where.replace("config.json", "generation_config.json")
    stated, width = ConfigReader(generation, name), config.int("vocab_size", ge=1)
    start: list[int] = []
    for key in ("decoder_start_token_id", "forced_bos_token_id"):
        reader = stated if key in stated else config
        start += reader.ids(key, below=width)[:1]
    if not start or not ("decoder_start_token_id" in stated or "decoder_start_token_id" in config):
        raise config.wrong("decoder_start_token_id", f"a token id below {width}")
    return tuple(start)


def suppressed_ids(
    generation: Mapping[str, Any], config: Mapping[str, Any], width: int
) -> tuple[int, ...]:
    """Tokens that a speech model may not say."""
    stated = generation.get("suppress_tokens") or config.get("suppress_tokens") or ()
    return tuple(one for one in stated if isinstance(one, int) and 0 <= one < width)


def alignment_heads(
    generation: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[tuple[int, int], ...]:
    """The heads that follow the sound, as the checkpoint says; else all of the upper half of the
    decoder."""
    layers, heads = (
        int(config.get(f"decoder_{name}") or 1) for name in ("layers", "attention_heads")
    )
    pairs = [
        (one[0], one[1])
        for one in generation.get("alignment_heads") or ()
        if isinstance(one, list) and len(one) == 2 and all(isinstance(each, int) for each in one)
    ]
    known = [pair for pair in pairs if 0 <= pair[0] < layers and 0 <= pair[1] < heads]
    return tuple(known) or tuple(
        (layer, head) for layer in range(layers // 2, layers) for head in range(heads)
    )

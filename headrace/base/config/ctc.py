"""Models that say of every frame of a sound which letter is heard, or none (connectionist temporal
classification, Graves et al. 2006), or which tokens it emits (transducers, Graves 2012), as their
config.json has them, with the sizes under the keys that all models have. Without torch, so that
launch can ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CTC: Mapping[str, str] = {
    "ParakeetForCTC": "encoder_config",
    "LasrForCTC": "encoder_config",
    "GraniteSpeech5ForCTC": "encoder_config",
    "ParakeetForRNNT": "encoder_config",
    "ParakeetForTDT": "encoder_config",
    "NemotronAsrStreamingForRNNT": "encoder_config",
    "Nemotron3_5AsrForRNNT": "encoder_config",
    "Wav2Vec2ForCTC": "",
    "HubertForCTC": "",
    "UniSpeechForCTC": "",
    "UniSpeechSatForCTC": "",
    "WavLMForCTC": "",
    "Data2VecAudioForCTC": "",
    "SEWForCTC": "",
    "Wav2Vec2ConformerForCTC": "",
    "Wav2Vec2BertForCTC": "",
}
"""Architectures, and the section with the sizes of their encoder."""
TRANSDUCERS = frozenset(
    {
        *("ParakeetForRNNT", "ParakeetForTDT"),
        *("NemotronAsrStreamingForRNNT", "Nemotron3_5AsrForRNNT"),
    }
)
"""Those whose frames emit tokens: NUMBERS for each of `most_symbols`."""
NUMBERS = 3
"""Of an emission: its token and one (0: none), its frames, its log-probability."""
MOST_POSITIONS = 4096
"""Frames of a sound: 30 s have 1,500 at most."""
_SIZES = {
    **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"intermediate_size": 3072},
}


def is_ctc(config: Mapping[str, Any]) -> bool:
    """Whether a config is of such a model."""
    return (config.get("architectures") or [""])[0] in CTC


def most_symbols(config: Mapping[str, Any]) -> int:
    """Tokens that a frame of a transducer emits at most."""
    value = config.get("max_symbols_per_step", 10)
    return value if isinstance(value, int) and 1 <= value <= 64 else 10


def num_labels(config: Mapping[str, Any]) -> int:
    """Numbers that are told of a frame."""
    if config["architectures"][0] in TRANSDUCERS:
        return NUMBERS * most_symbols(config)
    return int(config.get("vocab_size", 32))


def with_encoder_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of such a model with its encoder's sizes, and as many labels as are told
    of a frame; any other as it is."""
    if not is_ctc(config):
        return dict(config)
    section = config.get(CTC[config["architectures"][0]]) or {}
    stated = {key: section[key] for key in _SIZES if key in section}
    plain = {key: value for key, value in config.items() if key not in ("id2label", "label2id")}
    return {
        **_SIZES,
        **plain,
        **stated,
        "num_labels": num_labels(config),
        "max_position_embeddings": MOST_POSITIONS,
    }

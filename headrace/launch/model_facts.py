"""What is known about a model before its weights are read: from config.json (or GGUF metadata) and
file headers.

`describe` is a pure function of what the files say; `read_model_facts` reads the files. Neither
needs torch, so that `headrace plan` answers for a model that does not fit this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.back.models.cached_layers import (
    KV_HEADS_LISTED,
    TWO_ATTENTIONS,
    indexed_layers,
    kv_heads_of,
    whole_cache_heads,
)
from headrace.back.models.encoder_families import (
    DECODERS_ALONE,
    ENCODERS,
    HEADLESS,
    JUDGES,
    reserved_positions,
)
from headrace.back.models.families import (
    FALLBACK,
    HEADS,
    WIDTH,
    Architecture,
    architecture_of,
    text_config,
)
from headrace.back.models.published_families import refuse_not_built
from headrace.back.models.recurrent_families import RECURRENT
from headrace.back.models.text_parts import TEXT_SECTIONS
from headrace.back.models.vlm_inside import inside_vlm, is_late_vision
from headrace.base.config.gguf import read_gguf
from headrace.base.config.gguf_config import gguf_config, gguf_generation
from headrace.base.config.gguf_vision import seeing_config
from headrace.base.config.hf import REQUIRED, ConfigReader, read_json
from headrace.base.config.layer_count import num_layers
from headrace.base.config.media import MediaSpec, SoundSettings
from headrace.base.config.pooling import DenseSpec, PoolingSpec
from headrace.base.config.quantization_formats import stored_quantization
from headrace.front.media.processors.families import read_media
from headrace.front.media.processors.speech_families import read_speech
from headrace.launch.config_files import read_config
from headrace.launch.encoder_decoder import (
    decoder_config,
    decoder_start,
    is_encoder_decoder,
    spectrogram_of,
)
from headrace.launch.generation_defaults import eos_ids_of
from headrace.launch.layer_windows import layer_windows
from headrace.launch.locate import LocatedModel
from headrace.launch.pooling_facts import as_filed, labels_of, read_pooling
from headrace.launch.published_pooling import head_of, modules_of
from headrace.launch.stored_weights import (
    DTYPE_BYTES,
    Stored,
    gguf_stored,
    safetensors_stored,
)

LONGEST_RECURRENT: Final = 131_072
"""Context of families whose state does not grow and whose config states none."""
MAX_POSITIONS: Final = 1 << 24
"""Longest context believed (the longest published is 10 million); rotary tables are sized by it."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `resolve` and `plan` ask about a model.

    `dtype` is the checkpoint's. `num_params` counts what is stored, or what the sizes in
    config.json add up to when only those are known. `weight_bytes` is the size as stored (dummy: in
    `dtype`), `kv_bytes_per_token` that of all layers in `dtype`. `windows` has a window in tokens
    per layer, None where it attends to everything or the config leaves it to the family. `head` and
    `bare` are ModelSpec's; `encodes`: attention in both directions, no KV cache. Of an
    encoder-decoder all sizes are its decoder's; `encoder_tokens`: the most its encoder reads,
    `encoder_vocabulary`: see ModelSpec;
    `decoder_start`: what its decoder begins with.
    `vision_path`: see ModelSpec. `cache_heads`: the KV heads of layers that keep whole sequences,
    each number once; empty where only the family knows.
    `generation_defaults` are the entries of generation_config.json as they stand there.
    """

    path: str
    name: str
    format: str
    architecture: str
    family: str
    dtype: str
    max_model_len: int
    logits_width: int
    eos_ids: tuple[int, ...]
    config: dict[str, Any]
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    num_params: int
    weight_bytes: int
    kv_bytes_per_token: int
    tokenizer_path: str
    chat_template: str | None = None
    generation_defaults: dict[str, Any] = {}
    head: str = "lm"
    bare: bool = False
    encodes: bool = False
    num_labels: int = 0
    pooling: PoolingSpec = PoolingSpec()
    dense: tuple[DenseSpec, ...] = ()
    unattended_expansion: bool = False
    media: MediaSpec | None = None
    encoder_tokens: int = 0
    encoder_vocabulary: int = 0
    decoder_start: tuple[int, ...] = ()
    spectrogram: tuple[int, ...] = ()
    vision_path: str | None = None
    hears: SoundSettings | None = None
    speech_prompt: str = ""
    cache_heads: tuple[int, ...] = ()

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder stands before the decoder."""
        return bool(self.encoder_tokens or self.spectrogram)


def read_model_facts(located: LocatedModel, *, family: str = "auto") -> ModelFacts:
    """Reads the files of a located model; `family` overrides the one its architecture names."""
    if located.path.is_file():
        return _gguf_facts(located, family)
    config = read_config(located.path)
    generation_path = located.path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    unread = located.format in ("dummy", "sharded_state") or located.remote
    stored = None if unread else safetensors_stored(located.path, config)
    facts = describe(located, config, generation, stored, family=family)
    whole = inside_vlm(config) if is_late_vision(config) else config
    return with_media(facts, read_media(located.path, whole))


def _gguf_facts(located: LocatedModel, family: str) -> ModelFacts:
    """Of a GGUF file, and the one of its tower."""
    file, vision = read_gguf(located.path), located.vision
    config = gguf_config(file) if vision is None else seeing_config(located.path, vision)
    facts = describe(located, config, gguf_generation(file), gguf_stored(file), family=family)
    template, pooling = file.text("tokenizer.chat_template"), as_filed(facts.pooling, file)
    facts = msgspec.structs.replace(facts, chat_template=template, pooling=pooling)
    if vision is None:
        return facts
    seen = gguf_stored(read_gguf(vision))
    return msgspec.structs.replace(
        facts,
        media=read_media(located.path, config),
        vision_path=str(vision),
        num_params=facts.num_params + seen.num_params,
        weight_bytes=facts.weight_bytes + seen.num_bytes,
    )


def describe(
    located: LocatedModel,
    config: dict[str, Any],
    generation: Mapping[str, Any],
    stored: Stored | None,
    *,
    family: str = "auto",
) -> ModelFacts:
    """The facts that follow from a config; a key that is missing or wrong is a CheckpointError
    naming it."""
    where = f"{located.path}/config.json" if located.path.is_dir() else str(located.path)
    named = architecture_of(config) if family == "auto" else Architecture(family=family)
    chosen = named.family
    _refuse_unreadable(located.format, chosen, config, where)
    whole = ConfigReader(config, where)
    reader = _text_part(whole, named)
    layers, hidden = num_layers(reader), reader.int("hidden_size", aliases=WIDTH, ge=1)
    heads = _heads(reader, chosen)
    kv_heads = kv_heads_of(chosen, reader, heads)
    head_dim = reader.int("head_dim", 0, ge=0) or max(1, hidden // heads)
    width, dtype = reader.int("vocab_size", aliases=("n_words",), ge=1), _dtype(reader, stored)
    encodes = chosen in ENCODERS
    labels = labels_of(reader) if named.head in ("sequence", "token") else ()
    modules = modules_of(located.path, reader, whole)
    sizes = (layers, hidden, heads, kv_heads, head_dim)
    num_params = stored.num_params if stored else _count_params(reader, *sizes)
    facts = ModelFacts(
        path=str(located.path),
        name=located.name,
        format=located.format,
        architecture=str((config.get("architectures") or ["?"])[0]),
        family=chosen,
        dtype=dtype,
        max_model_len=_max_positions(reader, chosen) - reserved_positions(chosen, config),
        logits_width=width,
        eos_ids=eos_ids_of(generation, reader, where, width),
        config=config,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        windows=layer_windows(reader, chosen, layers),
        num_params=num_params,
        weight_bytes=stored.num_bytes if stored else num_params * DTYPE_BYTES[dtype],
        cache_heads=whole_cache_heads(chosen, reader, heads),
        kv_bytes_per_token=_kv_bytes(chosen, reader, layers, kv_heads, head_dim, dtype),
        tokenizer_path=str(located.path),
        generation_defaults=dict(generation),
        head=head_of(named.head, named.family, modules, where),
        bare=named.bare,
        encodes=encodes,
        num_labels=len(labels),
        pooling=read_pooling(modules, reader, named.head, labels, encodes=encodes, whole=whole),
        dense=() if modules is None else modules.dense,
        unattended_expansion=bool(modules and modules.unattended),
    )
    return with_encoder(facts, reader, generation, whole) if is_encoder_decoder(named) else facts


def with_media(facts: ModelFacts, media: MediaSpec | None) -> ModelFacts:
    """The facts of a model that takes these; an encoder that reads images alone reads one."""
    if media is not None and media.alone:
        facts = msgspec.structs.replace(facts, encoder_tokens=media.settings.rows_each)
    return msgspec.structs.replace(facts, media=media)


def _refuse_unreadable(form: str, family: str, config: dict[str, Any], where: str) -> None:
    """CheckpointError for weights stored, or a family made, in a way that nothing here reads."""
    if form == "safetensors":
        stored_quantization(config, where)
    if family == FALLBACK:
        refuse_not_built(config, where)


def with_encoder(
    facts: ModelFacts, reader: ConfigReader, generation: Mapping[str, Any], whole: ConfigReader
) -> ModelFacts:
    """The facts of an encoder-decoder, whose halves hold equally many positions unless it reads
    speech; `whole`: its config, of which `reader` is the decoder's view."""
    speech = read_speech(Path(facts.path), whole)
    spectrogram = spectrogram_of(reader, speech)
    reserved = reserved_positions(facts.family, facts.config)
    return msgspec.structs.replace(
        facts,
        encoder_tokens=0 if spectrogram else _max_positions(reader, facts.family) - reserved,
        encoder_vocabulary=whole.int("src_vocab_size", 0, ge=1),
        spectrogram=spectrogram,
        hears=None if speech is None else speech.sound,
        speech_prompt="" if speech is None else speech.prompt,
        decoder_start=decoder_start(generation, reader, reader.where),
    )


def _kv_bytes(
    family: str, reader: ConfigReader, layers: int, kv_heads: int, head_dim: int, dtype: str
) -> int:
    """What all layers keep of a token: a key and a value of each KV head, or one latent of all of
    them with the rotated key beside it, and the keys of indexers, or of their groups. The fallback
    keeps no latents, encoders nothing."""
    if family in ENCODERS:
        return 0
    values, rank = 2 * kv_heads * head_dim, reader.int("kv_lora_rank", None, ge=1)
    if family == FALLBACK:
        return layers * values * DTYPE_BYTES[dtype]
    if rank is not None:
        values = rank + reader.int("qk_rope_head_dim", 0, ge=0)
    index = reader.int("index_head_dim", 0, aliases=("indexer_head_dim",), ge=0)
    group = reader.int("index_kpool", 1, aliases=("indexer_compress_ratio",), ge=1)
    indexed = indexed_layers(family, reader, layers) if index else 0
    attentions = layers * (2 if family in TWO_ATTENTIONS else 1)
    each = reader.list(KV_HEADS_LISTED, None, of=int)
    if each is not None:  # `values` are those of the layer with most heads
        attentions, values = sum(each), 2 * head_dim
    return (attentions * values + indexed * -(-index // group)) * DTYPE_BYTES[dtype]


def _text_part(reader: ConfigReader, named: Architecture) -> ConfigReader:
    """The section with the decoder's sizes: text_config where a model has several parts."""
    if is_encoder_decoder(named) or named.family in _HALVES:
        return ConfigReader(decoder_config(reader.raw), reader.where)
    if is_late_vision(reader.raw):
        return ConfigReader(text_config(reader.raw), f"{reader.where}: vlm_config")
    section = next((one for one in map(reader.section, TEXT_SECTIONS) if one is not None), None)
    inside = named.media or "hidden_size" not in reader
    return section if section is not None and inside else reader


_HALVES = {*JUDGES.values(), *DECODERS_ALONE.values()}
"""Families whose config is that of an encoder and a decoder."""


def _dtype(reader: ConfigReader, stored: Stored | None) -> str:
    default = (stored.dtype if stored else None) or "bfloat16"
    return reader.choice("torch_dtype", DTYPE_BYTES, default, aliases=("dtype",))


def _heads(reader: ConfigReader, family: str) -> int:
    none = 1 if family in RECURRENT | HEADLESS else REQUIRED
    return reader.int("num_attention_heads", none, aliases=HEADS, ge=1)


def _max_positions(reader: ConfigReader, family: str) -> int:
    """The stated context. YaRN is the one scaling whose config may keep the length before the
    extension."""
    keys: tuple[str, ...] = ("n_positions", "n_ctx", "model_max_length", "max_seq_len")
    keys += ("seq_length", "max_encoder_position_embeddings")
    default = LONGEST_RECURRENT if family in RECURRENT else 2048
    stated = reader.int("max_position_embeddings", default, aliases=keys, ge=1, le=MAX_POSITIONS)
    scaling = reader.section("rope_parameters") or reader.section("rope_scaling")
    if scaling is None or ("rope_type" not in scaling and "type" not in scaling):
        return stated
    if scaling.str("rope_type", aliases=("type",)) != "yarn":
        return stated
    original = scaling.int("original_max_position_embeddings", stated, ge=1)
    extended = int(original * scaling.float("factor", 1.0, ge=1.0, le=1e6))
    return min(MAX_POSITIONS, max(stated, extended))


def _count_params(
    reader: ConfigReader, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> int:
    """The dense decoder the sizes describe: embedding, head unless tied, attention, gated MLP, two
    norms a layer."""
    inner = _inner(reader, 4 * hidden)
    tables = 1 if reader.bool("tie_word_embeddings", False) else 2
    attention = 2 * hidden * (heads + kv_heads) * head_dim
    layer = attention + 3 * hidden * inner + 2 * hidden
    return tables * reader.int("vocab_size", ge=1) * hidden + layers * layer + hidden


def _inner(reader: ConfigReader, default: int) -> int:
    """Of the MLP; where each layer has its own, the mean."""
    if isinstance(reader.raw.get("intermediate_size"), list):
        sizes = reader.list("intermediate_size", of=int)
        return sum(sizes) // max(1, len(sizes))
    return reader.int("intermediate_size", default, aliases=("n_inner",), ge=1)

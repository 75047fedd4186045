"""What a server takes beside text: what the model knows, within what its operator allows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.back.models.families import FALLBACK, TABLE_READERS, TOWERS
from headrace.base.config.media import MediaSpec
from headrace.base.config.pooling import PoolingSpec
from headrace.base.config.tree import MediaCounts, Options
from headrace.base.errors import ConfigError, MissingDependency
from headrace.base.optional import available
from headrace.launch.model_facts import ModelFacts


def prompt_width(options: Options, model: ModelFacts) -> int:
    """Numbers of a vector that may stand in the place of a token; 0: none may. ConfigError for
    models that take none."""
    if not options.model.enable_prompt_embeds:
        return 0
    if model.family == FALLBACK or model.encodes or model.has_encoder or model.head != "lm":
        raise ConfigError(
            f"--enable-prompt-embeds: {model.architecture} is no decoder of headrace's own families "
            "that generates text",
            field="enable_prompt_embeds",
        )
    return model.hidden_size


MOST_ENCODED = 32_768
"""Tokens of a request to a server that only encodes: what its cache of media holds at a time."""
MEAN_OF_ROWS = PoolingSpec(how="mean", normalize=False, media_alone=True)


def encoding_alone(options: Options, model: ModelFacts) -> ModelFacts:
    """The facts of a model of which the towers are loaded alone, if that is asked for: it is
    served as an encoder, whose answers are the mean of what the towers gave. ConfigError where
    there is no tower before a decoder, or where nobody could find what it gives."""
    if not options.kv.mm_encoder_only:
        return model
    reason = None
    if model.family == FALLBACK or model.encodes or model.has_encoder or model.head != "lm":
        reason = f"{model.architecture} is no tower before a decoder that generates text"
    elif model.media is None or options.model.language_model_only:
        reason = f"{model.architecture} takes no images, video or sounds here"
    elif model.family in TABLE_READERS:
        reason = f"the tower of {model.architecture} reads the decoder's table of tokens"
    elif options.kv.encoder_cache_path is None:
        reason = "no --encoder-cache-path is given, where other servers find what is encoded"
    if reason is not None:
        raise ConfigError(f"--mm-encoder-only: {reason}", field="mm_encoder_only")
    longest = min(model.max_model_len, MOST_ENCODED)
    return msgspec.structs.replace(
        model, head=TOWERS, encodes=True, pooling=MEAN_OF_ROWS, max_model_len=longest
    )


PRUNING = ("qwen_vl",)
"""Processors of models whose video may be pruned."""


def media_spec(options: Options, known: MediaSpec | None) -> MediaSpec | None:
    """The spec with the operator's limits; ConfigError for a folder that is none."""
    if known is None or options.model.language_model_only:
        return None
    needed = {"pillow": "PIL"} if known.image_token is not None else {}
    needed |= {"av": "av"} if known.audio_token is not None else {}
    for library, module in needed.items():
        if not available(module):
            raise MissingDependency(
                f"this model takes images or sound, which needs the library {library!r}: pip "
                "install 'headrace[media]', or serve it with --language-model-only"
            )
    root = options.server.allowed_local_media_path
    if root is not None:
        folder = Path(root).expanduser().resolve()
        if not folder.is_dir():
            raise ConfigError(
                f"--allowed-local-media-path {root}: no such folder",
                field="allowed_local_media_path",
            )
        root = str(folder)
    counts = options.model.limit_mm_per_prompt or MediaCounts()
    most = {kind: n for kind, n in msgspec.structs.asdict(counts).items() if n is not None}
    if rate := options.model.video_pruning_rate:
        if known.processor not in PRUNING or known.video_token is None:
            raise ConfigError(
                f"--video-pruning-rate {rate:g}: this model's video is not pruned",
                field="video_pruning_rate",
            )
        settings = msgspec.structs.replace(known.settings, pruned=rate)
        known = msgspec.structs.replace(known, settings=settings)
    return msgspec.structs.replace(
        known,
        most=known.most | most,
        domains=options.server.allowed_media_domains,
        local_root=root,
        embeds=options.model.enable_mm_embeds,
    )

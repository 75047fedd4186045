"""Diffusion language models that write blocks: `--diffusion-config` decided. What does not go with
them: kind_modes.py."""

from __future__ import annotations

from msgspec.structs import replace

from headrace.back.models.diffusion_families import FAMILY, blocks_of
from headrace.base.config.denoising import DenoisingSpec, DiffusionOptions
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.launch.chooser import Chooser
from headrace.launch.model_facts import ModelFacts

FIELD = "diffusion_config"


def with_denoising(
    engine: EngineSpec, options: Options, model: ModelFacts, choose: Chooser
) -> EngineSpec:
    """The engine of a model that writes blocks, with KV blocks of whole blocks of text; that of
    others as it is. ConfigError for --diffusion-config of such others, and for windows."""
    asked = options.scheduler.diffusion_config
    if model.family != FAMILY:
        if asked is not None:
            raise _refused(f"{model.architecture} does not write blocks by diffusion")
        return engine
    if set(model.windows) != {None}:
        raise _refused(f"{model.architecture} with sliding windows is not supported")
    spec = _denoising(asked or DiffusionOptions(), model)
    choose.note(
        "--diffusion-config",
        "auto" if asked is None else asked,
        f"blocks of {spec.length}, {spec.steps} steps, threshold {spec.threshold}",
        "what is not said is as the model was published",
    )
    block_tokens = max(engine.kv.block_tokens, spec.length)
    if block_tokens != engine.kv.block_tokens:
        why = "a KV block holds whole blocks of text"
        choose.note("--block-tokens", engine.kv.block_tokens, block_tokens, why)
    return replace(engine, denoising=spec, kv=replace(engine.kv, block_tokens=block_tokens))


def _denoising(asked: DiffusionOptions, model: ModelFacts) -> DenoisingSpec:
    blocks = blocks_of(ConfigReader(model.config, "config.json"), asked)
    if blocks.length & (blocks.length - 1):
        raise _refused(f"block_length is {blocks.length}; a power of two is needed")
    if blocks.mask >= model.logits_width:
        raise _refused(
            f"mask_token_id is {blocks.mask}; the model knows tokens below {model.logits_width}"
        )
    steps = blocks.length if asked.steps is None else asked.steps
    if steps > blocks.length:
        raise _refused(f"steps is {steps}; a block has {blocks.length} tokens (block_length)")
    part = blocks.length if blocks.part is None else min(blocks.part, blocks.length)
    if blocks.length % part:
        raise _refused(f"part_length is {part}; it must divide block_length ({blocks.length})")
    return DenoisingSpec(
        length=blocks.length,
        steps=steps,
        threshold=asked.threshold,
        mask=blocks.mask,
        part=part,
        shifted=blocks.shifted,
    )


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"--diffusion-config: {reason}", field=FIELD)

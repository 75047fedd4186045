"""Diffusion language models: `--diffusion-config` decided. What does not go with them:
kind_modes.py."""

from __future__ import annotations

from msgspec.structs import replace

from headrace.back.models.diffusion_families import CANVAS, CANVAS_TOKENS, FAMILY, blocks_of
from headrace.base.config.denoising import MOST_BLOCK, DenoisingSpec, DiffusionOptions
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import EngineSpec
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.launch.chooser import Chooser
from headrace.launch.model_facts import ModelFacts

FIELD = "diffusion_config"
THRESHOLD = 0.95


def with_denoising(
    engine: EngineSpec, options: Options, model: ModelFacts, choose: Chooser
) -> EngineSpec:
    """The engine of a model that writes blocks, with KV blocks of whole blocks of text, if it has
    any; that of others as it is. ConfigError for --diffusion-config of such others, and for
    windows."""
    asked = options.scheduler.diffusion_config
    if model.family not in (FAMILY, CANVAS):
        if asked is not None:
            raise _refused(f"{model.architecture} does not write blocks by diffusion")
        return engine
    if set(model.windows) != {None}:
        raise _refused(f"{model.architecture} with sliding windows is not supported")
    decide = _denoising if model.family == FAMILY else _on_canvas
    spec = decide(asked or DiffusionOptions(), model)
    chosen = f"blocks of {spec.length}, {spec.steps} steps, threshold {spec.threshold}"
    if spec.canvas:
        chosen += f", {spec.canvas} masks at most, decided by {spec.order}"
    choose.note(
        "--diffusion-config",
        "auto" if asked is None else asked,
        chosen,
        "what is not said is as the model was published",
    )
    if spec.canvas:
        return replace(engine, denoising=spec)
    block_tokens = max(engine.kv.block_tokens, spec.length)
    if block_tokens != engine.kv.block_tokens:
        why = "a KV block holds whole blocks of text"
        choose.note("--block-tokens", engine.kv.block_tokens, block_tokens, why)
    return replace(engine, denoising=spec, kv=replace(engine.kv, block_tokens=block_tokens))


def _denoising(asked: DiffusionOptions, model: ModelFacts) -> DenoisingSpec:
    blocks = blocks_of(ConfigReader(model.config, "config.json"), asked)
    length = blocks.length
    assert length is not None, blocks
    if length & (length - 1) or length > MOST_BLOCK:
        raise _refused(f"block_length is {length}; a power of two, at most {MOST_BLOCK}, is needed")
    for name, value in (("canvas_length", asked.canvas_length), ("order", asked.order)):
        if value is not None:
            raise _refused(f"{name}: the blocks of {model.architecture} see no later ones")
    part = length if blocks.part is None else min(blocks.part, length)
    if length % part:
        raise _refused(f"part_length is {part}; it must divide block_length ({length})")
    return DenoisingSpec(
        length=length,
        steps=_steps(asked, length),
        threshold=THRESHOLD if asked.threshold is None else asked.threshold,
        mask=_mask(blocks.mask, model),
        part=part,
        shifted=blocks.shifted,
    )


def _on_canvas(asked: DiffusionOptions, model: ModelFacts) -> DenoisingSpec:
    blocks = blocks_of(ConfigReader(model.config, "config.json"), asked)
    canvas = asked.canvas_length or CANVAS_TOKENS
    length = min(blocks.length or canvas, canvas)
    if canvas % length:
        raise _refused(f"block_length is {length}; it must divide canvas_length ({canvas})")
    threshold = 1.0 if asked.threshold is None else asked.threshold
    if threshold < 1.0 and blocks.order != "confidence":
        raise _refused(f"threshold is {threshold}; with order {blocks.order!r} only 1 is possible")
    if asked.part_length is not None:
        raise _refused("part_length: blocks of a canvas have no parts; block_length divides it")
    return DenoisingSpec(
        length=length,
        steps=_steps(asked, length),
        threshold=threshold,
        mask=_mask(blocks.mask, model),
        part=length,
        shifted=blocks.shifted,
        canvas=canvas,
        order=blocks.order,
        timed=blocks.timed,
    )


def _mask(mask: int, model: ModelFacts) -> int:
    if mask >= model.logits_width:
        raise _refused(
            f"mask_token_id is {mask}; the model knows tokens below {model.logits_width}"
        )
    return mask


def _steps(asked: DiffusionOptions, length: int) -> int:
    steps = length if asked.steps is None else asked.steps
    if steps > length:
        raise _refused(f"steps is {steps}; a block has {length} tokens (block_length)")
    return steps


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"--diffusion-config: {reason}", field=FIELD)

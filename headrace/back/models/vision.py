"""What the families that see share: the sections of their configs, the decoder of another family,
the encoder beside it, and constants of the reference processors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import MediaEncoder
from headrace.back.layers.vision.layer import VisionLayerNames, VisionLayerSpec
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTowerSpec, ProjectorSpec, TowerNorm
from headrace.back.layers.vision.shared_encoder import SharedEncoder
from headrace.back.models import blocks
from headrace.back.models.blocks import Decoder
from headrace.back.models.families import TOWERS, text_config
from headrace.back.models.text_parts import TEXT_SECTIONS, TEXT_TYPES
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import Decision

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)
ACTIVATIONS = {**blocks.ACTIVATIONS, "quick_gelu": "quick_gelu"}
SIGLIP_NAMES = VisionLayerNames(
    before_attention="layer_norm1",
    before_mlp="layer_norm2",
    attention="self_attn",
    merged=None,
    out="out_proj",
)
OLDER_TOWER = ((r"(.*vision_tower)\.vision_model\.(.*)", r"\1.\2"),)
"""How older checkpoints name the tensors of CLIP's and SigLIP's towers."""


SHARED = Decision(
    "model.mm_encoder_tp_mode", "data", "data", "ranks share out what is to be encoded"
)


def parts_of(config: ConfigReader) -> tuple[ConfigReader, ConfigReader]:
    """The text's keys, which older checkpoints have beside the others, and the vision tower's."""
    vision = config.required_section("vision_config")
    section = next((key for key in TEXT_SECTIONS if key in config), None)
    where = config.where if section is None else f"{config.where}: {section}"
    return ConfigReader(text_config(config.raw), where), vision


def square(vision: ConfigReader) -> tuple[int, int]:
    """Pixels of a patch's side, and patches of an image's."""
    patch, pixels = _side(vision, "patch_size"), _side(vision, "image_size")
    if pixels < patch:
        raise vision.wrong("image_size", f"at least patch_size ({patch})")
    return patch, pixels // patch


def _side(vision: ConfigReader, key: str) -> int:
    """A number, or two equal ones."""
    if not isinstance(vision.raw.get(key), list):
        return vision.int(key, ge=1)
    one, other = vision.list(key, of=int, length=2)
    if one != other or one < 1:
        raise vision.wrong(key, "a number, or two equal ones")
    return one


@dataclass(frozen=True, kw_only=True)
class LayerDefaults:
    """What a family's layers have unless the config says otherwise, and how it calls it. `inner`:
    None: four times the width. `eps_key`: None: no config states it."""

    width: int = 768
    heads: int = 12
    inner: int | None = 3072
    eps: float = 1e-6
    activation: str = "gelu_pytorch_tanh"
    eps_key: str | None = "layer_norm_eps"
    width_keys: tuple[str, ...] = ("hidden_size",)
    heads_keys: tuple[str, ...] = ("num_attention_heads",)
    inner_keys: tuple[str, ...] = ("intermediate_size",)


def tower_layer(
    vision: ConfigReader, defaults: LayerDefaults, names: VisionLayerNames, **more: Any
) -> VisionLayerSpec:
    """A layer of a tower with these tensors; `more`: as VisionLayerSpec has it."""
    width_key, *width_aliases = defaults.width_keys
    heads_key, *heads_aliases = defaults.heads_keys
    inner_key, *inner_aliases = defaults.inner_keys
    width = vision.int(width_key, defaults.width, aliases=tuple(width_aliases), ge=1)
    heads = vision.int(heads_key, defaults.heads, aliases=tuple(heads_aliases), ge=1)
    if width % heads:
        raise vision.wrong(heads_key, f"a divisor of the width ({width})")
    inner = defaults.inner or 4 * width
    eps = defaults.eps
    if defaults.eps_key is not None:
        eps = vision.float(defaults.eps_key, eps, ge=0.0)
    activation = vision.choice("hidden_act", ACTIVATIONS, defaults.activation)
    spec = VisionLayerSpec(
        width=width,
        inner=vision.int(inner_key, inner, aliases=tuple(inner_aliases), ge=1),
        heads=heads,
        head_dim=width // heads,
        eps=eps,
        activation=ACTIVATIONS[activation],
        norm=LAYER,
        names=names,
    )
    return replace(spec, **more)


def siglip_layer(
    vision: ConfigReader, *, default_width: int = 768, default_heads: int = 12
) -> VisionLayerSpec:
    """A layer of SigLIP's tower."""
    defaults = LayerDefaults(width=default_width, heads=default_heads)
    return tower_layer(vision, defaults, SIGLIP_NAMES)


def siglip_tower(
    vision: ConfigReader, projector: ProjectorSpec, layer: VisionLayerSpec | None = None
) -> PlainTowerSpec:
    """SigLIP's tower at its one size, the norm behind it included."""
    patch, side = square(vision)
    layer = layer or siglip_layer(vision)
    if side % projector.merge:
        raise vision.wrong("image_size", f"such that {projector.merge} divides {side} patches")
    return PlainTowerSpec(
        patches=PatchSpec(patch=patch, mean=HALF, std=HALF, name="embeddings.patch_embedding"),
        layer=layer,
        layers=vision.int("num_hidden_layers", 12, ge=1),
        projector=projector,
        side=side,
        positions=("embeddings.position_embedding.weight", (side**2, layer.width)),
        behind=TowerNorm(name="post_layernorm", norm=LAYER),
    )


def text_decoder(scope: Scope, text: ConfigReader) -> Decoder:
    """The decoder of the family that the text's `model_type` names."""
    from headrace.back.models.registry import FAMILIES

    kind = text.choice("model_type", TEXT_TYPES)
    decoder = FAMILIES.load(TEXT_TYPES[kind])(scope, text)
    assert isinstance(decoder, Decoder), kind
    return decoder


def text_alone(scope: Scope, text: ConfigReader, why: str) -> Decoder:
    """The decoder without what stands before it."""
    scope.ledger.note(Decision("model.parts", "auto", "text", why))
    return text_decoder(scope, text)


def with_media(
    scope: Scope,
    decoder: Decoder,
    encoder: MediaEncoder,
    *,
    renamed: tuple[tuple[str, str], ...] = (),
) -> Decoder:
    """The decoder with what encodes images and more for it, whose weights must have been asked for
    before the decoder's: its plan would not load them. `renamed`: see WeightPlan."""
    unloaded = [param.name for param in scope.ledger.params[len(decoder.weights.params) :]]
    assert not unloaded, f"built behind the decoder, which loads none of it: {unloaded[:3]}"
    decoder.media = seeing(scope, encoder)
    decoder.weights = replace(decoder.weights, renamed=(*decoder.weights.renamed, *renamed))
    return decoder


def seeing(scope: Scope, encoder: MediaEncoder) -> MediaEncoder:
    """The encoder as this rank runs it."""
    text = () if scope.head.kind == TOWERS else ("text",)
    kinds = ", ".join((*text, *(form.kind for form in encoder.forms)))
    scope.ledger.note(Decision("model.parts", "auto", kinds, "what the checkpoint takes"))
    if not scope.shares_encoder or scope.mesh.tp.size == 1:
        return encoder
    scope.ledger.note(SHARED)
    return SharedEncoder(encoder, scope.mesh.tp)

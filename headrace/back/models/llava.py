"""LLaVA 1.5, NeXT and OneVision, ViP-LLaVA, Pixtral in its clothes, and Mistral 3: a decoder of
another family behind CLIP's, SigLIP's or Pixtral's tower and two linear layers (Liu et al. 2023,
2024; Cai et al. 2024; Li et al. 2024; Agrawal et al. 2024). ViP-LLaVA's project outputs of several
layers. The later LLaVAs show pictures as tiles put together again, a learned row behind each row of
patches."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.back.layers.norm import LAYER, RMS, NormSpec
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.layer import VisionLayerNames, VisionLayerSpec
from headrace.back.layers.vision.merger import TwoLayers
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.layers.vision.plain_tower import PlainTower, PlainTowerSpec, TowerNorm
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import (
    ACTIVATIONS,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    OLDER_TOWER,
    SIGLIP_NAMES,
    parts_of,
    square,
    text_alone,
    text_decoder,
    with_media,
)
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import Packing

TOWERS = ("clip_vision_model", "siglip_vision_model", "pixtral")
PIXTRAL_EPS = 1e-5
VIP_LAYERS = (-2, -5, -8, -11, 6)
PIXTRAL_NAMES = VisionLayerNames(
    before_attention="attention_norm",
    before_mlp="ffn_norm",
    attention="attention",
    merged=None,
    out="o_proj",
    mlp_module="feed_forward",
    mlp=("gate_proj", "up_proj", "down_proj"),
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """LlavaForConditionalGeneration, LlavaNextForConditionalGeneration,
    LlavaNextVideoForConditionalGeneration, LlavaOnevisionForConditionalGeneration,
    Mistral3ForConditionalGeneration, VipLlavaForConditionalGeneration."""
    text, vision = parts_of(config)
    inside = scope / "language_model"
    kind = vision.str("model_type", "")
    if kind not in TOWERS:
        return text_alone(inside, text, f"of towers {', '.join(TOWERS)} are known, not {kind!r}")
    if kind == "pixtral":
        projector = read_projector(config, text, vision.int("hidden_size", 1024, ge=1))
        taken = taken_layers(config, vision)
        if len(taken) > 1:
            raise config.wrong("vision_feature_layer", "one layer of Pixtral's tower")
        spec = pixtral_tower(vision, projector, taken[0])
    else:
        spec = still_tower(config, text, vision)
    tower = PlainTower(scope, scope / "vision_tower", spec)
    return with_media(scope, text_decoder(inside, text), tower, renamed=OLDER_TOWER)


def read_projector(config: ConfigReader, text: ConfigReader, width: int) -> TwoLayers:
    """What leads to the decoder, of rows this wide."""
    activation = config.choice("projector_hidden_act", ACTIVATIONS, "gelu")
    if "spatial_merge_size" not in config:
        return TwoLayers(
            width=width,
            outputs=text.int("hidden_size", ge=1),
            bias=config.bool("multimodal_projector_bias", True),
            activation=ACTIVATIONS[activation],
            norm=_norm_before(config),
        )
    return TwoLayers(
        width=width,
        outputs=text.int("hidden_size", ge=1),
        merge=config.int("spatial_merge_size", ge=1),
        bias=config.bool("multimodal_projector_bias", False),
        activation=ACTIVATIONS[activation],
        norm=("norm", RMS, text.float("rms_norm_eps", 1e-5, ge=0.0)),
        reduced="patch_merger.merging_layer",
    )


def _norm_before(config: ConfigReader) -> tuple[str, NormSpec, float] | None:
    """ViP-LLaVA's, of all that is projected."""
    if config.str("model_type", "") != "vipllava":
        return None
    return "projector_layernorm", LAYER, config.float("projector_layernorm_eps", 1e-5, ge=0.0)


def taken_layers(config: ConfigReader, vision: ConfigReader) -> tuple[int, ...]:
    """Behind how many of the tower's layers outputs are taken."""
    layers = vision.int("num_hidden_layers", ge=1)
    several = config.str("model_type", "") == "vipllava"
    taken: tuple[int, ...]
    if isinstance(config.raw.get("vision_feature_layer", [] if several else 0), list):
        taken = config.list("vision_feature_layer", VIP_LAYERS, of=int)
    else:
        default = -1 if vision.str("model_type") == "pixtral" else -2
        taken = (config.int("vision_feature_layer", default),)
    if not taken or any(not -layers - 1 <= one <= layers for one in taken):
        raise config.wrong("vision_feature_layer", f"layers of the {layers} there are")
    return tuple(one if one >= 0 else layers + 1 + one for one in taken)


def pixtral_tower(vision: ConfigReader, projector: TwoLayers, layers: int) -> PlainTowerSpec:
    """Pixtral's, of so many layers."""
    width, heads = (
        vision.int("hidden_size", 1024, ge=1),
        vision.int("num_attention_heads", 16, ge=1),
    )
    activation = ACTIVATIONS[vision.choice("hidden_act", ACTIVATIONS, "silu")]
    ropes = vision.section("rope_parameters") or vision
    layer = VisionLayerSpec(
        width=width,
        inner=vision.int("intermediate_size", 4096, ge=1),
        heads=heads,
        head_dim=width // heads,
        eps=PIXTRAL_EPS,
        activation=activation,
        norm=RMS,
        rotary=True,
        bias=False,
        out_bias=False,
        mlp_bias=False,
        names=PIXTRAL_NAMES,
    )
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=vision.int("patch_size", 16, ge=1),
            mean=CLIP_MEAN,
            std=CLIP_STD,
            bias=False,
            name="patch_conv",
        ),
        layer=layer,
        layers=layers,
        projector=projector,
        before=TowerNorm(name="ln_pre", norm=RMS),
        theta=ropes.float("rope_theta", 10_000.0, ge=1.0),
        layers_name="transformer.layers",
        breaks=1,
    )


def still_tower(config: ConfigReader, text: ConfigReader, vision: ConfigReader) -> PlainTowerSpec:
    """CLIP's or SigLIP's tower, as the config has it."""
    width, heads = vision.int("hidden_size", 768, ge=1), vision.int("num_attention_heads", 12, ge=1)
    clip = vision.str("model_type") == "clip_vision_model"
    patch, side = square(vision)
    known = ("default", "full")
    drops = config.choice("vision_feature_select_strategy", known, "default") == "default"
    if drops != clip:
        raise config.wrong("vision_feature_select_strategy", "default of CLIP's, full of SigLIP's")
    layer = VisionLayerSpec(
        width=width,
        inner=vision.int("intermediate_size", 4 * width, ge=1),
        heads=heads,
        head_dim=width // heads,
        eps=vision.float("layer_norm_eps", 1e-5 if clip else 1e-6, ge=0.0),
        activation=ACTIVATIONS[
            vision.choice("hidden_act", ACTIVATIONS, "quick_gelu" if clip else "gelu_pytorch_tanh")
        ],
        norm=LAYER,
        names=SIGLIP_NAMES,
    )
    rows = side**2 + clip
    taken = taken_layers(config, vision)
    packings = _packings(config, side)
    return PlainTowerSpec(
        patches=PatchSpec(
            patch=patch,
            mean=CLIP_MEAN if clip else HALF,
            std=CLIP_STD if clip else HALF,
            bias=not clip,
            name="embeddings.patch_embedding",
        ),
        layer=layer,
        layers=max(taken),
        taken=taken if len(taken) > 1 else (),
        projector=read_projector(config, text, width * len(taken)),
        side=side,
        positions=("embeddings.position_embedding.weight", (rows, width)),
        class_token=("embeddings.class_embedding", (width,)) if clip else None,
        before=TowerNorm(name="pre_layrnorm", norm=LAYER) if clip else None,
        frames=bool(packings),
        packings=packings,
        learned=("image_newline",) if packings else (),
        averaged=_averaged(config, side),
    )


def _averaged(config: ConfigReader, side: int) -> tuple[str, ...]:
    if config.str("model_type", "") != "llava_next_video":
        return ()
    config.choice("spatial_pool_mode", ("average",), "average")
    if config.int("spatial_pool_stride", 2) != 2 or side % 2:
        raise config.wrong("spatial_pool_stride", "2, of a square of an even number of patches")
    return ("video",)


def _packings(config: ConfigReader, side: int) -> Mapping[str, Packing]:
    """By kind, of the families whose inputs are cut."""
    if "image_grid_pinpoints" not in config:
        return {}
    if "vision_aspect_ratio" not in config:
        return {"image": Packing(newline=True, middle=True)}
    ratio = config.str("vision_aspect_ratio").removeprefix("anyres_max_")
    if not ratio.isdecimal() or not int(ratio):
        raise config.wrong("vision_aspect_ratio", "anyres_max_ with a number")
    still = Packing(newline=True, tails=True, middle=True, most=int(ratio) * side**2)
    return {"image": still, "video": Packing(tails=True, halved=True)}

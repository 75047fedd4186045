"""From the metadata of a GGUF file with a vision tower ("mmproj") beside one with a decoder to the
config.json that the whole model has: one row per `clip.projector_type`, plain data throughout.

Keys of the metadata: those of the `gguf` package (constants.py: Keys.ClipVision). What they leave
unsaid is what that projector fixes in llama.cpp (tools/mtmd).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headrace.base.config.gguf import GGUFFile, read_gguf
from headrace.base.config.gguf_config import gguf_config
from headrace.base.config.resolved import Decision
from headrace.base.errors import CheckpointError

Config = dict[str, Any]
PREFIX: Final = "mmproj"
TYPES: Final = ("f16", "bf16", "f32", "q8_0")
PROJECTOR: Final = "clip.projector_type"
MERGE: Final = 2


@dataclass(frozen=True, kw_only=True)
class GGUFVision:
    """How one projector is read. `tokens`: config keys by the token whose id they hold; `decoders`:
    values of general.architecture that stand behind it. `vision`: makes the tower's keys, `whole`:
    changes the model's; `image`: keys of the processor of images."""

    model_type: str
    architecture: str
    tokens: Mapping[str, str]
    decoders: tuple[str, ...]
    vision: Callable[[GGUFFile], Config]
    whole: Callable[[GGUFFile, GGUFFile, Config], None] | None = None
    image: Callable[[GGUFFile], Config] = field(default=lambda file: {})


def vision_files(names: Iterable[str]) -> list[str]:
    """Of files of one folder those of towers, whose names begin with "mmproj"."""
    return sorted(name for name in names if name.startswith(PREFIX) and name.endswith(".gguf"))


def vision_file_of(names: Iterable[str]) -> str | None:
    """The only one of them, or of several the one that alone has the first of TYPES there is; None:
    there is none, or it is not clear which."""
    candidates = vision_files(names)
    if len(candidates) <= 1:
        return candidates[0] if candidates else None
    for kind in TYPES:
        matches = [name for name in candidates if re.search(rf"(?i)(^|[-_.]){kind}([-_.]|$)", name)]
        if len(matches) == 1:
            return matches[0]
    return None


def vision_beside(model: Path, stated: str | None) -> tuple[Path | None, tuple[Decision, ...]]:
    """The file with a GGUF model's tower: the one that is named, else one beside it, as far as it
    is known; and what was decided."""
    if stated is not None:
        path = Path(stated).expanduser()
        if not path.is_file():
            raise CheckpointError(f"--mmproj {stated}: there is no such file", field="mmproj")
        return path, ()
    names = vision_files(path.name for path in model.parent.iterdir())
    name = vision_file_of(names)
    if name is None:
        why = f"{', '.join(names)} lie beside the model: name one with --mmproj"
        return None, (Decision("--mmproj", "auto", "none", why),) if names else ()
    try:
        seeing_config(model, model.parent / name)
    except CheckpointError as error:
        return None, (
            Decision("--mmproj", "auto", "none", f"{name} is not taken: {error.message}"),
        )
    return model.parent / name, (Decision("--mmproj", "auto", name, "it lies beside the model"),)


def row_of(vision: GGUFFile) -> GGUFVision:
    """The row of a file's projector; a CheckpointError where it is none that is known."""
    name = vision.text(PROJECTOR) or vision.text("clip.vision.projector_type") or "(none)"
    if vision.text("general.architecture") != "clip" or name not in PROJECTORS:
        known = ", ".join(sorted(PROJECTORS))
        raise CheckpointError(
            f"{vision.paths[0]}: {PROJECTOR} is {name!r}; known ones: {known}", field="mmproj"
        )
    return PROJECTORS[name]


def seeing_config(path: Path, vision_path: Path) -> Config:
    """The config.json-like dict of the whole model; `image_processor`: of what a file of its own
    says elsewhere."""
    file, vision = read_gguf(path), read_gguf(vision_path)
    row, decoder = row_of(vision), file.text("general.architecture")
    if decoder not in row.decoders:
        raise CheckpointError(
            f"{vision_path}: {vision.text(PROJECTOR)!r} stands before {' or '.join(row.decoders)}, and "
            f"{path} is {decoder!r}",
            field="mmproj",
        )
    text = gguf_config(file)
    width = vision.whole("clip.vision.projection_dim", text["hidden_size"])
    if width != text["hidden_size"]:
        raise vision.wrong(
            "clip.vision.projection_dim", f"the decoder's width ({text['hidden_size']})"
        )
    config: Config = {
        "model_type": row.model_type,
        "architectures": [row.architecture],
        "torch_dtype": text["torch_dtype"],
        "eos_token_id": text["eos_token_id"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": row.vision(vision),
        "image_processor": _image_keys(vision) | row.image(vision),
        **{key: _token(file, text_of) for key, text_of in row.tokens.items()},
    }
    if row.whole is not None:
        row.whole(file, vision, config)
    return config


def _token(file: GGUFFile, text: str) -> int:
    tokens = file.texts("tokenizer.ggml.tokens") or []
    if text not in tokens:
        raise CheckpointError(
            f"{file.paths[0]}: its vocabulary has no {text}, which stands for images",
            field="mmproj",
        )
    return tokens.index(text)


def _image_keys(vision: GGUFFile) -> Config:
    """Mean and deviation of colours, and bounds of pixels if they are stated."""
    values = ((key, vision.numbers(f"clip.vision.{key}")) for key in ("image_mean", "image_std"))
    keys: Config = {key: value.tolist() for key, value in values if value is not None}
    for key, ours in (("image_min_pixels", "min_pixels"), ("image_max_pixels", "max_pixels")):
        if (bound := vision.whole(f"clip.vision.{key}")) is not None:
            keys[ours] = bound
    return keys


def _sizes(vision: GGUFFile) -> dict[str, int]:
    """Width, heads, inner size, layers, patch and image."""
    names = {
        "hidden_size": "embedding_length",
        "num_attention_heads": "attention.head_count",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "patch_size": "patch_size",
        "image_size": "image_size",
    }
    sizes = {}
    for key, ours in names.items():
        size = vision.whole(f"clip.vision.{ours}")
        if size is None or size < 1:
            raise vision.wrong(f"clip.vision.{ours}", "a number of at least 1")
        sizes[key] = size
    return sizes


def _activation(vision: GGUFFile, default: str) -> str:
    for key, name in (("clip.use_silu", "silu"), ("clip.use_gelu", "gelu_pytorch_tanh")):
        if vision.flag(key, False):
            return name
    return default


def _eps(vision: GGUFFile, default: float) -> float:
    return float(vision.number("clip.vision.attention.layer_norm_epsilon", default) or default)


def _qwen2(vision: GGUFFile) -> Config:
    """Qwen2-VL's names for the same."""
    sizes = _sizes(vision)
    return {
        "embed_dim": sizes["hidden_size"],
        "num_heads": sizes["num_attention_heads"],
        "mlp_ratio": sizes["intermediate_size"] / sizes["hidden_size"],
        "depth": sizes["num_hidden_layers"],
        "patch_size": sizes["patch_size"],
        "hidden_size": vision.whole("clip.vision.projection_dim"),
        "hidden_act": _activation(vision, "quick_gelu"),
        "spatial_merge_size": vision.whole("clip.vision.spatial_merge_size", MERGE),
    }


def _qwen25(vision: GGUFFile) -> Config:
    sizes, every = _sizes(vision), vision.whole("clip.vision.n_wa_pattern", 8) or 8
    layers = sizes["num_hidden_layers"]
    return {
        "hidden_size": sizes["hidden_size"],
        "num_heads": sizes["num_attention_heads"],
        "intermediate_size": sizes["intermediate_size"],
        "depth": layers,
        "patch_size": sizes["patch_size"],
        "out_hidden_size": vision.whole("clip.vision.projection_dim"),
        "hidden_act": "silu",
        "window_size": vision.whole("clip.vision.window_size", 112),
        "fullatt_block_indexes": [i for i in range(layers) if (i + 1) % every == 0],
        "tokens_per_second": 2,
        "spatial_merge_size": vision.whole("clip.vision.spatial_merge_size", MERGE),
    }


def _qwen3(vision: GGUFFile) -> Config:
    sizes, positions = _sizes(vision), vision.tensors.get("v.position_embd.weight")
    if positions is None:
        raise CheckpointError(f"{vision.paths[0]}: tensor v.position_embd.weight is missing")
    return {
        "hidden_size": sizes["hidden_size"],
        "num_heads": sizes["num_attention_heads"],
        "intermediate_size": sizes["intermediate_size"],
        "depth": sizes["num_hidden_layers"],
        "patch_size": sizes["patch_size"],
        "out_hidden_size": vision.whole("clip.vision.projection_dim"),
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": positions.shape[0],
        "deepstack_visual_indexes": deep_layers(vision),
        "spatial_merge_size": vision.whole("clip.vision.spatial_merge_size", MERGE),
    }


def deep_layers(vision: GGUFFile) -> list[int]:
    """Layers of the tower whose output is added behind those of the decoder."""
    flags = vision.numbers("clip.vision.is_deepstack_layers") or ()
    return [layer for layer, flag in enumerate(flags) if flag]


def _with_axes(file: GGUFFile, vision: GGUFFile, config: Config) -> None:
    """Positions in three axes, and the video that such models see."""
    name, text = file.text("general.architecture"), config["text_config"]
    sections = file.numbers(f"{name}.rope.dimension_sections")
    if sections is None or len(sections) < 3:
        raise file.wrong(f"{name}.rope.dimension_sections", "three numbers or four")
    scaling = text.pop("rope_scaling", {"rope_type": "default"})
    text["rope_parameters"] = {
        **scaling,
        "rope_theta": text["rope_theta"],
        "mrope_section": sections.tolist()[:3],
    }
    if name == "qwen3vlmoe":
        config["model_type"] = "qwen3_vl_moe"
        config["architectures"] = ["Qwen3VLMoeForConditionalGeneration"]


def _siglip(vision: GGUFFile) -> Config:
    return {
        "model_type": "siglip_vision_model",
        **_sizes(vision),
        "layer_norm_eps": _eps(vision, 1e-6),
        "hidden_act": _activation(vision, "gelu_pytorch_tanh"),
    }


def _with_windows(file: GGUFFile, vision: GGUFFile, config: Config) -> None:
    """Gemma 3: tokens of an image."""
    sizes = config["vision_config"]
    merge = vision.whole("clip.vision.projector.scale_factor", 4) or 4
    config["mm_tokens_per_image"] = (sizes["image_size"] // sizes["patch_size"] // merge) ** 2


def _clip(vision: GGUFFile) -> Config:
    taken = vision.numbers("clip.vision.feature_layer")
    layers = _sizes(vision)["num_hidden_layers"]
    if taken is not None and taken.tolist() not in ([layers], [-1]):
        raise vision.wrong("clip.vision.feature_layer", f"the last of the {layers} layers")
    return {
        "model_type": "clip_vision_model",
        **_sizes(vision),
        "layer_norm_eps": _eps(vision, 1e-5),
        "hidden_act": _activation(vision, "quick_gelu"),
    }


def _with_last_layer(file: GGUFFile, vision: GGUFFile, config: Config) -> None:
    """LLaVA: files hold no layer behind the one that is taken."""
    config |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}


def _pixtral(vision: GGUFFile) -> Config:
    sizes = _sizes(vision)
    return {
        "model_type": "pixtral",
        **sizes,
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "hidden_act": _activation(vision, "silu"),
        "rope_theta": 10_000.0,
    }


def _with_merger(file: GGUFFile, vision: GGUFFile, config: Config) -> None:
    """Mistral 3 where windows are merged, else Pixtral."""
    config["vision_feature_layer"] = -1
    config["multimodal_projector_bias"] = "mm.1.bias" in vision.tensors
    if "mm.patch_merger.weight" in vision.tensors:
        config["model_type"] = "mistral3"
        config["architectures"] = ["Mistral3ForConditionalGeneration"]
        config["spatial_merge_size"] = vision.whole("clip.vision.spatial_merge_size", MERGE)
    else:
        config["vision_feature_select_strategy"] = "full"


def _intern(vision: GGUFFile) -> Config:
    tensors = vision.tensors
    return {
        **_sizes(vision),
        "layer_norm_eps": _eps(vision, 1e-6),
        "hidden_act": "gelu",
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in tensors else "rms_norm",
        "attention_bias": "v.blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in tensors,
        "use_mean_pooling": "v.post_ln.weight" not in tensors,
    }


def _with_shuffle(file: GGUFFile, vision: GGUFFile, config: Config) -> None:
    scale = vision.whole("clip.vision.projector.scale_factor", MERGE) or MERGE
    config |= {"downsample_ratio": 1 / scale, "scale_factor": scale}


def _tiles(vision: GGUFFile) -> Config:
    """Idefics 3: the longest side that pictures get before they are cut."""
    longest = vision.whole("clip.vision.preproc_image_size")
    return {} if longest is None else {"size": {"longest_edge": longest}}


_QWEN_TOKENS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
PROJECTORS: Final[dict[str, GGUFVision]] = {
    "qwen2vl_merger": GGUFVision(
        model_type="qwen2_vl",
        architecture="Qwen2VLForConditionalGeneration",
        tokens=_QWEN_TOKENS,
        decoders=("qwen2vl",),
        vision=_qwen2,
        whole=_with_axes,
    ),
    "qwen2.5vl_merger": GGUFVision(
        model_type="qwen2_5_vl",
        architecture="Qwen2_5_VLForConditionalGeneration",
        tokens=_QWEN_TOKENS,
        decoders=("qwen2vl",),
        vision=_qwen25,
        whole=_with_axes,
    ),
    "qwen3vl_merger": GGUFVision(
        model_type="qwen3_vl",
        architecture="Qwen3VLForConditionalGeneration",
        tokens=_QWEN_TOKENS,
        decoders=("qwen3vl", "qwen3vlmoe"),
        vision=_qwen3,
        whole=_with_axes,
    ),
    "gemma3": GGUFVision(
        model_type="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        tokens={"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>"},
        decoders=("gemma3",),
        vision=_siglip,
        whole=_with_windows,
    ),
    "mlp": GGUFVision(
        model_type="llava",
        architecture="LlavaForConditionalGeneration",
        tokens={"image_token_index": "<image>"},
        decoders=("llama", "qwen2"),
        vision=_clip,
        whole=_with_last_layer,
    ),
    "pixtral": GGUFVision(
        model_type="llava",
        architecture="LlavaForConditionalGeneration",
        tokens={"image_token_index": "[IMG]"},
        decoders=("llama", "mistral3"),
        vision=_pixtral,
        whole=_with_merger,
    ),
    "internvl": GGUFVision(
        model_type="internvl",
        architecture="InternVLForConditionalGeneration",
        tokens={"image_token_id": "<IMG_CONTEXT>"},
        decoders=("qwen2", "qwen3", "qwen3moe", "llama"),
        vision=_intern,
        whole=_with_shuffle,
    ),
    "idefics3": GGUFVision(
        model_type="smolvlm",
        architecture="SmolVLMForConditionalGeneration",
        tokens={"image_token_id": "<image>"},
        decoders=("llama",),
        vision=_siglip,
        whole=_with_shuffle,
        image=_tiles,
    ),
}

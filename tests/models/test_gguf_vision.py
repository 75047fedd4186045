"""A GGUF model with its tower in a file of its own sees as the safetensors model that both were made of (QNT-16). Names
of tensors and keys come from the `gguf` library; what its converters turn or take apart is done here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from headrace.back.executor.inline import InlineExecutor
from headrace.base.config.gguf_vision import seeing_config, vision_beside, vision_file_of
from headrace.base.config.tree import ModelOptions
from headrace.base.errors import CheckpointError
from headrace.launch.locate import locate
from headrace.launch.model_facts import read_model_facts
from tests.back.models.load.checkpoints import write_gguf
from tests.models.media import Prompt, SeeingEngine, engine_spec, image, save_media_oracle
from tests.models.test_qwen_vl import CASES as QWEN
from tests.models.test_towers import CASES as TOWERS
from tests.models.vision_cases import CASES as MORE

VOCABULARY = 120
Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Written:
    """`text`: the module of the decoder in the stored model. `tower`: what the library's table has in place of the
    beginning of other names. `kinds`: metadata of the tower. `changed`: what a converter makes of a tensor."""

    case: Any
    decoder: str
    text: str
    projector: str
    tower: tuple[tuple[str, str], ...] = ()
    kinds: dict[str, Any] = field(default_factory=dict)
    changed: Callable[[str, torch.Tensor], Tensors] | None = None
    tokens: dict[str, int] = field(default_factory=lambda: {"<image>": 100})
    merge: int = 2


def apart(name: str, tensor: torch.Tensor) -> Tensors:
    """Query, key and value."""
    if ".attn.qkv." not in name:
        yield name, tensor
        return
    for part, values in zip("qkv", tensor.chunk(3), strict=True):
        yield name.replace("qkv", part), values


def turned(name: str, tensor: torch.Tensor) -> Tensors:
    if ".q_proj." in name or ".k_proj." in name:
        tensor = tensor.unflatten(0, (2, 2, -1)).transpose(1, 2).flatten(0, 2)
    yield name, tensor


def plus_one(name: str, tensor: torch.Tensor) -> Tensors:
    if name.endswith("soft_emb_norm.weight"):
        tensor = tensor + 1
    yield name.replace("mm_input_projection_weight", "mm_input_projection.weight"), tensor


GEMMA3 = {**MORE["gemma3"].text, "query_pre_attn_scalar": 12, "sliding_window": 7}
GEMMA3["layer_types"] = ["sliding_attention"] * 2
LAST_LAYER = {"image_token_index": 100, "vision_feature_layer": -1}
QWEN_TOKENS = {"<|image_pad|>": 100, "<|video_pad|>": 101}
CASES = {
    "qwen3-vl": Written(
        case=QWEN["qwen3-vl"],
        decoder="qwen3vl",
        text="model.language_model.",
        projector=gguf.VisionProjectorType.QWEN3VL,
        tower=(("model.visual.", "visual."),),
        kinds={"use_gelu": True},
        tokens=QWEN_TOKENS,
    ),
    "qwen2.5-vl": Written(
        case=QWEN["qwen2.5-vl"],
        decoder="qwen2vl",
        text="model.",
        projector=gguf.VisionProjectorType.QWEN25VL,
        kinds={"use_silu": True},
        changed=apart,
        tokens=QWEN_TOKENS,
    ),
    "gemma3": Written(
        case=replace(MORE["gemma3"], text=GEMMA3),
        decoder="gemma3",
        text="language_model.model.",
        projector=gguf.VisionProjectorType.GEMMA3,
        tower=(("vision_tower.", "vision_tower.vision_model."),),
        kinds={"use_gelu": True},
        changed=plus_one,
        tokens={"<image_soft_token>": 100, "<start_of_image>": 102},
    ),
    "mistral3": Written(
        case=TOWERS["mistral3"],
        decoder="llama",
        text="language_model.model.",
        projector=gguf.VisionProjectorType.PIXTRAL,
        kinds={"use_silu": True},
        changed=turned,
        tokens={"[IMG]": 100},
    ),
    "llava": Written(
        case=replace(TOWERS["llava"], config=LAST_LAYER),
        decoder="llama",
        text="language_model.model.",
        projector="mlp",
        tower=(("vision_tower.", "vision_tower.vision_model."),),
        tokens={"<image>": 100},
        merge=1,
    ),
    "internvl": Written(
        case=TOWERS["internvl"],
        decoder="qwen2",
        text="language_model.model.",
        projector=gguf.VisionProjectorType.INTERNVL,
        tower=(
            ("vision_tower.", "model.vision_tower."),
            ("multi_modal_projector.layer_norm.", "mlp1.0."),
            ("multi_modal_projector.linear_1.", "mlp1.1."),
            ("multi_modal_projector.linear_2.", "mlp1.3."),
        ),
        tokens={"<IMG_CONTEXT>": 100},
    ),
    "smolvlm": Written(
        case=TOWERS["smolvlm"],
        decoder="llama",
        text="model.text_model.",
        projector=gguf.VisionProjectorType.IDEFICS3,
        merge=4,
    ),
}


def save(case: Any, folder: Path) -> Any:
    more = getattr(case, "config", {"image_token_id": 100, "video_token_id": 101})
    config = getattr(transformers, f"{case.name}Config")(
        vision_config=case.vision, text_config=case.text, tie_word_embeddings=False, **more
    )
    return save_media_oracle(
        getattr(transformers, f"{case.name}ForConditionalGeneration"), config, folder
    )


def write_text(path: Path, written: Written, config: Any, stored: dict[str, torch.Tensor]) -> None:
    own = {
        "model." + name.removeprefix(written.text): tensor
        for name, tensor in stored.items()
        if name.startswith(written.text)
    }
    own["lm_head.weight"] = next(stored[name] for name in stored if name.endswith("lm_head.weight"))
    config.pad_token_id, config.tie_word_embeddings = config.pad_token_id or 0, False
    tokens = [f"t{i}" for i in range(VOCABULARY)]
    for token, id in written.tokens.items():
        tokens[id] = token

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(tokens)
        sections = config.rope_parameters.get("mrope_section")
        if sections:
            writer.add_rope_dimension_sections([*sections, 0])

    model = SimpleNamespace(config=config, state_dict=lambda: own)
    write_gguf(path, written.decoder, model, extra=extra)


def vision_names(written: Written, config: Any, stored: dict[str, torch.Tensor]) -> Tensors:
    """By the library's names."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    deep = getattr(config, "deepstack_visual_indexes", [])
    for name, tensor in stored.items():
        if name.startswith(written.text) and ".visual." not in name and name[:7] != "visual.":
            continue
        if name.endswith("lm_head.weight"):
            continue
        for old, new in written.tower:
            name = new + name.removeprefix(old) if name.startswith(old) else name
        if "deepstack" in name:
            *_, index, part, kind = name.split(".")
            own = part.removeprefix("linear_")
            yield f"v.deepstack.{deep[int(index)]}.{own}.{kind}", tensor
            continue
        if "patch_embed.proj.weight" in name and tensor.ndim == 5:
            yield "v.patch_embd.weight", tensor[:, :, 0]
            yield "v.patch_embd.weight.1", tensor[:, :, 1]
            continue
        parts = (written.changed or (lambda *one: iter([one])))(name, tensor)
        for part, values in parts:
            yield named(table, part), values


TABLE_NAMES = (
    ("visual.merger.norm.", "v.post_ln."),
    ("visual.merger.linear_fc1.", "mm.0."),
    ("visual.merger.linear_fc2.", "mm.2."),
    ("visual.merger.ln_q.", "v.post_ln."),
)
"""What the library's converters name by themselves."""


def named(table: Any, name: str) -> str:
    for own, stored in TABLE_NAMES:
        if name.startswith(own):
            return name.replace(own, stored)
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def write_tower(
    path: Path, written: Written, config: Any, stored: dict[str, torch.Tensor], width: int
) -> None:
    vision = written.case.vision
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string(gguf.Keys.Clip.PROJECTOR_TYPE, str(written.projector))
    writer.add_bool(gguf.Keys.Clip.HAS_VISION_ENCODER, True)
    sizes = {
        gguf.Keys.ClipVision.EMBEDDING_LENGTH: vision["hidden_size"],
        gguf.Keys.ClipVision.FEED_FORWARD_LENGTH: vision["intermediate_size"],
        gguf.Keys.ClipVision.BLOCK_COUNT: vision.get("num_hidden_layers", vision.get("depth")),
        gguf.Keys.ClipVision.Attention.HEAD_COUNT: vision.get(
            "num_attention_heads", vision.get("num_heads")
        ),
        gguf.Keys.ClipVision.PATCH_SIZE: first(vision["patch_size"]),
        gguf.Keys.ClipVision.IMAGE_SIZE: first(vision.get("image_size", 24)),
        gguf.Keys.ClipVision.PROJECTION_DIM: width,
        gguf.Keys.ClipVision.Projector.SCALE_FACTOR: written.merge,
        gguf.Keys.ClipVision.SPATIAL_MERGE_SIZE: written.merge,
    }
    for key, value in sizes.items():
        writer.add_uint32(key, value)
    eps = vision.get("layer_norm_eps", getattr(config, "layer_norm_eps", 1e-6))
    writer.add_float32(gguf.Keys.ClipVision.Attention.LAYERNORM_EPS, eps)
    mean, std = written.case.norm
    writer.add_array(gguf.Keys.ClipVision.IMAGE_MEAN, list(mean))
    writer.add_array(gguf.Keys.ClipVision.IMAGE_STD, list(std))
    for kind, flag in written.kinds.items():
        writer.add_bool(f"clip.{kind}", flag)
    if "window_size" in vision:
        writer.add_uint32(gguf.Keys.ClipVision.WINDOW_SIZE, vision["window_size"])
        writer.add_uint32(gguf.Keys.ClipVision.N_WA_PATTERN, 2)
    if deep := vision.get("deepstack_visual_indexes"):
        flags = [layer in deep for layer in range(vision["depth"])]
        writer.add_array(gguf.Keys.ClipVision.IS_DEEPSTACK_LAYERS, flags)
    for name, tensor in vision_names(written, config, stored):
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def first(value: Any) -> int:
    return int(value[0] if isinstance(value, list) else value)


GATED = ("qwen3-vl",)


@pytest.mark.parametrize(
    "name", [one if one in GATED else pytest.param(one, marks=pytest.mark.slow) for one in CASES]
)
def test_it_sees_as_the_model_it_was_made_of(name: str, tmp_path: Path) -> None:
    written, folder = CASES[name], tmp_path / "folder"
    oracle = save(written.case, folder)
    stored = load_file(folder / "model.safetensors")
    text, tower = tmp_path / "model.gguf", tmp_path / "mmproj-model.gguf"
    config = oracle.config
    write_text(text, written, config.text_config, stored)
    write_tower(tower, written, config.vision_config, stored, config.text_config.hidden_size)
    located = locate(ModelOptions(model=str(text)))
    assert located.vision == tower and located.decisions[0].chosen == tower.name
    facts = read_model_facts(located)
    assert facts.vision_path == str(tower) and facts.media is not None
    assert facts.media.image_token == 100
    theirs = SeeingEngine(folder)
    spec = engine_spec(folder)
    model = msgspec.structs.replace(
        spec.model, path=str(text), format="gguf", config=facts.config, family=facts.family,
        vision_path=str(tower), image_norm=facts.media.norm,
    )  # fmt: skip
    spec = msgspec.structs.replace(spec, model=model)
    ours = SeeingEngine(folder, InlineExecutor(spec))
    grid = getattr(written.case, "grids", ((1, 6, 4),))[0]
    breaks = getattr(written.case, "breaks", 0)
    one = image(3, grid, patch=4, merge=written.merge, breaks=breaks)
    prompt = Prompt().text(5, 6, 7).put(one).text(8, 9)
    (expected,), (got,) = theirs.run(prompt), ours.run(prompt)
    assert got.tokens == expected.tokens
    for mine, other in zip(got.prompt_logprobs, expected.prompt_logprobs, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-6)
    theirs.close()
    ours.close()


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    model, tower = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    for path, architecture in ((model, "qwen3"), (tower, "clip")):
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_string(gguf.Keys.Clip.PROJECTOR_TYPE, "qwen3vl_merger")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    with pytest.raises(
        CheckpointError, match=r"stands before qwen3vl or qwen3vlmoe, and .*'qwen3'"
    ):
        seeing_config(model, tower)
    with pytest.raises(CheckpointError, match="no such file"):
        vision_beside(model, str(tmp_path / "other.gguf"))
    found, (decision,) = vision_beside(model, None)
    assert found is None and "stands before" in decision.why
    assert vision_beside(model, str(tower)) == (tower, ())
    assert (
        vision_file_of(["mmproj-BF16.gguf", "a.gguf", "mmproj-x-f16.gguf"]) == "mmproj-x-f16.gguf"
    )
    (tmp_path / "mmproj-b.gguf").write_bytes(b"")
    found, (decision,) = vision_beside(model, None)
    assert found is None and "mmproj-b.gguf, mmproj.gguf lie beside" in decision.why

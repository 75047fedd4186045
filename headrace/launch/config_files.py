"""config.json of a folder, with what older checkpoints say in files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.back.models.published_keys import in_common_keys
from headrace.back.models.vlm_inside import thinker_config
from headrace.base.config.checkpoint_parts import with_parts
from headrace.base.config.hf import ConfigReader, read_json
from headrace.base.config.two_towers import filled
from headrace.launch.token_classes import with_token_classes


def read_config(folder: Path) -> dict[str, Any]:
    """config.json; what older checkpoints say of their weights in a file of its own stands under
    `quantization_config`, as newer ones have it, and keys of their own under common ones. Of
    checkpoints that speak, the thinker's."""
    config = read_json(folder / "config.json")
    for name, method in _BESIDE.items():
        beside = folder / name
        if "quantization_config" in config or not beside.is_file():
            continue
        written = read_json(beside)
        if method == "modelopt":
            inside = ConfigReader(written, str(beside)).section("quantization")
            written = {} if inside is None else dict(inside.raw)
        if method == "quanto":
            written = {"modules": written, "hidden_size": config.get("hidden_size")}
        if written:
            config["quantization_config"] = {"quant_method": method, **written}
    if of_mlx := _written_by_mlx(config):
        config["quantization_config"] = {"quant_method": "mlx", **of_mlx}
    config = in_common_keys(config, str(folder / "config.json"))
    if config.get("engram_layer_ids"):
        config = with_token_classes(folder, config)
    return filled(thinker_config(with_parts(folder, config)))


def _written_by_mlx(config: dict[str, Any]) -> dict[str, Any]:
    """What MLX says of its weights: it names no method, under neither key."""
    written, common = config.get("quantization"), config.get("quantization_config")
    named = isinstance(common, dict) and "quant_method" in common
    if named or not isinstance(written, dict) or not written.keys() >= {"bits", "group_size"}:
        return {}
    return dict(written)


_BESIDE = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quanto_qmap.json": "quanto",
}
"""Files of ModelOpt, AutoGPTQ, AutoAWQ and Quanto beside config.json -> their method."""

"""The type of the KV cache, and which layers keep that of the activations."""

from __future__ import annotations

from headrace.back.models.families import FALLBACK
from headrace.base.config.resolved import DeviceSpec
from headrace.base.config.tree import Options
from headrace.base.errors import ConfigError
from headrace.launch.chooser import Chooser
from headrace.launch.model_facts import ModelFacts

MEANINGS = {
    "int8": "one-byte values with a scale per token and head",
    "fp8": "e4m3 values with a scale per token and head",
    "fp8_e5m2": "e5m2 values with a scale per token and head",
    "int4": "4-bit values with a scale and a smallest value per token and head",
    "int4-rotated": "the same of rotated heads",
    "int3-rotated": "3-bit values of rotated heads with a scale and a smallest value per token and head",
    "turboquant-4bit": "4-bit levels for normal values of rotated heads with a scale per token and head",
    "turboquant-3bit": "3-bit levels for normal values of rotated heads with a scale per token and head",
    "nvfp4": "e2m1 values with an e4m3 scale per 16 dimensions and one per token and head",
    "nvfp4-4over6": "the same, whose 16 dimensions end at 4 or at 6, whichever loses less",
}
WINDOWS = "sliding_window"


def kv_dtype_of(
    options: Options, model: ModelFacts, device_spec: DeviceSpec, choose: Chooser
) -> str | None:
    """The type of the KV cache where it is not that of the activations."""
    kv_dtype = options.kv.kv_dtype
    if kv_dtype == "auto":
        return None
    if device_spec.device not in ("cpu", "cuda"):
        raise ConfigError(
            f"--kv-dtype {kv_dtype} runs on CPU and CUDA, not on {device_spec.device}"
        )
    if model.family == FALLBACK:
        raise ConfigError(
            f"--kv-dtype {kv_dtype} needs a model family of headrace; {model.architecture} runs "
            "by the transformers fallback"
        )
    choose.note("--kv-dtype", kv_dtype, MEANINGS[kv_dtype], "as asked")
    return kv_dtype


def kv_plain_layers(options: Options, model: ModelFacts) -> tuple[int | str, ...]:
    """The layers that --kv-dtype-skip-layers names; ConfigError for one that the model does not
    have, and where no type is to be skipped."""
    skipped = options.kv.kv_dtype_skip_layers
    if skipped and options.kv.kv_dtype == "auto":
        raise ConfigError(
            "--kv-dtype-skip-layers needs a --kv-dtype that other layers have",
            field="kv_dtype_skip_layers",
        )
    layers: list[int | str] = []
    for name in skipped:
        number = int(name) if name.isdecimal() else -1
        if name != WINDOWS and not 0 <= number < model.num_layers:
            raise ConfigError(
                f"--kv-dtype-skip-layers {name}: a number from 0 to {model.num_layers - 1}, or {WINDOWS}",
                field="kv_dtype_skip_layers",
            )
        layers.append(WINDOWS if name == WINDOWS else number)
    return tuple(layers)

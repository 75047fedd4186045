"""Which weights are quantized while they load: `--quantization` and `--quantization-config`,
checked and noted."""

from __future__ import annotations

from headrace.back.models.families import FALLBACK
from headrace.base.config.quantization_options import WEIGHT_BITS, QuantizationParts
from headrace.base.config.resolved import DeviceSpec
from headrace.base.config.tree import ModelOptions, Options
from headrace.base.errors import ConfigError
from headrace.launch.chooser import Chooser
from headrace.launch.model_facts import ModelFacts


def online_quantization(
    options: Options, model: ModelFacts, device_spec: DeviceSpec, choose: Chooser
) -> str | None:
    """The scheme of all parts that are not reason apart, by name; ConfigError where no kernel could
    serve it, or any part's."""
    schemes = _schemes(options.model)
    if not schemes:
        return None
    flag, field = "--quantization", "quantization"
    if options.model.quantization == "none":
        flag, field = "--quantization-config", "quantization_config"
    asked = f"{flag} {', '.join(schemes)}"
    if device_spec.device == "cuda" and options.model.deterministic:
        raise ConfigError(f"{asked} does not go with --deterministic on CUDA", field=field)
    if model.family == FALLBACK:
        raise ConfigError(
            f"{asked} needs a model family of headrace; {model.architecture} runs by the "
            "transformers fallback",
            field=field,
        )
    for scheme in schemes:
        bits = WEIGHT_BITS[scheme]
        size = model.num_params * bits / 8 / 2**30
        reason = f"{size:.2f}GiB, packed while loading" if len(schemes) == 1 else "of its parts"
        choose.note(flag, scheme, f"{bits:g} bits a weight", reason)
    return None if options.model.quantization == "none" else options.model.quantization


def online_weight_bytes(options: Options, model: ModelFacts) -> int:
    """Of the whole model in memory, about; of parts that differ the largest."""
    schemes = _schemes(options.model)
    if not schemes:
        return model.weight_bytes
    return int(model.num_params * max(WEIGHT_BITS[one] for one in schemes) / 8)


def _schemes(options: ModelOptions) -> tuple[str, ...]:
    """Those of linear layers and experts, each once. Whether a part is in the model is not known
    here."""
    parts = options.quantization_config or QuantizationParts()
    both = (parts.of(part) or options.quantization for part in ("linear", "moe"))
    return tuple(dict.fromkeys(scheme for scheme in both if scheme != "none"))

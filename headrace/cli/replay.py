"""`headrace replay MODEL --module NAME`: runs a linear layer, or all of a module, again on what
went into it, as other schemes hold it or another device computes it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.base.config.options import CommandLine
from headrace.base.errors import ConfigError
from headrace.cli.model_argument import with_model
from headrace.front.text.tokenizer_files import load_tokenizer
from headrace.launch.facts import resolve_options

AS_RUN = {"cpu": "as it ran", "cuda": "as stored, on CUDA"}


def main(argv: Sequence[str]) -> int:
    """Prints the errors of the layer's outputs by scheme."""
    line = CommandLine(
        "headrace replay",
        "Captures what a module's linear layers give for a text on the CPU, and compares schemes and devices.",
        groups=("model",),
        own=("quantization",),
    )
    line.parser.add_argument("path", nargs="?", metavar="MODEL", help="folder or hub id")
    line.parser.add_argument(
        "--module", help="such as model.layers.0.mlp.down_proj, or model.layers.0.self_attn"
    )
    line.parser.add_argument(
        "--prompt", default="The mill stands by the water.", help="text that the model reads"
    )
    line.parser.add_argument(
        "--schemes", default="int8,fp8,int4,int4-g128", help="comma-separated, as --quantization"
    )
    line.parser.add_argument(
        "--on", choices=("cpu", "cuda"), default="cpu", help="where the module runs again"
    )
    own, options = line.parse(argv)
    if own.module is None:
        raise ConfigError(
            "--module: which? such as model.layers.0.mlp.down_proj or model.layers.0",
            field="module",
        )
    resolved = resolve_options(
        msgspec.structs.replace(
            with_model(options, own.path),
            device=msgspec.structs.replace(options.device, device="cpu"),
        )
    )
    import torch  # after the options were checked

    from headrace.back.quant.scheme import ONLINE_SCHEMES
    from headrace.launch.replay import capture, replay

    if own.on == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--on cuda: PyTorch finds no CUDA GPU here", field="--on")
    schemes = [name for name in own.schemes.split(",") if name]
    for name in schemes:
        if name not in ONLINE_SCHEMES:
            raise ConfigError(
                f"--schemes: {name!r} is not one of {', '.join(ONLINE_SCHEMES)}", field="--schemes"
            )
    spec, tokenizer = resolved.engine.model, resolved.text.tokenizer_path
    if tokenizer is None:
        raise ConfigError("headrace replay: the model has no tokenizer", field="MODEL")
    captured = capture(spec, own.module, load_tokenizer(tokenizer).encode(own.prompt))
    table = Table("scheme", "layer", "largest error", "mean error", "relative")
    for scheme in (None, *schemes):
        for names, errors in replay(spec, captured, scheme, torch.device(own.on)).items():
            layer = "+".join(name.removesuffix(".weight").rpartition(".")[2] for name in names)
            figures = (f"{errors.largest:.3g}", f"{errors.mean:.3g}", f"{errors.relative:.3%}")
            table.add_row(scheme or AS_RUN[own.on], layer, *figures)
    Console().print(table)
    return 0

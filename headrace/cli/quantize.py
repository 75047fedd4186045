"""`headrace quantize MODEL OUT --scheme int4-g128`: writes a checkpoint with quantized weights that
other engines load too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.base.config.options import CommandLine
from headrace.base.config.resolved import ModelSpec
from headrace.base.config.units import show_bytes
from headrace.base.errors import ConfigError
from headrace.cli.model_argument import with_model
from headrace.launch.facts import resolve_options


def main(argv: Sequence[str]) -> int:
    """Writes OUT, and prints its size and the weights' loss."""
    line = CommandLine(
        "headrace quantize",
        "Writes a checkpoint with quantized weights, in the layout of compressed-tensors.",
        groups=("model",),
        own=("quantization",),
    )
    line.parser.add_argument(
        "path", nargs="?", metavar="MODEL", help="folder or hub id, of plain safetensors"
    )
    line.parser.add_argument("out", nargs="?", metavar="OUT", help="folder to write: new, or empty")
    line.parser.add_argument(
        "--scheme",
        default="int4-g128",
        help="int4, int4-g64, int4-g128, int4-asym..., int8 and fp8 (with 8-bit activations), "
        "int8-g128... [int4-g128]",
    )
    line.parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="UTF-8 text that linear layers are rounded by instead of to the nearest",
    )
    line.parser.add_argument(
        "--method",
        choices=("gptq", "awq"),
        default="gptq",
        help="what rounds them by it: GPTQ, or AWQ (larger numbers for the inputs that it shows to "
        "be large, folded into what makes these) [gptq]",
    )
    line.add_number(
        "--calibration-tokens", "tokens of it at most", default=16384, least=512, greatest=1 << 24
    )
    own, options = line.parse(argv)
    if own.path is None or own.out is None:
        raise ConfigError("headrace quantize MODEL OUT: name both folders", field="OUT")
    resolved = resolve_options(
        msgspec.structs.replace(
            with_model(options, own.path),
            device=msgspec.structs.replace(options.device, device="cpu"),
        )
    )
    calibration = Calibration(
        path=own.calibration,
        tokenizer=resolved.text.tokenizer_path,
        tokens=own.calibration_tokens,
        method=own.method,
    )
    return _write(resolved.engine.model, Path(own.out), own.scheme, calibration)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A text, or none (`path` None); how many tokens of it are run at most; by which method it
    rounds."""

    path: str | None
    tokenizer: str | None
    tokens: int
    method: str


def _write(spec: ModelSpec, out: Path, scheme: str, calibration: Calibration) -> int:
    """Imports torch here, after the options were checked."""
    from headrace.launch.calibrate import calibration_texts
    from headrace.launch.quantize import quantize_checkpoint, stored_bytes

    texts: Sequence[Sequence[int]] = ()
    if calibration.path is not None:
        if calibration.tokenizer is None:
            raise ConfigError("--calibration: the model has no tokenizer", field="--calibration")
        path = Path(calibration.path)
        texts = calibration_texts(path, calibration.tokenizer, tokens=calibration.tokens)
    console = Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("quantizing", total=stored_bytes(spec))
        report = quantize_checkpoint(
            spec,
            out,
            scheme,
            lambda name, size: bar.update(task, advance=size),
            texts=texts,
            method=calibration.method,
        )
    loss, module = report.worst
    console.print(
        f"{out}: {show_bytes(report.after)} of {show_bytes(report.before)}, {report.quantized} "
        f"matrices in {scheme}, relative error {report.loss:.2%} (at most {loss:.2%}, {module})"
    )
    if report.by_text:
        console.print(
            f"{report.by_text} matrices by {calibration.method.upper()}: outputs over the calibration text off by "
            f"{report.output_loss:.2%}"
        )
    if report.left:
        more = f" and {len(report.left) - 3} more" if len(report.left) > 3 else ""
        console.print(f"left plain: {', '.join(report.left[:3])}{more}")
    return 0

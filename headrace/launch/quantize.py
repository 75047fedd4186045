"""Writes a checkpoint with quantized weights: the linear layers and experts of a plain one, a
tensor at a time, rounded to nearest or, linear layers, by GPTQ or AWQ; all else is copied as it is.

What is a linear layer the model itself says, built without memory: the weights that
`--quantization` would pack. Embedding and output head stay as they are.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from headrace.back.models.load.plain_norms import PLAIN_NORMS
from headrace.back.models.load.safetensors import TORCH_DTYPES, SafetensorsSource
from headrace.back.models.load.source import name_of
from headrace.back.quant.awq import input_scales, rounded
from headrace.back.quant.compressed import WRITTEN, Grid, config, grid_of, stored, takes
from headrace.back.quant.gptq import calibrated, output_errors
from headrace.back.quant.scheme import SCHEMES, Scheme
from headrace.base.config.hf import ConfigReader
from headrace.base.config.quantization_formats import stored_quantization
from headrace.base.config.resolved import ModelSpec
from headrace.base.config.weight_files import WEIGHT_SUFFIXES
from headrace.base.errors import CheckpointError, ConfigError
from headrace.launch.calibrate import Texts, hessians
from headrace.launch.fold import Folds, source_of
from headrace.launch.plan import build_without_memory

METHODS = ("gptq", "awq")
"""By which a calibration text rounds linear layers."""
SHARD_BYTES = 4 << 30
INDEX = "model.safetensors.index.json"
Progress = Callable[[str, int], None]
"""Told a tensor's name and its bytes once it is written."""


@dataclass(kw_only=True)
class Written:
    """Sizes in bytes, and how far the written weights are from the plain ones: `error` and `size`
    are sums of squares, as are `output_error` and `output_size` of the outputs of the `by_text`
    matrices that a calibration text has rounded. `left`: matrices that stay plain although their
    kind is quantized."""

    before: int = 0
    after: int = 0
    quantized: int = 0
    error: float = 0.0
    size: float = 0.0
    worst: tuple[float, str] = (0.0, "")
    by_text: int = 0
    output_error: float = 0.0
    output_size: float = 0.0
    left: list[str] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Relative error of all quantized weights together, in the Euclidean norm."""
        return math.sqrt(self.error / self.size) if self.size else 0.0

    @property
    def output_loss(self) -> float:
        """The same of the outputs over the calibration text."""
        return math.sqrt(self.output_error / self.output_size) if self.output_size else 0.0


def quantize_checkpoint(
    spec: ModelSpec,
    out: Path,
    scheme_name: str,
    progress: Progress = lambda name, size: None,
    *,
    texts: Texts = (),
    method: str = "gptq",
) -> Written:
    """Writes `out`, a folder that must be new or empty; with calibration texts by a method of
    METHODS. ConfigError for a scheme without a layout, a family whose scales cannot be folded
    (AWQ), a checkpoint that is no plain safetensors, and a folder that is not empty."""
    scheme = _checked(spec, out, scheme_name)
    if method not in METHODS:
        raise ConfigError(f"--method {method}: one of {', '.join(METHODS)}", field="--method")
    linear = linear_weights(spec)
    report = Written()
    ready: dict[str, dict[str, torch.Tensor]] = {}
    if texts and method == "gptq":
        ready = _calibrated(spec, linear, scheme, texts, report, progress)
    scaled = _scaled(spec, linear, scheme, texts, report) if texts and method == "awq" else None
    by_text, names = frozenset(ready), Shards(out)
    ignored: set[str] = set()
    out.mkdir(parents=True, exist_ok=True)
    with closing(SafetensorsSource(Path(spec.path))) as source:
        for name, tensor in tensors_of(source):
            module = name.removesuffix(".weight")
            report.before += tensor.nbytes
            size, plain = tensor.nbytes, tensor
            if scaled is not None:
                tensor = scaled.folds.apply(name, tensor)
            tensors = {name: tensor.to(plain.dtype)}
            if name in ready:
                tensors = ready.pop(name)
            elif name in linear:
                if tensor.dim() == 2 and takes(tuple(tensor.shape), scheme):
                    squares_I = None if scaled is None else scaled.squares.pop(name, None)
                    tensors = _quantized(module, tensor, scheme, report, squares_I)
                else:
                    report.left.append(name)
                    ignored.add(module)
            elif tensor.dim() == 2 and name.endswith(".weight"):
                ignored.add(module)
            for one, values in tensors.items():
                report.after += values.nbytes
                names.add(one, values)
            if name not in by_text:
                progress(name, size)
    names.close()
    quantization = config(scheme, ignored | {"lm_head"})
    copy_rest(Path(spec.path), out, quantization_config=quantization)
    return report


def stored_bytes(spec: ModelSpec) -> int:
    """Of the checkpoint's weight files."""
    return sum(path.stat().st_size for path in Path(spec.path).glob("*.safetensors"))


def linear_weights(spec: ModelSpec) -> frozenset[str]:
    """The checkpoint's names of the weights that are quantized."""
    plain = msgspec.structs.replace(spec, quantization="int8")
    plan = build_without_memory(plain, block_tokens=16).weights
    packed = {
        piece.name
        for param in plan.params
        if param.packed_bytes
        for piece in param.pieces
        if not piece.transposed and "embed" not in param.name and "lm_head" not in piece.name
    }
    names = _own_names(spec, plan.renamed)
    return frozenset(name for own, name in names.items() if own in packed)


def _own_names(spec: ModelSpec, renamed: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The model's name of a tensor -> the checkpoint's."""
    with closing(SafetensorsSource(Path(spec.path))) as source:
        return {name_of(name, renamed): name for name in source.entries}


def _checked(spec: ModelSpec, out: Path, scheme_name: str) -> Scheme:
    if scheme_name not in WRITTEN:
        raise ConfigError(f"--scheme {scheme_name}: one of {', '.join(WRITTEN)}", field="--scheme")
    if spec.format != "safetensors":
        raise ConfigError(
            f"{spec.path}: only safetensors checkpoints are quantized, not {spec.format}",
            field="MODEL",
        )
    if stored_quantization(spec.config, f"{spec.path}/config.json") is not None:
        raise ConfigError(f"{spec.path}: the checkpoint is quantized already", field="MODEL")
    check_out(out)
    return SCHEMES[scheme_name]


def check_out(out: Path) -> None:
    """ConfigError unless the folder is new or empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: is there, and not an empty folder", field="OUT")


def tensors_of(source: SafetensorsSource) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors, in the order of the files."""
    for name, _ in sorted(source.entries.items(), key=lambda item: item[1].order):
        yield name, _tensor(source, name)


def _tensor(source: SafetensorsSource, name: str) -> torch.Tensor:
    entry = source.entries[name]
    tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
    source.copy(name, entry.shape, tuple(slice(0, size) for size in entry.shape), tensor)
    return tensor


def _calibrated(
    spec: ModelSpec,
    linear: frozenset[str],
    scheme: Scheme,
    texts: Texts,
    report: Written,
    progress: Progress,
) -> dict[str, dict[str, torch.Tensor]]:
    """Linear weight -> the tensors that stand for it, rounded by what the texts show."""
    ready: dict[str, dict[str, torch.Tensor]] = {}
    renamed = build_without_memory(spec, block_tokens=16).weights.renamed
    names = {own: name for own, name in _own_names(spec, renamed).items() if name in linear}
    with closing(SafetensorsSource(Path(spec.path))) as source:
        for shared, hessian_II in hessians(spec, texts):
            for name in (names[one] for one in shared if one in names):
                weight_OI = _tensor(source, name)
                if not takes(tuple(weight_OI.shape), scheme):
                    continue
                module = name.removesuffix(".weight")
                grid = _grid(module, weight_OI, scheme)
                numbers_OI, grid = calibrated(weight_OI, grid, hessian_II)
                exact_OI = grid.meaning(numbers_OI)
                tensors = stored(numbers_OI, grid, scheme)
                ready[name] = {f"{module}.{leaf}": values for leaf, values in tensors.items()}
                _note(report, module, exact_OI, weight_OI)
                errors = output_errors(exact_OI - weight_OI, weight_OI.float(), hessian_II)
                report.by_text += 1
                report.output_error += errors[0]
                report.output_size += errors[1]
                progress(name, weight_OI.nbytes)
    return ready


@dataclass
class _Scaled:
    """What AWQ found: scales, and of the weights' scaled inputs the sums of their squares."""

    folds: Folds = field(default_factory=Folds)
    squares: dict[str, torch.Tensor] = field(default_factory=dict)


def _scaled(
    spec: ModelSpec, linear: frozenset[str], scheme: Scheme, texts: Texts, report: Written
) -> _Scaled:
    if spec.family not in PLAIN_NORMS:
        raise ConfigError(
            f"--method awq: scales are folded into layers of {', '.join(PLAIN_NORMS)}, not of "
            f"{spec.family}; use gptq",
            field="--method",
        )
    scaled = _Scaled()
    renamed = build_without_memory(spec, block_tokens=16).weights.renamed
    names = {own: name for own, name in _own_names(spec, renamed).items() if name in linear}
    with closing(SafetensorsSource(Path(spec.path))) as source:
        shapes = {name: entry.shape for name, entry in source.entries.items()}
        for shared, hessian_II in hessians(spec, texts):
            mine = [names[one] for one in shared if one in names]
            mine = [name for name in mine if takes(shapes[name], scheme)]
            if not mine:
                continue
            weights = {name: _tensor(source, name).float() for name in mine}
            for name, weight_OI in weights.items():
                _grid(name.removesuffix(".weight"), weight_OI, scheme)
            place = source_of(mine, shapes, head_dim=_head_dim(spec))
            scales_I = torch.ones(len(hessian_II))
            if place is not None:
                by = list(weights.values())
                scales_I = input_scales(by, scheme, hessian_II, place.shared)
                scaled.folds.add(mine, place, scales_I)
            squares_I = hessian_II.diagonal() / scales_I.square()
            for name, weight_OI in weights.items():
                scaled.squares[name] = squares_I
                numbers_OI, grid = rounded(weight_OI * scales_I, scheme, squares_I)
                back_OI = grid.meaning(numbers_OI) / scales_I
                errors = output_errors(back_OI - weight_OI, weight_OI, hessian_II)
                report.by_text += 1
                report.output_error += errors[0]
                report.output_size += errors[1]
    return scaled


def _head_dim(spec: ModelSpec) -> int:
    """Of the families whose scales are folded."""
    reader = ConfigReader(spec.config, "config.json")
    width, heads = reader.int("hidden_size", ge=1), reader.int("num_attention_heads", ge=1)
    return reader.int("head_dim", width // heads, ge=1)


def _quantized(
    module: str,
    weight_OI: torch.Tensor,
    scheme: Scheme,
    report: Written,
    squares_I: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Rounded to nearest; with sums of the inputs' squares, scales lose least by them."""
    grid = _grid(module, weight_OI, scheme)
    numbers_OI = grid.nearest(weight_OI.float())
    if squares_I is not None:
        numbers_OI, grid = rounded(weight_OI.float(), scheme, squares_I)
    _note(report, module, grid.meaning(numbers_OI), weight_OI)
    tensors = stored(numbers_OI, grid, scheme)
    return {f"{module}.{name}": values for name, values in tensors.items()}


def _grid(module: str, weight_OI: torch.Tensor, scheme: Scheme) -> Grid:
    try:
        return grid_of(weight_OI, scheme)
    except ValueError as error:
        raise CheckpointError(f"tensor {module}.weight {error}") from error


def _note(report: Written, module: str, exact_OI: torch.Tensor, weight_OI: torch.Tensor) -> None:
    """How far a weight is from the plain one."""
    error_of = float((exact_OI - weight_OI.float()).square().sum())
    size = float(weight_OI.float().square().sum())
    report.quantized += 1
    report.error, report.size = report.error + error_of, report.size + size
    loss = math.sqrt(error_of / size) if size else 0.0
    report.worst = max(report.worst, (loss, module))


class Shards:
    """Files of at most SHARD_BYTES and their index; one file has no index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, torch.Tensor] = {}
        self._files: list[dict[str, int]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a tensor, which is written with the others of its file."""
        if self._waiting and self._bytes() + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self._waiting[name] = tensor.contiguous()

    def close(self) -> None:
        """Writes what waits, and the index."""
        self._flush()
        count = len(self._files)
        if count == 1:
            (self._folder / _part(1)).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._files):
            final = f"model-{i + 1:05}-of-{count:05}.safetensors"
            (self._folder / _part(i + 1)).rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        total = sum(sum(names.values()) for names in self._files)
        document = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(document, indent=1))

    def _flush(self) -> None:
        self._files.append({name: tensor.nbytes for name, tensor in self._waiting.items()})
        path = self._folder / _part(len(self._files))
        save_file(self._waiting, path, metadata={"format": "pt"})
        self._waiting = {}

    def _bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._waiting.values())


def _part(number: int) -> str:
    return f"part-{number:05}.safetensors"


def copy_rest(folder: Path, out: Path, **changes: object) -> None:
    """Everything but weights: tokenizer, template, generation defaults; and config.json, with these
    keys changed."""
    for path in sorted(folder.iterdir()):
        weights = path.suffix in WEIGHT_SUFFIXES
        if path.is_file() and not weights and path.name not in ("config.json", INDEX):
            shutil.copyfile(path, out / path.name)
    document = json.loads((folder / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps(document, indent=2) + "\n")

"""Loading a model: build it empty, check the checkpoint against it, copy the weights in, let it
pack them.

Formats differ only in their source (`safetensors.py`, `gguf.py`) or, for dummy weights, in having
none. The check runs on a model built without memory, so that a wrong checkpoint is refused before a
byte of weights is allocated.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import torch

from headrace.back.kernels.linear_fp8.op import fp8_refusal
from headrace.back.kernels.linear_int4.op import int4_refusal
from headrace.back.kernels.native.library import unsupported
from headrace.back.layers.adapters import AdapterSlots, LentSlots
from headrace.back.layers.offload import Offload
from headrace.back.layers.scope import Ledger
from headrace.back.models.load.asked import (
    cache_decisions,
    input_decisions,
    sparse_decisions,
    with_asked_rows,
    with_stored_scales,
)
from headrace.back.models.load.dummy import DummyWeights
from headrace.back.models.load.fill import absent, check, fill
from headrace.back.models.load.gguf import GGUFSource
from headrace.back.models.load.gguf_vision import SeeingGGUFSource
from headrace.back.models.load.manifest import verify_manifest
from headrace.back.models.load.merged import MergedSource, adapter_of
from headrace.back.models.load.offloaded import choose_offload
from headrace.back.models.load.quantized import QuantizedSource
from headrace.back.models.load.readers import reader_of
from headrace.back.models.load.safetensors import SafetensorsSource
from headrace.back.models.load.sharded import check_shards, fill_shards, open_shards
from headrace.back.models.load.source import Source, renamed, separate_experts
from headrace.back.models.protocol import Loadable, LoadableModel
from headrace.back.models.registry import DTYPES, build_model
from headrace.back.models.weights import WeightPlan
from headrace.back.parallel.mesh import Mesh
from headrace.back.quant.cache_scales import FORM, CacheScales
from headrace.back.quant.gpu import GPU_SCHEMES
from headrace.back.quant.gpu_expert_forms import TYPES
from headrace.back.quant.stored import Stored
from headrace.base.config.checkpoint_parts import all_weight_files, parts_of
from headrace.base.config.quantization_formats import stored_quantization
from headrace.base.config.resolved import Decision, ModelSpec
from headrace.base.errors import CheckpointError, ConfigError

SOURCES: dict[str, Callable[[Path], Source]] = {
    "safetensors": SafetensorsSource,
    "gguf": GGUFSource,
}


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Further checks: a scan for NaN and Inf (0.06 s)."""

    scan_finite: bool = True


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How a model was built, for new weights to be brought into it (back/transfer).

    `rebuild` builds another one of the same making, without memory for its parameters, which leaves
    its layers in a ledger and shares the slots of adapters. `absent`: names of the optional
    parameters that the checkpoint lacked.
    """

    spec: ModelSpec
    ledger: Ledger
    rebuild: Callable[[Ledger], LoadableModel]
    absent: frozenset[str] = frozenset()


@dataclass(kw_only=True)
class LoadReport:
    """Where the time of a load went (seconds by phase), how many bytes this rank holds, and what
    was decided. `origin`: None where weights cannot be replaced."""

    seconds: dict[str, float] = field(default_factory=dict)
    weight_bytes: int = 0
    decisions: tuple[Decision, ...] = ()
    origin: Origin | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block as `name`."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def load_model(
    spec: ModelSpec,
    *,
    mesh: Mesh,
    device: torch.device,
    block_tokens: int,
    verify_queries: int = 1,
    adapters: AdapterSlots | None = None,
    options: LoadOptions = LoadOptions(),
) -> tuple[LoadableModel, LoadReport]:
    """This rank's model, ready to run, and how the load went. `adapters`: slots instead of the
    specification's. A flaw of the checkpoint is a CheckpointError."""
    report = LoadReport()

    def build(
        where: torch.device,
        stored: Stored | None = None,
        *,
        bare: bool = spec.bare,
        ledger: Ledger | None = None,
        slots: AdapterSlots | None = None,
        hollow: bool = False,
        offload: Offload | None = None,
        cache_scales: CacheScales | None = None,
    ) -> LoadableModel:
        named = msgspec.structs.replace(spec, bare=bare)
        return build_model(
            named,
            mesh=mesh,
            device=where,
            block_tokens=block_tokens,
            verify_queries=verify_queries,
            stored=stored,
            ledger=ledger,
            slots=slots or adapters,
            hollow=hollow,
            offload=offload,
            cache_scales=cache_scales,
        )

    if spec.format == "dummy":
        with report.phase("build"):
            offload = _offload(spec, build, device, report)
            model = _built(spec, partial(build, device, offload=offload), report)
        with report.phase("weights"):
            fill_dummy(model, spec.seed)
    elif spec.format == "sharded_state":
        model = _load_shards(spec, build, device, mesh, options, report)
    else:
        model = _load(spec, build, device, options, report)
    report.weight_bytes = weight_bytes_of(model)
    with report.phase("pack"):
        model.finish_load()
    report.decisions += model.decisions
    return model, report


def _load(
    spec: ModelSpec,
    build: Callable[..., LoadableModel],
    device: torch.device,
    options: LoadOptions,
    report: LoadReport,
) -> LoadableModel:
    with report.phase("open"):
        if spec.manifest is not None:
            report.decisions += (_verified(Path(spec.manifest), Path(spec.path)),)
        source = open_source(spec)
    with closing(source):
        scales = None
        if isinstance(source, MergedSource):
            report.decisions += (source.decision,)
        if isinstance(source, QuantizedSource):
            scales = source.cache_scales()
            report.decisions += (*source.decisions(), *cache_decisions(spec, scales))
            build = partial(build, cache_scales=scales)
        stored, why = stored_blocks(spec, source, device)
        with report.phase("check"):
            meta = torch.device("meta")
            plan = build(meta, stored).weights
            wanted = {piece.name for param in plan.params for piece in param.pieces}
            separate = separate_experts(renamed(source, plan.renamed), wanted)
            if separate is not source:  # other names, which may be stored quantized
                source = separate
                stored, why = stored_blocks(spec, source, device)
                plan = build(meta, stored).weights
            if scales is not None and spec.kv_dtype == FORM:
                scales.check_all_asked(plan.ignored)
            bare = spec.bare or lacks_prefix(plan, source)
            check(build(meta, stored, bare=True).weights if bare else plan, source)
        with report.phase("build"):
            lacking = frozenset(param.name for param in plan.params if absent(param, source))
            offload = _offload(spec, build, device, report, stored)
            make = partial(build, device, stored, bare=bare, offload=offload)
            model = _built(spec, make, report, lacking)
        if why:
            report.decisions += (_kept(model, source, why, spec.quantization or spec.dtype),)
            if spec.quantization is None:
                report.decisions += input_decisions(model, source, stored, device.type)
            report.decisions += sparse_decisions(source)
        with report.phase("weights"):
            fill(model.weights, source, scan_finite=options.scan_finite)
    return model


def _offload(
    spec: ModelSpec,
    build: Callable[..., LoadableModel],
    device: torch.device,
    report: LoadReport,
    stored: Stored | None = None,
) -> Offload | None:
    """Which layers' weights will lie in host memory, decided on a model without memory."""
    if spec.offload is None:
        return None
    weights = build(torch.device("meta"), stored).weights
    choice = choose_offload(weights, spec.offload, family=spec.family)
    requested = "auto" if spec.offload.count is None else str(spec.offload.count)
    report.decisions += (choice.decision(requested, len(weights.layers)),)
    if not choice.layers:
        return None
    return Offload(layers=frozenset(choice.layers), experts=choice.experts, device=device)


def _built(
    spec: ModelSpec,
    build: Callable[..., LoadableModel],
    report: LoadReport,
    lacking: frozenset[str] = frozenset(),
) -> LoadableModel:
    """The model to be filled; the report tells how another one is made."""
    ledger = Ledger()
    model = build(ledger=ledger)

    def rebuild(another: Ledger) -> LoadableModel:
        slots = None if model.adapters is None else LentSlots(model.adapters)
        return build(ledger=another, slots=slots, hollow=True)

    if spec.offload is None:
        report.origin = Origin(spec=spec, ledger=ledger, rebuild=rebuild, absent=lacking)
    return model


def _load_shards(
    spec: ModelSpec,
    build: Callable[..., LoadableModel],
    device: torch.device,
    mesh: Mesh,
    options: LoadOptions,
    report: LoadReport,
) -> LoadableModel:
    """This rank's own files."""
    axis = mesh.tp
    if mesh.ep.size > 1:
        raise ConfigError(
            f"--enable-expert-parallel: sharded state ({spec.path}) has a part of each expert for a rank; leave it out",
            field=mesh.ep.option,
        )
    with report.phase("open"):
        source = open_shards(Path(spec.path), rank=axis.rank, ranks=axis.size, reader=spec.reader)
    with closing(source):
        with report.phase("build"):
            check_shards(build(torch.device("meta")).weights, source)
            model = build(device, offload=_offload(spec, build, device, report))
        with report.phase("weights"):
            fill_shards(model.weights, source, scan_finite=options.scan_finite)
    return model


def lacks_prefix(plan: WeightPlan, source: Source) -> bool:
    """Whether the checkpoint names its tensors as that of a base model alone would, whatever head
    its config names (the first GPT-2 files)."""
    prefix, names = f"{plan.prefix}.", source.entries.keys()
    if not plan.prefix or any(name.startswith(prefix) for name in names):
        return False
    pieces = (piece.name for param in plan.params for piece in param.pieces)
    return any(name.removeprefix(prefix) in names for name in pieces)


def stored_blocks(spec: ModelSpec, source: Source, device: torch.device) -> tuple[Stored, str]:
    """The tensors whose quantized blocks are kept, and why those or none; the text is empty if
    nothing is quantized."""
    own = TYPES if device.type == "cuda" else {}
    stored = {
        name: entry.dtype if entry.dtype in own else entry.scheme or entry.dtype
        for name, entry in source.entries.items()
        if entry.quantized
    }
    if not stored:
        return {}, ""
    if spec.quantization is not None:
        return stored, f"linear weights become {spec.quantization} (--quantization)"
    if device.type == "cuda":
        return _stored_on_gpu(spec, with_asked_rows(stored, source))
    reason = unsupported(device.type, DTYPES[spec.dtype])
    if reason is not None:
        return {}, f"the kernel that reads quantized weights {reason}"
    return with_stored_scales(stored, source), "read as the file holds them"


def _stored_on_gpu(spec: ModelSpec, stored: Stored) -> tuple[Stored, str]:
    """The same of a GPU, which reads e4m3 numbers and 4-bit integers."""
    if spec.deterministic:
        return {}, "with --deterministic no kernel reads them"
    dtype, kept, reasons = DTYPES[spec.dtype], stored, []
    if reason := fp8_refusal(dtype):
        kept = {name: scheme for name, scheme in kept.items() if scheme not in GPU_SCHEMES}
        reasons.append(f"the kernel that reads e4m3 weights {reason}")
    if reason := int4_refusal(dtype):
        kept = {name: scheme for name, scheme in kept.items() if scheme in GPU_SCHEMES}
        reasons.append(f"the kernel that reads 4-bit weights {reason}")
    why = "; ".join(reasons) or "e4m3, 8-bit and 4-bit weights are read as the file holds them"
    return kept, why


def _kept(model: LoadableModel, source: Source, why: str, dtype: str) -> Decision:
    """How many tensors of which type stay quantized. Fused ones of which a part is stored
    otherwise, small ones, and types without a kernel do not."""
    kept = [
        param
        for param in model.weights.params
        if param.on_blocks is not None or param.on_groups is not None
    ]
    types = Counter(source.entries[piece.name].dtype for param in kept for piece in param.pieces)
    rest = Counter(entry.dtype for entry in source.entries.values() if entry.quantized) - types
    if rest:
        why += f"; {_counts(rest)}: dequantized to {dtype}"
    return Decision("weights", "auto", _counts(types) or "floats", why)


def _counts(types: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(types.items()))


def open_source(spec: ModelSpec) -> Source:
    """The checkpoint behind `spec.path`, its headers read and checked."""
    if spec.format not in SOURCES:
        known = ", ".join(sorted(SOURCES))
        raise CheckpointError(f"load_format {spec.format!r} is not one of {known}, dummy")
    if spec.format == "safetensors":
        reader = reader_of(spec.reader, spec.weights_url)
        folder, parts = Path(spec.path), None
        if parts_of(spec.config):
            parts = all_weight_files(folder, spec.config, reader.files(folder))
        adapter = adapter_of(folder, spec.config)
        source: Source = (
            SafetensorsSource(folder, reader, parts)
            if adapter is None
            else MergedSource(folder, adapter, reader)
        )
    elif spec.vision_path is not None:
        source = SeeingGGUFSource(Path(spec.path), Path(spec.vision_path))
    else:
        source = SOURCES[spec.format](Path(spec.path))
    if not isinstance(source, SafetensorsSource):
        return source
    quantization = stored_quantization(spec.config, f"{spec.path}/config.json")
    return source if quantization is None else QuantizedSource(source, quantization)


def fill_dummy(model: Loadable, seed: int) -> None:
    """Made-up weights."""
    weights = DummyWeights(seed)
    for param in model.weights.params:
        weights.fill(param)
        param.filled()


def weight_bytes_of(model: Loadable) -> int:
    """Bytes of all its weights on this rank."""
    return sum(
        param.packed_bytes if param.tensor is None else param.tensor.nbytes
        for param in model.weights.params
        if param.bundle is None
    ) + sum(part.nbytes for param in model.weights.params for part in param.members.values())


def _verified(manifest: Path, path: Path) -> Decision:
    count = verify_manifest(manifest, path if path.is_dir() else path.parent)
    return Decision("weights", "manifest", "verified", f"SHA-256 of {count} files as listed")

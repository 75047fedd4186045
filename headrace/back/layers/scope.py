"""Where a layer is being built: mesh, device, dtype and checkpoint path, in one value that narrows.

`scope / "self_attn" / "o_proj"` is the scope of that layer. Parameters that layers ask for, the
work they put off until the weights are there, and the kernels they choose are collected in the
`Ledger` behind all scopes of a model; nothing walks over modules afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from headrace.back.kernels.op import KernelChoice, Op, decisions
from headrace.back.layers.adapters import AdaptedLinear, AdapterSlots
from headrace.back.layers.fusions import counted
from headrace.back.layers.moe.balance import MovableExperts
from headrace.back.layers.moe.routing_tap import RoutingTap
from headrace.back.layers.offload import HOST, HostPart, Offload
from headrace.back.layers.row_directions import RowDirections
from headrace.back.parallel.bundle import Bundle
from headrace.back.parallel.mesh import Mesh
from headrace.back.parallel.param import Param, WeightPiece, local_pieces
from headrace.back.parallel.shard import Shard
from headrace.back.platforms import huge_pages
from headrace.back.quant.cache_scales import FORM, CacheScales
from headrace.back.quant.experts import (
    Floats,
    MatricesOf,
    OnlineExperts,
    StoredExperts,
    stored_schemes,
)
from headrace.back.quant.gpu_expert_forms import MixtureSizes
from headrace.back.quant.gpu_weights import (
    LoadedWeight,
    online_experts_on_gpu,
    online_on_gpu,
    stored_experts_on_gpu,
    stored_weight_on_gpu,
)
from headrace.back.quant.kept import KeptWeight, inputs_scaled, scheme_of
from headrace.back.quant.online import OnlineWeight
from headrace.back.quant.parts import PartSchemes
from headrace.back.quant.scheme import Scheme
from headrace.back.quant.stored import Stored, StoredWeight, kept_blocks
from headrace.base.config.media import ImageNorm
from headrace.base.config.resolved import Decision
from headrace.base.errors import ConfigError

P = TypeVar("P")


@dataclass(eq=False)
class Ledger:
    """What the layers of one model leave behind while they are built. `tables`: what many layers
    read; `finished`: work that was put off, and is done; `movable`: experts that change ranks."""

    params: list[Param] = field(default_factory=list)
    finishers: list[Callable[[], None]] = field(default_factory=list)
    choices: list[KernelChoice[Any]] = field(default_factory=list)
    notes: list[Decision] = field(default_factory=list)
    tables: dict[Any, torch.Tensor] = field(default_factory=dict)
    finished: list[Callable[[], None]] = field(default_factory=list)
    routing: RoutingTap = field(default_factory=RoutingTap)
    movable: list[MovableExperts] = field(default_factory=list)

    def note(self, decision: Decision) -> None:
        """Keeps `decision` once, however many layers come to it."""
        if decision not in self.notes:
            self.notes.append(decision)

    def finish(self) -> None:
        """Runs the work put off until the weights are loaded, layer by layer, each freeing what it
        packs."""
        self.finished, self.finishers = self.finishers, []
        for finish in self.finished:
            finish()
        self.tables.clear()

    def decisions(self) -> tuple[Decision, ...]:
        """What the layers noted, and which kernels were chosen."""
        return (*self.notes, *counted(self.choices), *decisions(self.choices))

    def host_kernels(self) -> tuple[str, ...]:
        """The chosen kernels that read arrays of a step on the host: its steps cannot be replayed
        from the device."""
        readers = {
            f"{one.op} kernel {one.kernel.name}" for one in self.choices if one.kernel.reads_host
        }
        return tuple(sorted(readers))

    def host_pairs(self) -> int | None:
        """See CausalModel."""
        wanted = (one.kernel.host_pairs for one in self.choices)
        return min((count for count in wanted if count is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Head:
    """What stands on top of the model: "lm", "sequence" or "token" (a classifier of `num_labels`),
    "none". `bare`: the checkpoint is of the base model alone, whose names lack the prefix. `name`:
    of a decoder's classifier; `deep`: a layer with a ReLU stands before its last one."""

    kind: str = "lm"
    num_labels: int = 0
    bare: bool = False
    name: str = "score"
    deep: bool = False


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The place of one layer. `path` is its checkpoint name; `block_tokens`, `max_positions`,
    `encoder_tokens` (the most that an encoder before the decoder reads) and `verify_queries` (query
    tokens of a row in steps that verify drafts) come from the engine.
    `online` says how weights are quantized while they load; None: they are not. `kv_quantized`:
    how values in the KV cache are (kernels/kv_write/quantized.py), but for the caches `kv_plain`,
    by number, and those of windows and chunks where it holds "sliding_window". `deterministic`:
    only invariant kernels (kernels/op.py) are chosen. `stored` names the checkpoint's tensors that
    are quantized already and stay so. `planned`: the kind of device that kernels are chosen for but
    not bound, while all tensors are on meta. `unbiased`: the projection that has no bias where
    those merged with it have one. `base_within`: where the model lies among others but for its
    head, instead of below the prefix of its family. `adapters`: the slots of its layers' adapters,
    None: they take none. `offload`: which layers' weights lie in host memory; `host`: the part of
    them that the parameters of this scope belong to, `host_experts` that of its routed experts.
    `mutual`: whether tokens of a step's spans see each other: "window": as far back as a
    layer's window lets them, "all": whatever the window, "local": in layers with a window alone;
    "blocks": each row of a step is a block that sees itself whole; "": they do not. `hollow`:
    parameters get no memory; whoever fills one gives it some.
    `image_norm`: mean and deviation of colours, where the checkpoint states them; None: those of
    the family. `shares_encoder`: the ranks share out what is to be encoded. `cache_scales`: those
    that the checkpoint holds for a quantized KV cache. `control`: by layer, what is added
    to the residual behind it, float32 [E]; `directions`: what rows add; `unfused`: fusions.py."""

    ledger: Ledger
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    block_tokens: int
    max_positions: int
    encoder_tokens: int = 0
    verify_queries: int = 1
    online: PartSchemes | None = None
    kv_quantized: str | None = None
    kv_plain: frozenset[int | str] = frozenset()
    deterministic: bool = False
    stored: Stored = field(default_factory=dict)
    head: Head = Head()
    planned: str = ""
    base_within: str = ""
    adapters: AdapterSlots | None = None
    offload: Offload | None = None
    host: HostPart | None = None
    host_experts: HostPart | None = None
    unbiased: str = ""
    mutual: str = ""
    hollow: bool = False
    image_norm: ImageNorm | None = None
    shares_encoder: bool = False
    cache_scales: CacheScales | None = None
    control: Mapping[int, torch.Tensor] = field(default_factory=dict)
    directions: RowDirections | None = None
    unfused: frozenset[str] = frozenset()
    path: str = ""

    @property
    def kind(self) -> str:
        """The kind of device that kernels are chosen for."""
        return self.planned or self.device.type

    def of_cache(self, number: int, *, windowed: bool = False) -> Scope:
        """The scope of a layer with this cache, which may stay as it is."""
        plain = number in self.kv_plain or (windowed and "sliding_window" in self.kv_plain)
        return replace(self, kv_quantized=None) if plain else self

    def cache_scales_of(self, kv_heads: int) -> tuple[torch.Tensor, ...]:
        """What op kv_write takes as the scales of the attention here, of `kv_heads` on all ranks:
        [2, K] of the checkpoint; nothing where tokens find theirs."""
        if self.cache_scales is None:
            return ()
        scales_2K = self.cache_scales.of(self.path, kv_heads, self.mesh.tp)
        fixed = scales_2K is not None and self.kv_quantized == FORM
        return (scales_2K.to(self.device),) if fixed and scales_2K is not None else ()

    @property
    def of_experts(self) -> Scope:
        """The scope of a layer's routed experts, whose weights may lie in host memory."""
        return self if self.host_experts is None else replace(self, host=self.host_experts)

    @property
    def beside(self) -> tuple[object, ...]:
        """What layers hold that is not theirs alone: who looks for a layer's tensors stays out."""
        parts = () if self.offload is None else tuple(self.offload.parts.values())
        return (self.ledger, self.mesh, self.offload, self.adapters, parts, *parts)

    @property
    def params_device(self) -> torch.device:
        """Where parameters are filled."""
        return self.device if self.host is None else HOST

    def __truediv__(self, name: str) -> Scope:
        return replace(self, path=self.name(name))

    def name(self, name: str) -> str:
        """The checkpoint name of `name` here."""
        return f"{self.path}.{name}" if self.path else name

    def param(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        pieces: tuple[WeightPiece, ...] | None = None,
        shard: Shard | None = None,
        init: str = "normal",
        init_scale: float = 0.02,
        bundle: Bundle | None = None,
        dtype: torch.dtype | None = None,
        optional: bool = False,
    ) -> Param:
        """Adds a parameter of global `shape`; by default it is one checkpoint tensor of its own
        name. With a `bundle` it is made of that one's tensors instead. `dtype`: its own, where it
        is not the model's. `optional`: see Param."""
        dtype = dtype or self.dtype
        axis = self.mesh.axis(shard.axis) if shard else None
        local = list(shape)
        if shard is not None and axis is not None:
            local[shard.dim] = shard.local_size(axis)
        if self.unbiased and pieces is not None:
            pieces = tuple(_or_zeros(piece, pieces, self.unbiased) for piece in pieces)
        param = Param(
            name=self.name(name),
            shape=shape,
            dtype=dtype,
            pieces=pieces or (WeightPiece(name=self.name(name), shape=shape),),
            tensor=None if bundle is not None else self._empty(local, dtype),
            bundle=bundle,
            shard=shard,
            spans=shard.spans(axis) if shard is not None and axis is not None else (),
            init=init,
            init_scale=init_scale,
            optional=optional,
        )
        for member in bundle.members if bundle is not None else ():
            sizes = bundle.local_shape(member, local, len(local_pieces(param)))
            param.members[member.name] = self._empty(sizes, member.dtype)
        self.ledger.params.append(param)
        return param

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if self.hollow:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            tensor.untyped_storage().resize_(0)
            return tensor
        if self.params_device.type == "cpu" and shape:
            tensor = huge_pages.kept(shape, dtype)
            many = self.device.type == "cuda" and tensor.nbytes >= huge_pages.LEAST_BYTES
            if many:  # gigabytes in all, which few threads will fill
                huge_pages.populate(tensor.data_ptr(), tensor.nbytes)
            return tensor
        return torch.empty(shape, dtype=dtype, device=self.params_device)

    def quantized_table(self, weight: Param, part: str) -> LoadedWeight:
        """The weight [outputs, inputs] of a "head", a "tied" one that an embedding shares, or an
        "embedding": quantized while it loads if the scope says so, else as the checkpoint holds it,
        on GPUs as floats. A GPU quantizes no embedding."""
        named = "head" if part == "tied" else part
        if self.kind != "cuda":
            return self._on_cpu(weight, self._scheme_of(named, weight))
        if self.online is None or not self.online.asked(named):
            return weight
        if part != "head":
            raise ConfigError(
                f"--quantization-config: {named} is {self.online.parts.of(named)}, but {weight.name} is a table "
                "of tokens, which no kernel of this device reads quantized; leave it out",
                field="quantization_config",
            )
        scheme = self._scheme_of(named, weight)
        return weight if scheme is None else online_on_gpu(weight, scheme)

    def _scheme_of(self, part: str, *weights: Param) -> Scheme | None:
        return None if self.online is None else self.online.of(part, weights)

    def _on_cpu(self, weight: Param, scheme: Scheme | None) -> LoadedWeight:
        if scheme is not None:
            return OnlineWeight(weight, scheme)
        if self.stored and kept_blocks(weight, self.stored):
            return StoredWeight(weight, self.stored, meta=self.device.type == "meta")
        kept = scheme_of(weight, self.stored) if self.stored else None
        if kept is None:
            return weight
        return KeptWeight(weight, kept, fixed=inputs_scaled(weight, self.stored))

    def quantized_gemm(self, weight: Param) -> LoadedWeight:
        """The same of a layer that is no table of tokens and no output head: those stay floats on
        GPUs."""
        scheme = self._scheme_of("linear", weight)
        if self.kind != "cuda":
            return self._on_cpu(weight, scheme)
        if scheme is not None:
            return online_on_gpu(weight, scheme)
        return stored_weight_on_gpu(weight, self.stored) if self.stored else weight

    def adapted(self, weight: Param) -> AdaptedLinear | None:
        """The slots of the linear layer of `weight` [outputs, inputs], if there are any."""
        if self.adapters is None:
            return None
        return self.adapters.over(weight, self.mesh, self.device, self.kind)

    def packed_experts(
        self,
        params: Sequence[Param],
        matrices: Sequence[MatricesOf] | None,
        floats: Floats,
        *,
        sizes: tuple[int, int, int],
    ) -> LoadedWeight | None:
        """The weights of experts, of which there are `sizes`: experts, width, this rank's inner
        size. Quantized once all `params` are full, if the scope says so, else as the checkpoint
        holds them; None: they stay floats."""
        experts, width, inner = sizes
        if self.kind == "cuda":
            return self._experts_on_gpu(
                params, matrices, floats, MixtureSizes(experts, width, inner)
            )
        scheme = self._scheme_of("moe", *params)
        if scheme is not None:
            return OnlineExperts(params, floats, scheme, experts=experts)
        if not self.stored or matrices is None:
            return None
        schemes = stored_schemes(matrices, self.stored, width=width, inner=inner)
        if schemes is None:
            return None
        meta = self.device.type == "meta"
        return StoredExperts(
            matrices, schemes, experts=experts, width=width, inner=inner, meta=meta
        )

    def _experts_on_gpu(
        self,
        params: Sequence[Param],
        matrices: Sequence[MatricesOf] | None,
        floats: Floats,
        sizes: MixtureSizes,
    ) -> LoadedWeight | None:
        scheme = self._scheme_of("moe", *params)
        if scheme is not None:
            return online_experts_on_gpu(params, floats, scheme, sizes)
        if not self.stored or matrices is None:
            return None
        return stored_experts_on_gpu(matrices, self.stored, sizes, device=self.params_device)

    def makes_experts(self, params: Sequence[Param]) -> bool:
        """Whether experts of these parameters are to be quantized while they load."""
        return self._scheme_of("moe", *params) is not None

    def on_finish(self, finish: Callable[[], None]) -> None:
        """Puts `finish` off until the weights are loaded."""
        self.ledger.finishers.append(finish)

    def bind(self, op: Op[Any], problem: Any, *weights: Any) -> Callable[..., Any]:
        """The callable of the kernel chosen for `problem`; the choice is kept for the decisions."""
        choice = op.choose(problem, invariant=self.deterministic)
        self.ledger.choices.append(choice)
        return self._bound(choice, weights)

    def bind_fused(self, op: Op[Any], problem: Any, *weights: Any) -> Callable[..., Any] | None:
        """The same for an op that other ops compose: None if no kernel does it in one, so that the
        caller takes the kernels of the parts instead of the reference."""
        choice = op.choose(problem, invariant=self.deterministic)
        self.ledger.choices.append(choice)
        return None if choice.kernel is op.reference else self._bound(choice, weights)

    def bind_if_served(self, op: Op[Any], problem: Any, *weights: Any) -> Callable[..., Any] | None:
        """The same for a problem that is only one way to ask: if no kernel serves it, nothing was
        chosen."""
        choice = op.choose(problem, invariant=self.deterministic, must=False)
        if choice.kernel is op.reference:
            return None
        self.ledger.choices.append(choice)
        return self._bound(choice, weights)

    def _bound(self, choice: KernelChoice[Any], weights: tuple[Any, ...]) -> Callable[..., Any]:
        return not_loaded if self.planned else choice.bind(*weights)


def _or_zeros(piece: WeightPiece, beside: tuple[WeightPiece, ...], unbiased: str) -> WeightPiece:
    """The piece, or in place of a bias that there is not another one of its size, times 0."""
    if not piece.name.endswith(f".{unbiased}.bias"):
        return piece
    other = next(one for one in beside if one.name != piece.name and one.shape == piece.shape)
    return replace(piece, name=other.name, scale=0.0)


def not_loaded(*arguments: Any) -> Any:
    """Stands in for a layer's kernel until `finish_load`."""
    raise AssertionError("the model is used before finish_load")

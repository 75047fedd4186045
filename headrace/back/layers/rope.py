"""Rotary position embedding: frequencies by every scaling that checkpoints use, and the table of a
model's positions.

A `RopeSpec` is what is left of a configuration: one frequency per pair of dimensions and one
attention factor. Scalings that transformers changes while a sequence grows (dynamic NTK, longrope)
are fixed here by the longest sequence the engine allows: cached keys must not depend on how long a
request becomes later. Frequencies and angles are float32, as in the models' training code. Sources:
linear (kaiokendev 2023), dynamic NTK (bloc97, emozilla 2023), YaRN (Peng et al. 2023), LongRoPE
(Ding et al. 2024), Llama 3.1's wavelength rule (its reference implementation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headrace.back.kernels.rope.op import OP, RopeProblem
from headrace.back.kernels.rope.op import Rope as Rotate
from headrace.back.layers.fourier_rope import FourierSeries, rotating_by_heads
from headrace.back.layers.scope import Scope, not_loaded
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import Decision

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
OLD_NAMES = {
    **{"su": "longrope", "ntk": "dynamic", "deepseek_yarn": "yarn", "mrope": "default"},
    "xdrope": "dynamic",
}


class LearnedStretch:
    """The checkpoint's own factors of a rotation's frequencies, as logarithms ("LeRoPE", Mistral
    Large 4; transformers 5.23, modeling_mistral_large4)."""

    def __init__(self, scope: Scope, name: str, pairs: int) -> None:
        self._param = scope.param(name, (pairs,), init="zeros", dtype=torch.float32)
        self.factors = torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self.factors = self._param.take().exp().cpu()


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """`frequencies` [R/2] in radians per position; cosines and sines are multiplied by
    `attention_factor`.

    R = 2 * len(frequencies) dimensions of each head are rotated, from the first on. `decision` says
    what was fixed by the longest sequence the engine allows; empty if nothing was. `stretch`:
    learned factors of the frequencies; `series`: learned sums of them. `halves`: a step's own table
    may have twice as many columns: angles of the first dimensions of pairs, then those of the
    second ones (HunYuanVL's images).
    """

    kind: str
    head_dim: int
    frequencies: tuple[float, ...]
    attention_factor: float = 1.0
    layout: str = "half"
    decision: str = ""
    stretch: LearnedStretch | None = None
    series: FourierSeries | None = None
    halves: bool = False

    @property
    def rotary_dim(self) -> int:
        """R."""
        return 2 * len(self.frequencies)

    @property
    def by_heads(self) -> bool:
        """Whether each KV head has a table of its own, which no kernel with other work takes."""
        return self.series is not None and self.series.by_heads


class Rope:
    """`rotate(q_THD, k_TKD, positions_T, table_PR)` in place. Layers with one spec share one
    table."""

    def __init__(self, scope: Scope, spec: RopeSpec) -> None:
        self.rotate = not_loaded
        self.table_PR = torch.empty(0)
        self._scope = scope
        self._spec = spec
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        scope, spec = self._scope, self._spec
        problem = RopeProblem(
            device=scope.kind,
            dtype=scope.dtype,
            head_dim=spec.head_dim,
            rotary_dim=spec.rotary_dim,
            layout=spec.layout,
        )
        self.rotate = scope.bind(OP, problem)
        if spec.halves:
            self.rotate = _by_halves(self.rotate, spec.rotary_dim)
        if spec.by_heads:
            self.rotate = rotating_by_heads(self.rotate)
        if spec not in scope.ledger.tables:
            if spec.decision:
                why = "cached keys must not depend on how long a request becomes"
                scope.ledger.note(Decision("model.rope", spec.kind, spec.decision, why))
            scope.ledger.tables[spec] = rope_table(spec, scope.max_positions).to(scope.device)
        self.table_PR = scope.ledger.tables[spec]


def _by_halves(rotate: Rotate, rotary_dim: int) -> Rotate:
    """Rotates as `rotate`, and by tables of twice as many columns."""

    def either(
        q_THD: torch.Tensor, k_TKD: torch.Tensor, positions_T: torch.Tensor, table_PR: torch.Tensor
    ) -> None:
        if table_PR.shape[1] == rotary_dim:
            rotate(q_THD, k_TKD, positions_T, table_PR)
            return
        parts = table_PR.index_select(0, positions_T)[:, None].chunk(4, dim=2)
        cos_first, sin_first, cos_second, sin_second = parts
        for x_TND in (q_THD, k_TKD):
            first, second = x_TND[..., :rotary_dim].float().chunk(2, dim=2)
            turned = (
                first * cos_first - second * sin_first,
                second * cos_second + first * sin_second,
            )
            x_TND[..., :rotary_dim] = torch.cat(turned, dim=2).to(x_TND.dtype)

    return either


class NoRope:
    """In its place where no dimension turns: a table without columns."""

    rotate = not_loaded

    def __init__(self, scope: Scope) -> None:
        shape = (scope.max_positions, 0)
        self.table_PR = torch.empty(shape, dtype=torch.float32, device=scope.device)


def rope_table(spec: RopeSpec, max_positions: int) -> torch.Tensor:
    """table_PR float32: cosines, then sines, of every position."""
    frequencies = torch.tensor(spec.frequencies, dtype=torch.float32)
    if spec.stretch is not None:
        frequencies = frequencies * spec.stretch.factors
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    if spec.series is not None:
        return spec.series.table(angles) * spec.attention_factor
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * spec.attention_factor


def read_rope(
    config: ConfigReader,
    *,
    head_dim: int,
    max_positions: int,
    layer_type: str | None = None,
    theta: float | None = None,
    default_theta: float = 10_000.0,
    default_share: float = 1.0,
    whole: bool = False,
    keys: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    layout: str = "half",
    renamed: Mapping[str, str] = OLD_NAMES,
) -> RopeSpec:
    """The rope of a configuration, in either spelling: `rope_parameters` (flat, or per layer type),
    or `rope_scaling` beside `rope_theta` and `partial_rotary_factor`.

    `theta` overrides the base frequency of the second spelling, whose scaling is then left out
    (Gemma 3's local layers). `default_share` of a head is rotated where nothing is said, all of it
    if `whole`; `keys` are what the second spelling calls base frequency and share; `layout`: see op
    rope. `renamed` maps old names of kinds.
    """
    values = _rope_section(config, layer_type, scaled=theta is None)
    top = config.float(keys[0], default_theta, ge=1.0) if theta is None else theta
    base = values.float("rope_theta", top, ge=1.0)
    partial = values.float(
        "partial_rotary_factor",
        config.float(keys[1], default_share, ge=0.0, le=1.0),
        ge=0.0,
        le=1.0,
    )
    if whole:
        partial = 1.0
    named = values.choice("rope_type", (*KINDS, *renamed), "default", aliases=("type",))
    kind = renamed.get(named, named)
    if kind == "proportional":
        return _proportional(values, head_dim, base, partial, layout)
    rotary_dim = int(head_dim * partial)
    if partial == 1.0 and head_dim % 2:
        key = "head_dim" if "head_dim" in config.raw else "num_attention_heads"
        raise config.wrong(
            key, f"such that heads have an even size: the rotation takes pairs, not {head_dim}"
        )
    if rotary_dim % 2 or rotary_dim == 0:
        raise config.wrong(
            "partial_rotary_factor",
            f"a share of head_dim ({head_dim}) that is an even number of dimensions, not {rotary_dim}",
        )
    scaling = _Scaling(config, values, base, rotary_dim, max_positions)
    frequencies, attention_factor = _COMPUTE[kind](scaling)
    return RopeSpec(
        kind=kind,
        head_dim=head_dim,
        frequencies=tuple(frequencies.tolist()),
        attention_factor=attention_factor,
        layout=layout,
        decision=_decision(kind, scaling),
    )


def _proportional(
    values: ConfigReader, head_dim: int, base: float, share: float, layout: str
) -> RopeSpec:
    """Pairs over the whole head, of which the first `share` turn, as fast as if all did (Gemma 4;
    transformers 5.23, modeling_rope_utils)."""
    turning = int(share * head_dim // 2)
    exponents = torch.arange(0, 2 * turning, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / base**exponents / values.float("factor", 1.0, ge=1.0)
    still = (0.0,) * (head_dim // 2 - turning)
    return RopeSpec(
        kind="proportional",
        head_dim=head_dim,
        frequencies=(*frequencies.tolist(), *still),
        layout=layout,
    )


def _decision(kind: str, scaling: _Scaling) -> str:
    longest = f"sequences may have {scaling.max_positions} tokens"
    if kind == "longrope":
        passes = scaling.max_positions > scaling.original_positions
        return f"{'long' if passes else 'short'} factors: {longest}"
    if kind == "dynamic" and "alpha" not in scaling.values:
        return f"one base for all lengths: {longest}"
    return ""


def _rope_section(config: ConfigReader, layer_type: str | None, *, scaled: bool) -> ConfigReader:
    section = config.section("rope_parameters")
    if section is not None:
        nested = section.section(layer_type) if layer_type else None
        return nested or section
    old = config.section("rope_scaling")
    if old is None or not scaled:
        return ConfigReader({}, f"{config.where}: rope_scaling")
    return old


@dataclass(frozen=True)
class _Scaling:
    """What a scaling may look at. `frequencies` are the unscaled ones."""

    config: ConfigReader
    values: ConfigReader
    base: float
    rotary_dim: int
    max_positions: int

    @property
    def exponents(self) -> torch.Tensor:
        """2i / R for each pair i."""
        return torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim

    @property
    def frequencies(self) -> torch.Tensor:
        return 1.0 / self.base**self.exponents

    @property
    def trained_positions(self) -> int:
        return self.config.int("max_position_embeddings", ge=1)

    @property
    def original_positions(self) -> int:
        """The length before extension; Phi-3 states it beside the scaling, and that one counts."""
        top = self.config.int("original_max_position_embeddings", None, ge=1)
        here = self.values.int("original_max_position_embeddings", None, ge=1)
        return top or here or self.trained_positions

    def factor(self) -> float:
        """The stated factor, or the one that follows from the two lengths."""
        stated = self.values.float("factor", None, ge=1.0)
        return stated or self.trained_positions / self.original_positions


def _default(scaling: _Scaling) -> tuple[torch.Tensor, float]:
    return scaling.frequencies, 1.0


def _linear(scaling: _Scaling) -> tuple[torch.Tensor, float]:
    return scaling.frequencies / scaling.values.float("factor", ge=1.0), 1.0


def _dynamic(scaling: _Scaling) -> tuple[torch.Tensor, float]:
    """The base grows with the longest sequence allowed, beyond the trained length; with `alpha`
    (Hunyuan) by that alone."""
    alpha = scaling.values.float("alpha", None, ge=1.0)
    if alpha is not None:
        base = scaling.base * alpha ** (scaling.rotary_dim / (scaling.rotary_dim - 2))
        return 1.0 / base**scaling.exponents, 1.0
    factor = scaling.values.float("factor", ge=1.0)
    ratio = max(scaling.max_positions, scaling.trained_positions) / scaling.trained_positions
    stretch = factor * ratio - (factor - 1)
    base = scaling.base * stretch ** (scaling.rotary_dim / (scaling.rotary_dim - 2))
    return 1.0 / base**scaling.exponents, 1.0


def _yarn(scaling: _Scaling) -> tuple[torch.Tensor, float]:
    """Interpolates slow dimensions, keeps fast ones, ramps between (section 3.2; attention factor
    section 3.4)."""
    values, factor = scaling.values, scaling.factor()
    low, high = (
        _yarn_dimension(scaling, values.float(key, None, ge=0.0) or default)
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if values.bool("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, scaling.rotary_dim - 1)
    width = high - low or 0.001
    pairs = torch.arange(scaling.rotary_dim // 2, dtype=torch.float32)
    slow = ((pairs - low) / width).clamp(0, 1)
    plain = scaling.frequencies
    return plain / factor * slow + plain * (1 - slow), _yarn_attention(values, factor)


def _yarn_dimension(scaling: _Scaling, rotations: float) -> float:
    """The pair index (not rounded) whose wave turns `rotations` times within the original
    length."""
    turns = scaling.original_positions / (rotations * 2 * math.pi)
    return scaling.rotary_dim * math.log(turns) / (2 * math.log(scaling.base))


def _yarn_attention(values: ConfigReader, factor: float) -> float:
    stated = values.float("attention_factor", None, ge=0.0)
    if stated is not None:
        return stated
    mscale = values.float("mscale", None)
    mscale_all = values.float("mscale_all_dim", None)
    if mscale and mscale_all:
        return yarn_factor(factor, mscale) / yarn_factor(factor, mscale_all)
    return yarn_factor(factor)


def yarn_factor(factor: float, weight: float = 1.0) -> float:
    """What a stretch by `factor` multiplies queries and keys by (YaRN, section 3.4)."""
    return weight * 0.1 * math.log(factor) + 1.0


def _longrope(scaling: _Scaling) -> tuple[torch.Tensor, float]:
    """One stretch per dimension; the long ones once the engine allows sequences beyond the original
    length."""
    values, original, half = scaling.values, scaling.original_positions, scaling.rotary_dim // 2
    stretches = {
        key: values.list(key, of=float, length=half) for key in ("short_factor", "long_factor")
    }
    factor = scaling.factor()
    passes = scaling.max_positions > original
    own = values.float("long_mscale" if passes else "short_mscale", None, ge=0.0)  # Phi-3.5-MoE
    attention = own or values.float("attention_factor", None, ge=0.0)
    if attention is None:
        grown = math.log(factor) / math.log(original) if factor > 1 else 0.0
        attention = math.sqrt(1 + grown)
    chosen = stretches["long_factor" if passes else "short_factor"]
    stretch = torch.tensor(chosen, dtype=torch.float32)
    return 1.0 / (stretch * scaling.base**scaling.exponents), attention


def _llama3(scaling: _Scaling) -> tuple[torch.Tensor, float]:
    """Long waves are stretched, short ones kept, those between mixed by where they lie."""
    values = scaling.values
    factor = values.float("factor", ge=1.0)
    low, high = values.float("low_freq_factor"), values.float("high_freq_factor")
    if high <= low:
        raise values.wrong("high_freq_factor", f"more than low_freq_factor ({low})")
    plain = scaling.frequencies
    turns = scaling.original_positions * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain, 1.0


_COMPUTE = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}

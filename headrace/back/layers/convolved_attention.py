"""Attention whose queries and keys pass a causal convolution, and half of whose values are those of
the token before (Figliolia et al. 2025, "Compressed convolutional attention", section 3; ZAYA).

Of each channel of queries and keys a convolution is taken, then one over all channels of a head;
the two are one here: the first gives the second its taps side by side. T tokens, E hidden size, H
query heads, K KV heads, D head_dim, C = (H + K) * D, W taps of the second convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.back.attention.forms import CacheForm, StateForm
from headrace.back.attention.plan import Batch
from headrace.back.kernels.causal_conv.op import OP as CAUSAL_CONV
from headrace.back.kernels.causal_conv.op import CausalConv, CausalConvProblem
from headrace.back.layers.attended import Attended
from headrace.back.layers.attention import AttentionSpec
from headrace.back.layers.heads_cache import bind_kv_write
from headrace.back.layers.linear import ColumnLinear, RowLinear
from headrace.back.layers.mutual_attention import bind_attention
from headrace.back.layers.norm import RMS_NO_WEIGHT, RMSNorm
from headrace.back.layers.rope import Rope
from headrace.back.layers.scope import Scope, not_loaded
from headrace.back.layers.ssm.recurrence import scan_rows
from headrace.back.parallel.shard import Part
from headrace.base.errors import ConfigError

LENGTH_EPS = 1e-12
"""Of the lengths that queries and keys are divided by."""
DEPTHWISE, GROUPED = "qkv_proj.conv_qk_depthwise", "qkv_proj.conv_qk_grouped"


@dataclass(frozen=True, kw_only=True)
class ConvolvedAttentionSpec:
    """`attention`: of any layer, with a rope, without what only some families have. `taps`: of the
    convolution of a channel and of that of a head."""

    attention: AttentionSpec
    taps: tuple[int, int]

    def build(
        self, scope: Scope, cache: int, *, norm: RMSNorm | None = None, adds: bool = False
    ) -> ConvolvedAttention:
        """See MixerSpec."""
        if scope.mesh.tp.size > 1:
            raise ConfigError(
                f"--tensor-parallel {scope.mesh.tp.size}: half of the values of this attention lie "
                "in other heads than their keys; it runs on one device",
                field="tensor_parallel",
            )
        return ConvolvedAttention(scope / "self_attn", cache, self, adds=adds)


class ConvolvedAttention(Attended):
    """x_TE -> y_TE: see Mixer. `scope` is its own. Its caches are keys and values, and the last
    inputs of the convolutions."""

    norms = probed = False

    def __init__(
        self, scope: Scope, cache: int, spec: ConvolvedAttentionSpec, *, adds: bool
    ) -> None:
        attention = spec.attention
        scope = scope.of_cache(cache, windowed=attention.cache_kind != "full")
        self._scope, self._cache, self._spec = scope, cache, spec
        heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
        self._value_dim = dim
        half = kv_heads * dim // 2
        names = {
            "qkv_proj.q_proj": heads * dim,
            "qkv_proj.k_proj": kv_heads * dim,
            "qkv_proj.v_proj_delayed": half,
            "qkv_proj.v_proj_current": half,
        }
        parts = tuple(Part(name, size, 1) for name, size in names.items())
        self._in = ColumnLinear(scope, attention.width, parts)
        channels, (first, second) = (heads + kv_heads) * dim, spec.taps
        self._convolutions = {
            DEPTHWISE: (
                scope.param(f"{DEPTHWISE}.weight", (channels, 1, first)),
                scope.param(f"{DEPTHWISE}.bias", (channels,), init="zeros"),
            ),
            GROUPED: (
                scope.param(f"{GROUPED}.weight", (channels, dim, second)),
                scope.param(f"{GROUPED}.bias", (channels,), init="zeros"),
            ),
        }
        self._key_scale = scope.param("qk_norm.temp", (kv_heads,), init="ones")
        self._norm = RMS_NO_WEIGHT.build(scope, dim, eps=LENGTH_EPS)
        assert attention.rope is not None, "no rope"
        self._rope = Rope(scope, attention.rope)
        self._out = RowLinear(scope / "o_proj", parts[0], attention.width, adds=adds)
        self._conv: CausalConv = not_loaded
        self._write = self._attend = not_loaded
        self._weight_HXD = self._bias_H1D = self._scale_K1 = torch.empty(0)
        scope.on_finish(self._finish)

    @property
    def kv_forms(self) -> tuple[CacheForm, ...]:
        """See the class."""
        attention, (first, second) = self._spec.attention, self._spec.taps
        heads = attention.form(self._scope, self._cache, attention.kv_heads)
        shape = (first + second - 2, self._conv_channels)
        return heads, StateForm(cache=self._cache + 1, shape=shape)

    def queries(
        self, x_TE: torch.Tensor, batch: Batch, at_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q_THD, rotated, of the tokens `at_N` (None: all), whose keys and values are cached."""
        attention, second = self._spec.attention, self._spec.taps[1]
        kv_heads, dim = attention.kv_heads, attention.head_dim
        q_size, k_size, *half = self._in.sizes
        qk_TC, later_TV, now_TV = self._in.project(x_TE).split_with_sizes(
            (q_size + k_size, *half), dim=1
        )
        taps_TC = self._conv(
            torch.cat((qk_TC.repeat(1, second), later_TV), dim=1),
            batch.kv[self._cache + 1],
            scan_rows(batch, self._cache + 1),
        )
        taps_TC, before_TV = taps_TC.split_with_sizes((second * qk_TC.shape[1], half[0]), dim=1)
        taps_HTX = taps_TC.unflatten(1, (second, -1, dim)).permute(2, 0, 1, 3).flatten(2)
        mixed_THD = torch.baddbmm(self._bias_H1D, taps_HTX, self._weight_HXD).transpose(0, 1)
        q_THD, k_TKD = qk_TC.unflatten(1, (-1, dim)).split_with_sizes(
            (attention.heads, kv_heads), dim=1
        )
        mean_TKGD = (q_THD.unflatten(1, (kv_heads, -1)) + k_TKD[:, :, None]) * 0.5
        q_THD = self._norm.norm(mixed_THD[:, : attention.heads] + mean_TKGD.flatten(1, 2))
        k_TKD = self._norm.norm(mixed_THD[:, attention.heads :] + mean_TKGD.mean(2))
        k_TKD = k_TKD * self._scale_K1
        self._rope.rotate(q_THD, k_TKD, batch.positions_T, self._rope.table_PR)
        v_TKD = torch.cat((now_TV, before_TV), dim=1).unflatten(1, (kv_heads, dim))
        plan = batch.plans[batch.group_of_layer[self._cache]]
        self._write(k_TKD, v_TKD, batch.kv[self._cache], plan.slot_T)
        return q_THD if at_N is None else q_THD.index_select(0, at_N)

    @property
    def _conv_channels(self) -> int:
        """Queries and keys for each tap of the second convolution, and delayed values."""
        q_size, k_size, half, _ = self._in.sizes
        return self._spec.taps[1] * (q_size + k_size) + half

    def _finish(self) -> None:
        attention, scope = self._spec.attention, self._scope
        self._bind_convolutions()
        self._scale_K1 = self._key_scale.take()[:, None]
        self._write = bind_kv_write(scope, kv_heads=attention.kv_heads, head_dim=attention.head_dim)
        problem = attention.problem(scope, heads=attention.heads, kv_heads=attention.kv_heads)
        self._attend = bind_attention(scope, problem)

    def _bind_convolutions(self) -> None:
        """The first one's bias reaches every tap of the second, before a text begins as well: it is
        a part of that one's."""
        (first, second), dim = self._spec.taps, self._spec.attention.head_dim
        (depth_C1W, depth_bias_C), (weight_CDW, bias_C) = (
            (weight.take().float(), bias.take().float())
            for weight, bias in self._convolutions.values()
        )
        qk = depth_C1W.shape[0]
        weight_VC = depth_C1W.new_zeros(first + second - 1, self._conv_channels)
        for place in range(second):
            weight_VC[place : place + first, place * qk : (place + 1) * qk] = depth_C1W[:, 0].t()
        weight_VC[-2, second * qk :] = 1.0  # the token before
        problem = CausalConvProblem(
            device=self._scope.kind,
            dtype=self._scope.dtype,
            channels=self._conv_channels,
            taps=first + second - 1,
            activation="",
        )
        self._conv = self._scope.bind(CAUSAL_CONV, problem, weight_VC, None)
        weight_HDDW = weight_CDW.unflatten(0, (-1, dim))
        constant_HD = torch.einsum("hoiw,hi->ho", weight_HDDW, depth_bias_C.view(-1, dim))
        bias_HD = bias_C.view(-1, dim) + constant_HD
        self._bias_H1D = bias_HD[:, None].to(self._scope.dtype)
        weight_HXD = weight_HDDW.permute(0, 3, 2, 1).flatten(1, 2)
        self._weight_HXD = weight_HXD.to(self._scope.dtype).contiguous()

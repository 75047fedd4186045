"""A compact Kimi Linear for training: delta layers and latent attention take turns, experts behind the first layer.

Weights are named as in the published checkpoints. B rows, T tokens of a row, C width, H heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.decoder import Attend, Norm
from demo.mixture.delta import CHUNK, delta

BIAS_STEP = 1e-3
"""How much the routers' bias moves a step, towards equal load (Wang et al. 2024, "Auxiliary-loss-free load
balancing")."""


@dataclass(frozen=True, kw_only=True)
class MixtureShape:
    """The sizes, named as in `config.json`. `latent_layers` have attention, the others the delta rule."""

    vocab_size: int = 4096
    hidden_size: int = 160
    intermediate_size: int = 224
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 5
    latent_layers: tuple[int, ...] = (2, 4)
    num_attention_heads: int = 4
    num_experts: int = 8
    num_experts_per_token: int = 2
    routed_scaling_factor: float = 2.446
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    linear_num_heads: int = 4
    linear_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    model_max_length: int = 8192
    rms_norm_eps: float = 1e-5


class Taps(nn.Module):
    """A causal convolution of each channel: weight [channels, taps], the last on the token itself."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, taps))
        self.taps = taps

    def forward(self, x_BTC: Tensor, place_BT: Tensor) -> Tensor:
        found = x_BTC * self.weight[:, -1]
        for back in range(1, self.taps):
            moved = F.pad(x_BTC, (0, 0, back, 0))[:, :-back]
            moved = torch.where((place_BT >= back)[..., None], moved, 0.0)
            found = found + moved * self.weight[:, -1 - back]
        return F.silu(found)


class DeltaAttention(nn.Module):
    """Kimi delta attention."""

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__()
        width, self.heads, size = shape.hidden_size, shape.linear_num_heads, shape.linear_head_dim
        inner = self.heads * size
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(width, inner, bias=False) for _ in range(3)
        )
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            Taps(inner, shape.linear_conv_kernel_dim) for _ in range(3)
        )
        self.f_a_proj, self.f_b_proj = (
            nn.Linear(width, size, bias=False),
            nn.Linear(size, inner, bias=False),
        )
        self.g_a_proj, self.g_b_proj = (
            nn.Linear(width, size, bias=False),
            nn.Linear(size, inner, bias=False),
        )
        self.b_proj = nn.Linear(width, self.heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1.0, 16.0).log())
        step = torch.empty(inner).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.o_norm = Norm(size, shape.rms_norm_eps)
        self.o_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, place_BT: Tensor, goes_on_BN: Tensor) -> Tensor:
        q, k, v = (
            self._headed(conv(proj(x), place_BT))
            for proj, conv in (
                (self.q_proj, self.q_conv1d), (self.k_proj, self.k_conv1d), (self.v_proj, self.v_conv1d),
            )
        )  # fmt: skip
        decay = self._headed(self.f_b_proj(self.f_a_proj(x)))
        gate = self._headed(self.g_b_proj(self.g_a_proj(x)))
        beta = self.b_proj(x).float().sigmoid().transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):
            bias = self._headed(self.dt_bias.float()[None, None])
            g = -self.A_log.float().exp()[:, None, None] * F.softplus(decay.float() + bias)
            q, k = _unit(q.float()) * q.shape[-1] ** -0.5, _unit(k.float())
            out = delta(q, k, v.float(), g, beta, goes_on_BN)
            out = (self.o_norm(out) * gate.float().sigmoid()).transpose(1, 2).flatten(-2)
        return self.o_proj(out.to(x.dtype))

    def _headed(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


class LatentAttention(nn.Module):
    """Multi-head latent attention without positions."""

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__()
        width, self.heads = shape.hidden_size, shape.num_attention_heads
        self.rank, self.nope, self.shared = (
            shape.kv_lora_rank,
            shape.qk_nope_head_dim,
            shape.qk_rope_head_dim,
        )
        self.values = shape.v_head_dim
        self.q_proj = nn.Linear(width, self.heads * (self.nope + self.shared), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, self.rank + self.shared, bias=False)
        self.kv_a_layernorm = Norm(self.rank, 1e-6)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.values), bias=False)
        self.o_proj = nn.Linear(self.heads * self.values, width, bias=False)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(x).split((self.rank, self.shared), dim=-1)
        both = (
            self.kv_b_proj(self.kv_a_layernorm(latent))
            .unflatten(-1, (self.heads, -1))
            .transpose(1, 2)
        )
        own, v = both.split((self.nope, self.values), dim=-1)
        k = torch.cat((own, shared[:, None].expand(-1, self.heads, -1, -1).to(own.dtype)), dim=-1)
        out = attend(q, k, v)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(width, inner, bias=False),
        )
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Expert(nn.Module):
    """The matrices of one expert: gate, down, up."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)


class Router(nn.Module):
    """Sigmoid scores; a bias that only chooses and follows the load while training."""

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__()
        self.top, self.scale = shape.num_experts_per_token, shape.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Each expert's share [..., experts], 0 where it was not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
            chosen = (scores + self.e_score_correction_bias).topk(self.top, dim=-1).indices
            mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
            if self.training:
                load = mask.flatten(0, -2).mean(dim=0)
                self.e_score_correction_bias.add_(BIAS_STEP * torch.sign(load.mean() - load))
            kept = scores * mask
            return kept / (kept.sum(dim=-1, keepdim=True) + 1e-20) * self.scale


class Mixture(nn.Module):
    """Experts, all of which are computed: they are as large together as one usual feed-forward."""

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.moe_intermediate_size
        self.gate = Router(shape)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(shape.num_experts))
        self.shared_experts = MLP(width, inner)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).to(x.dtype).repeat_interleave(self.inner, dim=-1)
        gate, up, down = (
            torch.cat([getattr(one, name).weight for one in self.experts], dim=dim)
            for name, dim in (("w1", 0), ("w3", 0), ("w2", 1))
        )
        hidden = F.silu(F.linear(x, gate)) * F.linear(x, up) * shares
        return F.linear(hidden, down) + self.shared_experts(x)


class Layer(nn.Module):
    """One layer, norms before each half."""

    def __init__(self, shape: MixtureShape, number: int) -> None:
        super().__init__()
        self.latent = number in shape.latent_layers
        self.self_attn = LatentAttention(shape) if self.latent else DeltaAttention(shape)
        if number == 0:
            self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        else:
            self.block_sparse_moe = Mixture(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, place_BT: Tensor, goes_on_BN: Tensor, attend: Attend) -> Tensor:
        y = self.input_layernorm(x)
        x = x + (
            self.self_attn(y, attend) if self.latent else self.self_attn(y, place_BT, goes_on_BN)
        )
        y = self.post_attention_layernorm(x)
        return x + (self.mlp(y) if hasattr(self, "mlp") else self.block_sparse_moe(y))


class Trunk(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            Layer(shape, number) for number in range(shape.num_hidden_layers)
        )
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class KimiLinear(nn.Module):
    """The whole model."""

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        deep = 0.02 / math.sqrt(2 * shape.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if "conv1d" in name:
                nn.init.normal_(parameter, std=0.2)
                parameter.data[:, -1] += 0.8
            elif parameter.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight"))
                nn.init.normal_(parameter, std=deep if last else 0.02)

    def forward(self, tokens_BT: Tensor, place_BT: Tensor, attend: Attend) -> Tensor:
        """Logits [B, T, vocabulary]. `place_BT`: of each token in its document, which begins with a chunk."""
        goes_on = place_BT[:, ::CHUNK] > 0
        x = self.model.embed_tokens(tokens_BT)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
        for layer in self.model.layers:
            x = layer(x, place_BT, goes_on, attend)
        return self.lm_head(self.model.norm(x))

"""What families with recurrent layers share: the keys of config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headrace.back.layers.norm import NormPlacement
from headrace.back.layers.ssm.gated_norm import GatedNormSpec
from headrace.back.layers.ssm.mamba1 import Mamba1Spec
from headrace.back.layers.ssm.mamba2 import Mamba2Spec
from headrace.back.models.blocks import EPS, DecoderNames, DecoderSizes
from headrace.base.config.hf import ConfigReader
from headrace.base.config.layer_count import num_layers

MAMBA1_KEYS = ("expand", "state_size", "time_step_rank")
BACKBONE = DecoderNames(prefix="backbone", embedding="embeddings", norm="norm_f")
ANY_STEP = (0.0, math.inf)
"""The limits of a time step where the config states none."""
ONE_BRANCH = NormPlacement(before_attention="norm")
"""Of layers that are a norm and a mixer, nothing else."""
HYBRID_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}
"""What the layers of hybrid models are called; transformers renamed them."""


def read_recurrent_sizes(config: ConfigReader, *, tied: bool, eps: float = 1e-5) -> DecoderSizes:
    """The sizes of a model without attention; `tied`, `eps`: the family's defaults."""
    return DecoderSizes(
        vocabulary=config.int("vocab_size", ge=1),
        width=config.int("hidden_size", aliases=("d_model",), ge=1),
        inner=0,
        layers=num_layers(config),
        heads=0,
        kv_heads=0,
        head_dim=0,
        eps=config.float("rms_norm_eps", eps, aliases=EPS, ge=0.0),
        activation="silu",
        tied=config.bool("tie_word_embeddings", tied),
    )


def read_mamba1(
    config: ConfigReader, width: int, *, keys: tuple[str, str, str] = MAMBA1_KEYS
) -> Mamba1Spec:
    """Mamba as it is stated where all layers are of that kind; `keys`: what expansion, state size
    and the rank of time steps are called."""
    expand, state, rank = keys
    automatic = config.raw.get(rank, "auto") == "auto"
    config.choice("hidden_act", ("silu", "swish"), "silu")
    inner = config.int(expand, 2, ge=1) * width
    stated = keys == MAMBA1_KEYS  # elsewhere it is the size of the MLPs
    return Mamba1Spec(
        width=width,
        inner=config.int("intermediate_size", inner, ge=1) if stated else inner,
        state_dim=config.int(state, 16, ge=1),
        step_rank=-(-width // 16) if automatic else config.int(rank, ge=1),
        taps=config.int("conv_kernel", 4, aliases=("mamba_d_conv",), ge=2, le=8),
        bias=config.bool("use_bias", False) or config.bool("mamba_proj_bias", False),
        conv_bias=config.bool("use_conv_bias", True) and config.bool("mamba_conv_bias", True),
    )


def read_layer_kinds(
    config: ConfigReader, layers: int, known: Mapping[str, str], *, default: str | None = None
) -> tuple[str, ...]:
    """What each layer is, by `layer_types`; `known` turns the checkpoint's words into ours."""
    key = "layers_block_type" if "layers_block_type" in config else "layer_types"
    words = config.list(key, None if default is None else [default] * layers, of=str)
    if words is None or len(words) != layers:
        raise config.wrong(key, f"a list of {layers} layers, one of {', '.join(known)} each")
    for index, word in enumerate(words):
        if word not in known:
            allowed = f"of {', '.join(known)}; layer {index} is {word!r}"
            raise config.wrong(key, allowed)
    return tuple(known[word] for word in words)


def divides(config: ConfigReader, key: str, value: int, heads: int) -> int:
    """`value`, which the key states and which must divide the number of heads."""
    if heads % value:
        raise config.wrong(key, f"a divisor of the number of Mamba heads ({heads})")
    return value


def read_mamba2(config: ConfigReader, sizes: DecoderSizes) -> Mamba2Spec:
    """Mamba 2 as hybrid models state it, by the keys `mamba_...`."""
    heads = config.int("mamba_n_heads", 128, ge=1)
    inner = config.int("mamba_d_ssm", None, ge=1)
    inner = inner or config.int("mamba_expand", 2, ge=1) * sizes.width
    if inner % heads:
        raise config.wrong("mamba_n_heads", f"a divisor of Mamba's inner size ({inner})")
    automatic = config.raw.get("mamba_d_head") == "auto"
    stated = None if automatic else config.int("mamba_d_head", None, ge=1)
    if stated not in (None, inner // heads):
        raise config.wrong("mamba_d_head", f"{inner} / {heads} = {inner // heads}")
    groups = config.int("mamba_n_groups", 1, ge=1)
    return Mamba2Spec(
        width=sizes.width,
        heads=heads,
        head_dim=inner // heads,
        state_dim=config.int("mamba_d_state", 256, ge=1),
        groups=divides(config, "mamba_n_groups", groups, heads),
        taps=config.int("mamba_d_conv", 4, ge=2, le=8),
        limits=config.range("time_step_limit", ANY_STEP),
        bias=config.bool("mamba_proj_bias", False),
        conv_bias=config.bool("mamba_conv_bias", True),
        norm=GatedNormSpec(eps=sizes.eps, groups=groups),
        name="mamba",
    )

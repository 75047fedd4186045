"""RWKV 6 (Peng et al. 2024, "Eagle and Finch"): layers of time mixing and channel mixing behind
layer norms, without attention. Checkpoints in safetensors are used as they are stored; GGUF files
hold outputs of layers halved every few of them, which is undone."""

from __future__ import annotations

from headrace.back.layers.norm import LAYER, NormPlacement
from headrace.back.layers.scope import Scope
from headrace.back.layers.ssm.rwkv import ChannelMixSpec
from headrace.back.layers.ssm.rwkv6 import TimeMix6Names, TimeMix6Spec
from headrace.back.layers.ssm.token_shift import TokenShiftSpec
from headrace.back.models.blocks import Decoder, DecoderSizes, DecoderSpec, LayerSpec
from headrace.back.models.chained_layer import ChainedSpec
from headrace.back.models.rwkv import NAMES
from headrace.back.models.ssm import read_recurrent_sizes
from headrace.base.config.hf import ConfigReader

WIDE = 4096
"""From this hidden size on, projections of low rank have twice the rank."""
HEAD_EPS = 1e-5


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Rwkv6ForCausalLM."""
    sizes = read_recurrent_sizes(config, tied=False)
    inner = config.int("intermediate_size", None, ge=1)
    channel = ChannelMixSpec(
        width=sizes.width,
        inner=inner or int(3.5 * sizes.width) // 32 * 32,
        shift=TokenShiftSpec(names=("time_maa_k", "time_maa_r")),
    )
    time = _time_mix(config, sizes)
    every = config.int("rescale_every", 6, ge=0) if config.bool("rescaled", False) else 0

    def branch(mixer: TimeMix6Spec | ChannelMixSpec, norm: str, layer: int) -> LayerSpec:
        return LayerSpec(
            mixer=mixer,
            placement=NormPlacement(before_attention=norm),
            feed_forward=None,
            branch_scale=2.0 ** (layer // every) if every else 1.0,
        )

    layers = tuple(
        ChainedSpec(parts=(branch(time, "ln1", layer), branch(channel, "ln2", layer)))
        for layer in range(sizes.layers)
    )
    return Decoder(scope, DecoderSpec(sizes=sizes, layers=layers, norm=LAYER, names=NAMES))


def _time_mix(config: ConfigReader, sizes: DecoderSizes) -> TimeMix6Spec:
    head_dim = config.int("head_size", 64, ge=1)
    inner = config.int("attention_hidden_size", None, ge=1) or sizes.width
    if inner != sizes.width:
        raise config.wrong("attention_hidden_size", f"hidden_size ({sizes.width})")
    if sizes.width % head_dim:
        raise config.wrong("head_size", f"a divisor of hidden_size ({sizes.width})")
    twice = 2 if sizes.width >= WIDE else 1
    return TimeMix6Spec(
        width=sizes.width,
        heads=sizes.width // head_dim,
        key_heads=sizes.width // head_dim,
        head_dim=head_dim,
        mix_rank=config.int("time_mix_extra_dim", 32 * twice, ge=1),
        decay_rank=config.int("time_decay_extra_dim", 64 * twice, ge=1),
        eps=HEAD_EPS * config.int("head_size_divisor", 8, ge=1) ** 2,
        names=TimeMix6Names(by_output=config.bool("low_rank_by_output", False)),
    )

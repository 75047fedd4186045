"""Falcon Mamba: Mamba that norms what its scan is controlled by."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.norm import RMS_NO_WEIGHT
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import Decoder
from headrace.back.models.mamba import mamba_decoder
from headrace.back.models.ssm import read_mamba1, read_recurrent_sizes
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """FalconMambaForCausalLM."""
    sizes = read_recurrent_sizes(config, tied=True)
    eps = config.float("mixer_rms_eps", 1e-6, ge=0.0)
    mamba = replace(read_mamba1(config, sizes.width), norm=RMS_NO_WEIGHT, eps=eps)
    return mamba_decoder(scope, sizes, mamba)

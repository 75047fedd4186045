"""VaultGemma (Google 2025): Gemma 2 without the norms behind its branches."""

from __future__ import annotations

from headrace.back.layers.norm import NormPlacement
from headrace.back.layers.scope import Scope
from headrace.back.models import gemma2
from headrace.back.models.blocks import Decoder
from headrace.base.config.hf import ConfigReader

PLACEMENT = NormPlacement(
    before_attention="input_layernorm", before_mlp="pre_feedforward_layernorm"
)


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """VaultGemmaForCausalLM."""
    return gemma2.build(scope, config, placement=PLACEMENT)

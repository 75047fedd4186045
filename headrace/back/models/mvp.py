"""MVP (Tang et al. 2022): BART, trained on many tasks, without their prompts."""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.bart import BartForm, build_bart, learned
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.base.config.hf import ConfigReader


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """MvpForConditionalGeneration."""
    if config.bool("use_prompt", False):
        raise config.wrong("use_prompt", "false")
    return build_bart(scope, config, BartForm(pre=False), positions=learned(config))

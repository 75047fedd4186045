"""X-MOD (Pfeiffer et al. 2022): XLM-RoBERTa with a small MLP for the language behind each layer's
own. Texts are read in the language that the config calls the default one."""

from __future__ import annotations

import re

import torch

from headrace.back.layers.mlp import ElementwiseActivation, FeedForwardPlace, PlainMLP, PlainMLPSpec
from headrace.back.layers.norm import LayerNorm
from headrace.back.layers.scope import Scope
from headrace.back.models.encoder import Encoder, EncoderSizes, TokenNorm
from headrace.back.models.roberta import build_roberta
from headrace.base.config.hf import ConfigReader

ADAPTER = PlainMLPSpec(name="", up="dense1", down="dense2", bias=True)


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """XmodModel, XmodForSequenceClassification, XmodForTokenClassification, XmodForMaskedLM."""
    if config.bool("pre_norm", False):
        raise config.wrong("pre_norm", "false")
    known = config.list("languages", ["en_XX"], of=str)
    language = config.choice("default_language", known)
    return build_roberta(
        scope,
        config,
        tail_of=lambda at, sizes: AdaptedNorm(at / "output", sizes, config, language),
        ignored=(rf".*\.adapter_modules\.(?!{re.escape(language)}\.).*",),
    )


class AdaptedNorm:
    """x_TE -> what the layer's last norm makes of x with a language's MLP added."""

    def __init__(
        self, scope: Scope, sizes: EncoderSizes, config: ConfigReader, language: str
    ) -> None:
        self._norm = LayerNorm(scope / "LayerNorm", sizes.width, eps=sizes.eps)
        self._before: TokenNorm | None = None
        if config.bool("adapter_layer_norm", False):
            self._before = LayerNorm(scope / "adapter_layer_norm", sizes.width, eps=sizes.eps)
        elif config.bool("adapter_reuse_layer_norm", True):
            self._before = self._norm
        self._adds_normed = config.bool("ln_before_adapter", True)
        inner = sizes.width // config.int("adapter_reduction_factor", 2, ge=1)
        place = FeedForwardPlace(width=sizes.width, inner=inner, activation=sizes.activation)
        at = scope / "adapter_modules" / language
        self._adapter = PlainMLP(at, ADAPTER, place, ElementwiseActivation(at, sizes.activation))

    def norm(self, x_TE: torch.Tensor, /) -> torch.Tensor:
        """See the class."""
        y_TE = x_TE if self._before is None else self._before.norm(x_TE)
        residual_TE = y_TE if self._adds_normed else x_TE
        return self._norm.norm(self._adapter.forward(y_TE) + residual_TE)

"""Jina Embeddings v2 (Günther et al. 2023): BERT whose scores fall with the distance of two tokens,
to either side (ALiBi), instead of positions, with gated MLPs."""

from __future__ import annotations

from headrace.back.layers.alibi import alibi_slopes
from headrace.back.layers.mlp import GatedMLP
from headrace.back.layers.position_bias import SlopeBias
from headrace.back.layers.scope import Scope
from headrace.back.models.bert import BertNames, build_bert
from headrace.back.models.encoder import Encoder, EncoderSizes
from headrace.base.config.hf import ConfigReader

NAMES = BertNames(after_mlp="mlp.layernorm", renamed=((r"^bert\.", ""),))
ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """JinaBertModel, JinaBertForMaskedLM."""
    config.choice("position_embedding_type", ("alibi",), "alibi")
    gate = config.choice("feed_forward_type", ACTIVATIONS, "geglu")
    raw = {**config.raw, "position_embedding_type": "absolute", "hidden_act": ACTIVATIONS[gate]}
    separate = config.bool("separate_gate", False)  # GGUF files may have gate and up apart

    def mlp(at: Scope, sizes: EncoderSizes) -> GatedMLP:
        return GatedMLP(
            at / "mlp",
            sizes.feed_forward,
            down_bias=True,
            merged=None if separate else "gated_layers",
            names=("gated_layers_w", "gated_layers_v", "wo") if separate else ("", "", "wo"),
        )

    def slopes(inside: Scope, sizes: EncoderSizes) -> SlopeBias:
        return SlopeBias(inside, alibi_slopes(sizes.heads), reach=scope.max_positions)

    return build_bert(
        scope,
        ConfigReader(raw, config.where),
        prefix="",
        first_position=None,
        head=lambda outer, inner, width: None,
        names=NAMES,
        bias_of=slopes,
        mlp_of=mlp,
    )

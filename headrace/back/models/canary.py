"""Canary and Cohere's transcriber: a FastConformer behind whose positions a decoder with
cross-attention writes what is said, also in another language (Puvvada et al. 2024; transformers
5.23, modeling_canary.py, modeling_cohere_asr.py)."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.mlp import PlainMLPSpec
from headrace.back.layers.norm import LAYER
from headrace.back.layers.positions import LearnedPositions, PositionsSpec, SinusoidalPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import PLAIN_ACTIVATIONS, DecoderSizes
from headrace.back.models.crossing_layer import plain_cross_layer
from headrace.back.models.encoder_decoder import EncoderDecoder, EncoderDecoderSpec, StackSpec
from headrace.back.models.frame_source import FrameSource
from headrace.back.models.parakeet import conformer_spec
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import length_after

EPS = 1e-5
"""Of all norms; no config states it."""
MOST_FRAMES = 3000
NORMS = ("input_layernorm", "post_attention_layernorm", "final_layernorm")
MLP = PlainMLPSpec(name="mlp", up="fc1", down="fc2", bias=True)
CROSS = ("encoder_attn", "q_proj", "k_proj", "v_proj", "o_proj")
HEAD = "proj_out"
_PARTS = (("query_net", "q_proj"), ("key_net", "k_proj"), ("value_net", "v_proj"))
_ATTENTIONS = (("first", "self_attn"), ("second", "encoder_attn"))
RENAMED = (
    (r"^(encoder|transf_decoder|encoder_decoder_proj)\.", r"model.\1."),
    (r"\.encoder\.pre_encode\.conv\.", ".encoder.subsampling.layers."),
    (r"\.encoder\.pre_encode\.out\.", ".encoder.subsampling.linear."),
    (r"\.transf_decoder\._embedding\.position_embedding\.pos_enc", ".decoder.pos_emb.weight"),
    (r"\.transf_decoder\._embedding\.token_embedding\.", ".decoder.embed_tokens."),
    (r"\.transf_decoder\._embedding\.layer_norm\.", ".decoder.embedding_layernorm."),
    (r"\.transf_decoder\._decoder\.final_layer_norm\.", ".decoder.norm."),
    (r"\.transf_decoder\._decoder\.layers\.", ".decoder.layers."),
    (r"\.encoder_decoder_proj\.", ".decoder.proj."),
    (r"\.self_attn\.linear_([qkv])\.", r".self_attn.\1_proj."),
    (r"\.self_attn\.linear_out\.", ".self_attn.o_proj."),
    (r"\.self_attn\.linear_pos\.", ".self_attn.relative_k_proj."),
    (r"\.self_attn\.pos_(bias_[uv])$", r".self_attn.\1"),
    *(
        (rf"\.{number}_sub_layer\.{own}\.", f".{attention}.{ours}.")
        for number, attention in _ATTENTIONS
        for own, ours in (*_PARTS, ("out_projection", "o_proj"))
    ),
    (r"\.third_sub_layer\.dense_in\.", ".mlp.fc1."),
    (r"\.third_sub_layer\.dense_out\.", ".mlp.fc2."),
    (r"\.layer_norm_1\.", ".input_layernorm."),
    (r"\.layer_norm_2\.", ".post_attention_layernorm."),
    (r"\.layer_norm_3\.", ".final_layernorm."),
    (r"\.conv\.batch_norm\.", ".conv.norm."),
    (r"^log_softmax\.mlp\.layer0\.", f"{HEAD}."),
)
"""How NeMo's checkpoints name the tensors."""
UNREAD = (r"preprocessor\.featurizer\..*", r"model\.encoder\..*\.num_batches_tracked")


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """CanaryForConditionalGeneration, CohereAsrForConditionalGeneration."""
    encoder = config.required_section("encoder_config")
    decoder = config.section("decoder_config")
    conformer = conformer_spec(encoder, plain=True)
    if "attention_bias" not in encoder:
        conformer = replace(conformer, bias=True)
    scope = replace(scope, encoder_tokens=length_after(MOST_FRAMES, conformer.strides))
    sizes = _sizes(decoder or config, tied=config.bool("tie_word_embeddings", decoder is not None))
    positions: PositionsSpec = SinusoidalPositions(scale=sizes.width**-0.5)
    projected = None
    if decoder is None:
        rows = config.int("max_position_embeddings", 1024, ge=1)
        positions = LearnedPositions(name="pos_emb", rows=rows)
        projected = scope / "model.decoder.proj"
    bias = (decoder or config).bool("attention_bias", True)
    layer = plain_cross_layer(scope, sizes, bias=bias, cross=CROSS, feed_forward=MLP, norms=NORMS)
    spec = EncoderDecoderSpec(
        sizes=sizes,
        encoder_layers=0,
        encoder_layer=_none,
        layers=(layer,) * sizes.layers,
        norm=LAYER,
        encoder=StackSpec(stack="encoder"),
        decoder=StackSpec(
            stack="decoder",
            norm="norm",
            embedding_norm="embedding_layernorm",
            positions=positions,
        ),
        hears=lambda at, width: FrameSource(at, conformer, width, projected),
        shared="decoder.embed_tokens",
        head=None if sizes.tied else HEAD,
        head_bias=HEAD,
        ignored=(*UNREAD, *((rf"{HEAD}\.weight",) if sizes.tied else ())),
    )
    model = EncoderDecoder(scope, spec)
    model.weights = replace(model.weights, renamed=(*model.weights.renamed, *RENAMED))
    return model


def _none(scope: Scope, index: int) -> None:
    raise AssertionError("the conformer has layers of its own")


def _sizes(config: ConfigReader, *, tied: bool) -> DecoderSizes:
    width = config.int("hidden_size", 1024, ge=1)
    heads = config.int("num_attention_heads", 8, ge=1)
    if config.int("num_key_value_heads", heads, ge=1) != heads:
        raise config.wrong("num_key_value_heads", f"num_attention_heads ({heads})")
    named = config.choice("hidden_act", PLAIN_ACTIVATIONS, "relu")
    return DecoderSizes(
        vocabulary=config.int("vocab_size", 16_384, ge=1),
        width=width,
        inner=config.int("intermediate_size", 4096, ge=1),
        layers=config.int("num_hidden_layers", 8, ge=1),
        heads=heads,
        kv_heads=heads,
        head_dim=config.int("head_dim", width // heads, ge=1),
        eps=EPS,
        activation=PLAIN_ACTIVATIONS[named],
        tied=tied,
    )

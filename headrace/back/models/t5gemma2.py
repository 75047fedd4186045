"""T5Gemma 2 (Zhang et al. 2025): Gemma 3's layers in both halves over one embedding, and its tower,
whose rows stand among the encoder's tokens; a decoder's layer attends to its own tokens and to the
encoder's outputs at once."""

from __future__ import annotations

from dataclasses import replace

from headrace.back.layers.joint_attention import JointAttentionSpec
from headrace.back.layers.mlp import GATED_MLP, GatedMLP
from headrace.back.layers.norm import RMS_UNIT_OFFSET, BlockNorm
from headrace.back.layers.position_bias import BandBias
from headrace.back.layers.qk_norm import QKNorm
from headrace.back.layers.rope import RopeSpec
from headrace.back.layers.scope import Scope
from headrace.back.models.blocks import DecoderSizes, plain_attention
from headrace.back.models.encoder import EncoderLayer, EncoderSizes, SpanAttentionLayer
from headrace.back.models.encoder_decoder import EncoderDecoder, EncoderDecoderSpec, StackSpec
from headrace.back.models.gemma2 import embedding_scale, gemma_sizes
from headrace.back.models.gemma3 import gemma3_windows, local_and_global_ropes
from headrace.back.models.gemma3_vision import gemma_tower
from headrace.back.models.joint_layer import JointLayerSpec
from headrace.back.models.t5gemma import BEFORE, BEHIND, PROJECTIONS
from headrace.back.models.vision import OLDER_TOWER, seeing
from headrace.base.config.hf import ConfigReader

IGNORED = (
    r"model\.encoder\.vision_tower\.(vision_model\.)?head\..*",  # one vector of an image
    r"model\.decoder\.embed_tokens\.(weight|eoi_embedding)",
    r"lm_head\.out_proj\.weight",
)
UNSEEN = r"model\.encoder\.(vision_tower|multi_modal_projector)\..*"
NORMS, OUTER = (BEFORE[0], BEFORE[2]), (BEHIND[0], BEHIND[2])


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """T5Gemma2ForConditionalGeneration."""
    scope = replace(scope, max_positions=max(scope.max_positions, scope.encoder_tokens))
    reader, says = config.section("encoder"), config.section("decoder")
    reads = None if reader is None else reader.section("text_config")
    if reader is None or reads is None or says is None:
        missing = "decoder" if says is None else "encoder"
        raise config.wrong(missing, "the config of that half, the encoder's under text_config")
    if not config.bool("tie_word_embeddings", True):
        raise config.wrong("tie_word_embeddings", "true")
    sizes, read_sizes = gemma_sizes(says), gemma_sizes(reads)
    if (sizes.width, sizes.vocabulary) != (read_sizes.width, read_sizes.vocabulary):
        raise config.wrong("decoder", "of the encoder's hidden_size and vocab_size")
    tower = None
    if "vision_config" in reader:
        within = scope / "model.encoder"
        tower = seeing(scope, gemma_tower(within, reader, reads, mutual=""))
    ropes = local_and_global_ropes(scope, reads, read_sizes.head_dim)
    windows = gemma3_windows(reads, read_sizes.layers)
    model = EncoderDecoder(
        scope,
        EncoderDecoderSpec(
            sizes=sizes,
            encoder_layers=read_sizes.layers,
            encoder_layer=lambda at, i: _encoder_layer(at, reads, read_sizes, windows[i], ropes),
            layers=_layers(scope, says, sizes),
            norm=RMS_UNIT_OFFSET,
            encoder=StackSpec(stack="encoder", norm="norm"),
            decoder=StackSpec(stack="decoder", norm="norm"),
            shared="encoder.embed_tokens",
            embedding_scale=embedding_scale(sizes.width, scope.dtype),
            logits_softcap=says.float("final_logit_softcapping", None, ge=1e-6),
            apart=("eoi_embedding", reader.int("eoi_token_index", 256_000, ge=0)),
            media=tower,
            ignored=IGNORED if tower is not None else (*IGNORED, UNSEEN),
        ),
    )
    model.weights = replace(model.weights, renamed=OLDER_TOWER)
    return model


def _layers(scope: Scope, config: ConfigReader, sizes: DecoderSizes) -> tuple[JointLayerSpec, ...]:
    local, whole = local_and_global_ropes(scope, config, sizes.head_dim)
    shared = {
        **plain_attention(sizes),
        "scale": config.float("query_pre_attn_scalar", 256.0, ge=1e-6) ** -0.5,
        "softcap": config.float("attn_logit_softcapping", None, ge=1e-6),
        "bias": config.bool("attention_bias", False),
        "qk_norm": QKNorm(norm=RMS_UNIT_OFFSET, eps=sizes.eps),
        "span": scope.encoder_tokens,
    }
    return tuple(
        JointLayerSpec(
            attention=JointAttentionSpec(**shared, window=window, rope=local if window else whole),
            feed_forward=GATED_MLP,
            norms=NORMS,
            behind=OUTER,
        )
        for window in gemma3_windows(config, sizes.layers)
    )


def _encoder_layer(
    scope: Scope,
    config: ConfigReader,
    sizes: DecoderSizes,
    window: int | None,
    ropes: tuple[RopeSpec, RopeSpec],
) -> EncoderLayer:
    """A window reaches one token farther ahead than back where its size is even."""

    def norm(name: str) -> BlockNorm:
        return RMS_UNIT_OFFSET.build(scope / name, sizes.width, eps=sizes.eps)

    if config.float("attn_logit_softcapping", None) is not None:
        raise config.wrong("attn_logit_softcapping", "null in the encoder")
    same = ("vocabulary", "width", "inner", "layers", "heads", "kv_heads", "head_dim", "eps")
    encoder = EncoderSizes(
        **{name: getattr(sizes, name) for name in same}, activation=sizes.activation
    )
    band = None
    if window is not None:
        band = BandBias(scope, sizes.heads, back=(window - 1) // 2, ahead=window // 2)
    return EncoderLayer(
        before_attention=norm(NORMS[0]),
        attention=SpanAttentionLayer(
            scope / "self_attn",
            encoder,
            names=PROJECTIONS,
            out="o_proj",
            bias=config.bool("attention_bias", False),
            rope=ropes[window is None],
            scale=config.float("query_pre_attn_scalar", 256.0, ge=1e-6) ** -0.5,
            qk_norm=QKNorm(norm=RMS_UNIT_OFFSET, eps=sizes.eps),
            position_bias=band,
        ),
        behind_attention=norm(OUTER[0]),
        before_mlp=norm(NORMS[1]),
        mlp=GatedMLP(scope / "mlp", encoder.feed_forward),
        behind_mlp=norm(OUTER[1]),
    )

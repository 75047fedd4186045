"""Models that say of every frame of a sound which token is heard, or none: Parakeet, also its
transducers, wav2vec 2.0 and its conformers, HuBERT, UniSpeech, UniSpeech-SAT, WavLM, Granite
Speech 5. A sound is a prompt of as many tokens as it has frames; the head's logits of each are what
is asked for (front/client/ctc_transcription.py)."""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.back.attention.plan import Batch
from headrace.back.kernels.gated_act.op import ACTIVATIONS
from headrace.back.layers.audio.fast_conformer import Conformer, ConformerSpec
from headrace.back.layers.audio.fast_conformer_tower import FastConformerTower
from headrace.back.layers.audio.halving_conformer import HalvingConformer
from headrace.back.layers.audio.transducer import EmissionHead
from headrace.back.layers.audio.wave_conformer import FrameConformerSpec
from headrace.back.layers.audio.wave_places import (
    Activation,
    StackedPlacesSpec,
    WavePlacesSpec,
    WidePlacesSpec,
)
from headrace.back.layers.audio.wave_tower import DistanceBias, WaveTower, WaveTowerSpec
from headrace.back.layers.classifier import Classifier, ConvolutionHead, Dense
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import MediaEncoder
from headrace.back.models.conformers import halving_spec, wave_layers
from headrace.back.models.encoder import Encoder, EncoderSizes, FrameHead
from headrace.back.models.lasr import lasr_spec
from headrace.back.models.parakeet import conformer_spec, streaming_spec, transducer_spec
from headrace.base.config.ctc import TRANSDUCERS
from headrace.base.config.hf import ConfigReader
from headrace.base.config.resolved import Decision

LASR, GRANITE, BERT = "LasrForCTC", "GraniteSpeech5ForCTC", "Wav2Vec2BertForCTC"
TURNING = "Wav2Vec2ConformerForCTC"
STREAMING = {"NemotronAsrStreamingForRNNT", "Nemotron3_5AsrForRNNT"}
CONFORMERS = {"ParakeetForCTC", "ParakeetForRNNT", "ParakeetForTDT", LASR, GRANITE, *STREAMING}
PREFIXES = {
    "Wav2Vec2ForCTC": "wav2vec2",
    "HubertForCTC": "hubert",
    "UniSpeechForCTC": "unispeech",
    "UniSpeechSatForCTC": "unispeech_sat",
    "WavLMForCTC": "wavlm",
    "Data2VecAudioForCTC": "data2vec_audio",
    "SEWForCTC": "sew",
    TURNING: "wav2vec2_conformer",
}
NAMES = ("feature_projection.layer_norm", "feature_projection.projection")
NAMES_OF_SEW = ("layer_norm", "feature_projection")
UNREAD = (
    r"wav2vec2_conformer\.encoder\.(?:pos_conv_embed\..*|embed_positions\.inv_freq)",
    r".*\.num_batches_tracked",
    r".*\.masked_spec_embed",
    r"(?:.*\.)?(?:quantizer|project_q|project_hid)\..*",
)
RENAMED = (
    (r"(.*pos_conv_embed\.conv)\.weight_g", r"\1.parametrizations.weight.original0"),
    (r"(.*pos_conv_embed\.conv)\.weight_v", r"\1.parametrizations.weight.original1"),
)
"""How older files call the two halves of a weight."""


def build(scope: Scope, config: ConfigReader) -> Encoder:
    """The rows of CONFORMERS and PREFIXES."""
    named = config.raw["architectures"][0]
    labels = config.int("vocab_size", ge=1)
    tower: MediaEncoder
    head: FrameHead
    if named in CONFORMERS:
        inside = config.required_section("encoder_config")
        spec = _conformer_spec(inside, named)
        says = transducer_spec(config, spec.width) if named in TRANSDUCERS else None
        tower = FastConformerTower(scope, scope / "encoder", spec, None, transducer=says)
        head = _conformer_head(scope, config, tower.conformer) if says is None else EmissionHead()
    elif named == BERT:
        frames = _bert_spec(config)
        tower = FastConformerTower(scope, scope / "wav2vec2_bert", frames, None)
        head = Classifier(Dense(scope / "lm_head", frames.width, labels, bias=True))
    else:
        tower = WaveTower(scope / PREFIXES[named], _wave_spec(config, named))
        head = Classifier(Dense(scope / "lm_head", tower.width, labels, bias=True))
    encoder = _encoder(scope, config, tower, head)
    encoder.media = tower
    encoder.weights = replace(encoder.weights, renamed=RENAMED)
    scope.ledger.note(Decision("model.parts", "auto", "audio", "what the checkpoint takes"))
    return encoder


def _conformer_head(scope: Scope, config: ConfigReader, conformer: Conformer) -> FrameHead:
    labels, at = config.int("vocab_size", ge=1), scope / "ctc_head"
    if not isinstance(conformer, HalvingConformer):
        return ConvolutionHead(at, conformer.width, labels)
    tied = config.bool("tie_word_embeddings", True)
    return Classifier(conformer.out if tied else Dense(at, conformer.width, labels, bias=True))


def _conformer_spec(encoder: ConfigReader, named: str) -> ConformerSpec:
    if named == LASR:
        return lasr_spec(encoder)
    if named in STREAMING:
        return streaming_spec(encoder)
    return halving_spec(encoder) if named == GRANITE else conformer_spec(encoder)


def _bert_spec(config: ConfigReader) -> FrameConformerSpec:
    for key in ("add_adapter", "use_intermediate_ffn_before_adapter"):
        if config.bool(key, False):
            raise config.wrong(key, "false")
    bands = config.int("feature_projection_input_dim", 160, ge=1, le=4096)
    layers = wave_layers(config, default="relative_key", activation="silu", backward=True)
    return FrameConformerSpec(bands=bands, layers=layers)


def _encoder(scope: Scope, config: ConfigReader, tower: MediaEncoder, head: FrameHead) -> Encoder:
    """Without layers of its own: what stands for a token is what the tower gave."""
    heads = config.int("num_attention_heads", ge=1)
    sizes = EncoderSizes(
        vocabulary=config.int("vocab_size", ge=1),
        width=tower.width,
        inner=config.int("intermediate_size", ge=1),
        layers=0,
        heads=heads,
        kv_heads=heads,
        head_dim=tower.width // heads,
        eps=0.0,
        activation="gelu",
    )

    def embed(batch: Batch) -> torch.Tensor:
        x_TE = torch.zeros(
            batch.token_ids_T.shape[0], tower.width, dtype=tower.dtype, device=scope.device
        )
        if batch.encoded is not None:
            x_TE = batch.encoded.put(x_TE)
        return x_TE

    return Encoder(scope, sizes, embed=embed, layers=(), norm=None, classifier=head, ignored=UNREAD)


def _wave_spec(config: ConfigReader, named: str) -> WaveTowerSpec:
    for key in ("add_adapter", "conv_pos_batch_norm"):
        if config.bool(key, False):
            raise config.wrong(key, "false")
    if config.raw.get("adapter_attn_dim") is not None:
        raise config.wrong("adapter_attn_dim", "null: adapters of languages are not read")
    width, heads = (
        config.int("hidden_size", 768, ge=1),
        config.int("num_attention_heads", 12, ge=1),
    )
    if width % heads:
        raise config.wrong("num_attention_heads", f"a divisor of hidden_size ({width})")
    channels = config.list("conv_dim", (512,) * 7, of=int)
    kernels = config.list("conv_kernel", (10, 3, 3, 3, 3, 2, 2), of=int)
    steps = config.list("conv_stride", (5, 2, 2, 2, 2, 2, 2), of=int)
    assert channels is not None and kernels is not None and steps is not None
    if not len(channels) == len(kernels) == len(steps) > 0:
        raise config.wrong("conv_dim", "as many as conv_kernel and conv_stride")
    distances = None
    if named == "WavLMForCTC":
        distances = DistanceBias(
            buckets=config.int("num_buckets", 320, ge=4),
            reach=config.int("max_bucket_distance", 800, ge=2),
        )
    turning = named == TURNING
    norm = config.choice("feat_extract_norm", ("group", "layer"), "group")
    convolution = config.choice("feat_extract_activation", ACTIVATIONS, "gelu")
    return WaveTowerSpec(
        channels=tuple(channels),
        strides=tuple((kernel, step, 0) for kernel, step in zip(kernels, steps, strict=True)),
        bias=config.bool("conv_bias", False),
        normed=norm == "layer" or named == "Data2VecAudioForCTC",
        convolution_activation=ACTIVATIONS[convolution],
        projection_norm=config.bool("feat_proj_layer_norm", True),
        width=width,
        inner=config.int("intermediate_size", 3072, ge=1),
        heads=heads,
        layers=config.int("num_hidden_layers", 12, ge=1),
        eps=config.float("layer_norm_eps", 1e-5, ge=0.0),
        activation=ACTIVATIONS[config.choice("hidden_act", ACTIVATIONS, "gelu")],
        places=None if turning else _places(config, named, width, ACTIVATIONS[convolution]),
        conformer=wave_layers(config, default="relative") if turning else None,
        projected=named != "SEWForCTC" or channels[-1] != width,
        names=NAMES_OF_SEW if named == "SEWForCTC" else NAMES,
        before=config.bool("do_stable_layer_norm", False),
        distances=distances,
    )


def _places(config: ConfigReader, named: str, width: int, activation: Activation) -> WavePlacesSpec:
    groups = config.int("num_conv_pos_embedding_groups", 16, ge=1)
    if named == "Data2VecAudioForCTC":
        return StackedPlacesSpec(
            width=width,
            taps=config.int("conv_pos_kernel_size", 19, ge=1),
            groups=groups,
            activation=activation,
            layers=config.int("num_conv_pos_embeddings", 5, ge=1),
        )
    return WidePlacesSpec(
        width=width,
        taps=config.int("num_conv_pos_embeddings", 128, ge=1),
        groups=groups,
        activation=activation,
        squeeze=config.int("squeeze_factor", 2, ge=1) if named == "SEWForCTC" else 1,
    )

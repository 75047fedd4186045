"""Kimi-Audio: Qwen2's decoder over two streams of tokens, whose embeddings are added. In all places
but those of sound one of the two is the blank; sound is what Whisper's encoder makes of it, four
positions side by side, added to the embeddings of tokens of sound (Ding et al. 2025, Kimi-Audio).

The layers that speak are not run. T tokens, E width of the decoder, D of the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from headrace.back.layers.audio.heard_windows import HeardWindows, HeardWindowsSpec
from headrace.back.layers.audio.speech_tokens import SoundTokens, SoundTokensSpec
from headrace.back.layers.embedding import TokenEmbedding
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.mlp import GATED_MLP
from headrace.back.layers.norm import LAYER
from headrace.back.layers.scope import Scope
from headrace.back.layers.vision.encoder import Grid
from headrace.back.models.blocks import Decoder, read_sizes
from headrace.back.models.hearing import EPS, num_layers, whisper_layer, without_key_bias
from headrace.back.models.qwen2 import qwen2_decoder
from headrace.back.models.vision import with_media
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.checkpoint_parts import ENCODER, SPEECH_TOKENIZER
from headrace.base.config.hf import ConfigReader
from headrace.base.config.kimi_audio import blank_of
from headrace.base.errors import ConfigError
from headrace.base.wire.media import MediaForm, SoundSteps

BESIDE = 4
"""Positions of a token."""
TOKEN = 2 * BESIDE
"""Frames of one."""
SPEAKS = (r"model\.mimo_(layers|norm)\..*", r"mimo_output\.weight")
OF_PARTS = (
    rf"{ENCODER}\.(model\.decoder\..*|proj_out\..*)",
    rf"{SPEECH_TOKENIZER}\.(model\.decoder\..*|proj_out\..*)",
    rf"{SPEECH_TOKENIZER}\.model\.encoder\.(layers|layer_norm|embed_positions2|ema_\w+)\b.*",
)
"""What is not read of the folders of its parts."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """MoonshotKimiaForCausalLM."""
    if scope.shares_encoder:
        raise ConfigError(
            "mm_encoder_tp_mode: data given; this model's encoder reads the decoder's table, which "
            "ranks share: weights is allowed",
            field="model.mm_encoder_tp_mode",
        )
    sizes = read_sizes(config)
    tower = KimiAudioTower(scope, config, sizes.width)
    decoder = qwen2_decoder(
        scope,
        config,
        sizes,
        [GATED_MLP] * sizes.layers,
        embedding_beside=blank_of(config),
        ignored=SPEAKS,
    )
    tower.embedding = decoder.embedding
    decoder = with_media(scope, decoder, tower)
    ignored = (*decoder.weights.ignored, *OF_PARTS)
    decoder.weights = replace(decoder.weights, ignored=ignored)
    return decoder


def _tokens_spec(config: ConfigReader) -> SoundTokensSpec:
    """What GLM-4's tokenizer of speech is, as far as it is served."""
    if not config.bool("encoder_causal_convolution", False):
        raise config.wrong("encoder_causal_convolution", "true: convolutions that look back alone")
    # Whether the checkpoint has layers behind the tokens too: they are not read.
    config.bool("quantize_encoder_only", False)
    layers, pooled = config.int("quantize_position", 16, ge=1), config.int("pooling_position", 16)
    if pooled != layers:
        raise config.wrong("pooling_position", f"quantize_position ({layers})")
    if config.str("pooling_type", "avg") != "avg":
        raise config.wrong("pooling_type", "avg")
    if config.int("pooling_kernel_size", BESIDE, ge=1) != BESIDE:
        raise config.wrong("pooling_kernel_size", f"{BESIDE}, as the encoder's")
    return SoundTokensSpec(
        bands=config.int("num_mel_bins", 128, ge=1),
        layer=whisper_layer(config),
        layers=layers,
        pool=BESIDE,
        block=config.int("quantize_causal_block_size", 200, ge=1),
        positions=config.int("max_source_positions", 1500, ge=1),
        entries=config.int("quantize_vocab_size", ge=1),
    )


class KimiAudioTower:
    """`MediaEncoder`. A row holds a frame for the encoder, one for the tokens, and whether it lies
    within the sound; `embedding`: the decoder's table."""

    rope = None
    layers = 0
    embedding: TokenEmbedding

    def __init__(self, scope: Scope, config: ConfigReader, width: int) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        audio = config.required_section("audio_config")
        tokens = _tokens_spec(config.required_section("speech_tokenizer_config"))
        spec = HeardWindowsSpec(
            bands=audio.int("num_mel_bins", 128, ge=1),
            layer=whisper_layer(audio),
            layers=num_layers(audio),
            positions=audio.int("max_source_positions", 1500, ge=1),
            beside=BESIDE,
            eps=EPS,
        )
        self._spec, self._bands = spec, spec.bands
        if tokens.bands != self._bands:
            raise config.wrong("speech_tokenizer_config.num_mel_bins", f"{self._bands}")
        self._first = config.int("kimia_token_offset", 152_064, ge=0)
        encoder = without_key_bias(scope / ENCODER / "model" / "encoder")
        self._windows = HeardWindows(encoder, spec)
        self._tokens = SoundTokens(
            without_key_bias(scope / SPEECH_TOKENIZER / "model" / "encoder"), tokens
        )
        inputs = config.int("kimia_adaptor_input_dim", spec.outputs, ge=1)
        if inputs != spec.outputs:
            raise config.wrong("kimia_adaptor_input_dim", f"{BESIDE} positions of the encoder")
        adaptor = scope / "model.vq_adaptor.layers"
        self._up = WholeLinear(adaptor / "0", inputs, width, bias=True)
        self._down = WholeLinear(adaptor / "3", width, width, bias=True)
        eps = config.float("rms_norm_eps", 1e-6, ge=0.0)
        self._adapted = LAYER.build(adaptor / "4", width, eps=eps)
        self.width, self.dtype = width, scope.dtype
        self.forms = (
            MediaForm(
                kind="audio",
                row_bytes=4 * (2 * self._bands + 1),
                max_t=1,
                sound=SoundSteps(pool=TOKEN, chunk=spec.rows, margin=TOKEN),
            ),
        )

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        row_NX, bands = rows_NB.view(torch.float32), self._bands
        inputs = row_NX.split([t * h * w for t, h, w in grids])
        windows = [part for one in inputs for part in one.split(self._spec.rows)]
        ids_T = self._tokens.tell(
            [one[:-TOKEN, bands:-1].to(self.dtype) for one in windows],
            [one[:-TOKEN, -1] > 0 for one in windows],
        )
        heard_TE = self._heard([one[:, :bands].to(self.dtype) for one in windows])
        table = self.embedding
        assert table.beside_E is not None
        token_TE = table.plain(ids_T + self._first) - table.beside_E
        return (token_TE + heard_TE) * 2**0.5 + table.beside_E

    def _heard(self, windows: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the encoder says of each token."""
        x_TX = self._windows.hear(windows)
        y_TE = self._down.project(F.silu(self._up.project(x_TX)))
        return self._adapted.norm(y_TE)

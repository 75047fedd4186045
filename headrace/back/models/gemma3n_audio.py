"""Gemma 3n with images (gemma3n_vision.py) and sound: its decoder behind the conformer of Universal
Speech Models, of which every fourth position is kept; each sound has as many tokens as half a
minute, and one that ends it, whose row is of a table beside the decoder's (transformers 5.23,
modeling_gemma3n.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.layers.audio.usm import UsmLayer, UsmLayerSpec, UsmNames, near_positions
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.norm import RMS, RMS_NO_WEIGHT
from headrace.back.layers.scope import Scope
from headrace.back.layers.towers import Towers
from headrace.back.layers.vision.encoder import Grid, MediaEncoder
from headrace.back.models import gemma3n
from headrace.back.models.blocks import Decoder
from headrace.back.models.families import text_config
from headrace.back.models.gemma3n_vision import Gemma3nVisionTower, gemma3n_vision_spec
from headrace.back.models.vision import text_alone, with_media
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MediaForm, SoundSteps

NAMES = UsmNames(
    mlps=("ffw_layer_start", "ffw_layer_end"),
    attention="attention.attn",
    places="attention.attn.relative_position_embedding.pos_proj",
    out="attention.post",
    norms=("attention.pre_attn_norm", "attention.post_norm", "norm"),
)
WINDOW = 3000
"""Frames of half a minute."""


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Gemma3nForConditionalGeneration."""
    inside = replace(scope, base_within="model.language_model")
    text = ConfigReader(text_config(config.raw), f"{config.where}: text_config")
    audio, vision = config.section("audio_config"), config.section("vision_config")
    towers: list[MediaEncoder] = []
    if vision is not None:
        seen = gemma3n_vision_spec(config, vision, text)
        towers.append(Gemma3nVisionTower(scope / "model", seen))
    if audio is not None:
        towers.append(Gemma3nAudioTower(scope / "model", _spec(config, audio, text)))
    if not towers:
        return text_alone(inside, text, "the checkpoint has no towers")
    return with_media(scope, gemma3n.build(inside, text), Towers(*towers))


@dataclass(frozen=True, kw_only=True)
class Gemma3nAudioSpec:
    """channels, strides: of both convolutions, along time and bands. kept: every so manieth
    position. tokens: of each sound; vocabulary: rows of the table whose last fills it up, and whose
    `end` ends it."""

    bands: int
    channels: tuple[int, int]
    strides: tuple[tuple[int, int], tuple[int, int]]
    group_eps: float
    layer: UsmLayerSpec
    layers: int
    kept: int
    tokens: int
    vocabulary: int
    end: int
    outputs: int


def _spec(config: ConfigReader, audio: ConfigReader, text: ConfigReader) -> Gemma3nAudioSpec:
    channels = audio.list("sscp_conv_channel_size", (128, 32), of=int, length=2)
    if _pairs(audio, "sscp_conv_kernel_size", 3) != ((3, 3), (3, 3)):
        raise audio.wrong("sscp_conv_kernel_size", "[[3, 3], [3, 3]]")
    width, heads = (
        audio.int("hidden_size", 1536, ge=2),
        audio.int("conf_num_attention_heads", 8, ge=1),
    )
    if width % heads:
        raise audio.wrong("conf_num_attention_heads", f"a divisor of hidden_size ({width})")
    first, count = audio.int("vocab_offset", 262_272, ge=0), audio.int("vocab_size", 128, ge=1)
    end = config.int("eoa_token_id", 262_272, aliases=("eoa_token_index",), ge=0)
    if not first <= end < first + count:
        raise config.wrong("eoa_token_id", f"one of the {count} ids from {first} on")
    left = audio.int("conf_attention_context_left", 13, ge=1)
    right = audio.int("conf_attention_context_right", 0, ge=0)
    layer = UsmLayerSpec(
        width=width,
        heads=heads,
        left=left,
        right=right,
        places=(left - 1, -right),
        cap=audio.float("conf_attention_logit_cap", 50.0, ge=0.0),
        key_scale=1.0,
        taps=audio.int("conf_conv_kernel_size", 5, ge=1),
        share=audio.float("conf_residual_weight", 0.5),
        clip=audio.float("gradient_clipping", 1e10, ge=0.0),
        eps=audio.float("rms_norm_eps", 1e-6, ge=0.0),
        clipped=False,
        module="",
        names=NAMES,
    )
    return Gemma3nAudioSpec(
        bands=audio.int("input_feat_size", 128, ge=1),
        channels=(channels[0], channels[1]),
        strides=_pairs(audio, "sscp_conv_stride_size", 2),
        group_eps=audio.float("sscp_conv_group_norm_eps", 1e-3, ge=0.0),
        layer=layer,
        layers=audio.int("conf_num_hidden_layers", 12, ge=1),
        kept=audio.int("conf_reduction_factor", 4, ge=1),
        tokens=config.int("audio_soft_tokens_per_image", 188, ge=1),
        vocabulary=count,
        end=end - first,
        outputs=text.int("hidden_size", ge=1),
    )


def _pairs(audio: ConfigReader, key: str, default: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Two pairs of numbers."""
    stated = audio.raw.get(key, ((default, default), (default, default)))
    try:
        (first, second), (third, fourth) = stated
    except (TypeError, ValueError):
        raise audio.wrong(key, "two pairs of numbers") from None
    if not all(isinstance(one, int) and one > 0 for one in (first, second, third, fourth)):
        raise audio.wrong(key, "two pairs of numbers of at least 1")
    return (first, second), (third, fourth)


class Gemma3nAudioTower:
    """`MediaEncoder`; `scope` is that of tower and projection."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, spec: Gemma3nAudioSpec) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        tower, leading = scope / "audio_tower", scope / "embed_audio"
        self._spec, width = spec, spec.layer.width
        inside = tower / "subsample_conv_projection"
        self._convolutions = [
            (
                inside.param(f"conv_{i}.conv.weight", (outputs, inputs, 3, 3)),
                inside.param(f"conv_{i}.norm.weight", (outputs,)),
            )
            for i, (inputs, outputs) in enumerate(((1, spec.channels[0]), spec.channels))
        ]
        left = spec.bands
        for _, step in spec.strides:
            left = (left - 1) // step + 1
        self._into = WholeLinear(inside / "input_proj_linear", left * spec.channels[1], width)
        self._layers = [
            UsmLayer(tower / "conformer" / str(index), spec.layer) for index in range(spec.layers)
        ]
        eps = spec.layer.eps
        self._table = leading.param("embedding.weight", (spec.vocabulary, width))
        self._hard, self._soft = (
            RMS.build(leading / name, width, eps=eps)
            for name in ("hard_embedding_norm", "soft_embedding_norm")
        )
        self._lead = WholeLinear(leading / "embedding_projection", width, spec.outputs)
        self._last = RMS_NO_WEIGHT.build(leading, spec.outputs, eps=eps)
        self.width, self.dtype = spec.outputs, scope.dtype
        self.forms = (
            MediaForm(
                kind="audio",
                row_bytes=4 * spec.bands,
                max_rows=WINDOW,
                max_t=1,
                sound=SoundSteps(chunk=WINDOW, per_chunk=spec.tokens + 1),
            ),
        )
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._filling_1E = self._end_1E = torch.empty(0)
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = [(kernel.take(), norm.take()) for kernel, norm in self._convolutions]
        table = self._table.take()
        self._filling_1E, self._end_1E = table[-1:].clone(), table[self._spec.end][None].clone()

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder. What a sound is shorter than half a minute is filled up."""
        spec = self._spec
        frames_NM = rows_NB.view(torch.float32).to(self.dtype)
        parts = [self._subsampled(one) for one in frames_NM.split([t * h * w for t, h, w in grids])]
        sizes = [len(one) for one in parts]
        near = near_positions(sizes, spec.layer, rows_NB.device)
        x_TE = self._into.project(torch.cat(parts))
        for layer in self._layers:
            x_TE = layer.forward(x_TE, near)
        kept = [one[:: spec.kept][: spec.tokens] for one in x_TE.split(sizes)]
        x_KE = self._soft.norm(torch.cat(kept))
        y_KF = self._led(x_KE)
        filling_1F, end_1F = (
            self._led(self._hard.norm(one)) for one in (self._filling_1E, self._end_1E)
        )
        rows = []
        for part in y_KF.split([len(one) for one in kept]):
            rows += [part, filling_1F.expand(spec.tokens - len(part), -1), end_1F]
        return torch.cat(rows)

    def _led(self, x_KE: torch.Tensor) -> torch.Tensor:
        return self._last.norm(self._lead.project(x_KE))

    def _subsampled(self, frames_NM: torch.Tensor) -> torch.Tensor:
        """[T, what is left of the bands times channels] of one input."""
        x_CNM = frames_NM[None]
        for (kernel, weight_C), stride in zip(self._weights, self._spec.strides, strict=True):
            x_CNM = F.conv2d(F.pad(x_CNM, (1, 1, 0, 2)), kernel, stride=stride)
            x_CNM = cumulative_norm(x_CNM, weight_C, self._spec.group_eps).relu()
        return x_CNM.permute(1, 2, 0).flatten(1)


def cumulative_norm(x_CTM: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """Each time less the mean of all channels and bands up to it, over the root of the mean of such
    differences' squares up to it."""
    x = x_CTM.float()
    count = x.shape[0] * x.shape[2]
    seen_T = torch.arange(1, x.shape[1] + 1, device=x.device) * float(count)
    mean_T = x.sum((0, 2)).cumsum(0) / seen_T
    apart = x - mean_T[:, None]
    variance_T = apart.square().sum((0, 2)).cumsum(0) / seen_T
    y = apart * torch.rsqrt(variance_T + eps)[:, None] * weight_C.float()[:, None, None]
    return y.to(x_CTM.dtype)

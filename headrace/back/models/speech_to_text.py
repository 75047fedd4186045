"""Speech2Text (Wang et al. 2020, fairseq S2T): strided convolutions with gates before a transformer
with sines and cosines as positions (transformers 5.23, modeling_speech_to_text.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from headrace.back.layers.positions import SinusoidalPositions
from headrace.back.layers.scope import Scope
from headrace.back.models.bart import BartForm, bart_spec
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.back.models.frame_source import FrameSource
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import Strides, length_after

MOST_FRAMES = 3000
IGNORED = (r"lm_head\.weight",)


@dataclass(frozen=True, kw_only=True)
class GatedConvolutionsSpec:
    """bands: of a frame; channels: of the convolutions between, before their gates; taps: of each;
    scale: of what comes out."""

    bands: int
    width: int
    channels: int
    taps: tuple[int, ...]
    scale: float

    @property
    def strides(self) -> Strides:
        """Along time."""
        return tuple((one, 2, one // 2) for one in self.taps)

    def build(self, scope: Scope) -> GatedConvolutions:
        """See ConformerSpec."""
        return GatedConvolutions(scope, self)


class GatedConvolutions:
    """frames_NM -> x_SE of one input."""

    def __init__(self, scope: Scope, spec: GatedConvolutionsSpec) -> None:
        self.width, self._spec = spec.width, spec
        last, inputs = len(spec.taps) - 1, spec.bands
        self._params = []
        for index, taps in enumerate(spec.taps):
            outputs = 2 * spec.width if index == last else spec.channels
            at = scope / "conv.conv_layers" / str(index)
            shape = (outputs, inputs, taps)
            self._params.append((at.param("weight", shape), at.param("bias", (outputs,))))
            inputs = spec.channels // 2
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []
        scope.on_finish(self._finish)

    def _finish(self) -> None:
        self._weights = [(weight.take(), bias.take()) for weight, bias in self._params]

    def forward(self, frames_NM: torch.Tensor, *, ghosts: int = 0) -> torch.Tensor:
        """See Conformer; there are no ghosts."""
        assert not ghosts, ghosts
        x_AEN = frames_NM.T[None]
        for weight, bias in self._weights:
            padding = weight.shape[2] // 2
            x_AEN = F.glu(F.conv1d(x_AEN, weight, bias, stride=2, padding=padding), dim=1)
        return (x_AEN[0].T * self._spec.scale).contiguous()


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """Speech2TextForConditionalGeneration."""
    if config.int("input_channels", 1, ge=1) != 1:
        raise config.wrong("input_channels", "1")
    width = config.int("d_model", 256, ge=1)
    source = GatedConvolutionsSpec(
        bands=config.int("input_feat_per_channel", 80, ge=1, le=1024),
        width=width,
        channels=config.int("conv_channels", 1024, ge=2),
        taps=tuple(config.list("conv_kernel_sizes", (5, 5), of=int) or ()),
        scale=width**0.5 if config.bool("scale_embedding", True) else 1.0,
    )
    scope = replace(scope, encoder_tokens=length_after(MOST_FRAMES, source.strides))
    first = config.int("pad_token_id", 1, ge=0) + 1
    form = BartForm(pre=True, embedding_norm=False, logits_bias=False)
    positions = SinusoidalPositions(first=first, spread=1)
    scaled = ConfigReader({"scale_embedding": True, **config.raw}, config.where)
    spec = bart_spec(scope, scaled, form, positions=positions)
    spec = replace(
        spec,
        encoder=replace(spec.encoder, positions=positions),
        shared="decoder.embed_tokens",
        hears=lambda at, width: FrameSource(at, source, width, None),
        ignored=IGNORED if spec.sizes.tied else (),
    )
    return EncoderDecoder(scope, spec)

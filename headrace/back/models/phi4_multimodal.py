"""Phi-4 multimodal: Phi-4's decoder behind SigLIP's layers over tiles and a conformer for sound,
which leads to the decoder by other layers where images stand in the same prompt; the adapters
beside the weights are those of requests with such media (Abouelenin et al. 2025; transformers 5.23,
modeling_phi4_multimodal.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from headrace.back.layers.audio.biased_conformer import BiasedConformer, BiasedConformerSpec
from headrace.back.layers.audio.fast_conformer import FastConformerSpec
from headrace.back.layers.linear import WholeLinear
from headrace.back.layers.scope import Scope
from headrace.back.layers.towers import Towers
from headrace.back.layers.vision.encoder import Grid
from headrace.back.layers.vision.masked_tiles import MERGE, MaskedTiles, MaskedTilesSpec
from headrace.back.layers.vision.patches import PatchSpec
from headrace.back.models import phi3
from headrace.back.models.blocks import Decoder
from headrace.back.models.vision import HALF, square, with_media
from headrace.back.parallel.mesh import Mesh
from headrace.base.config.hf import ConfigReader
from headrace.base.wire.media import MediaForm, SoundSteps

EXTENDED = "model.embed_tokens_extend"
MODES = ("speech", "vision_speech")
"""Without images and with them."""
MOST_FRAMES = 200_000
"""Half an hour."""
UNREAD = (
    rf"{EXTENDED.replace('.', '[.]')}\.image_embed\.img_processor\.(?:post_layernorm|head)\..*",
    rf"{EXTENDED.replace('.', '[.]')}\.image_embed\.img_processor\.encoder\.layers\.\d+\..*",
)
"""What stands behind the layer whose outputs are taken."""
ADAPTERS = r".*\.lora_[AB]\..*"
"""Of vision and speech, which published checkpoints hold in the weights' midst and in folders of
their own beside them; the latter are read (`--default-mm-loras`)."""
_SOUND = r"(.*audio_embed\.encoder\.encoders\.\d+\.)"
PUBLISHED = (
    (r"\.base_layer\.", "."),
    (_SOUND + r"feed_forward_(in|out)\.net\.0\.linear", r"\1feed_forward_\2.gate_up_proj"),
    (_SOUND + r"feed_forward_(in|out)\.net\.2", r"\1feed_forward_\2.down_proj"),
    (_SOUND + r"self_attn\.linear_([qkv])", r"\1self_attn.\2_proj"),
    (_SOUND + r"self_attn\.linear_out", r"\1self_attn.o_proj"),
    (r"audio_projection\.speech\.0\.", "up_proj_for_speech."),
    (r"audio_projection\.speech\.2\.", "down_proj_for_speech."),
    (r"audio_projection\.vision\.0\.", "up_proj_for_vision_speech."),
    (r"audio_projection\.vision\.2\.", "down_proj_for_vision_speech."),
    (r"image_embed\.img_projection\.0\.", "image_embed.img_projection_up."),
    (r"image_embed\.img_projection\.2\.", "image_embed.img_projection_down."),
    (r"image_embed\.glb_GN$", "image_embed.global_img_feature_extensor"),
    (r"image_embed\.sub_GN$", "image_embed.sub_img_feature_extensor"),
)
"""How the first checkpoint names what the converted one has."""
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{"swish": F.silu, "silu": F.silu, "relu": F.relu, "gelu": F.gelu, "sigmoid": torch.sigmoid},
}


def build(scope: Scope, config: ConfigReader) -> Decoder:
    """Phi4MultimodalForCausalLM, Phi4MMForCausalLM."""
    vision, audio = (config.required_section(f"{name}_config") for name in ("vision", "audio"))
    outputs = config.int("hidden_size", ge=1)
    inside = scope / EXTENDED
    sees = MaskedTiles(inside / "image_embed", _tiles(vision, outputs))
    hears = Hearing(inside / "audio_embed", _conformer(audio), outputs)
    decoder = with_media(scope, phi3.build(scope, config), Towers(sees, hears))
    weights = decoder.weights
    decoder.weights = replace(
        weights,
        ignored=(*weights.ignored, *UNREAD, ADAPTERS),
        renamed=(*weights.renamed, *PUBLISHED),
    )
    return decoder


class Hearing:
    """`MediaEncoder`: a frame's last value tells whether images stand in its prompt."""

    rope = None
    layers = 0

    def __init__(self, scope: Scope, spec: BiasedConformerSpec, outputs: int) -> None:
        scope = replace(scope, mesh=Mesh(), online=None, adapters=None)
        self._conformer = BiasedConformer(scope / "encoder", spec)
        self._projectors = [
            [
                WholeLinear(scope / f"{way}_proj_for_{mode}", inputs, outputs, bias=True)
                for way, inputs in (("up", spec.width), ("down", outputs))
            ]
            for mode in MODES
        ]
        self.width, self.dtype = outputs, scope.dtype
        self.forms = (
            MediaForm(
                kind="audio",
                row_bytes=4 * (spec.reader.bands + 1),
                max_rows=MOST_FRAMES,
                max_t=1,
                sound=SoundSteps(strides=spec.reader.strides),
            ),
        )

    def encode(self, kind: str, rows_NB: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """See MediaEncoder."""
        frames_NX = rows_NB.view(torch.float32).to(self.dtype)
        inputs = frames_NX.split([t * h * w for t, h, w in grids])
        return torch.cat([self._encoded(one) for one in inputs])

    def _encoded(self, frames_NX: torch.Tensor) -> torch.Tensor:
        up, down = self._projectors[bool(frames_NX[0, -1] > 0)]
        x_SE = self._conformer.forward(frames_NX[:, :-1])
        return down.project(F.gelu(up.project(x_SE)))


def _tiles(vision: ConfigReader, outputs: int) -> MaskedTilesSpec:
    patch, side = square(vision)
    if side % MERGE:
        raise vision.wrong("image_size", "an even number of patches")
    width, heads = (
        vision.int("hidden_size", 1152, ge=1),
        vision.int("num_attention_heads", 16, ge=1),
    )
    if width % heads:
        raise vision.wrong("num_attention_heads", f"a divisor of hidden_size ({width})")
    layers = vision.int("num_hidden_layers", 27, ge=1)
    taken = vision.int("feature_layer", -2, ge=-layers - 1, le=layers)
    return MaskedTilesSpec(
        patches=PatchSpec(patch=patch, mean=HALF, std=HALF, name="embeddings.patch_embedding"),
        width=width,
        inner=vision.int("intermediate_size", 4304, ge=1),
        heads=heads,
        layers=taken if taken >= 0 else layers + 1 + taken,
        eps=vision.float("layer_norm_eps", 1e-6, ge=0.0),
        side=side,
        outputs=outputs,
    )


def _conformer(audio: ConfigReader) -> BiasedConformerSpec:
    for key, value in (("chunk_size", -1), ("downsample_rate", 1)):
        if audio.int(key, value) != value:
            raise audio.wrong(key, str(value))
    audio.choice("nemo_activation", ("relu",), "relu")
    width, heads = (
        audio.int("hidden_size", 1024, ge=1),
        audio.int("num_attention_heads", 16, ge=1),
    )
    if width % heads:
        raise audio.wrong("num_attention_heads", f"a divisor of hidden_size ({width})")
    factor = audio.int("time_reduction", 8, ge=2, le=64)
    if factor & (factor - 1):
        raise audio.wrong("time_reduction", "a power of two")
    inner = audio.int("intermediate_size", 1536, ge=1)
    names = ("activation", "conv_glu_type", "conv_activation")
    activation, gate, convolved = (
        ACTIVATIONS[audio.choice(name, ACTIVATIONS, "swish")] for name in names
    )
    return BiasedConformerSpec(
        reader=FastConformerSpec(
            bands=audio.int("input_size", 80, ge=1, le=1024),
            channels=audio.int("nemo_conv_channels", 1024, ge=1),
            halvings=factor.bit_length() - 1,
            width=width,
            inner=inner,
            layers=audio.int("num_blocks", 24, ge=1),
            heads=heads,
            taps=1,
        ),
        inner=inner,
        distance=audio.int("bias_max_distance", 1000, ge=1),
        symmetric=audio.bool("bias_symmetric", False),
        channels=audio.int("ext_pw_out_channel", 1024, ge=1),
        spread=audio.int("depthwise_multiplier", 1, ge=1),
        mixed=audio.int("depthwise_separable_out_channel", 1024, ge=1),
        taps=audio.int("kernel_size", 3, ge=1),
        activation=activation,
        gate=gate,
        convolved=convolved,
    )

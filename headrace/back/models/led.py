"""LED, the Longformer's encoder-decoder (Beltagy et al. 2020): BART whose encoder sees a window
around each token.

No token of the prompt is global: every one attends within its window.
"""

from __future__ import annotations

from headrace.back.layers.scope import Scope
from headrace.back.models.bart import BartForm, build_bart, learned
from headrace.back.models.encoder import EncoderSizes, SpanAttentionLayer
from headrace.back.models.encoder_decoder import EncoderDecoder
from headrace.base.config.hf import ConfigReader

PROJECTIONS = tuple(f"longformer_self_attn.{name}" for name in ("query", "key", "value"))
GLOBAL = r"led\.encoder\.layers\.\d+\.self_attn\.longformer_self_attn\.\w+_global\.(weight|bias)"


def build(scope: Scope, config: ConfigReader) -> EncoderDecoder:
    """LEDForConditionalGeneration."""
    windows = read_windows(config, config.int("encoder_layers", ge=1))

    def attention(scope: Scope, sizes: EncoderSizes, index: int) -> SpanAttentionLayer:
        return SpanAttentionLayer(
            scope, sizes, names=PROJECTIONS, out="output", window=windows[index] // 2
        )

    form = BartForm(pre=False, prefix="led", encoder_attention=attention, ignored=(GLOBAL,))
    read, said = (
        learned(config, key=f"max_{half}_position_embeddings", unused=0)
        for half in ("encoder", "decoder")
    )
    return build_bart(scope, config, form, positions=said, read_positions=read)


def read_windows(config: ConfigReader, layers: int) -> tuple[int, ...]:
    """How many tokens around it each layer's tokens see: `attention_window`, one or a list."""
    if isinstance(config.raw.get("attention_window"), list):
        windows = config.list("attention_window", of=int, length=layers)
    else:
        windows = (config.int("attention_window", 512, ge=2),) * layers
    if not all(window >= 2 and window % 2 == 0 for window in windows):
        raise config.wrong("attention_window", "even numbers, at least 2")
    return windows

"""Dialects of GGUF files of RWKV 6 and 7, and of Qwen 2 with their layers in place of attention."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.back.models.load import gguf_names as names
from headrace.back.models.load.gguf_dialect import Dialect

_SIX = {
    "time_mix_w1": "time_maa_w1.",
    "time_mix_w2": "time_maa_w2.",
    "time_mix_decay": "time_decay.",
    "time_mix_decay_w1": "time_decay_w1.",
    "time_mix_decay_w2": "time_decay_w2.",
    "time_mix_first": "time_faaaa.",
    "time_mix_ln": "ln_x",
    **{f"time_mix_lerp_{letter}": f"time_maa_{letter}." for letter in "xwkvrg"},
}
_SEVEN = {
    **{f"time_mix_{one}0": f"{one}_lora.lora.2.bias." for one in "wav"},
    **{f"time_mix_{one}1": f"{one}_lora.lora.0" for one in "wavg"},
    **{f"time_mix_{one}2": f"{one}_lora.lora.2" for one in "wavg"},
    **{f"time_mix_{one}": f"{one}." for one in ("k_k", "k_a", "r_k")},
    "time_mix_receptance": "r_proj",
    "time_mix_key": "k_proj",
    "time_mix_value": "v_proj",
    "time_mix_output": "o_proj",
    "time_mix_ln": "g_norm",
}
_SIX_STACKED = tuple(f"time_maa_{letter}" for letter in "wkvrg")
_SEVEN_STACKED = tuple(f"x_{letter}" for letter in "rwkvag")
_FUSED = "time_mix_lerp_fused"

DIALECTS: Mapping[str, Dialect] = {
    "rwkv6": Dialect(
        blocks={
            "attn_norm": "ln1",
            "attn_norm_2": "ln2",
            **names.within(
                "attention",
                _SIX
                | {
                    f"time_mix_{one}": one
                    for one in ("receptance", "key", "value", "gate", "output")
                },
            ),
            "channel_mix_lerp_k": "feed_forward.time_maa_k.",
            "channel_mix_lerp_r": "feed_forward.time_maa_r.",
            **{
                f"channel_mix_{one}": f"feed_forward.{one}"
                for one in ("key", "receptance", "value")
            },
        },
        layers="rwkv.blocks",
        top={
            "token_embd": "rwkv.embeddings",
            "token_embd_norm": "rwkv.blocks.0.pre_ln",
            "output_norm": "rwkv.ln_out",
            "output": "head",
        },
        unstacked={_FUSED: tuple(f"attention.{one}" for one in _SIX_STACKED)},
    ),
    "rwkv7": Dialect(
        blocks={
            "attn_norm": "attn_norm",
            "attn_norm_2": "ffn_norm",
            **names.within("attn", _SEVEN),
            "channel_mix_lerp_k": "ffn.x_k.",
            "channel_mix_key": "ffn.key",
            "channel_mix_value": "ffn.value",
        },
        top=names.TOP
        | {"token_embd": "model.embeddings", "token_embd_norm": "model.layers.0.pre_norm"},
        unstacked={_FUSED: tuple(f"attn.{one}" for one in _SEVEN_STACKED)},
    ),
    "rwkv6qwen2": Dialect(
        blocks=names.BLOCK
        | names.within(
            "self_attn",
            _SIX
            | {
                "time_mix_receptance": "q_proj",
                "time_mix_key": "k_proj",
                "time_mix_value": "v_proj",
                "time_mix_gate": "gate",
                "time_mix_output": "o_proj",
            },
        ),
        unstacked={_FUSED: tuple(f"self_attn.{one}" for one in _SIX_STACKED)},
    ),
    "arwkv7": Dialect(
        blocks=names.BLOCK | names.within("self_attn", _SEVEN),
        unstacked={_FUSED: tuple(f"self_attn.{one}" for one in _SEVEN_STACKED)},
    ),
}

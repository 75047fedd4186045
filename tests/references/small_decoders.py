"""Decoders in plain PyTorch that differ from Llama's by a few facts, each written from its published configuration and
the tensor names of its checkpoint: PLaMo 13B, PLM 1.8B, Refact 1.6B, Talkie 13B, Maincoder 1B, Solar Pro, Step 1,
Rnj-1, ruGPT-3 XL.

One row at a time, whole; T tokens, E hidden size, H heads, K KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tests.references.plain import (
    Tensors,
    attended,
    mlp,
    norm,
    of_layer,
    random_tensors,
    rotated,
    window,
)

Config = dict[str, Any]
V, E, LAYERS, H, D, INNER = 97, 48, 3, 6, 8, 80
SHARED: Config = {
    **{"vocab_size": V, "hidden_size": E, "intermediate_size": INNER},
    **{"num_hidden_layers": LAYERS, "num_attention_heads": H, "max_position_embeddings": 128},
    **{"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
}


@dataclass(frozen=True)
class SmallDecoder:
    """Random tensors of a config, and the logits [T, V] of a row."""

    tensors: Callable[[Config], Tensors]
    logits: Callable[[Config, Tensors, list[int]], torch.Tensor]


def named(architecture: str, **keys: Any) -> Config:
    return {**SHARED, "architectures": [f"{architecture}ForCausalLM"], **keys}


def llama_shapes(
    kv_heads: int, *, at: str = "model.layers", mlp: str = "mlp", head: bool = True
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, E)}
    for layer in range(LAYERS):
        one = f"{at}.{layer}"
        shapes |= {f"{one}.self_attn.{name}_proj.weight": (H * D, E) for name in "qo"}
        shapes |= {f"{one}.self_attn.{name}_proj.weight": (kv_heads * D, E) for name in "kv"}
        shapes |= {f"{one}.{mlp}.{name}_proj.weight": (INNER, E) for name in ("gate", "up")}
        shapes[f"{one}.{mlp}.down_proj.weight"] = (E, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{one}.{name}.weight"] = (E,)
    return shapes | {"model.norm.weight": (E,)} | ({"lm_head.weight": (V, E)} if head else {})


def projected(own: Tensors, x_TE: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(
        (x_TE @ own[f"self_attn.{one}_proj.weight"].T).unflatten(1, (-1, D)) for one in "qkv"
    )


def in_pairs(x_THD: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotates dimensions 2i and 2i + 1 as a pair."""
    halves = torch.cat((x_THD[..., ::2], x_THD[..., 1::2]), -1)
    first, second = rotated(halves, theta).chunk(2, -1)
    return torch.stack((first, second), -1).flatten(-2)


Attention = Callable[[Tensors, torch.Tensor], torch.Tensor]


def llama_layer(
    own: Tensors, x_TE: torch.Tensor, attention: Attention, mlp_name: str = "mlp"
) -> torch.Tensor:
    x_TE = x_TE + attention(own, norm(x_TE, own["input_layernorm.weight"], 1e-5))
    return x_TE + mlp(own, mlp_name, norm(x_TE, own["post_attention_layernorm.weight"], 1e-5))


def headed(weights: Tensors, x_TE: torch.Tensor, head: str = "lm_head.weight") -> torch.Tensor:
    return norm(x_TE, weights["model.norm.weight"], 1e-5) @ weights[head].T


PLAMO = named("Plamo", model_type="plamo", n_shared_head=3)


def plamo_logits(config: Config, weights: Tensors, row: list[int]) -> torch.Tensor:
    """Query head i reads KV head i mod K; one norm before both branches."""
    x_TE, kv_heads = weights["model.embed_tokens.weight"][row], H // config["n_shared_head"]
    for layer in range(LAYERS):
        own = of_layer(weights, f"model.layers.layers.{layer}.")
        h_TE = norm(x_TE, own["norm.weight"], 1e-5)
        q, k, v = projected(own, h_TE)
        k, v = (x.repeat(1, H // kv_heads, 1) for x in (rotated(k, 1e4), v))
        y_TE = attended(rotated(q, 1e4), k, v) @ own["self_attn.o_proj.weight"].T
        x_TE = x_TE + y_TE + mlp(own, "mlp", h_TE)
    return headed(weights, x_TE)


def plamo_tensors(config: Config) -> Tensors:
    shapes = llama_shapes(H // config["n_shared_head"], at="model.layers.layers")
    kept = {name: shape for name, shape in shapes.items() if "layernorm" not in name}
    return random_tensors(
        kept | {f"model.layers.layers.{i}.norm.weight": (E,) for i in range(LAYERS)}
    )


PLM = named(
    "PLM",
    **{"kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12},
    **{"q_lora_rank": None, "hidden_act": "relu2", "rope_theta": 500.0, "num_key_value_heads": H},
    **{"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
)


def plm_tensors(config: Config) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, E)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (H * 16, E),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (24 + 6, E),
            f"{at}.self_attn.kv_a_layernorm.weight": (24,),
            f"{at}.self_attn.kv_b_proj.weight": (H * 22, 24),
            f"{at}.self_attn.o_proj.weight": (E, H * 12),
            f"{at}.mlp.up_proj.weight": (INNER, E),
            f"{at}.mlp.down_proj.weight": (E, INNER),
            f"{at}.input_layernorm.weight": (E,),
            f"{at}.post_attention_layernorm.weight": (E,),
        }
    return random_tensors(shapes | {"model.norm.weight": (E,)})


def plm_logits(config: Config, weights: Tensors, row: list[int]) -> torch.Tensor:
    """Keys and values from one latent a token; the rotated part of a key is shared by the heads."""
    table, eps = weights["model.embed_tokens.weight"], 1e-6
    x_TE = table[row]
    for layer in range(LAYERS):
        own = of_layer(weights, f"model.layers.{layer}.")
        h_TE = norm(x_TE, own["input_layernorm.weight"], eps)
        q = (h_TE @ own["self_attn.q_proj.weight"].T).unflatten(1, (H, 16))
        latent, k_rope = (h_TE @ own["self_attn.kv_a_proj_with_mqa.weight"].T).split((24, 6), -1)
        latent = norm(latent, own["self_attn.kv_a_layernorm.weight"], eps)
        k_nope, v = (
            (latent @ own["self_attn.kv_b_proj.weight"].T).unflatten(1, (H, 22)).split((10, 12), -1)
        )
        k_rope = in_pairs(k_rope[:, None], 500.0).expand(-1, H, -1)
        q = torch.cat((q[..., :10], in_pairs(q[..., 10:], 500.0)), -1)
        y_TX = attended(q, torch.cat((k_nope, k_rope), -1), F.pad(v, (0, 4))).unflatten(1, (H, 16))
        x_TE = x_TE + y_TX[..., :12].flatten(1) @ own["self_attn.o_proj.weight"].T
        h_TE = norm(x_TE, own["post_attention_layernorm.weight"], eps)
        x_TE = (
            x_TE
            + F.relu(h_TE @ own["mlp.up_proj.weight"].T).square() @ own["mlp.down_proj.weight"].T
        )
    return norm(x_TE, weights["model.norm.weight"], eps) @ table.T


REFACT: Config = {
    **{"architectures": ["GPTRefactForCausalLM"], "model_type": "gpt_refact", "vocab_size": V},
    **{"n_embd": E, "n_layer": LAYERS, "n_head": H, "n_positions": 128, "n_inner": None},
    **{"layer_norm_epsilon": 1e-5, "multi_query": True, "tie_word_embeddings": False},
}
REFACT_INNER = 256
"""Two thirds of 4 * 48, in whole multiples of 256."""
SLOPES = torch.tensor([2.0**-i for i in (2, 4, 6, 8, 1, 3)])[:, None, None]
"""ALiBi's (Press et al. 2022) of six heads."""


def distances(tokens: int) -> torch.Tensor:
    """[T, T]: how many positions a key stands before a query; 0 behind it."""
    place = torch.arange(tokens)
    return (place[:, None] - place[None]).clamp(min=0).double()


def refact_tensors(config: Config) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (V, E)}
    for layer in range(LAYERS):
        at = f"transformer.h.{layer}"
        shapes |= {f"{at}.attn.{name}.weight": (E, E) for name in ("q", "c_proj")}
        shapes |= {f"{at}.attn.kv.weight": (2 * D, E)}
        shapes |= {f"{at}.mlp.gate_up_proj.weight": (2 * REFACT_INNER, E)}
        shapes |= {f"{at}.mlp.c_proj.weight": (E, REFACT_INNER)}
        shapes |= {f"{at}.{name}.weight": (E,) for name in ("ln_1", "ln_2")}
    return random_tensors(shapes | {"ln_f.weight": (E,), "lm_head.weight": (V, E)})


def refact_logits(config: Config, weights: Tensors, row: list[int]) -> torch.Tensor:
    """One KV head, ALiBi, layer norms without bias."""

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (E,), weight, None, 1e-5)

    x_TE, far = weights["transformer.wte.weight"][row], distances(len(row))
    for layer in range(LAYERS):
        own = of_layer(weights, f"transformer.h.{layer}.")
        h_TE = normed(x_TE, own["ln_1.weight"])
        q = (h_TE @ own["attn.q.weight"].T).unflatten(1, (H, D))
        k, v = (h_TE @ own["attn.kv.weight"].T).unflatten(1, (2, 1, D)).unbind(1)
        y_TX = attended(q, k, v, change=lambda scores: scores - SLOPES * far)
        x_TE = x_TE + y_TX @ own["attn.c_proj.weight"].T
        gate, up = (normed(x_TE, own["ln_2.weight"]) @ own["mlp.gate_up_proj.weight"].T).chunk(
            2, -1
        )
        x_TE = x_TE + (F.silu(gate) * up) @ own["mlp.c_proj.weight"].T
    return normed(x_TE, weights["ln_f.weight"]) @ weights["lm_head.weight"].T


TALKIE: Config = {
    **{"architectures": ["TalkieForCausalLM"], "vocab_size": V, "n_layer": LAYERS, "n_head": H},
    **{"n_embd": E, "head_dim": D, "rope_base": 500.0, "max_seq_len": 128},
}
TALKIE_INNER = 128
"""Eight thirds of 48, in whole multiples of 128."""


def talkie_tensors(config: Config) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (V, E)}
    for layer in range(LAYERS):
        at = f"blocks.{layer}"
        parts = ("attn_query", "attn_key", "attn_value", "attn_resid")
        shapes |= {f"{at}.attn.{name}.weight": (E, E) for name in parts}
        shapes |= {
            f"{at}.mlp.{name}.weight": (TALKIE_INNER, E) for name in ("mlp_gate", "mlp_linear")
        }
        shapes |= {
            f"{at}.mlp.mlp_resid.weight": (E, TALKIE_INNER),
            f"{at}.attn.head_gain.head_g": (H,),
        }
        shapes |= {f"{at}.{name}.a_g": (1,) for name in ("attn_gain", "mlp_gain", "embed_skip")}
    made = random_tensors(shapes | {"lm_head": (V, E), "lm_head_gain.w_g": (1,)})
    return {name: one + 1.3 if name.endswith("_g") else one for name, one in made.items()}


def talkie_logits(config: Config, weights: Tensors, row: list[int]) -> torch.Tensor:
    """Norms without weights; rotations the other way round, before those of queries and keys."""
    eps = torch.finfo(torch.float32).eps

    def normed(x: torch.Tensor) -> torch.Tensor:
        return norm(x, 1.0, eps)

    def back(x_THD: torch.Tensor) -> torch.Tensor:
        first, second = x_THD.chunk(2, -1)
        swapped = rotated(torch.cat((second, first), -1), 500.0)
        return torch.cat(swapped.chunk(2, -1)[::-1], -1)

    x_TE = first_TE = normed(weights["embed.weight"][row])
    for layer in range(LAYERS):
        own = of_layer(weights, f"blocks.{layer}.")
        names = ("attn_query", "attn_key", "attn_value")
        h_TE = normed(x_TE)
        q, k, v = ((h_TE @ own[f"attn.{name}.weight"].T).unflatten(1, (H, D)) for name in names)
        q = normed(back(q)) * own["attn.head_gain.head_g"][:, None]
        y_TE = attended(q, normed(back(k)), v) @ own["attn.attn_resid.weight"].T
        x_TE = x_TE + y_TE * own["attn_gain.a_g"]
        y_TE = mlp(own, "mlp", normed(x_TE), ("mlp_gate", "mlp_linear", "mlp_resid"))
        x_TE = x_TE + y_TE * own["mlp_gain.a_g"] + first_TE * own["embed_skip.a_g"]
    return normed(x_TE) @ weights["lm_head"].T * weights["lm_head_gain.w_g"]


MAINCODER = named(
    "Maincoder",
    **{"head_dim": D, "num_key_value_heads": 2, "rope_theta": 500.0, "intermediate_size": 40},
    **{"intermediate_size_mlp": INNER, "use_qk_norm": True, "tie_word_embeddings": True},
)


def maincoder_tensors(config: Config) -> Tensors:
    shapes = llama_shapes(2, mlp="feed_forward", head=False)
    norms = [f"model.layers.{i}.self_attn.{one}_norm.weight" for i in range(LAYERS) for one in "qk"]
    return random_tensors(shapes | dict.fromkeys(norms, (D,)))


def maincoder_logits(config: Config, weights: Tensors, row: list[int]) -> torch.Tensor:
    """Neighbouring dimensions turn, and then queries and keys are normed."""

    def attention(own: Tensors, h_TE: torch.Tensor) -> torch.Tensor:
        q, k, v = projected(own, h_TE)
        q, k = (
            norm(in_pairs(x, 500.0), own[f"self_attn.{one}_norm.weight"], 1e-5)
            for x, one in ((q, "q"), (k, "k"))
        )
        return attended(q, k, v) @ own["self_attn.o_proj.weight"].T

    x_TE = weights["model.embed_tokens.weight"][row]
    for layer in range(LAYERS):
        x_TE = llama_layer(
            of_layer(weights, f"model.layers.{layer}."), x_TE, attention, "feed_forward"
        )
    return headed(weights, x_TE, "model.embed_tokens.weight")


SOLAR = named(
    "Solar",
    **{"num_key_value_heads": 2, "rope_theta": 500.0, "bskcn_1": [0, 1], "bskcn_2": [1]},
    **{"bskcn_3": [1], "bskcn_4": [2], "bskcn_tv": [0.9, 0.3], "sliding_window": 12},
)


def solar_logits(config: Config, weights: Tensors, row: list[int]) -> torch.Tensor:
    """The residual before some layers is kept, and mixed into that before others."""

    def attention(own: Tensors, h_TE: torch.Tensor) -> torch.Tensor:
        q, k, v = projected(own, h_TE)
        return attended(rotated(q, 500.0), rotated(k, 500.0), v) @ own["self_attn.o_proj.weight"].T

    x_TE, share = weights["model.embed_tokens.weight"][row], config["bskcn_tv"][1]
    kept: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        for slot in ("1", "2"):
            if layer in config[f"bskcn_{slot}"]:
                kept[slot] = x_TE
        for slot, key in (("1", "bskcn_3"), ("2", "bskcn_4")):
            if layer in config[key]:
                x_TE = share * kept[slot] + (1 - share) * x_TE
        x_TE = llama_layer(of_layer(weights, f"model.layers.{layer}."), x_TE, attention)
    return headed(weights, x_TE)


STEP_1: Config = {
    **{key: value for key, value in SHARED.items() if key != "max_position_embeddings"},
    **{"architectures": ["Step1ForCausalLM"], "num_attention_groups": 2, "max_seq_len": 128},
}


def step1_logits(config: Config, weights: Tensors, row: list[int]) -> torch.Tensor:
    """Scores fall with the square root of the distance."""
    far = distances(len(row)).sqrt()

    def attention(own: Tensors, h_TE: torch.Tensor) -> torch.Tensor:
        y_TX = attended(*projected(own, h_TE), change=lambda scores: scores - SLOPES * far)
        return y_TX @ own["self_attn.o_proj.weight"].T

    x_TE = weights["model.embed_tokens.weight"][row]
    for layer in range(LAYERS):
        x_TE = llama_layer(of_layer(weights, f"model.layers.{layer}."), x_TE, attention)
    return headed(weights, x_TE)


LOOPED = named(
    "IQuestLoopCoder",
    **{"num_key_value_heads": 2, "rope_theta": 500.0, "loop_num": 3, "loop_window_size": 6},
)


def looped_tensors(config: Config) -> Tensors:
    gates = {f"model.gate_projections.{layer}.weight": (H, D) for layer in range(LAYERS)}
    gates |= {f"model.gate_projections.{layer}.bias": (H,) for layer in range(LAYERS)}
    return random_tensors(llama_shapes(2) | gates)


def looped_logits(config: Config, weights: Tensors, row: list[int]) -> torch.Tensor:
    """All layers run several times; later ones see the first one's keys, and a window of their own, by a gate."""
    first: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    x_TE, near = (
        weights["model.embed_tokens.weight"][row],
        window(len(row), config["loop_window_size"]),
    )
    for time in range(config["loop_num"]):
        for layer in range(LAYERS):

            def attention(
                own: Tensors, h_TE: torch.Tensor, layer: int = layer, time: int = time
            ) -> torch.Tensor:
                q, k, v = projected(own, h_TE)
                q, k = rotated(q, 500.0), rotated(k, 500.0)
                first.setdefault(layer, (k, v))
                y_TX = attended(q, *first[layer])
                if time:
                    gate = weights[f"model.gate_projections.{layer}.weight"]
                    share = (q * gate).sum(-1) + weights[f"model.gate_projections.{layer}.bias"]
                    share = share.sigmoid().repeat_interleave(D, 1)
                    y_TX = share * y_TX + (1 - share) * attended(q, k, v, sees_HTT=near)
                return y_TX @ own["self_attn.o_proj.weight"].T

            x_TE = llama_layer(of_layer(weights, f"model.layers.{layer}."), x_TE, attention)
    return headed(weights, x_TE)


RNJ_1 = named(
    "Rnj1",
    **{"head_dim": D, "num_key_value_heads": 2, "query_pre_attn_scalar": 12, "sliding_window": 5},
    **{"hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 20.0},
    layer_types=["chunked_attention", "full_attention", "chunked_attention"],
    rope_parameters={
        "chunked_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
    },
)


def rnj1_tensors(config: Config) -> Tensors:
    shapes = llama_shapes(2)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{side}_feedforward_layernorm.weight": (E,) for side in ("pre", "post")}
        shapes |= {f"{at}.self_attn.{one}_norm.weight": (D,) for one in "qk"}
    made = random_tensors(shapes)
    return {name: one - 1 if "norm" in name else one for name, one in made.items()}


def rnj1_logits(config: Config, weights: Tensors, row: list[int]) -> torch.Tensor:
    """Gemma 3's layers; some see their own chunk of positions and the one before."""
    eps, size = config["rms_norm_eps"], config["sliding_window"]
    chunk = torch.arange(len(row)) // size
    near = chunk[:, None] - chunk[None] < 2

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")

    x_TE = weights["model.embed_tokens.weight"][row] * E**0.5
    for layer, kind in enumerate(config["layer_types"]):
        own = of_layer(weights, f"model.layers.{layer}.")
        normed = {
            name.removesuffix("_layernorm.weight"): partial(norm, weight=one + 1, eps=eps)
            for name, one in own.items()
            if name.endswith("_layernorm.weight")
        }
        q, k, v = projected(own, normed["input"](x_TE))
        q, k = (
            rotated(
                norm(x, own[f"self_attn.{one}_norm.weight"] + 1, eps),
                config["rope_parameters"][kind]["rope_theta"],
            )
            for x, one in ((q, "q"), (k, "k"))
        )
        sees = near if kind == "chunked_attention" else None
        scale = config["query_pre_attn_scalar"] ** -0.5
        y_TX = attended(q, k, v, scale=scale, sees_HTT=sees)
        x_TE = x_TE + normed["post_attention"](y_TX @ own["self_attn.o_proj.weight"].T)
        y_TE = mlp(own, "mlp", normed["pre_feedforward"](x_TE), act=gelu)
        x_TE = x_TE + normed["post_feedforward"](y_TE)
    y_TV = norm(x_TE, weights["model.norm.weight"] + 1, eps) @ weights["lm_head.weight"].T
    return 20 * (y_TV / 20).tanh()


RUGPT_3_XL = named(
    "RuGPT3XL",
    **{"hidden_act": "gelu", "layer_norm_eps": 1e-5, "tie_word_embeddings": True},
    **{"sparse_mode": "alternating", "sparse_block_size": 2, "sparse_num_local_blocks": 4},
    **{"sparse_num_global_blocks": 1, "sparse_num_different_global_patterns": 3},
)
WIDE: Config = {
    **{**RUGPT_3_XL, "sparse_mode": "all", "sparse_num_global_blocks": 2},
    **{"sparse_num_different_global_patterns": 2, "hidden_act": "gelu_new"},
}


def rugpt_tensors(config: Config) -> Tensors:
    matrices = {f"self_attn.{one}_proj": (E, E) for one in "qkvo"}
    matrices |= {"mlp.up_proj": (INNER, E), "mlp.down_proj": (E, INNER)}
    norms = {"input_layernorm": (E,), "post_attention_layernorm": (E,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, E)}
    shapes |= {"model.embed_positions.weight": (128, E), "model.norm.weight": (E,)}
    for layer in range(LAYERS):
        for name, shape in (matrices | norms).items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    return random_tensors(shapes | {"model.norm.bias": (E,)})


def fixed_layout(config: Config, tokens: int) -> torch.Tensor:
    """[H, T, T]: a query sees its own group of blocks, and a few blocks of every group, others for each head."""
    group, wide = config["sparse_num_local_blocks"], config["sparse_num_global_blocks"]
    sees = torch.zeros(H, tokens, tokens, dtype=torch.bool)
    for head in range(H):
        turn = head % config["sparse_num_different_global_patterns"]
        first = group - (turn + 1) * wide
        for query in range(tokens):
            for key in range(query + 1):
                at, to = (place // config["sparse_block_size"] for place in (query, key))
                within = first <= to % group < first + wide
                sees[head, query, key] = at // group == to // group or within
    return sees


def rugpt_logits(config: Config, weights: Tensors, row: list[int]) -> torch.Tensor:
    """Layer norms, learned positions, biases; layers see all or by blocks in turn."""
    table = weights["model.embed_tokens.weight"]
    x_TE = table[row] + weights["model.embed_positions.weight"][: len(row)]
    fixed = fixed_layout(config, len(row))
    rounded = "tanh" if config["hidden_act"] == "gelu_new" else "none"
    for layer in range(LAYERS):
        own = of_layer(weights, f"model.layers.{layer}.")

        def linear(name: str, x: torch.Tensor, own: Tensors = own) -> torch.Tensor:
            return F.linear(x, own[f"{name}.weight"], own[f"{name}.bias"])

        def normed(name: str, x: torch.Tensor, own: Tensors = own) -> torch.Tensor:
            return F.layer_norm(x, (E,), own[f"{name}.weight"], own[f"{name}.bias"], 1e-5)

        h_TE = normed("input_layernorm", x_TE)
        q, k, v = (linear(f"self_attn.{one}_proj", h_TE).unflatten(1, (H, D)) for one in "qkv")
        whole = config["sparse_mode"] == "alternating" and layer % 2
        y_TX = attended(q, k, v, sees_HTT=None if whole else fixed)
        x_TE = x_TE + linear("self_attn.o_proj", y_TX)
        inner = linear("mlp.up_proj", normed("post_attention_layernorm", x_TE))
        x_TE = x_TE + linear("mlp.down_proj", F.gelu(inner, approximate=rounded))
    last = F.layer_norm(x_TE, (E,), weights["model.norm.weight"], weights["model.norm.bias"], 1e-5)
    return last @ table.T


def of_llama(config: Config) -> Tensors:
    return random_tensors(llama_shapes(2))


SMALL: dict[str, tuple[SmallDecoder, Config]] = {
    "plamo": (SmallDecoder(plamo_tensors, plamo_logits), PLAMO),
    "plm": (SmallDecoder(plm_tensors, plm_logits), PLM),
    "refact": (SmallDecoder(refact_tensors, refact_logits), REFACT),
    "talkie": (SmallDecoder(talkie_tensors, talkie_logits), TALKIE),
    "maincoder": (SmallDecoder(maincoder_tensors, maincoder_logits), MAINCODER),
    "solar": (SmallDecoder(of_llama, solar_logits), SOLAR),
    "iquest-loop": (SmallDecoder(looped_tensors, looped_logits), LOOPED),
    "rnj-1": (SmallDecoder(rnj1_tensors, rnj1_logits), RNJ_1),
    "rugpt-3-xl": (SmallDecoder(rugpt_tensors, rugpt_logits), RUGPT_3_XL),
    "rugpt-3-xl-wide": (SmallDecoder(rugpt_tensors, rugpt_logits), WIDE),
    "step-1": (SmallDecoder(of_llama, step1_logits), STEP_1),
}

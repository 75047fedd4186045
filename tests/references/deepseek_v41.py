"""DeepSeek V4.1, written from what is published of Flash's config and of its inference: layers 2 and up of the small
model share entries of two or one tokens, some choose among them, those behind layer 4 within its best blocks; n-grams
are added to the streams of layers 1 and 3; branches read the streams by weights of the branch before. One row, whole.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.references.plain import Shapes, Tensors, norm, of_layer, random_tensors, weighed

STREAMS, DIM, ROTARY, HEADS, GROUPS, RANK = 3, 16, 8, 4, 2, 6
TEXT: dict[str, Any] = {
    **{"model_type": "deepseek_v41_text", "vocab_size": 97, "hidden_size": 48, "head_dim": DIM},
    **{"num_hidden_layers": 7, "num_attention_heads": HEADS, "num_key_value_heads": 1},
    **{"q_lora_rank": 24, "o_groups": GROUPS, "o_lora_rank": RANK, "qk_rope_head_dim": ROTARY},
    **{"moe_intermediate_size": 20, "n_routed_experts": 5, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus"},
    **{"swiglu_limit": 0.6, "sliding_window": 5, "rms_norm_eps": 1e-20},
    **{"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 0], "kv_source_layer_ids": [1, 4]},
    **{"index_source_layer_ids": [1, 3, 4, 5], "index_n_heads": 2, "index_head_dim": 12},
    **{"index_topk": 3, "candidate_source_layer_id": 4, "candidate_topk_blocks": 3},
    **{"candidate_block_size": 2, "max_position_embeddings": 128, "rope_theta": 500.0},
    **{"compress_rope_theta": 2000.0, "tie_word_embeddings": False},
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 4, "beta_fast": 4, "beta_slow": 1},
        "original_max_position_embeddings": 32,
    },
    **{"hc_mult": STREAMS, "hc_eps": 1e-6, "hc_sinkhorn_iters": 4, "engram_layer_ids": [1, 3]},
    **{"engram_num_embeddings": [280, 440], "engram_vocab_size": 36, "engram_max_ngram_size": 3},
    **{"engram_n_heads": 3, "engram_head_dim": 8, "engram_compressed_vocab_size": 41},
    **{"engram_pad_token_id": 2, "engram_token_classes": [i * 7 % 41 for i in range(97)]},
}
CONFIG: dict[str, Any] = {
    **{"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"},
    **{"text_config": TEXT, "vision_config": {"num_hidden_layers": 1, "hidden_size": 8}},
}


def tensors(config: dict[str, Any]) -> Tensors:
    """A random checkpoint under its published names."""
    text = config["text_config"]
    width, inner, rank = text["hidden_size"], text["moe_intermediate_size"], text["q_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (97, width),
        "head.weight": (97, width),
        "norm.weight": (width,),
        "vision.patch_embed.weight": (8, 8),
        "image_start": (width,),
    }
    for i in range(text["num_hidden_layers"]):
        own = {**_attention_shapes(text, i, width, rank), **_expert_shapes(text, width, inner)}
        mixes = (2 + STREAMS) * STREAMS
        for part in ("attn", "ffn"):
            own[f"{part}_norm.weight"] = (width,)
            own[f"hc_{part}_fn"] = (mixes, STREAMS * width)
            own |= {f"hc_{part}_base": (mixes,), f"hc_{part}_scale": (3,)}
        if i in text["engram_layer_ids"]:
            rows = text["engram_num_embeddings"][text["engram_layer_ids"].index(i)]
            inputs = 2 * text["engram_n_heads"] * text["engram_head_dim"]
            own["engram.embed.weight"] = (rows, text["engram_head_dim"])
            own["engram.wkv.weight"] = ((STREAMS + 1) * width, inputs)
            own |= {f"engram.{one}_weight": (STREAMS, width) for one in "qk"}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
    made = random_tensors(shapes)
    for name in made:
        if name.endswith("_scale"):
            made[name] = made[name] + 1.0
        elif name.endswith(("q_weight", "k_weight", "embed.weight")):
            made[name] = made[name] * made[name].shape[1] ** 0.5
    return made


def _attention_shapes(text: dict[str, Any], i: int, width: int, rank: int) -> Shapes:
    heads, dim = text["index_n_heads"], text["index_head_dim"]
    own: dict[str, tuple[int, ...]] = {
        "attn.wq_a.weight": (rank, width),
        "attn.q_norm.weight": (rank,),
        "attn.wq_b.weight": (HEADS * DIM, rank),
        "attn.wkv.weight": (DIM, width),
        "attn.kv_norm.weight": (DIM,),
        "attn.attn_sink": (HEADS,),
        "attn.wo_a.weight": (GROUPS * RANK, HEADS * DIM // GROUPS),
        "attn.wo_b.weight": (width, GROUPS * RANK),
    }
    if i in text["kv_source_layer_ids"]:
        own |= {"attn.compressor.wkv.weight": (DIM, width), "attn.compressor.norm.weight": (DIM,)}
        own |= {"attn.indexer.wk.weight": (dim, DIM), "attn.indexer.k_norm.weight": (dim,)}
        if text["compress_ratios"][i] > 1:
            own["attn.compressor.wgate.weight"] = (DIM, width)
    if i in text["index_source_layer_ids"]:
        own["attn.indexer.wq_b.weight"] = (heads * dim, rank)
        own["attn.indexer.weights_proj.weight"] = (heads, width)
    return own


def _expert_shapes(text: dict[str, Any], width: int, inner: int) -> Shapes:
    count = text["n_routed_experts"]
    own: dict[str, tuple[int, ...]] = {"ffn.gate.weight": (count, width)}
    own |= {"ffn.gate.bias": (count,), "ffn.gate.bias_vl": (count,)}
    for name in ("shared_experts", *(f"experts.{x}" for x in range(count))):
        own |= {f"ffn.{name}.{one}.weight": (inner, width) for one in ("w1", "w3")}
        own[f"ffn.{name}.w2.weight"] = (width, inner)
    return own


def logits(config: dict[str, Any], weights: Tensors, row: list[int]) -> torch.Tensor:
    """Of every position of a row, [T, V]."""
    text, ids = config["text_config"], torch.tensor(row)
    x_TSE = weights["embed.weight"][ids][:, None].expand(-1, STREAMS, -1)
    pre_TS = torch.eye(STREAMS, dtype=x_TSE.dtype)[0].expand(len(row), -1)
    shared: dict[str, torch.Tensor] = {}
    for i in range(text["num_hidden_layers"]):
        own = of_layer(weights, f"layers.{i}.")
        if i in text["engram_layer_ids"]:
            x_TSE = x_TSE + remembered(text, own, i, row, x_TSE)
        for part in ("attn", "ffn"):
            next_TS, post_TS, mix_TSS = stream_weights(text, own, part, x_TSE)
            read_TE = torch.einsum("ts,tse->te", pre_TS, x_TSE)
            read_TE = norm(read_TE, own[f"{part}_norm.weight"], 1e-20)
            if part == "attn":
                y_TE = attention(text, own, i, read_TE, shared)
            else:
                y_TE = experts(text, own, read_TE)
            x_TSE = post_TS[..., None] * y_TE[:, None] + torch.einsum(
                "tjk,tje->tke", mix_TSS, x_TSE
            )
            pre_TS = next_TS
    x_TE = norm(torch.einsum("ts,tse->te", pre_TS, x_TSE), weights["norm.weight"], 1e-20)
    return x_TE @ weights["head.weight"].T


def stream_weights(
    text: dict[str, Any], own: Tensors, part: str, x_TSE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the next branch's inputs, of this one's results, and the streams' mixture."""
    eps = text["hc_eps"]
    raw = norm(x_TSE.flatten(1), 1.0, 1e-20) @ own[f"hc_{part}_fn"].T
    base, scale = own[f"hc_{part}_base"], own[f"hc_{part}_scale"]
    pre, post, mix = raw.split([STREAMS, STREAMS, STREAMS**2], 1)
    b_pre, b_post, b_mix = base.split([STREAMS, STREAMS, STREAMS**2])
    mix = (mix * scale[2] + b_mix).unflatten(1, (STREAMS, STREAMS)).softmax(-1) + eps
    for turn in range(text["hc_sinkhorn_iters"]):
        if turn:
            mix = mix / (mix.sum(2, keepdim=True) + eps)
        mix = mix / (mix.sum(1, keepdim=True) + eps)
    pre = (pre * scale[0] + b_pre).sigmoid() + eps
    return pre, 2 * (post * scale[1] + b_post).sigmoid(), mix


def remembered(
    text: dict[str, Any], own: Tensors, layer: int, row: list[int], x_TSE: torch.Tensor
) -> torch.Tensor:
    """What the table of n-grams adds to the streams."""
    classes, count = text["engram_token_classes"], text["engram_compressed_vocab_size"]
    longest, heads = text["engram_max_ngram_size"], text["engram_n_heads"]
    bound = (2**63 - 1) // count // 2
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=(longest,), dtype=np.int64)
    factors = [2 * int(one) + 1 for one in drawn]
    sizes: list[int] = []
    number = text["engram_vocab_size"] - 1
    while len(sizes) < 2 * (longest - 1) * heads:
        number += 1
        if all(number % one for one in range(2, number)):
            sizes.append(number)
    each = (longest - 1) * heads
    at = text["engram_layer_ids"].index(layer)
    sizes = sizes[at * each : (at + 1) * each]
    rows = []
    for place in range(len(row)):
        seen = [
            classes[row[place - back]] if back <= place else classes[2] for back in range(longest)
        ]
        mixed, of_token = seen[0] * factors[0], []
        for i in range(1, longest):
            mixed ^= seen[i] * factors[i]
            for size in range((i - 1) * heads, i * heads):
                of_token.append(mixed % sizes[size] + sum(sizes[:size]))
        rows.append(of_token)
    held = own["engram.embed.weight"][torch.tensor(rows)].flatten(1) @ own["engram.wkv.weight"].T
    width = x_TSE.shape[2]
    key_TSE, value_TE = held[:, : STREAMS * width].unflatten(1, (STREAMS, width)), held[:, -width:]
    query_TSE = norm(x_TSE, own["engram.q_weight"], 1e-20)
    met_TS = (query_TSE * norm(key_TSE, own["engram.k_weight"], 1e-20)).sum(2) / math.sqrt(width)
    gate_TS = (met_TS.abs().clamp(min=1e-6).sqrt() * met_TS.sign()).sigmoid()
    return gate_TS[..., None] * value_TE[:, None]


def turned(
    x_THD: torch.Tensor, at_T: torch.Tensor, text: dict[str, Any], *, wide: bool, back: bool = False
) -> torch.Tensor:
    """The last ROTARY dimensions, neighbours as pairs; `wide`: by the base and scaling of layers with entries."""
    base = text["compress_rope_theta"] if wide else text["rope_theta"]
    speed = base ** (-torch.arange(0, ROTARY, 2).double() / ROTARY)
    if wide:
        scaling = text["rope_scaling"]
        length = scaling["original_max_position_embeddings"]

        def turns(count: float) -> float:
            return ROTARY * math.log(length / (count * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(turns(scaling["beta_fast"])), 0)
        high = min(math.ceil(turns(scaling["beta_slow"])), ROTARY - 1)
        ramp = ((torch.arange(ROTARY // 2).double() - low) / max(high - low, 0.001)).clamp(0, 1)
        speed = speed / scaling["factor"] * ramp + speed * (1 - ramp)
    angle = at_T.double()[:, None, None] * speed * (-1 if back else 1)
    pairs = x_THD[..., -ROTARY:].double().unflatten(-1, (-1, 2))
    turned_pairs = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones_like(angle), angle
    )
    last = torch.view_as_real(turned_pairs).flatten(-2).to(x_THD.dtype)
    return torch.cat((x_THD[..., :-ROTARY], last), -1)


def attention(
    text: dict[str, Any], own: Tensors, i: int, x_TE: torch.Tensor, shared: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Over a window, and over the entries that are chosen."""
    tokens, ratio = len(x_TE), text["compress_ratios"][i]
    place_T, wide = torch.arange(tokens), bool(ratio)
    low_TX = norm(x_TE @ own["attn.wq_a.weight"].T, own["attn.q_norm.weight"], 1e-20)
    q_THD = turned(
        (low_TX @ own["attn.wq_b.weight"].T).unflatten(1, (HEADS, DIM)), place_T, text, wide=wide
    )
    kv_TD = norm(x_TE @ own["attn.wkv.weight"].T, own["attn.kv_norm.weight"], 1e-20)
    read_SD = turned(kv_TD[:, None], place_T, text, wide=wide)[:, 0]
    behind = place_T[:, None] - place_T
    sees_TS = (behind >= 0) & (behind < text["sliding_window"])
    if ratio:
        choose(text, own, i, x_TE, low_TX, shared)
        read_SD = torch.cat((read_SD, shared["entries"]))
        sees_TS = torch.cat((sees_TS, shared["chosen"]), 1)
    scores = torch.einsum("thd,sd->hts", q_THD, read_SD) / math.sqrt(DIM)
    scores = scores.masked_fill(~sees_TS, -math.inf)
    sink = own["attn.attn_sink"][:, None, None].expand(-1, tokens, 1)
    share = torch.cat((scores, sink), 2).softmax(2)[..., :-1]
    y_THD = turned(torch.einsum("hts,sd->thd", share, read_SD), place_T, text, wide=wide, back=True)
    y_TGX = y_THD.flatten(1).unflatten(1, (GROUPS, -1))
    inner = torch.einsum(
        "tgx,grx->tgr", y_TGX, own["attn.wo_a.weight"].unflatten(0, (GROUPS, RANK))
    )
    return inner.flatten(1) @ own["attn.wo_b.weight"].T


def choose(
    text: dict[str, Any],
    own: Tensors,
    i: int,
    x_TE: torch.Tensor,
    low_TX: torch.Tensor,
    shared: dict[str, torch.Tensor],
) -> None:
    """Makes the entries of a group of layers, and what they read of them, where this layer does."""
    tokens, ratio = len(x_TE), text["compress_ratios"][i]
    count, heads = tokens // ratio, text["index_n_heads"]
    first_S = torch.arange(count) * ratio
    if i in text["kv_source_layer_ids"]:
        latent_TD = x_TE @ own["attn.compressor.wkv.weight"].T
        if ratio > 1:
            gate_TD = x_TE @ own["attn.compressor.wgate.weight"].T
            both = (
                one[: count * ratio].unflatten(0, (count, ratio)) for one in (latent_TD, gate_TD)
            )
            value, gate = both
            latent_TD = (value * gate.softmax(1)).sum(1)
        latent_SD = norm(latent_TD, own["attn.compressor.norm.weight"], 1e-20)
        shared["entries"] = turned(latent_SD[:, None], first_S, text, wide=True)[:, 0]
        key = norm(
            latent_SD @ own["attn.indexer.wk.weight"].T, own["attn.indexer.k_norm.weight"], 1e-20
        )
        shared["keys"] = turned(key[:, None], first_S, text, wide=True)[:, 0]
    if i not in text["index_source_layer_ids"]:
        return
    q_TJI = (low_TX @ own["attn.indexer.wq_b.weight"].T).unflatten(1, (heads, -1))
    q_TJI = turned(q_TJI, torch.arange(tokens), text, wide=True)
    weight_TJ = x_TE @ own["attn.indexer.weights_proj.weight"].T
    met_TJS = torch.einsum("tji,si->tjs", q_TJI, shared["keys"]).relu()
    score_TS = (weight_TJ[..., None] * met_TJS).sum(1)
    seen_T1 = (torch.arange(tokens)[:, None] + 1) // ratio
    open_TS = torch.arange(count) < seen_T1
    chosen_TS = torch.zeros_like(open_TS)
    for token in range(tokens):
        scores = {s: score_TS[token, s].item() for s in range(count) if open_TS[token, s]}
        if 0 <= text["candidate_source_layer_id"] < i:
            scores = {s: value for s, value in scores.items() if shared["within"][token, s]}
        best = sorted(scores, key=lambda s: -scores[s])[: text["index_topk"]]
        chosen_TS[token, best] = True
    shared["chosen"] = chosen_TS
    if i == text["candidate_source_layer_id"]:
        shared["within"] = blocks_of(text, score_TS, open_TS)


def blocks_of(text: dict[str, Any], score_TS: torch.Tensor, open_TS: torch.Tensor) -> torch.Tensor:
    """[T, S]: the entries of the best blocks of each token, its newest among them."""
    size, most = text["candidate_block_size"], text["candidate_topk_blocks"]
    within = torch.zeros_like(open_TS)
    for token, is_open in enumerate(open_TS.tolist()):
        count = sum(is_open)
        score = {
            block: max(score_TS[token, block * size : min((block + 1) * size, count)].tolist())
            for block in range(-(-count // size))
        }
        score |= {(count - 1) // size: math.inf} if count else {}
        for block in sorted(score, key=lambda one: -score[one])[:most]:
            within[token, block * size : (block + 1) * size] = True
    return within


def experts(text: dict[str, Any], own: Tensors, x_TE: torch.Tensor) -> torch.Tensor:
    """Two of five, and one that all take."""

    def expert(name: str) -> torch.Tensor:
        limit = text["swiglu_limit"]
        gate, up = (x_TE @ own[f"ffn.{name}.{one}.weight"].T for one in ("w1", "w3"))
        return (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)) @ own[
            f"ffn.{name}.w2.weight"
        ].T

    score_TX = F.softplus(x_TE @ own["ffn.gate.weight"].T).sqrt()
    chosen = (score_TX + own["ffn.gate.bias"]).topk(text["num_experts_per_tok"], -1).indices
    weight_TX = torch.zeros_like(score_TX).scatter(1, chosen, score_TX.gather(1, chosen))
    weight_TX = weight_TX / weight_TX.sum(-1, keepdim=True) * text["routed_scaling_factor"]
    return weighed(weight_TX, lambda x: expert(f"experts.{x}")) + expert("shared_experts")

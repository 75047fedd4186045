"""How the tensors of each GGUF architecture are named and ordered, against those of transformers: a
row for each (base/config/gguf_config.py has what their metadata mean).

Sources: gguf.tensor_mapping of the `gguf` library for names, and llama.cpp's converters for the
order of rows.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from headrace.back.models.load import gguf_experts, gguf_published, gguf_rwkv
from headrace.back.models.load import gguf_names as names
from headrace.back.models.load.gguf_dialect import Dialect, Joined
from headrace.back.models.load.gguf_heads import GroupedHeads, ValueHeads

_GRANITE_SHARED = Joined(
    name="shared_mlp.input_linear.weight", parts=("ffn_gate_shexp", "ffn_up_shexp")
)
_GRANITE_MLP = Joined(name="shared_mlp.input_linear.weight", parts=("ffn_gate", "ffn_up"))


def _t5(*, gated: bool) -> Dialect:
    encoder = names.T5_ATTENTION | names.t5_mlp("layer.1", gated=gated)
    decoder = names.T5_ATTENTION | names.T5_CROSS | names.t5_mlp("layer.2", gated=gated)
    return Dialect(
        blocks={},
        top=names.T5_TOP,
        further=(
            (r"enc\.blk", "encoder.block", encoder),
            (r"dec\.blk", "decoder.block", decoder),
        ),
    )


def dialect_of(name: str, tensors: Container[str]) -> Dialect:
    """That of a file of this architecture with these tensors: classifiers have parts of their own,
    T5's MLPs with a gate other names,
    Falcons with two norms too."""
    if "cls.output.weight" in tensors and name in CLASSIFIERS:
        return CLASSIFIERS[name]
    if name in ("t5", "t5encoder") and "enc.blk.0.ffn_gate.weight" in tensors:
        return GATED_T5
    if name == "jina-bert-v2" and "blk.0.ffn_gate.weight" in tensors:
        return replace(DIALECTS[name], blocks=names.JINA | names.JINA_GATED)
    if name == "falcon" and "blk.0.attn_norm_2.weight" in tensors:
        return TWO_NORMED_FALCON
    if name == "chatglm" and "blk.0.attn_q.weight" in tensors:
        return gguf_published.SEPARATE_GLM
    return DIALECTS[name]


DIALECTS: Mapping[str, Dialect] = {
    "llama": Dialect(blocks=names.MIXTRAL, interleaved=True),
    "qwen2moe": Dialect(blocks=names.MIXTURE),
    "qwen3moe": Dialect(blocks=names.MIXTURE),
    "olmoe": Dialect(blocks=names.MIXTURE),
    "gpt-oss": Dialect(blocks=names.GPT_OSS),
    "qwen3next": Dialect(blocks=names.MIXTURE | names.DELTA, added=names.PLUS_ONE),
    "qwen35": Dialect(
        blocks=names.BLOCK | names.DELTA, added=names.PLUS_ONE, order=ValueHeads, drafts=True
    ),
    "qwen35moe": Dialect(
        blocks=names.MIXTURE | names.DELTA, added=names.PLUS_ONE, order=ValueHeads, drafts=True
    ),
    "qwen3vl": Dialect(blocks=names.BLOCK),
    "qwen3vlmoe": Dialect(blocks=names.MIXTURE),
    "qwen2": Dialect(blocks=names.BLOCK),
    "qwen2vl": Dialect(blocks=names.BLOCK),
    "qwen3": Dialect(blocks=names.BLOCK),
    "gemma2": Dialect(blocks=names.SANDWICH, added=names.PLUS_ONE),
    "gemma3": Dialect(blocks=names.SANDWICH, added=names.PLUS_ONE),
    "phi3": Dialect(blocks=names.FUSED_MLP),
    "olmo2": Dialect(blocks=names.SANDWICH),
    "granite": Dialect(blocks=names.BLOCK, interleaved=True),
    "smollm3": Dialect(blocks=names.BLOCK, interleaved=True),
    "gemma": Dialect(blocks=names.BLOCK, added=names.PLUS_ONE),
    "glm4": Dialect(blocks=names.GLM4),
    "seed_oss": Dialect(blocks=names.BEHIND),
    "exaone": Dialect(blocks=names.BLOCK),
    "exaone4": Dialect(blocks=names.SANDWICH),
    "internlm2": Dialect(blocks=names.BLOCK, interleaved=True),
    "starcoder2": Dialect(blocks={**names.BLOCK, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "stablelm": Dialect(blocks=names.BLOCK),
    "command-r": Dialect(blocks=names.BLOCK),
    "cohere2": Dialect(blocks=names.BLOCK),
    "nemotron": Dialect(blocks=names.BLOCK, added=names.PLUS_ONE),
    "arcee": Dialect(blocks=names.BLOCK, interleaved=True),
    "olmo": Dialect(blocks=names.BLOCK, interleaved=True),
    "phi2": Dialect(
        blocks=names.PLAIN_MLP, top=names.TOP | {"output_norm": "model.final_layernorm"}
    ),
    "ernie4_5": Dialect(blocks=names.BLOCK),
    "ernie4_5-moe": Dialect(
        blocks=names.ROUTED | {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias."}
    ),
    "hunyuan-dense": Dialect(blocks=names.HUNYUAN),
    "hunyuan-moe": Dialect(
        blocks=names.MIXTURE | names.HUNYUAN | names.SHARED_MLP | {"ffn_gate_inp": "mlp.gate.wg"}
    ),
    "lfm2": Dialect(blocks=names.LFM2, top=names.LFM2_TOP),
    "lfm2moe": Dialect(blocks=names.LFM2, top=names.LFM2_TOP),
    "glm4moe": Dialect(
        blocks=names.ROUTED | {"post_attention_norm": "post_attention_layernorm"}, drafts=True
    ),
    "dots1": Dialect(blocks=names.ROUTED),
    "minimax-m2": Dialect(
        blocks=names.MIXTRAL | {"exp_probs_b": "block_sparse_moe.e_score_correction_bias."}
    ),
    "deepseek2": Dialect(blocks=names.ROUTED | names.LATENT, joined=gguf_experts.LATENTS),
    "mistral4": Dialect(
        blocks=names.ROUTED
        | names.LATENT
        | {
            "ffn_gate_up_exps": "mlp.experts.gate_up_proj.",
            "ffn_down_exps": "mlp.experts.down_proj.",
        },
        joined=gguf_experts.LATENTS,
    ),
    "minicpm3": Dialect(blocks=names.BLOCK | names.LATENT),
    "apertus": Dialect(
        blocks=names.BLOCK
        | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        stated={
            f"xielu.{one}": f"model.layers.{{}}.mlp.act_fn.{one}"
            for one in ("alpha_p", "alpha_n", "beta", "eps")
        },
    ),
    "gptj": Dialect(
        blocks={
            **{name: f"attn.{name[-1]}_proj" for name in ("attn_q", "attn_k", "attn_v")},
            **{"attn_norm": "ln_1", "attn_output": "attn.out_proj"},
            **{"ffn_up": "mlp.fc_in", "ffn_down": "mlp.fc_out"},
        },
        layers="transformer.h",
        top=names.GPT_2_TOP,
    ),
    "granitemoe": Dialect(blocks=names.GRANITE_MOE, interleaved=True, joined=(_GRANITE_SHARED,)),
    "granitehybrid": Dialect(
        blocks=names.GRANITE_MOE | names.MAMBA2 | {"ffn_down": "shared_mlp.output_linear"},
        interleaved=True,
        joined=(_GRANITE_SHARED, _GRANITE_MLP),
    ),
    "mistral3": Dialect(blocks=names.BLOCK, interleaved=True),
    "llama4": Dialect(blocks=names.LLAMA4),
    "gemma3n": Dialect(
        blocks=names.GEMMA3N,
        top=names.LAYER_INPUTS_TOP,
        stacked={
            "altup_proj.weight": "model.altup_projections.{}.weight",
            "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
        },
    ),
    "gemma4": Dialect(blocks=names.GEMMA4, top=names.LAYER_INPUTS_TOP),
    "mamba": Dialect(
        blocks=names.NORM | names.within("mixer", names.SCAN1),
        layers="backbone.layers",
        top=names.BACKBONE,
    ),
    "mamba2": Dialect(
        blocks=names.NORM | names.within("mixer", names.SCAN2),
        layers="backbone.layers",
        top=names.BACKBONE,
    ),
    "jamba": Dialect(blocks=names.JAMBA, top=names.FINAL),
    "falcon-h1": Dialect(
        blocks=names.LLAMA4 | names.within("mamba", names.SCAN2) | {"ffn_norm": "pre_ff_layernorm"},
        top=names.FINAL,
    ),
    "nemotron_h": Dialect(blocks=names.NEMOTRON_H, layers="backbone.layers", top=names.BACKBONE),
    "nemotron_h_moe": Dialect(
        blocks=names.NEMOTRON_H, layers="backbone.layers", top=names.BACKBONE, drafts=True
    ),
    "bert": Dialect(blocks=names.BERT, layers="encoder.layer", top=names.BERT_TOP),
    "nomic-bert": Dialect(
        blocks=names.NOMIC,
        layers="encoder.layers",
        top=names.BERT_TOP | {"token_embd_norm": "emb_ln"},
    ),
    "jina-bert-v2": Dialect(blocks=names.JINA, layers="encoder.layer", top=names.BERT_TOP),
    "jina-bert-v3": Dialect(
        blocks=names.JINA_V3,
        layers="encoder.layers",
        top=names.BERT_TOP | {"token_embd_norm": "emb_ln"},
    ),
    "neo-bert": Dialect(blocks=names.NEOBERT, layers="transformer_encoder", top=names.NEOBERT_TOP),
    "modern-bert": Dialect(blocks=names.MODERN_BERT, layers="layers", top=names.MODERN_BERT_TOP),
    "eurobert": Dialect(
        blocks=names.BLOCK,
        layers="layers",
        top={"token_embd": "embed_tokens", "output_norm": "norm"},
    ),
    **dict.fromkeys(("t5", "t5encoder"), _t5(gated=False)),
    "minicpm": Dialect(blocks=names.BLOCK, interleaved=True),
    "orion": Dialect(blocks=names.BLOCK),
    "jais2": Dialect(blocks=names.BLOCK),
    "falcon": Dialect(
        blocks=names.FALCON, layers="transformer.h", top=names.BLOOM_TOP, order=GroupedHeads
    ),
    "gptneox": Dialect(
        blocks=names.FALCON
        | {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"},
        layers="gpt_neox.layers",
        top=names.NEOX_TOP,
        order=GroupedHeads,
    ),
    "bloom": Dialect(
        blocks=names.FALCON, layers="transformer.h", top=names.BLOOM_TOP, order=GroupedHeads
    ),
    "gpt2": Dialect(blocks=names.GPT_2, layers="transformer.h", top=names.GPT_2_TOP),
    "starcoder": Dialect(blocks=names.GPT_2, layers="transformer.h", top=names.GPT_2_TOP),
    "mpt": Dialect(
        blocks=names.MPT,
        layers="transformer.blocks",
        top=names.GPT_2_TOP | {"output_norm": "transformer.norm_f"},
    ),
    "afmoe": Dialect(blocks=names.AFMOE),
    "exaone-moe": Dialect(
        blocks=names.ROUTED | {"exp_probs_b": "mlp.e_score_correction_bias."}, drafts=True
    ),
    "bailingmoe2": Dialect(
        blocks=names.LING,
        top=names.TOP | {"token_embd": "model.word_embeddings"},
        drafts=True,
    ),
    "phimoe": Dialect(blocks=names.MIXTRAL),
    **gguf_experts.DIALECTS,
    **gguf_published.DIALECTS,
    **gguf_rwkv.DIALECTS,
}
TWO_NORMED_FALCON = replace(
    DIALECTS["falcon"],
    blocks=names.FALCON | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
)
GATED_T5 = _t5(gated=True)
CLASSIFIERS: Mapping[str, Dialect] = {
    "bert": Dialect(
        blocks=names.BERT,
        layers="bert.encoder.layer",
        top={
            **names.within("bert", names.BERT_TOP),
            "cls": "bert.pooler.dense",
            "cls.output": "classifier",
        },
    ),
    "neo-bert": Dialect(
        blocks=names.NEOBERT,
        layers="model.transformer_encoder",
        top={
            **names.within("model", names.NEOBERT_TOP),
            "cls": "dense",
            "cls.output": "classifier",
        },
    ),
    "modern-bert": Dialect(
        blocks=names.MODERN_BERT,
        layers="model.layers",
        top={
            **names.within("model", names.MODERN_BERT_TOP),
            "cls": "head.dense",
            "cls.norm": "head.norm",
            "cls.output": "classifier",
        },
    ),
}
"""Of files with a classifier."""

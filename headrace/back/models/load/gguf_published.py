"""Dialects of GGUF files of models that were published with code of their own, and of embedders
that are decoders."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.back.models.load import gguf_names as names
from headrace.back.models.load.gguf_dialect import Dialect, Joined

CHATGLM = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
CHATGLM_TOP = {
    "token_embd": "transformer.embedding.word_embeddings",
    "output_norm": "transformer.encoder.final_layernorm",
    "output": "transformer.output_layer",
}
QWEN = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_gate": "mlp.w2",
    "ffn_up": "mlp.w1",
    "ffn_down": "mlp.c_proj",
}
NOMIC_EXPERTS = names.NOMIC | {
    "ffn_up": "mlp.fc1",
    "ffn_gate_inp": "mlp.router.layer",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
GROK = {
    **names.MIXTRAL,
    "attn_norm": "pre_attn_norm",
    "attn_output_norm": "post_attn_norm",
    "ffn_norm": "pre_moe_norm",
    "post_ffw_norm": "post_moe_norm",
    "layer_output_norm": "post_moe_norm",
}
ARCTIC = {
    **names.MIXTRAL,
    "ffn_norm_exps": "post_attention_layernorm",
    "ffn_norm": "residual_layernorm",
    "ffn_gate": "residual_mlp.w1",
    "ffn_up": "residual_mlp.w3",
    "ffn_down": "residual_mlp.w2",
}
BARE = {"token_embd": "embed_tokens", "output_norm": "norm"}

BITNET = names.BLOCK | {
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
}
TALKIE = {
    "attn_q": "attn.attn_query",
    "attn_k": "attn.attn_key",
    "attn_v": "attn.attn_value",
    "attn_output": "attn.attn_resid",
    "attn_output.scale": "attn_gain.a_g.",
    "attn_q_norm": "attn.head_gain.head_g.",
    "ffn_gate": "mlp.mlp_gate",
    "ffn_up": "mlp.mlp_linear",
    "ffn_down": "mlp.mlp_resid",
    "ffn_down.scale": "mlp_gain.a_g.",
    "layer_output_scale": "embed_skip.a_g.",
}
REFACT = {
    "attn_norm": "ln_1",
    "attn_q": "attn.q",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_down": "mlp.c_proj",
}
GATE_UP = ("ffn_gate", "ffn_up")
OPENELM = {
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.qkv_proj",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
    "attn_output": "attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_down": "ffn.proj_2",
}
PLAMO3 = {
    "attn_norm": "pre_mixer_norm",
    "attn_qkv": "mixer.qkv_proj",
    "attn_q_norm": "mixer.q_norm",
    "attn_k_norm": "mixer.k_norm",
    "attn_output": "mixer.o_proj",
    "post_attention_norm": "post_mixer_norm",
    "ffn_norm": "pre_mlp_norm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_mlp_norm",
}
PLAMO2 = PLAMO3 | {
    "attn_q_norm": "mixer.q_weight.",
    "attn_k_norm": "mixer.k_weight.",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_x": "mixer.bcdt_proj",
    "ssm_dt": "mixer.dt_proj",
    "ssm_dt.bias": "mixer.dt_bias.",
    "ssm_a": "mixer.A_log.",
    "ssm_d": "mixer.D.",
    "ssm_dt_norm": "mixer.dt_norm_weight.",
    "ssm_b_norm": "mixer.B_norm_weight.",
    "ssm_c_norm": "mixer.C_norm_weight.",
    "ssm_out": "mixer.out_proj",
}
PLAMO_NORMS = {"post_mixer_norm.weight": 1 / 5, "post_mlp_norm.weight": 5**-1.5, "norm.weight": 1.0}
DIALECTS: Mapping[str, Dialect] = {
    "refact": Dialect(
        blocks=REFACT,
        layers="transformer.h",
        top=names.GPT_2_TOP,
        joined=(
            Joined(name="attn.kv.weight", parts=("attn_k", "attn_v")),
            Joined(name="mlp.gate_up_proj.weight", parts=GATE_UP),
        ),
    ),
    "openelm": Dialect(
        blocks=OPENELM,
        layers="transformer.layers",
        top={"token_embd": "transformer.token_embeddings", "output_norm": "transformer.norm"},
        joined=(Joined(name="ffn.proj_1.weight", parts=GATE_UP),),
    ),
    "plamo2": Dialect(blocks=PLAMO2, layers="model.layers.layers", added=PLAMO_NORMS),
    "plamo3": Dialect(blocks=PLAMO3, layers="model.layers.layers", added=PLAMO_NORMS),
    "paddleocr": Dialect(blocks=names.BLOCK),
    "hunyuan_vl": Dialect(blocks=names.HUNYUAN),
    "talkie": Dialect(
        blocks=TALKIE, layers="blocks", top={"token_embd": "embed", "output": "lm_head"}
    ),
    "baichuan": Dialect(blocks=names.BLOCK, interleaved=True),
    "bitnet": Dialect(blocks=BITNET),
    "codeshell": Dialect(blocks=names.GPT_2, layers="transformer.h", top=names.GPT_2_TOP),
    "jais": Dialect(
        blocks=names.GPT_2 | {"ffn_gate": "mlp.c_fc2"}, layers="transformer.h", top=names.GPT_2_TOP
    ),
    "maincoder": Dialect(blocks=names.LLAMA4),
    "plamo": Dialect(blocks=names.BLOCK | {"attn_norm": "norm"}, layers="model.layers.layers"),
    "plm": Dialect(blocks=names.BLOCK | names.LATENT),
    "xverse": Dialect(blocks=names.BLOCK, interleaved=True),
    "deci": Dialect(blocks=names.BLOCK, interleaved=True),
    "deepseek": Dialect(blocks=names.ROUTED, interleaved=True),
    "grok": Dialect(blocks=GROK),
    "arctic": Dialect(blocks=ARCTIC, interleaved=True),
    "pangu-embedded": Dialect(blocks=names.BLOCK),
    "llama-embed": Dialect(blocks=names.BLOCK, interleaved=True, layers="layers", top=BARE),
    "gemma-embedding": Dialect(
        blocks=names.SANDWICH, added=names.PLUS_ONE, layers="layers", top=BARE
    ),
    "nomic-bert-moe": Dialect(
        blocks=NOMIC_EXPERTS,
        layers="encoder.layers",
        top=names.BERT_TOP | {"token_embd_norm": "emb_ln"},
    ),
    "chatglm": Dialect(blocks=CHATGLM, layers="transformer.encoder.layers", top=CHATGLM_TOP),
    "qwen": Dialect(blocks=QWEN, layers="transformer.h", top=names.GPT_2_TOP),
}
SEPARATE_GLM = Dialect(blocks=names.FUSED_MLP)
"""Of GLM-4-9B converted from the layout of transformers."""

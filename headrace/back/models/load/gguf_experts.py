"""Dialects of GGUF files of the mixtures in base/config/gguf_experts.py."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.back.models.load import gguf_names as names
from headrace.back.models.load.gguf_dialect import Dialect, Joined

GROVE = {
    **names.MIXTURE,
    "ffn_gate_chexps": "mlp.chunk_experts.gate_proj",
    "ffn_up_chexps": "mlp.chunk_experts.up_proj",
    "ffn_down_chexps": "mlp.chunk_experts.down_proj",
}
SMALLTHINKER = {
    **names.BLOCK,
    "ffn_gate_inp": "block_sparse_moe.primary_router",
    "ffn_gate_exps": "block_sparse_moe.experts.gate",
    "ffn_up_exps": "block_sparse_moe.experts.up",
    "ffn_down_exps": "block_sparse_moe.experts.down",
}
DBRX = {
    "attn_norm": "norm_attn_norm.norm_1",
    "attn_qkv": "norm_attn_norm.attn.Wqkv",
    "attn_output": "norm_attn_norm.attn.out_proj",
    "attn_output_norm": "norm_attn_norm.norm_2",
    "ffn_gate_inp": "ffn.router.layer",
    "ffn_gate_exps": "ffn.experts.gate_proj",
    "ffn_up_exps": "ffn.experts.up_proj",
    "ffn_down_exps": "ffn.experts.down_proj",
}
DBRX_TOP = {
    **names.HEAD,
    "token_embd": "transformer.wte",
    "output_norm": "transformer.norm_f",
}
LAGUNA = {
    **names.MIXTURE,
    "attn_gate": "self_attn.g_proj",
    "exp_probs_b": "mlp.experts.e_score_correction_bias.",
}
COHERE = {**names.ROUTED}
MIMO = {**names.ROUTED, "attn_sinks": "self_attn.attention_sink_bias."}
INDEXER = {
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
}
KIMI = {
    **names.ROUTED,
    **names.LATENT,
    "ffn_gate_exps": "mlp.experts.w1",
    "ffn_up_exps": "mlp.experts.w3",
    "ffn_down_exps": "mlp.experts.w2",
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log.",
    "ssm_dt": "self_attn.dt_bias.",
    "ssm_norm": "self_attn.o_norm",
}
LATENTS = (
    Joined(
        name="self_attn.kv_b_proj.weight",
        parts=("attn_k_b", "attn_v_b"),
        turned=True,
        flat=True,
    ),
)
"""Keys and values of latents apart."""

HUNYUAN_3 = {
    **names.ROUTED,
    **names.SHARED_MLP,
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b": "mlp.expert_bias.",
}
STEP = {
    **names.BLOCK,
    "attn_gate": "self_attn.g_proj",
    "ffn_gate_inp": "moe.gate",
    "ffn_gate_exps": "moe.gate_proj",
    "ffn_up_exps": "moe.up_proj",
    "ffn_down_exps": "moe.down_proj",
    "exp_probs_b": "moe.router_bias.",
    "ffn_gate_shexp": "share_expert.gate_proj",
    "ffn_up_shexp": "share_expert.up_proj",
    "ffn_down_shexp": "share_expert.down_proj",
}

W123 = {"gate": "w1", "up": "w3", "down": "w2"}
HYPER = ("fn", "base", "scale")


def compressor(name: str, place: str) -> dict[str, str]:
    """Of entries that several tokens share (DeepSeek V4)."""
    parts = {"kv": "wkv", "gate": "wgate", "ape": "ape.", "norm": "norm"}
    return {f"{name}_{one}": f"attn.{place}.{ours}" for one, ours in parts.items()}


DEEPSEEK_4 = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_sinks": "attn.attn_sink.",
    "attn_q_a": "attn.wq_a",
    "attn_q_a_norm": "attn.q_norm",
    "attn_q_b": "attn.wq_b",
    "attn_kv": "attn.wkv",
    "attn_kv_a_norm": "attn.norm",
    "attn_output_a": "attn.wo_a",
    "attn_output_b": "attn.wo_b",
    **compressor("attn_compressor", "compressor"),
    **compressor("indexer_compressor", "indexer.compressor"),
    "indexer.proj": "attn.indexer.weights_proj",
    "indexer.attn_q_b": "attn.indexer.wq_b",
    **{f"hc_{part}_{one}": f"{part}_hc.{one}." for part in ("attn", "ffn") for one in HYPER},
    "ffn_gate_inp": "ffn.gate",
    "ffn_gate_tid2eid": "ffn.gate.tid2eid.",
    "exp_probs_b": "ffn.gate.bias.",
    **{f"ffn_{part}_exps": f"ffn.experts.{one}" for part, one in W123.items()},
    **{f"ffn_{part}_shexp": f"ffn.shared_experts.{part}_proj" for part in W123},
}
DEEPSEEK_4_TOP = {
    **{f"output_hc_{one}": f"model.hc_head.hc_{one}." for one in HYPER},
    **{**names.TOP, "output": "head"},
}

DIALECTS: Mapping[str, Dialect] = {
    "deepseek4": Dialect(blocks=DEEPSEEK_4, top=DEEPSEEK_4_TOP, drafts=True),
    "hy_v3": Dialect(blocks=HUNYUAN_3, drafts=True),
    "step35": Dialect(blocks=STEP, added=names.PLUS_ONE, drafts=True),
    "deepseek2-ocr": Dialect(blocks=names.ROUTED),
    "bailingmoe": Dialect(blocks=names.ROUTED, interleaved=True),
    "dbrx": Dialect(blocks=DBRX, layers="transformer.blocks", top=DBRX_TOP),
    "grovemoe": Dialect(blocks=GROVE),
    "smallthinker": Dialect(blocks=SMALLTHINKER),
    "mellum": Dialect(blocks=names.MIXTURE),
    "laguna": Dialect(blocks=LAGUNA),
    "cohere2moe": Dialect(blocks=COHERE, drafts=True),
    "mimo2": Dialect(blocks=MIMO, drafts=True),
    **dict.fromkeys(
        ("glm-dsa", "deepseek32"),
        Dialect(blocks=names.ROUTED | names.LATENT | INDEXER, joined=LATENTS, drafts=True),
    ),
    "kimi-linear": Dialect(blocks=KIMI, joined=LATENTS),
}

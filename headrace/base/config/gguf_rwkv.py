"""Rows of the table of GGUF architectures: RWKV 6 and 7, and Qwen 2 with their layers in place of
attention. Ranks of projections that metadata leave unsaid are read off their tensors."""

from __future__ import annotations

from typing import Final

from headrace.base.config.gguf import GGUFFile
from headrace.base.config.gguf_row import (
    SILU,
    Config,
    GGUFArchitecture,
    count,
    need_int,
    rows_of,
)

_SHARED: Final = {"intermediate_size": "feed_forward_length"}
_RANKS: Final = {
    "decay_low_rank_dim": "time_mix_w1",
    "a_low_rank_dim": "time_mix_a1",
    "v_low_rank_dim": "time_mix_v1",
    "gate_low_rank_dim": "time_mix_g1",
}


def _seven(file: GGUFFile, name: str, config: Config) -> None:
    """Layer 0 has no values to mix with; what files hold there in their place is not read."""
    config["flat_bonus"] = True
    last = config["num_hidden_layers"] - 1
    for key, part in _RANKS.items():
        tensor = f"blk.{last}.{part}.weight"
        if tensor in file.tensors or key != "gate_low_rank_dim":
            config[key] = rows_of(file, tensor)
    if last == 0:
        config["v_low_rank_dim"] = 1  # nobody mixes


def _rwkv7(file: GGUFFile, name: str, config: Config) -> None:
    config["head_dim"] = need_int(file, f"{name}.wkv.head_size")
    _seven(file, name, config)


def _six(file: GGUFFile, name: str, config: Config) -> None:
    config["head_size"] = need_int(file, f"{name}.wkv.head_size")
    config["low_rank_by_output"] = True
    config["time_mix_extra_dim"] = rows_of(file, "blk.0.time_mix_w1.weight") // 5
    config["time_decay_extra_dim"] = rows_of(file, "blk.0.time_mix_decay_w1.weight")


def _rwkv6(file: GGUFFile, name: str, config: Config) -> None:
    """Outputs of layers are halved every few of them."""
    _six(file, name, config)
    config["rescaled"] = True
    config["rescale_every"] = file.whole(f"{name}.rescale_every_n_layers") or 0


def _rwkv6qwen2(file: GGUFFile, name: str, config: Config) -> None:
    _six(file, name, config)
    config["wkv_version"] = 6
    heads = config["hidden_size"] // config["head_size"]
    config["num_key_value_heads"] = count(file, f"{name}.attention.head_count_kv", heads)
    config["attention_bias"] = "blk.0.time_mix_key.bias" in file.tensors


def _arwkv7(file: GGUFFile, name: str, config: Config) -> None:
    config["head_size"] = need_int(file, f"{name}.wkv.head_size")
    config["wkv_version"] = 7
    config["wkv_has_gate"] = "blk.0.time_mix_g1.weight" in file.tensors
    config["wkv_has_group_norm"] = "blk.0.time_mix_ln.weight" in file.tensors
    _seven(file, name, config)


ROWS: Final[dict[str, GGUFArchitecture]] = {
    "rwkv6": GGUFArchitecture(
        model_type="rwkv6",
        architecture="Rwkv6ForCausalLM",
        keys=_SHARED,
        adjust=_rwkv6,
        recurrent=True,
    ),
    "rwkv7": GGUFArchitecture(
        model_type="rwkv7",
        architecture="RWKV7ForCausalLM",
        keys=_SHARED,
        adjust=_rwkv7,
        recurrent=True,
    ),
    **{
        name: GGUFArchitecture(
            model_type="rwkv_hybrid",
            architecture="RwkvHybridForCausalLM",
            fixed=SILU,
            keys=_SHARED,
            adjust=adjust,
            recurrent=True,
        )
        for name, adjust in (("rwkv6qwen2", _rwkv6qwen2), ("arwkv7", _arwkv7))
    },
}

"""What drafters propose that draft all tokens at once, against their formulas in float32 over transformers' hidden
states (SPC-01, SPC-06)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headrace.base.errors import ConfigError
from tests.back.speculative.checkpoints import DIM, HEADS, KV_HEADS, MASK, save_head
from tests.back.speculative.test_heads import (
    MODEL,
    Proposed,
    model,
    norm,
    proposed,
    pytestmark,
    run_greedily,
    speculating,
)

__all__ = ["model", "proposed", "pytestmark"]
PARD_MASK = 7


def medusa(tensors: dict[str, torch.Tensor], model: Any, text: list[int], count: int) -> list[int]:
    out = model(torch.tensor([text]), output_hidden_states=True)
    hidden = out.hidden_states[-1][0, -2]
    drafts = []
    for head in range(count):
        name = (
            f"blocks.{head}.layers.0"
            if "blocks.0.layers.0.weight" in tensors
            else f"{head}.0.linear"
        )
        bias = tensors.get(f"{name}.bias", torch.zeros(()))
        x = hidden + F.silu(tensors[f"{name}.weight"] @ hidden + bias)
        own = tensors.get(f"lm_heads.{head}.weight", model.get_input_embeddings().weight)
        drafts.append(int((own @ x).argmax()))
    return drafts


def rotated(x_THD: torch.Tensor, first: int) -> torch.Tensor:
    position_T = torch.arange(first, first + x_THD.shape[0])
    angles = position_T[:, None] * 100000.0 ** -(torch.arange(0, DIM, 2) / DIM)
    cos, sin = (torch.cat((one, one), -1)[:, None] for one in (angles.cos(), angles.sin()))
    left, right = x_THD.chunk(2, dim=-1)
    return x_THD * cos + torch.cat((-right, left), dim=-1) * sin


def dflash(w: dict[str, torch.Tensor], model: Any, text: list[int], count: int) -> list[int]:
    """The block is the newest token and a mask for each draft; its places see each other, and each
    is drafted where it stands."""
    hidden = block(w, model, text, count)
    return [int(one) for one in (hidden[1:] @ model.get_input_embeddings().weight.T).argmax(-1)]


def dspark(w: dict[str, torch.Tensor], model: Any, text: list[int], count: int) -> list[int]:
    """The same block, of which each place says the token behind it, and the token before it what
    follows that by itself."""
    logits = block(w, model, text, count)[:count] @ model.get_input_embeddings().weight.T
    token, drafts = text[-1], list[int]()
    for place in logits:
        if "markov_head.markov_w1.weight" in w:
            before = w["markov_head.markov_w1.weight"][token]
            place = place + w["markov_head.markov_w2.weight"] @ before
        token = int(place.argmax())
        drafts.append(token)
    return drafts


def block(w: dict[str, torch.Tensor], model: Any, text: list[int], count: int) -> torch.Tensor:
    """What a block's places give, the newest token's first."""
    out = model(torch.tensor([text]), output_hidden_states=True)
    seen = torch.cat([out.hidden_states[layer + 1][0, :-1] for layer in (1, 4)], dim=-1)
    context = norm(seen @ w["fc.weight"].T, w["hidden_norm.weight"])
    table = model.get_input_embeddings().weight
    hidden = table[[text[-1]] + [MASK] * count]
    behind = len(text) - 1
    for layer in ("layers.0", "layers.1"):
        x = norm(hidden, w[f"{layer}.input_layernorm.weight"])
        q, k, v = (
            (rows @ w[f"{layer}.self_attn.{name}_proj.weight"].T).view(len(rows), -1, DIM)
            for name, rows in (
                ("q", x),
                ("k", torch.cat((context, x))),
                ("v", torch.cat((context, x))),
            )
        )
        q = rotated(norm(q, w[f"{layer}.self_attn.q_norm.weight"]), behind)
        k = rotated(norm(k, w[f"{layer}.self_attn.k_norm.weight"]), 0)
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (k, v))
        scores = torch.einsum("qhd,thd->hqt", q, k) * DIM**-0.5
        y = torch.einsum("hqt,thd->qhd", scores.softmax(-1), v).flatten(1)
        hidden = hidden + y @ w[f"{layer}.self_attn.o_proj.weight"].T
        x = norm(hidden, w[f"{layer}.post_attention_layernorm.weight"])
        gate, up, down = (w[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        hidden = hidden + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    return norm(hidden, w["norm.weight"])


def chain(w: dict[str, torch.Tensor], model: Any, text: list[int], count: int) -> list[int]:
    """Each head reads the state of the one before and the token that this one said."""
    out = model(torch.tensor([text]), output_hidden_states=True)
    state, token, drafts = out.hidden_states[-1][0, -2], text[-1], list[int]()
    tied = "speculator.proj.2.weight" not in w
    if tied:
        state = norm(state, torch.ones_like(state)) / 2**0.5
    share = 0.5 ** (0.5 / 3)
    for head in range(count):
        own = 0 if tied else head
        proj = w[f"speculator.proj.{min(head, 1) if tied else head}.weight"]
        table = w[f"speculator.emb.{own}.weight"]
        factor = ((1 - share**2) * (proj.shape[0] / 2)) ** 0.5 / share
        state = norm(proj @ state + factor * table[token], w[f"speculator.ln.{own}.weight"])
        state = F.gelu(state + w[f"speculator.ln.{own}.bias"])
        token = int((w[f"speculator.head.{own}.weight"] @ state).argmax())
        drafts.append(token)
    return drafts


FORMULAS = {
    "medusa": medusa,
    "medusa-shared": medusa,
    "dflash": dflash,
    "dspark": dspark,
    "dspark-plain": dspark,
    "mlp_speculator": chain,
    "mlp_speculator-tied": chain,
}


SLOW = ("dspark-plain", "medusa-shared", "mlp_speculator-tied")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in FORMULAS]
)
def test_a_checkpoint_drafts_what_its_formula_says(
    kind: str, model: Any, tmp_path: Path, proposed: Proposed
) -> None:
    """Over a prompt in three chunks and five steps, each of which throws drafts away. `auto` knows
    what it is."""
    tensors = save_head(tmp_path, kind)
    spec = speculating(str(tmp_path))
    assert spec.speculation is not None and spec.speculation.method == kind.split("-")[0]
    run_greedily(spec)
    drafted = [one for one in proposed if one[1]]
    assert len(drafted) >= 4 and max(len(drafts) for _, drafts, _ in drafted) > 1
    with torch.inference_mode():
        for text, drafts, _ in drafted:
            assert drafts == FORMULAS[kind](tensors, model, text, len(drafts)), len(text)


def pard_folder(folder: Path, mask: int | None = PARD_MASK) -> Path:
    """The bundled model as a draft model that says which token stands for open places."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pard_token": mask}))
    return folder


def test_a_draft_model_drafts_all_tokens_behind_masks(
    model: Any, tmp_path: Path, proposed: Proposed
) -> None:
    folder = pard_folder(tmp_path / "pard")
    run_greedily(speculating(str(folder), method="draft_model", parallel_drafting=True))
    drafted = [one for one in proposed if one[1]]
    assert len(drafted) >= 2 and max(len(drafts) for _, drafts, _ in drafted) > 1
    with torch.inference_mode():
        for text, drafts, _ in drafted:
            read = [*text, *[PARD_MASK] * (len(drafts) - 1)]
            logits = model(torch.tensor([read])).logits[0, len(text) - 1 :]
            assert drafts == logits.argmax(-1).tolist(), len(text)


def test_what_cannot_draft_at_once_is_refused_with_the_numbers(tmp_path: Path) -> None:
    save_head(tmp_path / "medusa", "medusa-shared")
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 5, .* has 3 heads"):
        run_greedily(speculating(str(tmp_path / "medusa"), num_speculative_tokens=5))
    save_head(tmp_path / "dflash", "dflash", dflash_config={"mask_token_id": 5000})
    with pytest.raises(ConfigError, match="mask_token_id is 5000"):
        run_greedily(speculating(str(tmp_path / "dflash")))
    save_head(tmp_path / "block", "dflash")
    with pytest.raises(ConfigError, match=r"drafts at most 5 tokens \(block_size 6\)"):
        run_greedily(speculating(str(tmp_path / "block"), num_speculative_tokens=6))
    for number, (changes, said) in enumerate(
        (
            ({"markov_head_type": "rnn"}, "markov_head_type is 'rnn'; only vanilla heads are read"),
            ({"markov_rank": -1}, "markov_rank is -1"),
            ({"draft_vocab_size": 500}, "draft_vocab_size is 500, the model knows 4096 tokens"),
        )
    ):
        save_head(tmp_path / f"spark{number}", "dspark", **changes)
        with pytest.raises(ConfigError, match=said):
            run_greedily(speculating(str(tmp_path / f"spark{number}"), num_speculative_tokens=6))
    with pytest.raises(ConfigError, match=r"drafts at most 6 tokens \(block_size 6\)"):
        run_greedily(speculating(str(tmp_path / "spark0"), num_speculative_tokens=7))
    plain = {"method": "draft_model", "parallel_drafting": True}
    with pytest.raises(ConfigError, match="names no token for open places"):
        run_greedily(speculating(str(MODEL), **plain))

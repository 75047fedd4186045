"""Trains the drafters that come with the bundled model: an EAGLE-3 head, a head for multi-token
prediction, a block drafter (block_drafter.py) and a small model that drafts behind masks
(parallel_drafter.py).

    python -m demo.train_drafters --out demo/drafters [--minutes 4] [--kinds eagle3 mtp dflash pard]

The bundled model stays as it is and is the teacher: a drafter learns its distribution at each place
of the conversations of demo/tasks. Each step unrolls a head over its own states, as it will draft
(Li et al. 2025, "EAGLE-3", section 3.2): at unrolled pass j a query sees keys made of the model's
states up to j places back, and behind them its own. Embedding and output rows are the model's.

Each drafter is written every half minute, and at the end, when held-out rows say how many of four
drafts stand where the assistant speaks. `--weights` goes on from what an earlier run has written.

B rows, T tokens, C hidden, V vocabulary, D tokens a head knows, J passes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo.attention import ATTENTIONS, Batch
from demo.block_drafter import MASK, PLACES, DFlash, block_loss
from demo.decoder import MLP, Norm, Qwen3, Shape, rope, rotate
from demo.optimizer import Muon, adamw
from demo.packing import Rows, start_workers, stream
from demo.parallel_drafter import Pard, parallel_loss
from demo.train import held_out_rows, to_device

MODEL = Path(__file__).parent / "model"
PASSES = 5
KNOWN_TOKENS = 1024
TAPS = (2, 5, 7)
"""In front of these layers an EAGLE-3 head sees the model."""
BLOCK_TAPS = (7,)
"""And a block drafter: one place and two layers of one head take 0.9 MB and draft better than two places and one
layer of two heads (2.1 and 1.7 of four drafts stand)."""
DRAFTS = 4
SAVE_S = 30.0
SHAPE = Shape()
SHAPES = {
    "eagle3": replace(
        SHAPE,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        intermediate_size=128,
    ),
    "mtp": replace(
        SHAPE,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
    ),
    "dflash": replace(
        SHAPE,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=48,
    ),
    "pard": replace(
        SHAPE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
    ),
}


class PassAttention(nn.Module):
    """Attention of a head over its unrolled passes; `wide`: what it reads. `normed`: with norms on
    queries and keys, as Qwen3 has."""

    def __init__(self, shape: Shape, wide: int, *, normed: bool) -> None:
        super().__init__()
        size, self.heads = shape.head_dim, shape.num_attention_heads
        self.q_proj = nn.Linear(wide, self.heads * size, bias=False)
        self.k_proj = nn.Linear(wide, shape.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(wide, shape.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, shape.hidden_size, bias=False)
        if normed:
            self.q_norm, self.k_norm = (Norm(size, shape.rms_norm_eps) for _ in range(2))
        self.normed, self.size = normed, size

    def forward(
        self, x_BTC: Tensor, angles: tuple[Tensor, Tensor], same_BTT: Tensor, passes: Passes
    ) -> Tensor:
        B, T, _ = x_BTC.shape
        q, k, v = (
            project(x_BTC).view(B, T, -1, self.size).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *angles), rotate(k, *angles)
        k, v = (x.repeat_interleave(self.heads // x.shape[1], dim=1) for x in (k, v))
        passes.add(k, v)
        out = passes.attend(q / self.size**0.5, same_BTT)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))


class Passes:
    """Keys and values [B, H, T, D] of the passes so far; the first are made of the model's states.
    In pass j the query at place t sees those up to t - j, and of pass m the one at t - j + m."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def add(self, k: Tensor, v: Tensor) -> None:
        """Those of the next pass."""
        self.keys.append(k)
        self.values.append(v)

    def attend(self, q: Tensor, same_BTT: Tensor) -> Tensor:
        """Of the newest pass; same: whether two places are of one document."""
        j = len(self.keys) - 1
        seen = same_BTT.tril(-j)[:, None]
        scores = (q @ self.keys[0].mT).masked_fill(~seen, float("-inf"))
        own = [(q * later(self.keys[m], j - m)).sum(-1, keepdim=True) for m in range(1, j + 1)]
        weights = torch.cat([scores, *own], dim=-1).float().softmax(-1).nan_to_num().to(q.dtype)
        out = weights[..., : scores.shape[-1]] @ self.values[0]
        for m in range(1, j + 1):
            share = weights[..., scores.shape[-1] + m - 1, None]
            out = out + share * later(self.values[m], j - m)
        return out


def later(x: Tensor, count: int) -> Tensor:
    """Each place of dim -2 has what was `count` places before it."""
    return x if not count else F.pad(x, (0, 0, count, 0))[..., :-count, :]


class Eagle3(nn.Module):
    """Named as published checkpoints are."""

    normed = False

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        wide, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(len(TAPS) * wide, wide, bias=False)
        self.midlayer = nn.Module()
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self.midlayer, name, Norm(wide, eps))
        self.midlayer.self_attn = PassAttention(shape, 2 * wide, normed=False)
        self.midlayer.mlp = MLP(shape)
        self.norm = Norm(wide, eps)

    def first(self, seen: Tensor, last: Tensor) -> Tensor:
        """What stands for the hidden state in the first pass."""
        return self.fc(seen)

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        same: Tensor,
        passes: Passes,
    ) -> Tensor:
        layer = self.midlayer
        pair = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), dim=-1)
        x = hidden + layer.self_attn(pair, angles, same, passes)
        return x + layer.mlp(layer.post_attention_layernorm(x))


class Mtp(nn.Module):
    """Named as Qwen's checkpoints are."""

    normed = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        wide, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(2 * wide, wide, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (Norm(wide, eps) for _ in range(2))
        layer = nn.Module()
        layer.input_layernorm, layer.post_attention_layernorm = (Norm(wide, eps) for _ in range(2))
        layer.self_attn = PassAttention(shape, wide, normed=True)
        layer.mlp = MLP(shape)
        self.layers = nn.ModuleList([layer])
        self.norm = Norm(wide, eps)

    def first(self, seen: Tensor, last: Tensor) -> Tensor:
        """What stands for the hidden state in the first pass."""
        return last

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        same: Tensor,
        passes: Passes,
    ) -> Tensor:
        pair = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        layer, x = self.layers[0], self.fc(torch.cat(pair, dim=-1))
        x = x + layer.self_attn(layer.input_layernorm(x), angles, same, passes)
        return x + layer.mlp(layer.post_attention_layernorm(x))


BUILD: dict[str, Callable[[], nn.Module]] = {
    "eagle3": lambda: Eagle3(SHAPES["eagle3"]),
    "mtp": lambda: Mtp(SHAPES["mtp"]),
    "dflash": lambda: DFlash(SHAPES["dflash"], BLOCK_TAPS),
    "pard": lambda: Pard(SHAPES["pard"]),
}
PREFIXES = {"mtp": "mtp."}


class Teacher:
    """The bundled model, frozen."""

    def __init__(self, device: torch.device) -> None:
        self.model = Qwen3(SHAPE)
        self.model.load_state_dict(load_file(MODEL / "model.safetensors"))
        self.model.requires_grad_(False).to(device)
        self.device = device
        self.table = self.model.model.embed_tokens.weight

    @torch.no_grad()
    def states(self, batch: Batch, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What is seen in front of these layers, side by side [B, T, X], and the last hidden state [B, T, C]."""
        attention = ATTENTIONS["dense"]
        attend = attention.attend(batch, attention.prepare(batch))
        trunk, seen = self.model.model, []
        x = trunk.embed_tokens(batch.tokens)
        cos, sin = rope(batch.positions, SHAPE)
        for number, layer in enumerate(trunk.layers):
            if number in taps:
                seen.append(x)
            x = layer(x, cos, sin, attend)
        return torch.cat(seen, dim=-1), trunk.norm(x)


def head_loss(
    head: nn.Module, teacher: Teacher, batch: Batch, known: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss over all passes, and right [B, T, 4] of drafts that begin at each place (the first wrong
    one, and all behind it, false), -1 where the assistant does not speak. `known`: the head's tokens [D]."""
    seen, last = teacher.states(batch, TAPS)
    document, table = batch.document, teacher.table
    same = document[:, :, None] == document[:, None, :]
    angles = rope(batch.positions, SHAPE)
    embedded = F.embedding(torch.roll(batch.tokens, -1, 1), table)
    logits = F.linear(torch.roll(last, -1, 1), table)
    best = logits.argmax(-1)
    wanted = logits[..., known].log_softmax(-1)
    covered = torch.zeros(table.shape[0], dtype=torch.bool, device=known.device)
    covered[known] = True
    usable = (document == torch.roll(document, -2, 1)) & (document > 0)
    usable[:, -2:] = False
    learnt = torch.roll(batch.targets, -1, 1) >= 0
    weight = usable * torch.where(learnt, 1.0, 0.2) * covered[best]
    hidden, passes, loss, rights = head.first(seen, last), Passes(), 0.0, list[Tensor]()
    for j in range(PASSES):
        hidden = head(embedded, hidden, angles, same, passes)
        scores = F.linear(head.norm(hidden), table[known]).log_softmax(-1)
        divergence = (wanted.exp() * (wanted - scores)).sum(-1)
        loss = loss + 0.85**j * (divergence * weight).sum() / weight.sum().clamp(min=1)
        right = known[scores.argmax(-1)] == best
        rights.append(torch.roll(right, -j, 1))
        weight = weight * (later(document[..., None], j + 1)[..., 0] == document)
        hidden = later(hidden, 1)
    chain = torch.stack(rights[:DRAFTS], dim=-1).long().cumprod(-1)
    whole = usable & learnt & (document == torch.roll(document, -1 - DRAFTS, 1))
    whole[:, -1 - DRAFTS :] = False
    return loss, torch.where(whole[..., None], chain, -1)


def known_tokens(tokenizer: Tokenizer, count: int) -> Tensor:
    """The tokens that the assistant says most, in order of their ids."""
    seen: Counter[int] = Counter()
    source = stream(tokenizer, "known tokens", 4096)
    for _ in range(40):
        rows = next(source)
        seen.update(rows.tokens_BT[rows.learnt_BT].tolist())
    chosen = [token for token, _ in seen.most_common(count)]
    chosen += [token for token in range(SHAPE.vocab_size) if token not in seen]
    return torch.tensor(sorted(chosen[:count]))


def batches(arguments: argparse.Namespace) -> Iterator[Rows]:
    """Endless packed rows; made here where there are no workers."""
    file = MODEL / "tokenizer.json"
    size = {"rows": arguments.rows, "row_tokens": arguments.row_tokens}
    if arguments.workers:
        queue = start_workers(file, workers=arguments.workers, seed=7, depth=64, **size)
        while True:
            yield queue.get()
    source = stream(Tokenizer.from_file(str(file)), "drafters", arguments.row_tokens)
    while True:
        rows = [next(source) for _ in range(arguments.rows)]
        yield Rows(*(torch.cat([torch.from_numpy(part.astype("int32")) for part in parts]).numpy()
                     .astype(parts[0].dtype) for parts in zip(*rows, strict=True)))  # fmt: skip


Loss = Callable[[Batch], tuple[Tensor, Tensor]]
"""The loss of a batch, and right [..., drafts]: 1, 0 or, where nothing was drafted, -1."""


def loss_of(kind: str, head: nn.Module, teacher: Teacher, known: Tensor) -> Loss:
    """How a kind learns."""
    rng = Random(kind)
    if isinstance(head, Pard):
        return lambda batch: parallel_loss(
            head, teacher.states(batch, head.taps)[1], teacher.table, batch, rng
        )
    if not isinstance(head, DFlash):
        return lambda batch: head_loss(head, teacher, batch, known)

    def loss(batch: Batch) -> tuple[Tensor, Tensor]:
        return block_loss(head, teacher.states(batch, head.taps), teacher.table, batch, rng)

    return loss


def shares(right: Tensor) -> Tensor:
    """[drafts, 2]: how many stand, of how many."""
    flat = right.reshape(-1, right.shape[-1])
    flat = F.pad(flat, (0, DRAFTS - flat.shape[-1]), value=-1)
    return torch.stack([(flat > 0).sum(0), (flat >= 0).sum(0)], dim=-1)


class Held:
    """Held-out rows of each task, and what stands of a drafter's four drafts in them."""

    def __init__(self, each: int, row_tokens: int, device: torch.device) -> None:
        tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        rows = held_out_rows(tokenizer, each=each, row_tokens=row_tokens)
        self.batches = {task: to_device(found, device) for task, found in rows.items()}

    @torch.no_grad()
    def accepted(self, loss: Loss) -> dict[str, float]:
        """Mean drafts that stand, by task and over all."""
        found, sums = {}, torch.zeros(DRAFTS, 2)
        for task, batch in self.batches.items():
            parts = [
                shares(loss(Batch(*(x[i : i + 1] for x in batch)))[1])
                for i in range(len(batch.tokens))
            ]
            counts = torch.stack(parts).sum(0).cpu()
            found[task] = mean_accepted(counts)
            sums += counts
        return found | {"all": mean_accepted(sums)}


def mean_accepted(counts: Tensor) -> float:
    """Drafts that stand of four."""
    return round(float((counts[:, 0] / counts[:, 1].clamp(min=1)).sum()), 3)


def train(
    kind: str, source: Iterator[Rows], held: Held, arguments: argparse.Namespace, minutes: float
) -> None:
    """One drafter, for so long; writes its folder."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher, head = Teacher(device), BUILD[kind]().to(device)
    known = torch.arange(SHAPE.vocab_size)
    if kind == "eagle3":
        tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        known = known_tokens(tokenizer, KNOWN_TOKENS)
    known = known.to(device)
    for parameter in head.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    if isinstance(head, Pard):
        head.begin(teacher.table)
    if arguments.weights and (arguments.weights / kind).is_dir():
        head.load_state_dict(read(kind, arguments.weights / kind))
    loss_function = loss_of(kind, head, teacher, known)
    muon, adam = Muon(head), adamw(head, rate=arguments.rate)
    began, step, progress = time.monotonic(), 0, 0.0
    told, saved = began, began
    recent = torch.zeros(DRAFTS, 2, device=device)
    while progress < 1.0:
        rate = arguments.rate * min(1.0, (step + 1) / 100, max(0.01, (1.0 - progress) / 0.6))
        for group in adam.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, right = loss_function(to_device(next(source), device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        adam.step()
        muon.step(rate)
        head.zero_grad(set_to_none=True)
        recent = 0.98 * recent + shares(right)
        step += 1
        now = time.monotonic()
        spent = (now - began) / 60
        progress = step / arguments.steps if arguments.steps else spent / minutes
        if now - told > 5.0 or progress >= 1.0:
            line = {
                "drafter": kind,
                "step": step,
                "loss": round(loss.item(), 4),
                "minutes": round(spent, 2),
            }
            print(json.dumps(line | {"accepted": mean_accepted(recent)}), flush=True)
            told = now
        if now - saved > SAVE_S:
            write(kind, head, known, arguments.out / kind)
            saved = now
    write(kind, head, known, arguments.out / kind)
    accepted = held.accepted(loss_function)
    print(
        json.dumps({"drafter": kind, "steps": step, "held_out_accepted_of_4": accepted}), flush=True
    )


def read(kind: str, folder: Path) -> dict[str, Tensor]:
    """The weights that `write` has written."""
    found = load_file(folder / "model.safetensors")
    prefix = PREFIXES.get(kind, "")
    return {name.removeprefix(prefix): x.float() for name, x in found.items() if name != "d2t"}


def write(kind: str, head: nn.Module, known: Tensor, folder: Path) -> None:
    """config.json and model.safetensors, bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        PREFIXES.get(kind, "") + name: weight.detach().cpu().bfloat16().contiguous()
        for name, weight in head.state_dict().items()
    }
    shape = head.shape if isinstance(head, DFlash) else SHAPES[kind]
    config = shape.hub_config(eos=4089, pad=4087)
    if kind == "eagle3":
        known = known.cpu()
        tensors["d2t"] = known - torch.arange(known.numel())
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "draft_vocab_size": known.numel(),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)},
        }
    elif isinstance(head, DFlash):
        config |= {
            "architectures": ["DFlashDraftModel"],
            "block_size": PLACES,
            "dflash_config": {
                "mask_token_id": MASK,
                "target_layer_ids": [tap - 1 for tap in head.taps],
            },
        }
    elif isinstance(head, Pard):
        config["pard_token"] = MASK
    else:
        config["architectures"] = ["Qwen3MTP"]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Reads the flags and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--kinds", nargs="+", choices=sorted(BUILD), default=["eagle3", "mtp", "dflash"]
    )
    parser.add_argument("--minutes", type=float, default=4.0, help="of all heads together")
    parser.add_argument("--steps", type=int, default=0, help="of each head, instead of minutes")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=12, help="processes that make data")
    parser.add_argument("--weights", type=Path, help="a folder of drafters to go on from")
    parser.add_argument("--held-out", type=int, default=48, help="conversations of each task")
    arguments = parser.parse_args()
    source = batches(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    held = Held(arguments.held_out, arguments.row_tokens, device)
    for kind in arguments.kinds:
        train(kind, source, held, arguments, arguments.minutes / len(arguments.kinds))


if __name__ == "__main__":
    main()

"""Steps for kernels of recurrent state: rows of some tokens each, with padding between and behind them, and what each
row gives alone, written out token by token (KRN-14)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from headrace.back.kernels.causal_conv import op as causal_conv
from headrace.back.kernels.gated_delta import op as gated_delta
from headrace.back.kernels.gated_scan import op as gated_scan
from headrace.back.kernels.gated_scan.op import ScanRows, StateTrail
from headrace.back.kernels.selective_scan import op as selective_scan
from headrace.back.kernels.ssd_scan import op as ssd_scan
from headrace.back.kernels.state_return import op as state_return
from headrace.back.kernels.state_rows import op as state_rows
from headrace.back.kernels.token_shift import op as token_shift
from headrace.back.kernels.wkv import op as wkv
from headrace.back.kernels.wkv6 import op as wkv6
from headrace.back.kernels.wkv7 import op as wkv7

STATES = 7
COUNTS = {"decode": (1, 1, 1), "mixed": (1, 5, 9), "long": (40,)}
CHUNKS: dict[str, tuple[int, ...]] = {
    "causal_conv": (70, 1, 130),
    "gated_delta": (1, 70, 130),
    "gated_delta-bounded": (1, 70),
    "ssd_scan": (70, 1, 130),
}
"""By case, rows of which some go by chunks."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
CASES = {
    "gated_scan": (gated_scan, {}),
    "causal_conv": (causal_conv, {"channels": 40, "taps": 4, "bias": True}),
    "causal_conv-plain": (causal_conv, {"channels": 300, "taps": 2, "activation": ""}),
    "gated_delta": (
        gated_delta,
        {"key_heads": 2, "heads": 4, "key_dim": 24, "value_dim": 20},
    ),
    "gated_delta-wide": (
        gated_delta,
        {"key_heads": 1, "heads": 1, "key_dim": 128, "value_dim": 64},
    ),
    "gated_delta-channels": (
        gated_delta,
        {"key_heads": 4, "heads": 4, "key_dim": 24, "value_dim": 20, "per_channel": True},
    ),
    "gated_delta-bounded": (
        gated_delta,
        {
            **{"key_heads": 1, "heads": 2, "key_dim": 128, "value_dim": 64, "per_channel": True},
            **{"bound": -5.0, "beta_scale": 2.0},
        },
    ),
    "selective_scan": (selective_scan, {"channels": 40, "state_dim": 16}),
    "selective_scan-odd": (selective_scan, {"channels": 70, "state_dim": 21}),
    "ssd_scan": (ssd_scan, {"heads": 4, "groups": 2, "head_dim": 20, "state_dim": 24}),
    "ssd_scan-limits": (
        ssd_scan,
        {"heads": 2, "groups": 1, "head_dim": 64, "state_dim": 128, "limits": (0.5, 1.0)},
    ),
    "wkv": (wkv, {"channels": 300}),
    "wkv6": (wkv6, {"heads": 4, "key_heads": 4, "head_dim": 20}),
    "wkv6-linear": (
        wkv6,
        {"heads": 4, "key_heads": 2, "head_dim": 32, "first": False, "normed": False},
    ),
    "wkv7": (wkv7, {"heads": 3, "head_dim": 20}),
    "wkv7-first": (wkv7, {"heads": 2, "head_dim": 32, "mixes": False, "normed": False}),
    "token_shift": (token_shift, {"width": 300, "count": 3}),
}


def problem_of(case: str, dtype: torch.dtype, device: str = "cpu") -> Any:
    """The op's module and the problem."""
    module, sizes = CASES[case]
    names = {
        "gated_scan": "GatedScanProblem",
        "causal_conv": "CausalConvProblem",
        "gated_delta": "GatedDeltaProblem",
        "ssd_scan": "SsdScanProblem",
        "selective_scan": "SelectiveScanProblem",
        "wkv": "WkvProblem",
        "wkv6": "Wkv6Problem",
        "wkv7": "Wkv7Problem",
        "token_shift": "TokenShiftProblem",
    }
    more = {} if module is gated_scan else {"dtype": dtype}
    return module, getattr(module, names[case.partition("-")[0]])(device=device, **more, **sizes)


def step(case: str, dtype: torch.dtype, counts: str | tuple[int, ...], device: str = "cpu") -> Any:
    """Weights, inputs of the tokens, the state [STATES + 1, ...] as a view of wider rows, and rows with padding among
    them: a negative number, the padding's, and one whose owner has no token."""
    module, problem = problem_of(case, dtype, device)
    sample = module.OP.sample(problem)
    generator = torch.Generator().manual_seed(4)
    counts = COUNTS[counts] if isinstance(counts, str) else counts
    tokens = sum(counts) + 3

    def like(tensor: torch.Tensor) -> torch.Tensor:
        shape = (tokens, *tensor.shape[1:])
        values = torch.randn(shape, generator=generator).to(tensor.dtype).to(device)
        return values.sigmoid() if module is gated_scan else values

    *inputs, state, _ = sample.arguments
    wide = torch.randn(STATES + 1, state[0].numel() + 24, generator=generator).to(state.dtype)
    kept = wide.to(device)[:, : state[0].numel()].view(STATES + 1, *state.shape[1:])
    if module is wkv:  # a sum of weights is positive; row 5 begins with none
        kept[:, 1] = kept[:, 1].exp()
        kept[5] = 0
    row, start = [-1], [0, 0]
    for place, count in enumerate(counts):
        row += [(5, 0, 3)[place], STATES]
        start += [start[-1] + count] * 2
    rows = ScanRows(
        row_R=torch.tensor([*row, 2], dtype=torch.int32, device=device),
        query_start_R1=torch.tensor([*start, start[-1]], dtype=torch.int32, device=device),
        decode=False,
    )
    return problem, sample.weights, [like(one) for one in inputs], kept, rows


def alone(case: str, problem: Any, weights: Any, inputs: Any, state: torch.Tensor) -> Any:
    """What a row's tokens give, in float64 and without the op: (y, state behind them)."""
    return NAIVE[case.partition("-")[0]](problem, weights, inputs, state.double())


def _naive_scan(problem: Any, weights: Any, inputs: Any, state: torch.Tensor) -> Any:
    ys = []
    for gate, x in zip(*(one.double() for one in inputs), strict=True):
        state = gate * state + (1 - gate) * x
        ys.append(state)
    return torch.stack(ys), state


def _naive_conv(problem: Any, weights: Any, inputs: Any, state: torch.Tensor) -> Any:
    weight, bias = weights
    seen = torch.cat((state, inputs[0].double()))
    y = torch.nn.functional.conv1d(
        seen.T[None],
        weight.double().T[:, None],
        None if bias is None else bias.double(),
        groups=problem.channels,
    )[0].T
    silu = torch.nn.functional.silu
    return (silu(y) if problem.activation else y), seen[1 - problem.taps :]


def _naive_delta(problem: Any, weights: Any, inputs: Any, state: torch.Tensor) -> Any:
    """S_t = S_(t-1) diag(g) (I - beta k k^T) + beta v k^T, the papers' form, with S transposed."""
    decay, bias = (one.double() for one in weights)
    q, k, v, a, b = (one.double() for one in inputs)
    per_key, ys = problem.heads // problem.key_heads, []
    for t in range(len(v)):
        y = []
        for h in range(problem.heads):
            key = k[t, h // per_key] / (k[t, h // per_key].square().sum() + 1e-6).sqrt()
            query = q[t, h // per_key] / (q[t, h // per_key].square().sum() + 1e-6).sqrt()
            x = (a[t, h] + bias[h]).expand(problem.key_dim)
            fade = decay[h] * torch.nn.functional.softplus(x)
            if problem.bound:
                fade = problem.bound * torch.sigmoid(-decay[h] * x)
            beta = problem.beta_scale * torch.sigmoid(b[t, h])
            erase = torch.eye(problem.key_dim, dtype=torch.double) - beta * torch.outer(key, key)
            state[h] = erase @ torch.diag(fade.exp()) @ state[h] + beta * torch.outer(key, v[t, h])
            y.append(state[h].T @ query / math.sqrt(problem.key_dim))
        ys.append(torch.stack(y))
    return torch.stack(ys), state


def _naive_ssd(problem: Any, weights: Any, inputs: Any, state: torch.Tensor) -> Any:
    decay, bias, skip = (one.double() for one in weights)
    x, raw, b, c = (one.double() for one in inputs)
    per_group, ys = problem.heads // problem.groups, []
    for t in range(len(x)):
        y = []
        for h in range(problem.heads):
            dt = torch.nn.functional.softplus(raw[t, h] + bias[h]).clamp(*problem.limits)
            group = h // per_group
            state[h] = (dt * decay[h]).exp() * state[h] + dt * torch.outer(x[t, h], b[t, group])
            y.append(state[h] @ c[t, group] + skip[h] * x[t, h])
        ys.append(torch.stack(y))
    return torch.stack(ys), state


def _naive_selective(problem: Any, weights: Any, inputs: Any, state: torch.Tensor) -> Any:
    decay, bias, skip = (one.double() for one in weights)
    ys = []
    for x, raw, b, c, gate in zip(*(one.double() for one in inputs), strict=True):
        dt = torch.nn.functional.softplus(raw + bias)
        state = (dt[:, None] * decay).exp() * state + torch.outer(dt * x, b)
        ys.append((state @ c + skip * x) * gate * gate.sigmoid())
    return torch.stack(ys), state


def _naive_wkv(problem: Any, weights: Any, inputs: Any, state: torch.Tensor) -> Any:
    """The sums themselves; divided by what is greatest in them only at the end."""
    decay, first = (one.double() for one in weights)
    k, v = (one.double() for one in inputs)
    top, below, most = state
    most = torch.where(below == 0, -torch.inf, most)
    top, below = (torch.where(below == 0, 0.0, one * most.exp()) for one in (top, below))
    ys = []
    for t in range(len(k)):
        own = (k[t] + first).exp()
        ys.append((top + own * v[t]) / (below + own))
        top = (-decay).exp() * top + k[t].exp() * v[t]
        below = (-decay).exp() * below + k[t].exp()
        most = torch.maximum(most - decay, k[t])
    return torch.stack(ys), torch.stack((top / most.exp(), below / most.exp(), most))


def _of_heads(problem: Any, values: Any) -> list[Any]:
    size = problem.head_dim
    return [None if one is None else one.double().unflatten(-1, (-1, size)) for one in values]


def _naive_wkv6(problem: Any, weights: Any, inputs: Any, state: torch.Tensor) -> Any:
    first, weight, bias = _of_heads(problem, weights)
    r, w, k, v = _of_heads(problem, inputs)
    k, v = (one.repeat_interleave(r.shape[1] // k.shape[1], 1) for one in (k, v))
    ys = []
    for t in range(len(r)):
        keep = (-w[t].exp()).exp()
        key = k[t] if problem.first else k[t] * (1 - keep)
        now = key[:, :, None] * v[t][:, None]
        after = keep[:, :, None] * state + now
        read = state + first[:, :, None] * now if problem.first else after / problem.head_dim**0.5
        ys.append((r[t][:, None] @ read)[:, 0])
        state = after
    return _normed(problem, torch.stack(ys), weight, bias).flatten(1), state


def _naive_wkv7(problem: Any, weights: Any, inputs: Any, state: torch.Tensor) -> Any:
    removal, scale, bonus, weight, bias = _of_heads(problem, weights)
    r, w, k, v, a, *more = _of_heads(problem, inputs)
    if more:
        v = torch.lerp(v, more[0], more[1].sigmoid())
    ys, added = [], []
    for t in range(len(r)):
        keep, rate = (-math.exp(-0.5) * w[t].sigmoid()).exp(), a[t].sigmoid()
        gone = torch.nn.functional.normalize(k[t] * removal, dim=-1)
        key = k[t] * (1 + (rate - 1) * scale)
        change = torch.diag_embed(keep) - (rate * gone)[:, :, None] * gone[:, None]
        state = change @ state + key[:, :, None] * v[t][:, None]
        ys.append((r[t][:, None] @ state)[:, 0])
        added.append((r[t] * bonus * key).sum(-1, keepdim=True) * v[t])
    normed = _normed(problem, torch.stack(ys), weight, bias)
    return (normed + torch.stack(added)).flatten(1), state


def _normed(problem: Any, y: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    if weight is None:
        return y
    deviation = (y.var(-1, keepdim=True, unbiased=False) + problem.eps).sqrt()
    return (y - y.mean(-1, keepdim=True)) / deviation * weight + bias


def _naive_shift(problem: Any, weights: Any, inputs: Any, state: torch.Tensor) -> Any:
    """Rows in front, as all ops have them: [T, N, E]."""
    (x,) = (one.double() for one in inputs)
    before = torch.cat((state[None], x[:-1]))
    return torch.lerp(x[:, None], before[:, None], weights[0].double()), x[-1]


NAIVE: dict[str, Callable[..., Any]] = {
    "gated_scan": _naive_scan,
    "causal_conv": _naive_conv,
    "gated_delta": _naive_delta,
    "ssd_scan": _naive_ssd,
    "selective_scan": _naive_selective,
    "wkv": _naive_wkv,
    "wkv6": _naive_wkv6,
    "wkv7": _naive_wkv7,
    "token_shift": _naive_shift,
}


def check(case: str, bound: Callable[..., Any], arranged: Any, *, wide_rows: bool = False) -> None:
    """Runs the kernel over the step and compares: every row as alone, all other states untouched to the bit."""
    problem, weights, inputs, state, rows = arranged
    if wide_rows:
        rows = replace(rows, row_R=rows.row_R.long())
    before, limit = state.clone(), TOLERANCE[getattr(problem, "dtype", torch.float32)]
    y = bound(*inputs, state, rows)
    owned = set()
    starts = rows.query_start_R1.tolist()
    for row, first, last in zip(rows.row_R.tolist(), starts, starts[1:], strict=False):
        if first == last:
            continue
        owned.add(row)
        mine = [one[first:last].cpu() for one in inputs]
        own = [None if one is None else one.cpu() for one in weights]
        expected, after = alone(case, problem, own, mine, before[row].cpu())
        assert _error(y[first:last], expected) <= limit
        assert _error(state[row], after) <= limit
    for row in set(range(STATES + 1)) - owned:
        assert torch.equal(state[row], before[row]), row


def check_trail(
    case: str, bind: Callable[..., Any], dtype: torch.dtype, device: str, *, tolerance: float = 0.0
) -> None:
    """With a trail the outputs are the same bits, and behind each token lies, to the bit, the state that a step of the
    tokens up to it leaves; nothing else is touched. `tolerance`: of those that compute all tokens' gates at once."""
    problem, weights, inputs, short, rows = step(case, dtype, "mixed", device)
    depth, padded = max(COUNTS["mixed"]) - 1, STATES + 1
    trailed = short.new_full((padded + rows.row_R.shape[0] * depth, *short.shape[1:]), 7.0)
    trailed[:padded] = short
    bound, before = bind(problem, *weights), trailed.clone()
    with_trail = replace(rows, trail=StateTrail(first=padded, depth=depth))
    y = bound(*inputs, trailed, with_trail)
    written, starts = {STATES}, rows.query_start_R1.tolist()
    for i, (row, first, last) in enumerate(
        zip(rows.row_R.tolist(), starts, starts[1:], strict=False)
    ):
        for t in range(first, last):
            alone = before[:padded].clone()
            cut = ScanRows(
                row_R=torch.tensor([row], dtype=torch.int32, device=device),
                query_start_R1=torch.tensor([0, t + 1 - first], dtype=torch.int32, device=device),
                decode=False,
            )
            expected = bound(*(one[first : t + 1] for one in inputs), alone, cut)
            at = row if t == first else padded + i * depth + t - first - 1
            written.add(at)
            assert _error(y[first : t + 1], expected.double().cpu()) <= tolerance, (row, t)
            assert _error(trailed[at], alone[row].double().cpu()) <= tolerance, (row, t)
    for row in set(range(trailed.shape[0])) - written:
        assert torch.equal(trailed[row], before[row]), row


def return_problem(device: str) -> state_return.StateReturnProblem:
    trail = StateTrail(first=STATES + 1, depth=3)
    return state_return.StateReturnProblem(device=device, trail=trail)


def check_return(state_of: Callable[..., None], device: str) -> None:
    """A row's bytes are those behind the last draft that stands; no others move."""
    for wide in (False, True):
        *numbers, state = state_return.OP.sample(return_problem(device)).arguments
        if wide:
            numbers[0] = numbers[0].long()
        expected, first = state.clone(), STATES + 1
        expected[2], expected[0] = state[first + 2], state[first + 3]
        state_of(*numbers, state)
        kept = [row for row in range(first + 15) if row != STATES]
        assert torch.equal(state[kept], expected[kept])


def _error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    assert ours.isfinite().all()
    return float((ours.cpu().double() - expected).abs().max() / max(1.0, expected.abs().max()))


def step_of_states(wide: bool, device: str) -> tuple[torch.Tensor, ...]:
    """The op's sample with padding: the padding's row, a negative one, and one whose owner has no token; and states
    as views of longer rows."""
    *numbers, state, snapshots = state_rows.BEGIN_OP.sample(state_problem(device)).arguments
    row, start, length, table = (one.cpu() for one in numbers)
    more = torch.tensor([len(state) - 1, -1, 2], dtype=row.dtype)
    last = start[-1:].repeat(3)
    parts = (
        torch.cat((row, more)).long() if wide else torch.cat((row, more)),
        torch.cat((start, last)),
        torch.cat((length, torch.tensor([0, 0, 16], dtype=torch.int32))),
        torch.cat((table, torch.tensor([[0, 0, 0], [1, 1, 1], [1, 2, 3]], dtype=torch.int32))),
    )
    views = [torch.nn.functional.pad(one.cpu(), (0, 8))[:, :200] for one in (state, snapshots)]
    return tuple(one.to(device) for one in parts) + tuple(one.to(device) for one in views)


def check_states(begin: Callable[..., None], keep: Callable[..., None], device: str) -> None:
    """Bytes move as written in the op's head, and no others."""
    for wide in (False, True):
        *numbers, state, snapshots = step_of_states(wide, device)
        expected, slots = state.clone(), snapshots.clone()
        expected[6], expected[0] = 0, snapshots[2]
        begin(*numbers, state, snapshots)
        assert torch.equal(state, expected) and torch.equal(snapshots, slots)
        slots[3] = state[4]
        keep(*numbers, state, snapshots)
        assert torch.equal(state, expected) and torch.equal(snapshots, slots)


def state_problem(device: str) -> state_rows.StateRowsProblem:
    return state_rows.StateRowsProblem(device=device, block_tokens=16)

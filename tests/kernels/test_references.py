"""The PyTorch references do what their formulas say; the packed linear equals the plain one."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.back.kernels.gated_act import op as gated_act
from headrace.back.kernels.kv_write import op as kv_write
from headrace.back.kernels.linear import mkldnn
from headrace.back.kernels.linear import op as linear
from headrace.back.kernels.rms_norm import op as rms_norm
from headrace.back.kernels.rope import op as rope
from headrace.back.kernels.route import op as route
from headrace.back.kernels.step_inputs.op import HEADER, SLOT, StepInputsProblem
from headrace.back.kernels.step_verify import op as step_verify


def test_norm_divides_by_the_root_mean_square_and_multiplies_by_the_weight() -> None:
    problem = rms_norm.RMSNormProblem(device="cpu", dtype=torch.float32, width=2, eps=0.5)
    weight = torch.tensor([1.0, 10.0])
    got = rms_norm.OP.reference.bind(problem, weight)(torch.tensor([[3.0, 4.0]]))
    root = math.sqrt((9 + 16) / 2 + 0.5)
    torch.testing.assert_close(got, torch.tensor([[3 / root, 40 / root]]))


def test_add_norm_updates_the_residual_in_place_and_norms_the_sum() -> None:
    problem = rms_norm.RMSNormProblem(device="cpu", dtype=torch.float32, width=2, eps=0.0)
    residual, x = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]])
    got = rms_norm.ADD_OP.reference.bind(problem, torch.ones(2))(x, residual)
    assert residual.tolist() == [[3.0, 4.0]]
    torch.testing.assert_close(got, torch.tensor([[3.0, 4.0]]) / math.sqrt(12.5))


@pytest.mark.parametrize("layout", ["half", "pairs"])
def test_rope_turns_each_pair_by_its_angle_and_leaves_the_rest(layout: str) -> None:
    """Against multiplication by e^(i angle)."""
    problem = rope.RopeProblem(
        device="cpu", dtype=torch.float32, head_dim=6, rotary_dim=4, layout=layout
    )
    generator = torch.Generator().manual_seed(1)
    angles = torch.rand(5, 2, generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    q, k = torch.randn(2, 3, 6, generator=generator), torch.randn(2, 1, 6, generator=generator)
    before_q, before_k = q.clone(), k.clone()
    positions = torch.tensor([4, 2])
    rope.OP.reference.bind(problem)(q, k, positions, table)
    first, second = ([0, 1], [2, 3]) if layout == "half" else ([0, 2], [1, 3])
    for after, before in ((q, before_q), (k, before_k)):
        turn = torch.polar(torch.ones(2, 2), angles[positions])[:, None]
        expected = torch.complex(before[..., first], before[..., second]) * turn
        torch.testing.assert_close(after[..., first], expected.real)
        torch.testing.assert_close(after[..., second], expected.imag)
        assert torch.equal(after[..., 4:], before[..., 4:])


@pytest.mark.parametrize(
    ("activation", "at_one"),
    [
        ("silu", 1 / (1 + math.exp(-1))),
        ("gelu", 0.5 * (1 + math.erf(1 / math.sqrt(2)))),
        ("gelu_tanh", 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715))),
        ("relu", 1.0),
    ],
)
def test_gated_activation_is_the_activation_of_the_first_half_times_the_second(
    activation: str, at_one: float
) -> None:
    problem = gated_act.GatedActProblem(
        device="cpu", dtype=torch.float32, width=2, activation=activation
    )
    got = gated_act.OP.reference.bind(problem)(torch.tensor([[1.0, 0.0, 3.0, 5.0]]))
    torch.testing.assert_close(got, torch.tensor([[3 * at_one, 0.0]]))


def test_kv_write_touches_exactly_the_slots_given() -> None:
    problem = kv_write.KVWriteProblem(
        device="cpu", dtype=torch.float32, kv_heads=2, head_dim=3, block_tokens=4
    )
    kv = torch.full((3, 2, 2, 4, 3), -1.0)
    both = torch.arange(24.0).view(2, 4, 3)
    kv_write.OP.reference.bind(problem)(both[:, :2], both[:, 2:], kv, torch.tensor([6, 11]))
    assert torch.equal(kv[1, :, :, 2], both[0].view(2, 2, 3))
    assert torch.equal(kv[2, :, :, 3], both[1].view(2, 2, 3))
    assert int((kv == -1).sum()) == kv.numel() - 24


PACKED = linear.LinearProblem(device="cpu", dtype=torch.bfloat16, inputs=48, outputs=33, bias=True)
needs_packing = pytest.mark.skipif(
    mkldnn.KERNEL.supports(PACKED) is not None, reason=str(mkldnn.KERNEL.supports(PACKED))
)


@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 7, 130])
def test_packed_linear_equals_the_plain_one_for_any_number_of_rows(rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(33, 48, generator=generator).bfloat16()
    bias = torch.randn(33, generator=generator).bfloat16()
    x = torch.randn(rows, 48, generator=generator).bfloat16()
    got = mkldnn.KERNEL.bind(PACKED, weight, bias)(x).float()
    exact = x.double() @ weight.double().T + bias.double()
    assert (got - exact).abs().max() <= 2e-2 * exact.abs().max()


def test_a_tied_weight_is_never_packed_a_second_time() -> None:
    tied = linear.LinearProblem(
        device="cpu", dtype=torch.bfloat16, inputs=48, outputs=33, shared=True
    )
    assert "tied" in str(mkldnn.KERNEL.supports(tied))


def test_a_large_layer_is_checked_on_all_inputs_and_a_slice_of_the_outputs() -> None:
    """The slice leaves the same remainder by every power of two up to 256."""
    large = linear.LinearProblem(device="cpu", dtype=torch.float32, inputs=4099, outputs=151_936)
    sample = linear.OP.sample(large)
    assert (sample.problem.inputs, sample.problem.outputs) == (4099, 256 + 151_936 % 256)
    assert [x.shape for (x,) in (sample.arguments, *sample.further)] == [
        (rows, 4099) for rows in (3, 1, 40)
    ]


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_bias_chooses_experts_and_groups_and_weighs_nothing(renormalize: bool) -> None:
    """REG-040: of four groups of two the bias lifts the last two above all others."""
    problem = route.RouteProblem(
        device="cpu", experts=8, top_k=3, score="sigmoid", renormalize=renormalize, scale=2.5,
        groups=4, kept_groups=2, group_score="top2", bias=True,
    )  # fmt: skip
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.5, -1.0, -2.0, -0.5, -3.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 5.0])
    expert, weight = route.OP.reference.bind(problem, bias)(logits)
    assert expert.tolist() == [[6, 4, 5]]
    scores = [1 / (1 + math.exp(-float(logits[0, i]))) for i in (6, 4, 5)]
    total = sum(scores) if renormalize else 1.0
    torch.testing.assert_close(weight, torch.tensor([[2.5 * one / total for one in scores]]))


def test_padding_of_a_step_that_verifies_is_no_row() -> None:
    """SPC-03, REG-084: 11 query tokens of rows of up to 4 in a step of 13, four rows in one of nine."""
    problem = StepInputsProblem(device="cpu", block_tokens=16, max_rows=9, speculates=True)
    sample = step_verify.OP.sample(problem)
    words, token_T, _, tables, _, ring = sample.arguments
    rows = words[HEADER : HEADER + 4].tolist()
    tokens, lengths = tables.tokens_MC.clone(), tables.length_M.clone()
    step_verify.OP.reference.bind(sample.problem)(*sample.arguments)
    others = [row for row in range(len(lengths)) if row not in rows]
    assert torch.equal(tables.tokens_MC[others], tokens[others])
    assert torch.equal(tables.length_M[others], lengths[others])
    told = ring[int(words[SLOT]), 0, : len(token_T)].tolist()
    assert told[11:] == [step_verify.UNDRAFTED] * 2
    grown = (tables.length_M - lengths)[rows].tolist()
    assert grown == [
        sum(token >= 0 for token in told[a:b]) for a, b in ((0, 4), (4, 5), (5, 8), (8, 11))
    ]

"""Native norms, RoPE, gated activations and KV write against their references: odd widths, strides, extreme values."""

import pytest
import torch

from headrace.back.kernels.activation import native as activation_native
from headrace.back.kernels.activation import op as activation_op
from headrace.back.kernels.gated_act import native as gated_act
from headrace.back.kernels.gated_act import op as gated_act_op
from headrace.back.kernels.gated_norm import native as gated_norm
from headrace.back.kernels.gated_norm import op as gated_norm_op
from headrace.back.kernels.kv_write import native as kv_write
from headrace.back.kernels.kv_write import op as kv_write_op
from headrace.back.kernels.layer_norm import native as layer_norm
from headrace.back.kernels.layer_norm import op as layer_norm_op
from headrace.back.kernels.native.library import NativeError
from headrace.back.kernels.rms_norm import native as rms_norm
from headrace.back.kernels.rms_norm import op as rms_norm_op
from headrace.back.kernels.rope import native as rope
from headrace.back.kernels.rope import op as rope_op

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 3, 16, 40, 129, 1024]
# Float32 arithmetic in another order, rounded once: one unit in the last place of the dtype.
BOUND = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def values(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours, expected):
    assert ours.dtype == expected.dtype and ours.shape == expected.shape
    torch.testing.assert_close(ours, expected, rtol=BOUND[ours.dtype], atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_equals_the_reference(library, dtype, width):
    problem = rms_norm_op.RMSNormProblem(device="cpu", dtype=dtype, width=width, eps=1e-6)
    weight = values(width, dtype=torch.float32, seed=1)
    ours = rms_norm.bind_norm_with(library, problem, weight)
    theirs = rms_norm_op.bind_norm(problem, weight)
    x = values(7, 5, width, dtype=dtype)
    for view in (x, x[:, 1:3], x[::2], x[0], x[0, 0], x[:0]):
        assert_close(ours(view), theirs(view))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_norm_equals_the_reference_and_updates_the_residual(library, dtype, width):
    problem = rms_norm_op.RMSNormProblem(device="cpu", dtype=dtype, width=width, eps=1e-5)
    weight, x = values(width, dtype=torch.float32, seed=1), values(40, width, dtype=dtype, seed=2)
    ours, theirs = values(40, width, dtype=dtype, seed=3), values(40, width, dtype=dtype, seed=3)
    y = rms_norm.bind_add_norm_with(library, problem, weight)(x, ours)
    assert_close(y, rms_norm_op.bind_add_norm(problem, weight)(x, theirs))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_zeros_large_values_and_nan(library, dtype):
    problem = rms_norm_op.RMSNormProblem(device="cpu", dtype=dtype, width=33, eps=1e-6)
    weight = torch.ones(33)
    x = torch.stack(
        [
            torch.zeros(33),
            torch.full((33,), min(1e18, torch.finfo(dtype).max / 2)),
            torch.full((33,), float("nan")),
        ]
    )
    y = rms_norm.bind_norm_with(library, problem, weight)(x.to(dtype))
    assert not y[0].any() and y[2].isnan().all()
    assert_close(y[1], torch.ones(33).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("heads", [1, 5])
def test_layer_norm_equals_the_reference(library, dtype, width, bias, heads):
    problem = layer_norm_op.LayerNormProblem(
        device="cpu", dtype=dtype, width=width, eps=1e-5, bias=bias, heads=heads
    )
    weights = (
        values(heads, width, dtype=torch.float32, seed=1),
        values(width, dtype=torch.float32, seed=2) if bias else None,
    )
    ours = layer_norm.bind_norm_with(library, problem, *weights)
    theirs = layer_norm_op.bind_norm(problem, *weights)
    x = 3 + values(7, 5, width, dtype=dtype)
    for view in (x, x[::2], x[:0], *((x[0], x[0, 0], x[:, 1:3]) if heads == 1 else ())):
        assert_normed(ours(view), theirs(view))
    if heads == 1:
        mine, other = x[:, 0].clone(), x[:, 0].clone()
        y = layer_norm.bind_add_norm_with(library, problem, *weights)(x[:, 1], mine)
        assert_normed(y, layer_norm_op.bind_add_norm(problem, *weights)(x[:, 1], other))
        assert torch.equal(mine, other)


def test_a_layer_norm_keeps_its_weights(newest):
    """A layer drops its own once the kernel is bound."""
    problem = layer_norm_op.LayerNormProblem(
        device="cpu", dtype=torch.float32, width=4099, eps=1e-5, bias=True
    )
    norm = layer_norm.bind_norm_with(newest, problem, torch.ones(1, 4099), torch.full((4099,), 2.0))
    others = [torch.full((4099,), 1e9) for _ in range(8)]
    y = norm(values(2, 4099, dtype=torch.float32))
    assert others and y.abs().max() < 10


def assert_normed(ours, expected):
    """Values that the mean is taken from lose what it has in common with them."""
    assert ours.dtype == expected.dtype and ours.shape == expected.shape
    torch.testing.assert_close(ours, expected, rtol=BOUND[ours.dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_of_equal_and_large_values_and_nan(library, dtype):
    problem = layer_norm_op.LayerNormProblem(
        device="cpu", dtype=dtype, width=33, eps=1e-5, bias=False
    )
    x = torch.full((3, 33), 100.0)
    x[1] = torch.arange(33) + 1000  # a mean of squares less a squared mean would lose the variance
    x[2, 5] = float("nan")
    y = layer_norm.bind_norm_with(library, problem, torch.ones(1, 33), None)(x.to(dtype))
    expected = layer_norm_op.bind_norm(problem, torch.ones(1, 33), None)(x.to(dtype).double())
    assert not y[0].any() and y[2].isnan().all()
    torch.testing.assert_close(y[1].double(), expected[1], rtol=BOUND[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", activation_native.ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 40, 9001])
def test_activation_equals_the_reference(library, dtype, activation, width):
    problem = activation_op.ActivationProblem(device="cpu", dtype=dtype, activation=activation)
    x = 6 * values(3, width, dtype=dtype)
    x[0, 0], x[1, 0], x[2, 0] = float("nan"), 100.0, -100.0
    ours = activation_native.bind_with(library, problem)(x)
    theirs = activation_op.bind_reference(problem)(x)
    torch.testing.assert_close(ours, theirs, rtol=BOUND[dtype], atol=5e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["half", "pairs"])
@pytest.mark.parametrize("head_dim, rotary", [(16, 16), (64, 64), (128, 128), (80, 20), (24, 6)])
def test_rope_equals_the_reference_on_views_of_a_merged_projection(
    library, dtype, layout, head_dim, rotary
):
    problem = rope_op.RopeProblem(
        device="cpu", dtype=dtype, head_dim=head_dim, rotary_dim=rotary, layout=layout
    )
    angles = 3 * values(50, rotary // 2, dtype=torch.float32)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.arange(49, 0, -7)
    ours = values(len(positions), 6, head_dim, dtype=dtype, seed=1)
    theirs = ours.clone()
    rope.bind_with(library, problem)(ours[:, :4], ours[:, 4:5], positions, table)
    rope_op.bind_reference(problem)(theirs[:, :4], theirs[:, 4:5], positions, table)
    torch.testing.assert_close(
        ours, theirs, rtol=BOUND[dtype], atol=3e-6 if dtype is torch.float32 else 2e-2
    )
    assert torch.equal(ours[:, 5], theirs[:, 5])


@pytest.mark.parametrize("position", [-1, 8])
def test_rope_refuses_a_position_outside_the_table_and_writes_nothing(newest, position):
    problem = rope_op.RopeProblem(device="cpu", dtype=torch.float32, head_dim=8, rotary_dim=8)
    q, k, table = torch.ones(2, 1, 8), torch.ones(2, 1, 8), torch.ones(8, 8)
    with pytest.raises(NativeError, match="index out of range"):
        rope.bind_with(newest, problem)(q, k, torch.tensor([0, position]), table)
    assert torch.equal(q, torch.ones(2, 1, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", gated_act.ACTIVATIONS)
@pytest.mark.parametrize("width", [1, 40, 9001])
def test_gated_activation_equals_the_reference(library, dtype, activation, width):
    problem = gated_act_op.GatedActProblem(
        device="cpu", dtype=dtype, width=width, activation=activation
    )
    x = 6 * values(3, 2 * width + 5, dtype=dtype)[:, : 2 * width]
    x[0, 0], x[1, 0], x[2, 0] = float("nan"), 100.0, -100.0
    ours, theirs = gated_act.bind_with(library, problem)(x), gated_act_op.bind_reference(problem)(x)
    torch.testing.assert_close(ours, theirs, rtol=BOUND[dtype], atol=5e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1, 5, 41])
def test_a_gate_stands_for_several_values_and_rows_are_views(library, dtype, spread):
    problem = gated_norm_op.GatedNormProblem(
        device="cpu", dtype=dtype, width=6 * spread, group=0, gate="sigmoid", spread=spread
    )
    x, opened = 3 * values(3, 6 * spread + 7, dtype=dtype), 6 * values(3, 11, dtype=dtype, seed=1)
    both = x[:, : 6 * spread], opened[:, :6]
    ours = gated_norm.bind_with(library, problem, None)(*both)
    theirs = gated_norm_op.bind_reference(problem, None)(*both)
    torch.testing.assert_close(ours, theirs, rtol=BOUND[dtype], atol=5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", gated_norm_op.GATES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("width", "group"), [(41, 0), (40, 40), (84, 21), (9000, 4500)])
def test_gated_norm_equals_the_reference(library, dtype, gate, norm_first, width, group):
    problem = gated_norm_op.GatedNormProblem(
        device="cpu", dtype=dtype, width=width, group=group, eps=1e-5, gate=gate, norm_first=norm_first
    )  # fmt: skip
    weight = values(width, dtype=torch.float32, seed=2) if group else None
    x, opened = 3 * values(3, width, dtype=dtype), 6 * values(3, width + 5, dtype=dtype, seed=1)
    x[1, 3], opened[2, 7] = float("nan"), 100.0
    ours = gated_norm.bind_with(library, problem, weight)(x, opened[:, :width])
    theirs = gated_norm_op.bind_reference(problem, weight)(x, opened[:, :width])
    torch.testing.assert_close(ours, theirs, rtol=BOUND[dtype], atol=5e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write_puts_keys_and_values_in_their_slots(library, dtype):
    problem = kv_write_op.KVWriteProblem(
        device="cpu", dtype=dtype, kv_heads=3, head_dim=20, block_tokens=4
    )
    merged = values(5, 8, 20, dtype=dtype)
    slots = torch.tensor([4, 7, 23, 8, 14])
    ours = values(6, 2, 2, 3, 4, 20, dtype=dtype, seed=1)[:, 1]
    theirs = ours.clone()
    kv_write.bind_with(library, problem)(merged[:, :3], merged[:, 4:7], ours, slots)
    kv_write_op.bind_reference(problem)(merged[:, :3], merged[:, 4:7], theirs, slots)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("slot", [-1, 8])
def test_kv_write_refuses_a_slot_outside_the_cache_and_writes_nothing(newest, slot):
    problem = kv_write_op.KVWriteProblem(
        device="cpu", dtype=torch.float32, kv_heads=1, head_dim=4, block_tokens=4
    )
    cache = torch.zeros(2, 2, 1, 4, 4)
    with pytest.raises(NativeError, match="index out of range"):
        ones = torch.ones(2, 1, 4)
        kv_write.bind_with(newest, problem)(ones, ones, cache, torch.tensor([0, slot]))
    assert not cache.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_checks_accept_them(newest, dtype):
    norm = rms_norm_op.RMSNormProblem(device="cpu", dtype=dtype, width=1024, eps=1e-6)
    turn = rope_op.RopeProblem(device="cpu", dtype=dtype, head_dim=128, rotary_dim=128)
    gate = gated_act_op.GatedActProblem(device="cpu", dtype=dtype, width=300, activation="silu")
    opened = gated_norm_op.GatedNormProblem(device="cpu", dtype=dtype, width=96, group=24, eps=1e-6)
    write = kv_write_op.KVWriteProblem(
        device="cpu", dtype=dtype, kv_heads=2, head_dim=64, block_tokens=16
    )
    for op, kernel, problem in (
        (rms_norm_op.OP, rms_norm.KERNEL, norm),
        (rms_norm_op.ADD_OP, rms_norm.ADD_KERNEL, norm),
        (rope_op.OP, rope.KERNEL, turn),
        (gated_act_op.OP, gated_act.KERNEL, gate),
        (gated_norm_op.OP, gated_norm.KERNEL, opened),
        (kv_write_op.OP, kv_write.KERNEL, write),
    ):
        assert kernel.supports(problem) is None
        assert op.error(kernel, problem) <= op.tolerance(problem)

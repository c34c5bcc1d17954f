"""The comparison itself: planted faults must be caught, and what the rule permits must pass."""

import pytest
import torch
import torch.nn.functional as F
from support.cases import DTYPES, Case, covering_cases, pairwise
from support.compare import InaccurateError, assert_matches
from support.memory import GRADIENT_LAYOUTS, LAYOUTS, place, poisoned_memory, unchanged
from support.operations import ACTIVATIONS, OPERATIONS
from support.runner import check_op

LINEAR = Case("linear_act", (65,), (96, 130), "gelu")
GATED = Case("glu_mlp", (65,), (96, 160, 80), "gelu_tanh")
STACK = Case("relu_mlp", (65,), (96, 130, 64, 31))


def variant(case: Case, **changes) -> Case:
    return Case(**(vars(case) | changes))


def linear_act(t, function=F.gelu):
    return function(F.linear(t["x"], t["fc_weight"], t["fc_bias"]))


def to_tf32(t: torch.Tensor) -> torch.Tensor:
    """Round to 10 bits of mantissa, straight through for gradients."""
    rounded = ((t.detach().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return t + (rounded - t).detach()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [LINEAR, GATED, STACK], ids=lambda case: case.op)
def test_a_faithful_call_passes(case, dtype):
    operation = OPERATIONS[case.op]
    check_op(variant(case, dtype=dtype), "cpu", lambda t: operation.plain(t, case.activation))


@pytest.mark.parametrize("case", [LINEAR, GATED], ids=lambda case: case.op)
def test_wrong_gelu_variant(case):
    wrong = {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}[case.activation]
    with pytest.raises(InaccurateError, match="output.*relative error"):
        check_op(case, "cpu", lambda t: OPERATIONS[case.op].plain(t, wrong))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_missing_mask_on_the_last_reduction_tile(dtype):
    """One column too many is read beside the input; its weight is zero, and the result is NaN."""

    def unmasked(t):
        x = t["x"].detach()
        wide = x.as_strided((x.shape[0], x.shape[1] + 1), x.stride())
        return F.gelu(F.linear(wide, F.pad(t["fc_weight"], (0, 1)), t["fc_bias"]))

    with pytest.raises(AssertionError, match="NaN in ours and not in eager"):
        check_op(variant(LINEAR, x_layout="poisoned", frozen="x", dtype=dtype), "cpu", unmasked)


def test_tf32_in_place_of_fp32():
    with pytest.raises(InaccurateError, match="output"):
        check_op(
            LINEAR,
            "cpu",
            lambda t: linear_act(t | {"x": to_tf32(t["x"]), "fc_weight": to_tf32(t["fc_weight"])}),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dropped", ["gate_bias", "up_bias", "down_bias"])
def test_dropped_bias(dropped, dtype):
    with pytest.raises(InaccurateError, match="output"):
        check_op(
            variant(GATED, dtype=dtype),
            "cpu",
            lambda t: OPERATIONS["glu_mlp"].plain(t | {dropped: None}, "gelu_tanh"),
        )


def test_bias_after_the_activation():
    with pytest.raises(InaccurateError, match="output"):
        check_op(LINEAR, "cpu", lambda t: F.gelu(F.linear(t["x"], t["fc_weight"])) + t["fc_bias"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accumulation_in_16_bits(dtype):
    def accumulated(t):
        total = torch.zeros(65, 130, dtype=dtype)
        for k in range(0, 96, 8):
            total = total + F.linear(t["x"][:, k : k + 8], t["fc_weight"][:, k : k + 8])
        return F.gelu(total + t["fc_bias"])

    with pytest.raises(InaccurateError, match="output"):
        check_op(variant(LINEAR, dtype=dtype), "cpu", accumulated)


class ForgetsRow(torch.autograd.Function):
    """A linear layer whose weight gradient leaves out the last row, as a wrong loop bound does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gy):
        x, weight = ctx.saved_tensors
        return gy @ weight, gy[:-1].t() @ x[:-1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_left_out_of_the_weight_gradient(dtype):
    def forgets(t):
        return F.gelu(ForgetsRow.apply(t["x"], t["fc_weight"]) + t["fc_bias"])

    with pytest.raises(InaccurateError, match="gradient of fc_weight"):
        check_op(variant(LINEAR, dtype=dtype), "cpu", forgets)


def test_lost_gradient():
    with pytest.raises(AssertionError, match="gradient of fc_bias: is None, eager has a tensor"):
        check_op(LINEAR, "cpu", lambda t: linear_act(t | {"fc_bias": t["fc_bias"].detach()}))


def test_output_of_another_dtype():
    with pytest.raises(AssertionError, match="shape, dtype, device"):
        check_op(variant(LINEAR, dtype=torch.bfloat16), "cpu", lambda t: linear_act(t).float())


@pytest.mark.parametrize("victim", ["x", "fc_weight"])
def test_an_input_written_over(victim):
    def overwrites(t):
        y = linear_act({name: tensor.clone() for name, tensor in t.items()})
        t[victim].detach()[0, 0] += 1
        return y

    with pytest.raises(AssertionError, match=f"{victim}: .* bytes of its storage were written over"):
        check_op(LINEAR, "cpu", overwrites)


def test_an_output_left_unwritten():
    def forgets(t):
        out = torch.empty(65, 130)
        out[:64] = linear_act(t).detach()[:64]
        return out

    with pytest.raises(AssertionError, match="NaN in ours and not in eager"):
        check_op(variant(LINEAR, frozen="nothing"), "cpu", forgets)


def test_flipped_relu_in_one_seed_is_forgiven_but_not_in_all():
    calls = []

    def noisy(t, always):
        calls.append(1)
        y = F.relu(F.linear(t["x"], t["fc_weight"], t["fc_bias"]))
        return y * 1.5 if always or len(calls) == 1 else y

    small = Case("linear_act", (17,), (16, 31), "relu", dtype=torch.bfloat16)
    check_op(small, "cpu", lambda t: noisy(t, always=False))
    assert len(calls) == 2
    with pytest.raises(InaccurateError):
        check_op(small, "cpu", lambda t: noisy(t, always=True))


def test_the_factor_is_a_quarter_above_eager_for_large_tensors():
    exact = torch.randn(256, 256, dtype=torch.float64)
    noise = torch.randn_like(exact) * 0.01
    eager = (exact + noise).float()
    assert_matches("y", (exact - 1.24 * noise).float(), eager, exact)
    with pytest.raises(InaccurateError, match="y .*relative error"):
        assert_matches("y", (exact - 1.26 * noise).float(), eager, exact)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_must_match_both_ways(value):
    exact = torch.randn(8, 8, dtype=torch.float64)
    clean, spoilt = exact.float(), exact.float()
    spoilt[2, 3] = value
    with pytest.raises(AssertionError, match="in ours and not in eager"):
        assert_matches("y", spoilt, clean, exact)
    with pytest.raises(AssertionError, match="in eager and not in ours"):
        assert_matches("y", clean, spoilt, exact)
    assert_matches("y", spoilt, spoilt.clone(), exact)
    with pytest.raises(AssertionError, match="not finite where eager is"):
        assert_matches("y", spoilt, clean, exact, only_more_nonfinite=True)
    assert_matches("y", clean, spoilt, exact, only_more_nonfinite=True)


@pytest.mark.parametrize("layout", sorted({*LAYOUTS, *GRADIENT_LAYOUTS}))
@pytest.mark.parametrize("shape", [(5,), (0, 5), (4, 6), (2, 3, 5)], ids=str)
def test_layouts_hold_the_values(layout, shape):
    values = torch.randn(shape)
    leaf, view = place(values, layout)
    placed = view(leaf)
    assert placed.shape == values.shape and not placed.isnan().any()
    if layout not in ("expand", "scalar", "per_row", "per_column"):
        assert torch.equal(placed, values)
    if layout == "offset":
        assert placed.data_ptr() % 16 != 0 or placed.numel() == 0
    if layout == "step" and values.numel():
        assert placed.stride(-1) == 2
    if layout in ("poisoned", "chunk") and values.numel():
        whole = torch.empty(0).set_(placed.untyped_storage())
        assert whole.isnan().sum() > 0


def test_poisoned_memory_reaches_fresh_tensors_and_ends():
    with poisoned_memory() as seen:
        fresh = [torch.empty(3), torch.empty_like(torch.ones(3)), torch.ones(2).new_empty((3,))]
        fresh.append(torch.empty_strided((2, 2), (2, 1)))
        assert all(t.isnan().all() for t in fresh) and len(seen) == 4
        assert torch.empty(3, dtype=torch.int32).dtype is torch.int32
    assert not hasattr(torch.empty, "__wrapped__") and torch.empty is not None
    assert torch.empty.__name__ == "empty" and len(seen) == 5


def test_unchanged_sees_the_surroundings():
    buffer = torch.zeros(10)
    with pytest.raises(AssertionError, match="x: .* written over by the end"), unchanged({"x": buffer[2:4]}):
        buffer[9] = 1


def test_pairwise_covers_every_pair():
    factors = {"a": range(5), "b": "xyz", "c": range(4), "d": (True, False)}
    rows = pairwise(factors)
    assert rows == pairwise(factors)
    names = list(factors)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            seen = {(row[first], row[second]) for row in rows}
            assert seen == {(p, q) for p in factors[first] for q in factors[second]}


@pytest.mark.parametrize("op", list(OPERATIONS))
def test_cases_have_unique_names_and_every_activation(op):
    cases = covering_cases(op, ((1,), (5,)), (3, 16))
    assert len({case.id for case in cases}) == len(cases)
    assert {case.activation for case in cases} == ({"relu"} if op == "relu_mlp" else set(ACTIVATIONS))
    assert {case.dtype for case in cases} == set(DTYPES)

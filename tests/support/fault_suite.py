"""Faults that fused MLPs are known for, as tests on the operations; one suite for CPU, interpreter and GPU.

A test module instantiates it: `class TestFaults(FaultSuite): ...` with a fixture `device`.
"""

from __future__ import annotations

import pytest
import torch

import fusedmlp.functional as fused

from .cases import DTYPES, Case
from .compare import assert_matches
from .operations import ACTIVATIONS, OPERATIONS, Tensors
from .runner import Outcome, check_op, compare, run_tensors

# No power of two, and several tiles in each direction of a small kernel.
SMALL = {
    "linear_act": (96, 160),
    "glu_mlp": (96, 160, 96),
    "mlp": (96, 160, 96),
    "relu_mlp": (96, 160, 130, 48),
}
EXTREMES = (
    0.0,
    -0.0,
    1e-6,
    -1e-6,
    5,
    -5,
    11,
    -11,
    13.3,
    -13.3,
    44,
    -44,
    88,
    -88,
    89,
    -89,
    1e3,
    -1e3,
    3e4,
    -3e4,
)

ops = pytest.mark.parametrize("op", list(OPERATIONS))
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def activation_of(op: str) -> str:
    return {"linear_act": "relu", "relu_mlp": "relu", "mlp": "gelu", "glu_mlp": "gelu_tanh"}[op]


def parameters(op: str, dtype: torch.dtype, device: torch.device, bias_values: tuple[float, ...] = ()) -> Tensors:
    """Leaves of an operation at the small shape, without x."""
    generator = torch.Generator().manual_seed(5)
    tensors: Tensors = {}
    biases = list(bias_values)
    for name, shape in OPERATIONS[op].shapes(SMALL[op]).items():
        if biases and name.endswith("_bias"):
            values = torch.full(shape, biases.pop(0), dtype=torch.float64)
        else:
            scale = 0.5 if name.endswith("_bias") else shape[-1] ** -0.5
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        tensors[name] = values.to(device, dtype)
    return tensors


def three_ways(op: str, leaves: Tensors, make_loss, dtype: torch.dtype, roundings: int | None = None) -> None:
    """make_loss(call, leaves) -> scalar loss with `call(x)` the operation; all leaves' gradients compared."""
    operation, act = OPERATIONS[op], activation_of(op)

    def outcome(apply, to: torch.dtype) -> Outcome:
        return run_tensors(leaves, to, lambda t: make_loss(lambda x: apply(t | {"x": x}, act), t))

    exact, eager = outcome(operation.plain, torch.float64), outcome(operation.plain, dtype)
    compare(op, outcome(operation.fused, dtype), eager, exact, roundings=roundings)


class FaultSuite:
    @ops
    @dtypes
    @pytest.mark.parametrize("lead", [(70,), (3, 23)], ids=str)
    @pytest.mark.parametrize("reduction", ["sum", "rows", "columns"])
    def test_expanded_upstream_gradient(self, device, op, dtype, lead, reduction):
        """.sum().backward() hands over a gradient of stride 0."""
        leaves = {"input": torch.randn(*lead, SMALL[op][0]).to(device, dtype)} | parameters(op, dtype, device)
        strides = []

        def loss(call, t):
            y = call(t["input"])
            y.register_hook(lambda g: strides.append(g.stride()))
            if reduction == "sum":
                return y.sum()
            return y.sum(-1 if reduction == "rows" else 0).pow(2).sum()

        three_ways(op, leaves, loss, dtype, roundings=100)
        assert all(0 in stride for stride in strides), f"the gradients were not expanded: {strides}"

    @ops
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("layout", ["chunk", "outer_transpose", "t", "expand"])
    def test_input_layouts(self, device, op, dtype, layout):
        """A chunk, a transpose or an expanded row as input, with the gradient of its base."""
        d = SMALL[op][0]
        shape = {"chunk": (67, 2 * d), "outer_transpose": (10, 7, d), "t": (d, 67), "expand": (1, d)}[layout]
        leaves = {"base": torch.randn(shape).to(device, dtype)} | parameters(op, dtype, device)
        gradient = torch.randn(67, SMALL[op][-1]).to(device)

        def loss(call, t):
            base = t["base"]
            if layout == "chunk":
                x = base[:, :d]
            elif layout == "outer_transpose":
                x = base.transpose(0, 1)
            else:
                x = base.t() if layout == "t" else base.expand(67, d)
            y = call(x)
            return (y * y).sum() if layout == "outer_transpose" else (y * gradient.to(y.dtype)).sum()

        three_ways(op, leaves, loss, dtype, roundings=d)

    @pytest.mark.parametrize("gate_room, up_room", [(0, 8), (16, 0), (8, 24), (0, 3)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_gate_and_up_of_different_row_strides(self, device, dtype, gate_room, up_room):
        """Views of wider tensors, whose other columns are NaN."""

        def weight(rows, columns, room):
            wide = torch.full((rows, columns + room), torch.nan)
            wide[:, :columns] = torch.randn(rows, columns) / columns**0.5
            return wide.to(device, dtype)[:, :columns].detach().requires_grad_()

        M, D, H = 72, 64, 136
        x = torch.randn(M, D).to(device, dtype).requires_grad_()
        gate, up, down = weight(H, D, gate_room), weight(H, D, up_room), weight(D, H, 0)
        leaves = (x, gate, up, down)
        gy = torch.randn(M, D).to(device, dtype)
        y = fused.glu_mlp(*leaves, activation="silu")
        found = (y, *torch.autograd.grad(y, leaves, gy))
        exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
        exact = torch.nn.functional.linear(
            torch.nn.functional.silu(exact_leaves[0] @ exact_leaves[1].t()) * (exact_leaves[0] @ exact_leaves[2].t()),
            exact_leaves[3],
        )
        expected = (exact, *torch.autograd.grad(exact, exact_leaves, gy.double()))
        limit = 1e-2 if dtype == torch.bfloat16 else 2e-3  # TF32, where the setting allows it
        for ours, right in zip(found, expected, strict=True):
            assert float((ours.double() - right).norm() / right.norm()) < limit

    @ops
    @dtypes
    def test_poisoned_neighbours_at_ragged_sizes(self, device, op, dtype):
        """NaN around every operand, no size a multiple of a tile, the reductions over M, K and N ragged."""
        for rows, widths in ((17, (31, 33, 3, 16)), (1, (511, 3, 33, 1)), (129, (16, 130, 31, 33))):
            widths = widths[: len(OPERATIONS[op].widths)]
            case = Case(op, (rows,), widths, activation_of(op), dtype=dtype)
            layouts = {f"{what}_layout": "poisoned" for what in ("x", "weight", "gradient")}
            check_op(Case(**(vars(case) | layouts)), device)

    @ops
    @dtypes
    @pytest.mark.parametrize("rows", [1, 2])
    def test_tiny_dimensions(self, device, op, dtype, rows):
        for widths in ((5, 3, 5, 1), (1, 1, 1, 1), (16, 1, 16, 2), (1, 64, 1, 3), (8, 12, 8, 4)):
            widths = widths[: len(OPERATIONS[op].widths)]
            check_op(Case(op, (rows,), widths, activation_of(op), dtype=dtype), device)

    @ops
    @dtypes
    @pytest.mark.parametrize("lead", [(0,), (4, 0)], ids=str)
    def test_zero_rows(self, device, op, dtype, lead):
        """No rows: an empty output and an empty dx; every weight and bias gradient exists and is zero."""
        x = torch.empty(*lead, SMALL[op][0], dtype=dtype, device=device, requires_grad=True)
        leaves = {n: t.requires_grad_() for n, t in parameters(op, dtype, device).items()}
        y = OPERATIONS[op].fused(leaves | {"x": x}, activation_of(op))
        assert y.shape == (*lead, SMALL[op][-1])
        y.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        for name, leaf in leaves.items():
            assert leaf.grad is not None, f"{name} has no gradient"
            assert torch.equal(leaf.grad, torch.zeros_like(leaf)), f"the gradient of {name} is not zero"

    @ops
    @dtypes
    def test_large_distinct_biases(self, device, op, dtype):
        """A bias that is dropped, counted twice, swapped or added after the activation moves everything."""
        biases = (3.0, -5.0, 7.0)
        leaves = {"input": torch.randn(65, SMALL[op][0]).to(device, dtype)} | parameters(op, dtype, device, biases)
        gradient = torch.randn(65, SMALL[op][-1], device=device)
        three_ways(op, leaves, lambda call, t: (call(t["input"]) * gradient.to(t["input"].dtype)).sum(), dtype)

    @dtypes
    @pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "silu", "quick_gelu", "sigmoid", "relu", "relu2"])
    @pytest.mark.parametrize("gated", [True, False])
    def test_extreme_activation_inputs(self, device, dtype, activation, gated):
        """Finite wherever eager is finite, forward and backward, where home-made formulas overflow."""
        top = (65504.0, -65504.0) if dtype is torch.float16 else (1e30, -1e30)
        gates = torch.tensor((*EXTREMES, *top), dtype=torch.float64)
        ups = torch.tensor((0.0, 1.0, -2.0), dtype=torch.float64)
        x = torch.zeros(len(gates) * 3, 16, dtype=torch.float64)
        x[:, 0], x[:, 8] = gates.repeat_interleave(3), ups.repeat(len(gates))
        gate, up, down = torch.zeros(32, 16), torch.zeros(32, 16), torch.zeros(16, 32)
        gate[0, 0] = up[0, 8] = down[0, 0] = 1.0
        if gated:
            op, weights = "glu_mlp", {"gate_weight": gate, "up_weight": up, "down_weight": down}
        else:
            op, weights = "linear_act", {"fc_weight": gate}
        leaves = {name: t.to(device, dtype) for name, t in (weights | {"x": x}).items()}
        empty = dict.fromkeys(n for n in OPERATIONS[op].shapes((16, 32, 16)[: len(OPERATIONS[op].widths)]))

        def outcome(apply, to):
            return run_tensors(leaves, to, lambda t: apply(empty | t, activation)[:, :1].sum())

        def values(apply, to):
            return apply(empty | {n: t.to(to) for n, t in leaves.items()}, activation)[:, :1]

        plain, ours = OPERATIONS[op].plain, OPERATIONS[op].fused
        rules = {"only_more_nonfinite": True}
        y, eager, exact = values(ours, dtype), values(plain, dtype), values(plain, torch.float64)
        for i, (a, b, c) in enumerate(zip(y, eager, exact, strict=True)):  # one by one: the sizes differ by 1e30
            assert_matches(f"{activation}({x[i, 0]:g}) * {x[i, 8]:g}", a, b, c, **rules)
        mine, theirs, wanted = outcome(ours, dtype), outcome(plain, dtype), outcome(plain, torch.float64)
        for i in range(len(x)):
            rows = (o.gradients["x"][i, [0, 8]] for o in (mine, theirs, wanted))
            assert_matches(f"gradient of {activation} at {x[i, 0]:g}, up {x[i, 8]:g}", *rows, **rules)

    @ops
    def test_nan_and_inf_inputs_spread_as_in_eager(self, device, op):
        """A row with NaN or inf spoils what it spoils in eager, and nothing else."""
        x = torch.randn(37, SMALL[op][0])
        x[3, 5], x[20, 7], x[30, 9] = float("nan"), float("inf"), float("-inf")
        leaves = {"x": x.to(device)} | parameters(op, torch.float32, device)
        operation, act = OPERATIONS[op], activation_of(op)
        y, eager = operation.fused(leaves, act), operation.plain(leaves, act)
        exact = operation.plain({n: t.double() for n, t in leaves.items()}, act)
        assert_matches(op, y, eager, exact)
        assert torch.isfinite(y[[i for i in range(37) if i not in (3, 20, 30)]]).all()

    @pytest.mark.parametrize("op", ["glu_mlp", "mlp", "relu_mlp"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("rows", [5, 37, 150])
    def test_an_infinite_weight_spoils_no_sum_of_a_bias(self, device, op, dtype, rows):
        """All is positive, so that eager's sums are infinite; 0 * inf in the padding of a tile would make them NaN."""
        leaves = {"x": torch.rand(rows, SMALL[op][0])}
        leaves |= {n: torch.rand(t.shape) * t.shape[-1] ** -0.5 for n, t in parameters(op, dtype, device).items()}
        leaves[[n for n in leaves if n.endswith("_weight")][-1]][2, 3] = torch.inf
        leaves = {n: (t + 0.1 * t.shape[-1] ** -0.5).to(device, dtype).requires_grad_() for n, t in leaves.items()}

        def gradients(call):
            y = call(leaves, activation_of(op))
            return torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y))

        ours, eager = gradients(OPERATIONS[op].fused), gradients(OPERATIONS[op].plain)
        assert any(g.dim() == 1 and g.isposinf().any() for g in eager)
        for name, a, b in zip(leaves, ours, eager, strict=True):
            assert not b.isnan().any() and torch.equal(a.isposinf(), b.isposinf()), name
            assert not a.isnan().any(), name

    @pytest.mark.parametrize("gated", [True, False])
    def test_gelu_variants_are_told_apart(self, device, gated):
        """Each name gives its own function and slope to 2e-6; the GELUs differ by 4.73e-4 at |x| = 2.70."""
        n = 4096 if device.type == "cuda" else 512
        g = torch.linspace(-6, 6, n, dtype=torch.float64)
        outputs = {}
        for name, function in ACTIVATIONS.items():
            exact_in = g.float().double().requires_grad_()
            exact = function(exact_in)
            exact.sum().backward()
            x = torch.stack((g.float(), torch.ones(n)), 1).to(device).requires_grad_()
            first, second = torch.eye(2, device=device).split(1)
            if gated:
                y = fused.glu_mlp(x, first, second, torch.ones(1, 1, device=device), activation=name)
            else:
                y = fused.linear_act(x, first, activation=name)
            y.sum().backward()
            for what, ours, wanted in (("value", y[:, 0], exact), ("slope", x.grad[:, 0], exact_in.grad)):
                # At the kink of relu (x = 0) no point of the grid lies.
                worst = (ours.detach().cpu().double() - wanted.detach()).abs() / wanted.detach().abs().clamp(min=1)
                assert worst.max() < 2e-6, f"{name}: {what} off by {worst.max():.2e} at {g[worst.argmax()]:.3f}"
            outputs[name] = y.detach()[:, 0].cpu()
        difference = (outputs["gelu"] - outputs["gelu_tanh"]).abs()
        assert abs(difference.max().item() - 4.73e-4) < 1e-5
        assert abs(abs(g[difference.argmax()].item()) - 2.70) < 0.03

    @ops
    @pytest.mark.parametrize("precision", ["highest", "high"])
    def test_float32_matmul_precision_is_followed(self, device, op, precision):
        """The error is that of eager under the same setting, switched between two calls in one process."""
        other = "high" if precision == "highest" else "highest"
        case = Case(op, (65,), SMALL[op], activation_of(op))
        torch.set_float32_matmul_precision(other)
        check_op(case, device)
        torch.set_float32_matmul_precision(precision)
        check_op(case, device)

    @dtypes
    def test_long_bias_reduction(self, device, dtype):
        """db over many rows that nearly cancel: no worse than a float32 sum, in a fixed order."""
        rows = 65536 if device.type == "cuda" else 4096
        signs = torch.cat((torch.ones(rows // 4), torch.full((rows // 4,), -0.9999))).repeat(2)
        gradient = (signs[:, None] + 0.01 * torch.randn(rows, 16)).to(device, dtype)
        x = torch.randn(rows, 16).to(device, dtype)
        weight, bias = torch.randn(16, 16).to(device, dtype), torch.full((16,), 50.0).to(device, dtype)
        bias.requires_grad_()
        weight.requires_grad_()
        fused.linear_act(x, weight, bias, activation="relu").backward(gradient)
        # The bias keeps every ReLU open, so that db is the plain column sum.
        exact = gradient.double().sum(0)
        magnitude = gradient.double().abs().sum(0)
        floor = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
        limit = exact.abs() * floor + magnitude * 2.0**-24 * 16
        excess = (bias.grad.double() - exact).abs() / limit
        assert excess.max() <= 1, f"db off by {excess.max():.1f}x of what a float32 sum allows"
        dw = gradient.double().t() @ x.double()
        bound = (gradient.double().abs().t() @ x.double().abs()) * 2.0**-24 * 64 + dw.abs() * floor
        assert ((weight.grad.double() - dw).abs() <= bound).all()

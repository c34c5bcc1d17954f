"""Peak memory, offloading hooks and misaligned data on a GPU."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.cases import DTYPES, Case
from support.compare import relative_error
from support.fault_suite import SMALL, activation_of
from support.operations import OPERATIONS, WAYS
from support.runner import check_op
from torch.utils.checkpoint import checkpoint

import fusedmlp.functional as fused

pytestmark = pytest.mark.gpu

M, D, H = 8192, 2304, 9216


def peak(function) -> int:
    """Bytes allocated above what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def problem(gated: bool):
    torch.manual_seed(0)
    x = torch.randn(M, D, device="cuda", dtype=torch.bfloat16)
    inner = [torch.randn(H, D, device="cuda", dtype=torch.bfloat16) / D**0.5 for _ in range(1 + gated)]
    down = torch.randn(D, H, device="cuda", dtype=torch.bfloat16) / H**0.5
    return x, [*inner, down]


def plain(x, weights):
    *inner, down = weights
    hidden = F.gelu(F.linear(x, inner[0]), approximate="tanh")
    return F.linear(hidden * F.linear(x, inner[1]) if len(inner) == 2 else hidden, down)


def ours(x, weights, **options):
    call = fused.glu_mlp if len(weights) == 3 else fused.mlp
    return call(x, *weights, activation="gelu_tanh", **options)


def inference(function, x, weights, mode):
    def run():
        with mode():
            function(x, weights)

    return run


def training(function, x, weights):
    def run():
        fresh = [w.detach().requires_grad_() for w in weights]
        function(x.detach().requires_grad_(), fresh).sum().backward()

    return run


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_inference_holds_the_hidden_layer_once(gated, mode):
    """Neither gate nor up nor the pre-activation is written: hidden and output, and no more than eager."""
    x, weights = problem(gated)
    inference(ours, x, weights, mode)()
    mine, theirs = peak(inference(ours, x, weights, mode)), peak(inference(plain, x, weights, mode))
    assert mine <= theirs
    assert mine <= 2 * M * (H + D) + 2**22, f"{mine} bytes"


@pytest.mark.parametrize("gated", [True, False])
def test_frozen_weights_hold_no_more_than_inference(gated):
    x, weights = problem(gated)
    ours(x, weights)
    mine = peak(lambda: ours(x, weights))
    assert mine <= 2 * M * (H + D) + 2**22, f"{mine} bytes"


@pytest.mark.parametrize("gated", [True, False])
def test_training_peak_is_at_most_eagers(gated):
    x, weights = problem(gated)
    step = training(ours, x, weights)
    step()
    mine, theirs = peak(step), peak(training(plain, x, weights))
    assert mine <= theirs, f"{mine} bytes, eager {theirs}"


def test_a_kept_activation_raises_the_peak_by_itself_at_most():
    """The default needs room for an activation too, which it makes again, but gives it up for the products after it."""
    x, weights = problem(True)
    peaks = []
    for step in (training(ours, x, weights), training(partial(ours, keep_activation=True), x, weights)):
        step()
        peaks.append(peak(step))
    assert peaks[1] <= peaks[0] + 2 * M * H + 2**22, peaks


@pytest.mark.parametrize("way", ["glu_mlp", "glu_mlp-recompute", "glu_mlp-keep_activation", "mlp", "mlp-recompute"])
def test_kept_between_forward_and_backward(way):
    """2H or H a token beside the output; with recompute the output alone, with the activation of gated MLPs 3H."""
    op, options = WAYS[way]
    x, weights = problem(op == "glu_mlp")
    x.requires_grad_()
    fresh = [w.requires_grad_() for w in weights]
    ours(x, fresh, **options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = ours(x, fresh, **options)
    kept = torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()
    values = {"glu_mlp": 2 * H, "glu_mlp-keep_activation": 3 * H, "mlp": H}.get(way, 0)
    assert 2 * M * values <= kept <= 2 * M * values + 2**22, f"{kept} bytes, promised {2 * M * values}"


@pytest.mark.parametrize("op, options", list(WAYS.values()), ids=list(WAYS))
@pytest.mark.parametrize("pin_memory", [True, False])
def test_save_on_cpu(op, options, pin_memory):
    torch.manual_seed(0)
    leaves = {"x": (3, 43, SMALL[op][0])} | OPERATIONS[op].shapes(SMALL[op])
    leaves = {n: (torch.randn(s, device="cuda", dtype=torch.bfloat16) / 8).requires_grad_() for n, s in leaves.items()}

    def grads(context):
        for leaf in leaves.values():
            leaf.grad = None
        with context:
            y = OPERATIONS[op].fused(leaves, activation_of(op), **options)
        y.backward(torch.ones_like(y))
        return {name: leaf.grad.clone() for name, leaf in leaves.items()}

    plain_run = grads(torch.enable_grad())
    offloaded = grads(torch.autograd.graph.save_on_cpu(pin_memory=pin_memory))
    for name, gradient in plain_run.items():
        assert torch.equal(gradient, offloaded[name]), name


def test_checkpointing_lowers_the_peak():
    """Four layers, each checkpointed: at most a part of what four layers keep otherwise. Checkpoints hold on to what
    they made again, so that in them no gradient takes the place of gate and up."""
    x, weights = problem(True)

    def stack(wrap):
        def run():
            y = x.detach().requires_grad_()
            fresh = [w.detach().requires_grad_() for w in weights]
            for _ in range(4):
                y = wrap(fresh, y)
            y.sum().backward()

        return run

    kept = peak(stack(lambda w, y: ours(y, w)))
    dropped = peak(stack(lambda w, y: checkpoint(lambda t: ours(t, w), y, use_reentrant=False)))
    assert dropped <= kept - 2 * 2 * M * 2 * H + 2**22  # three of the four layers' gate and up, less one for gradients


@pytest.mark.parametrize("op", list(OPERATIONS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_misaligned_after_aligned_warm_up(op, dtype):
    """A view that starts one element later, after the aligned call was specialised and cached."""
    aligned = Case(op, (256,), tuple(128 for _ in SMALL[op]), activation_of(op), dtype=dtype)
    check_op(aligned, "cuda")
    for changed in ({"x_layout": "offset"}, {"weight_layout": "offset"}, {"gradient_layout": "offset"}):
        check_op(Case(**(vars(aligned) | changed)), "cuda")
    check_op(aligned, "cuda")


@pytest.mark.parametrize("op", list(OPERATIONS))
def test_misaligned_inside_a_cuda_graph(op):
    """Captured with an aligned input, then a capture of its own with a misaligned one."""
    widths = tuple(128 for _ in SMALL[op])
    torch.manual_seed(0)
    weights = {
        n: torch.randn(s, device="cuda", dtype=torch.bfloat16) / 8 for n, s in OPERATIONS[op].shapes(widths).items()
    }
    buffer = torch.randn(256 * 128 + 8, device="cuda", dtype=torch.bfloat16)
    for start in (0, 1):
        x = buffer[start : start + 256 * 128].view(256, 128)

        def call(x=x):
            with torch.no_grad():
                return OPERATIONS[op].fused(weights | {"x": x}, activation_of(op))

        expected = call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
        buffer.normal_()
        graph.replay()
        assert relative_error(out, call()) == 0

"""What was kept is written over by the last backward alone, on a GPU: every family, many tiles, CUDA graphs, peaks."""

from contextlib import nullcontext

import pytest
import torch
from support.operations import OPERATIONS
from support.spent_suite import SpentSuite, assert_same, grads
from torch import Tensor

from fusedmlp import settings

pytestmark = pytest.mark.gpu

FAMILIES = [None, "pointer", "tma", "pair", "gluon", "small"]


def forced(family):
    return nullcontext() if family is None else settings.override(family=family)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture(params=FAMILIES, ids=str)
def family(request):
    with forced(request.param):
        yield request.param


@pytest.mark.usefixtures("lone_layers_fused", "family")
class TestSpent(SpentSuite):
    pass


def leaves_of(op: str, biases: bool, widths: tuple[int, ...], rows: int) -> dict[str, Tensor]:
    made = {"x": torch.randn(rows, widths[0], device="cuda", dtype=torch.bfloat16)}
    for name, shape in OPERATIONS[op].shapes(widths).items():
        if biases or len(shape) == 2:
            made[name] = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5
    return {name: t.requires_grad_() for name, t in made.items()}


def call(op: str, leaves: dict[str, Tensor]) -> Tensor:
    none = dict.fromkeys(OPERATIONS[op].shapes((8, 8, 8)))
    return OPERATIONS[op].fused(none | leaves, "gelu_tanh")


# On an H200 the plans take, from few tokens to many: kernels with one tile or a few, the grouped products, and the
# warp-specialised ones with tiles for every multiprocessor several times over. The last widths fill no tile.
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("op", ["glu_mlp", "mlp"])
@pytest.mark.parametrize("rows, widths", [(16, (768, 3072, 768)), (1000, (768, 3072, 768)), (5000, (520, 2056, 264))])
def test_bits_of_many_tiles(op, biases, rows, widths, family):
    with forced(family):
        leaves = leaves_of(op, biases, widths, rows)
        gy = torch.randn(rows, widths[-1], device="cuda", dtype=torch.bfloat16)
        right = None
        for _ in range(4):  # the last two are steady calls, where nothing is forced
            y = call(op, leaves)
            first = grads(y, leaves, gy, retain_graph=True)
            right = right or first
            assert_same(first, right, leaves)
            assert_same(grads(y, leaves, gy), right, leaves)


@pytest.mark.parametrize("op", ["glu_mlp", "mlp"])
def test_a_captured_backward_is_replayed_alone(op):
    """The forward ran once, outside; every replay gives the gradients of that one."""
    leaves = leaves_of(op, True, (256, 512, 256), 200)
    gy = torch.randn(200, 256, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            grads(call(op, leaves), leaves, gy)
        y = call(op, leaves)
        right = [g.clone() for g in grads(y, leaves, gy, retain_graph=True)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            found = torch.autograd.grad(y, list(leaves.values()), gy)
    for _ in range(3):
        for g in found:
            g.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(list(found), right, leaves)


@pytest.mark.parametrize("gated", [True, False])
def test_the_peak_of_a_step_holds_the_hidden_layer_once_for_each_use(gated):
    """Gate and up, whose gradients take their place, and the activation (pre-activation and activation), beside the
    output, its gradient and the weights': all three of wide gated layers, which share a launch, else the first."""
    rows, D, H = 8192, 2304, 9216
    op = "glu_mlp" if gated else "mlp"
    leaves = leaves_of(op, False, (D, H, D), rows)

    def step() -> None:
        y = call(op, leaves)
        torch.autograd.grad(y.sum(), list(leaves.values()))

    for _ in range(4):  # the long way, written down, steady
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated() - before
    hidden, weights = (3, 3) if gated else (2, 1)
    assert found <= 2 * (hidden * rows * H + 2 * rows * D + weights * D * H) + 2**22, f"{found} bytes"

"""The suite on a GPU: as dispatched, and with each kernel family forced."""

import pytest
import torch
from support.autocast_suite import AutocastSuite
from support.autograd_suite import AutogradSuite
from support.bad_input_suite import BadInputSuite
from support.cases import DTYPES, FULL_LEADS, FULL_WIDTHS, SMALL_LEADS, SMALL_WIDTHS, Case, covering_cases
from support.fault_suite import FaultSuite
from support.functorch_suite import FunctorchSuite
from support.operations import OPERATIONS
from support.runner import check_op
from support.saved_suite import SavedMemorySuite

from fusedmlp import settings

pytestmark = pytest.mark.gpu

CASES = [case for op in OPERATIONS for case in covering_cases(op, FULL_LEADS, FULL_WIDTHS)]
FORCED = [case for op in OPERATIONS for case in covering_cases(op, SMALL_LEADS, SMALL_WIDTHS)]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_accuracy(case, device):
    check_op(case, device)


FAMILIES = ["pointer", "tma", "gluon", "small"]


@pytest.mark.parametrize(
    "case, family",
    [(case, family) for case in FORCED for family in FAMILIES if case.suits(family)],
    ids=lambda value: value if isinstance(value, str) else value.id,
)
def test_accuracy_of_each_family(case, device, family):
    with settings.override(family=family):
        check_op(case, device)


# On an H200 these take the kernels for small batches, TMA, one launch for the products after the hidden layer, and the
# warp-specialised kernels with cuBLAS; in fp32 all of it is cuBLAS and a pointwise kernel. every_second: all weights.
@pytest.mark.parametrize("frozen", ["nothing", "every_second"])
@pytest.mark.parametrize("bias", ["all", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [16, 200, 1024, 8192])
def test_accuracy_from_a_kept_activation(device, tokens, dtype, bias, frozen):
    widths = (768, 3072, 768)
    case = Case("glu_mlp", (tokens,), widths, "gelu_tanh", bias, dtype, frozen=frozen, keep_activation=True)
    check_op(case, device)


@pytest.mark.parametrize("gate_room, up_room", [(0, 8), (16, 0), (8, 24), (0, 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_gate_and_up_of_different_row_strides(device, family, gate_room, up_room):
    with settings.override(family=family):
        FaultSuite().test_gate_and_up_of_different_row_strides(device, torch.bfloat16, gate_room, up_room)


@pytest.mark.usefixtures("lone_layers_fused")
class TestFaults(FaultSuite):
    pass


@pytest.mark.usefixtures("lone_layers_fused")
class TestAutograd(AutogradSuite):
    pass


@pytest.mark.usefixtures("lone_layers_fused")
class TestSavedMemory(SavedMemorySuite):
    pass


@pytest.mark.usefixtures("lone_layers_fused")
class TestAutocast(AutocastSuite):
    pass


@pytest.mark.usefixtures("lone_layers_fused")
class TestFunctorch(FunctorchSuite):
    pass


@pytest.mark.usefixtures("lone_layers_fused")
class TestBadInput(BadInputSuite):
    pass

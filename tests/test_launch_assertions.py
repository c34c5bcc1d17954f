"""Counting on the host, the assertions for users' tests, and the pytest plug-in."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedmlp import FusedGeGLUMLP, FusedReLUMLP
from fusedmlp.profiling import (
    DeviceEvent,
    HostCountWarning,
    ProfilerError,
    assert_launches,
    compare_launches,
    count_launches,
)

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.filterwarnings("ignore::fusedmlp.profiling.HostCountWarning")


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU, wherever this runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def geglu() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    class Eager(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
            self.down_proj, self.act_fn = nn.Linear(32, 16, bias=False), nn.GELU(approximate="tanh")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    eager = Eager()
    return eager, FusedGeGLUMLP.from_module(eager), torch.randn(4, 16, requires_grad=True)


def test_a_forward_has_the_operations_that_compute() -> None:
    eager, _, x = geglu()
    counts = count_launches(lambda: eager(x))
    assert (counts.kernels, counts.memcpy, counts.memset, counts.source) == (5, 0, 0, "host")
    assert counts.by_name == {"aten.mm.default": 3, "aten.gelu.default": 1, "aten.mul.Tensor": 1}
    assert "5 compute operations" in str(counts) and "no CUDA device" in str(counts)


def test_a_warning_says_that_the_host_was_counted() -> None:
    with pytest.warns(HostCountWarning, match="counted on the host"):
        count_launches(lambda: torch.ones(2).exp())
    with pytest.warns(HostCountWarning), count_launches() as c:
        torch.ones(2).exp()
    assert c.names == ["aten.ones.default", "aten.exp.default"]


def test_views_and_allocations_are_no_work_and_casts_are() -> None:
    x = torch.randn(4, 6)

    def work() -> None:
        x.t().reshape(12, 2)[1:].detach()  # the reshape has to copy
        torch.empty(3).resize_(2)
        x.bfloat16()
        x.to(torch.float32)
        torch.zeros(2).copy_(x[0, :2])

    counts = count_launches(work)
    assert counts.names == ["aten._to_copy float32 -> bfloat16"]
    assert (counts.memcpy, counts.memset) == (2, 1)


def test_a_backward_counts() -> None:
    eager, _, x = geglu()
    found = compare_launches(eager, eager, x, backward=True)
    assert found.eager_step is not None
    names = found.eager_step.by_name
    assert names["aten.mm.default"] == 9 and names["aten.gelu_backward.default"] == 1
    assert found.eager_step.kernels == 15
    assert found.saved == 0 and found.saved_step == 0
    assert x.grad is None and all(p.grad is None for p in eager.parameters())
    assert str(found) == "launches: forward 5 -> 5, step 15 -> 15"


def test_a_step_needs_an_output_with_a_gradient() -> None:
    with pytest.raises(ValueError, match="requires a gradient"):
        compare_launches(torch.exp, torch.exp, torch.ones(2), backward=True)


def test_outputs_of_any_structure_take_part_in_a_step() -> None:
    class Nested(nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, object]:  # type: ignore[override]
            return {"a": (super().forward(x), None), "b": [3]}

    found = compare_launches(nn.Linear(4, 4), Nested(4, 4), torch.randn(2, 4), backward=True)
    assert found.saved_step == 0


def test_gradients_of_whatever_a_step_reaches_start_as_none() -> None:
    """Of a module that a function closes over, of inputs within a dictionary, and those that were there before."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    for call, argument in ((layer, x), (lambda t: layer(t), x), (lambda d: layer(d["x"]), {"x": x})):
        for leaf in (x, *layer.parameters()):
            leaf.grad = torch.ones_like(leaf)
        found = compare_launches(call, layer.forward if argument is x else call, argument, backward=True, warmup=0)
        # The forward, three gradients, and the output's ones, which the first step makes.
        assert found.eager_step is not None and found.eager_step.kernels == 5, found.eager_step
        assert found.saved_step == 0
        assert all(leaf.grad is None for leaf in (x, *layer.parameters()))


def test_a_step_ends_at_its_inputs() -> None:
    above = torch.randn(2, 4, requires_grad=True)
    x = above.exp()
    assert compare_launches(nn.Linear(4, 4), nn.Linear(4, 4), x, backward=True).saved_step == 0
    assert above.grad is None and not x.is_leaf


def test_gradients_within_a_reentrant_checkpoint_start_as_none() -> None:
    class Checkpointed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]

    layer, x = Checkpointed(4, 4), torch.randn(2, 4, requires_grad=True)
    found = compare_launches(nn.Linear(4, 4), layer, x, backward=True)
    assert str(found) == "launches: forward 1 -> 1, step 4 -> 5"
    assert layer.weight.grad is None


def test_inference_mode_dispatches_the_same() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(), nn.ReLU()).eval()
    x, names = torch.randn(2, 4, 4), []
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            names.append(count_launches(lambda: module(x.reshape(2, 4, 4)).contiguous().float()).names)
    assert names == [["aten.addmm.default", "aten.relu.default"]] * 2


def test_bounds() -> None:
    x = torch.ones(3)

    def two() -> None:
        x.exp().log()

    assert assert_launches(two, 2).kernels == 2
    assert assert_launches(two, at_most=2, at_least=1).kernels == 2
    assert assert_launches(lambda: None, 0).kernels == 0
    with pytest.raises(AssertionError, match=r"(?s)at most 1 launches were expected; found 2.*aten\.exp"):
        assert_launches(two, at_most=1)
    with pytest.raises(AssertionError, match="exactly 3"):
        assert_launches(two, 3)
    with pytest.raises(AssertionError, match="at least 3"):
        assert_launches(two, at_least=3)
    with pytest.raises(ValueError, match="needs a bound"):
        assert_launches(two)


def test_nothing_dispatched_raises_unless_allowed() -> None:
    with pytest.raises(ProfilerError, match="allow_empty"):
        count_launches(lambda: None)
    with pytest.raises(ProfilerError, match="allow_empty"), count_launches():
        pass
    assert count_launches(lambda: None, allow_empty=True).kernels == 0


def test_calls_that_differ_raise() -> None:
    calls: list[int] = []

    def growing() -> None:
        calls.append(1)
        for _ in calls:
            torch.ones(2).exp()

    with pytest.raises(ProfilerError, match="differ from call to call"):
        count_launches(growing, warmup=0, steps=2)


def test_an_error_in_the_code_ends_the_count() -> None:
    with pytest.raises(KeyError):
        count_launches(lambda: {}["x"], warmup=0)
    with pytest.raises(KeyError), count_launches():
        raise KeyError("x")
    assert count_launches(lambda: torch.ones(2).exp()).kernels == 2


def test_an_operation_of_a_library_is_one_and_a_range_is_none() -> None:
    @torch.library.custom_op("fusedmlp_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x.exp().log() * 2

    def work() -> None:
        with torch.profiler.record_function("a range"):
            twice(torch.empty(3))

    assert count_launches(work).names == ["fusedmlp_test.twice.default"]


INTERPRETED = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch, warnings
warnings.simplefilter("ignore")
from support import interpreter
interpreter.repair()
from torch import nn
from fusedmlp import FusedReLUMLP
from fusedmlp.profiling import count_launches
layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
fused = FusedReLUMLP.from_module(layers)
x = torch.randn(8, 32)
with torch.no_grad():
    counts = count_launches(lambda: fused(x), warmup=1)
print(counts.names, counts.memcpy, counts.source)
"""


def test_triton_launches_count_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    code = INTERPRETED.format(root=str(ROOT), tests=str(ROOT / "tests"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "['relu_stack'] 0 host"


def test_the_fused_layer_without_a_device_has_pytorchs_operations() -> None:
    eager, fused, x = geglu()
    assert compare_launches(eager, fused, x).saved == 0
    stack = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    assert compare_launches(stack, FusedReLUMLP.from_module(stack), torch.randn(2, 8)).eager.kernels == 4


PLUGIN_TEST = """
import sys

def test_light():
    assert "torch" not in sys.modules and "fusedmlp" not in sys.modules

def test_counts(launches):
    import torch
    x = torch.ones(3)
    assert launches(lambda: x.exp().log()).kernels == 2
    launches.check(lambda: x.exp(), at_most=1)
    assert launches.compare(torch.exp, torch.log, x).saved == 0

def test_fails(launches):
    import torch
    launches.check(lambda: torch.ones(2).exp(), 1)
"""


def test_the_plugin_gives_a_fixture_and_stays_light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_users.py").write_text(PLUGIN_TEST)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1"
    )  # where fusedmlp is installed, its entry point is the plug-in
    command = [sys.executable, "-m", "pytest", "-p", "fusedmlp_pytest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "exactly 1 launches were expected; found 2 compute operations" in done.stdout
    assert "HostCountWarning" in done.stdout


def test_no_warning_where_a_device_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedmlp.profiling import launches as module

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "capture_events", lambda fn, attempts: [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert count_launches(lambda: None, allow_empty=True).source == "device"


def test_counts_of_an_earlier_block_do_not_outlive_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedmlp.profiling import launches as module

    class Frame:
        def start(self) -> None: ...

        def abort(self) -> None: ...

        def finish(self) -> list[DeviceEvent]:
            return [DeviceEvent(name, "kernel", i, 1.0) for i, name in enumerate(("probe", "k", "probe"))]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_probe_name", lambda index: "probe")
    monkeypatch.setattr(module, "_Frame", Frame)
    capture = count_launches()
    with capture:
        pass
    assert capture.names == ["k"]
    with pytest.raises(KeyError), capture:
        raise KeyError
    with pytest.raises(ProfilerError, match="without an error"):
        capture.kernels  # noqa: B018

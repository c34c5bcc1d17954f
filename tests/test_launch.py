"""The launch paths, with a stand-in for the compiled kernel: what is passed on, and which tensor maps are encoded."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fusedmlp import launch
from fusedmlp.launch import Launch, Tile


class Kernel:
    """Counts public launches; hands out one compiled kernel."""

    def __init__(self, compiled):
        self.compiled, self.public = compiled, []
        self.fn = SimpleNamespace(__name__="kernel")

    def __getitem__(self, grid):
        def run(*args, **options):
            self.public.append((grid, args, options))
            return self.compiled

        return run


@pytest.fixture
def compiled():
    run = mock.Mock()
    return SimpleNamespace(run=run, function="function", packed_metadata="metadata", metadata=SimpleNamespace())


@pytest.fixture(autouse=True)
def stream():
    """Device 0 is the current one, its stream is 7; a CPU build of PyTorch lacks both functions."""
    with (
        mock.patch.object(torch._C, "_cuda_getDevice", return_value=0, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=7, create=True),
    ):
        yield


def test_first_launch_is_public_then_run(compiled):
    kernel = Kernel(compiled)
    made = Launch(kernel, 5, (64, True), num_warps=8)
    x = torch.randn(4)
    with mock.patch.object(launch, "_RAW", set()):
        made(0, x, None, 3)
        made(0, x, None, 3)
    assert kernel.public == [((5,), (x, None, 3, 64, True), {"num_warps": 8})]
    compiled.run.assert_called_once_with(5, 1, 1, 7, "function", "metadata", None, None, None, x, None, 3, 64, True)


def test_unknown_triton_stays_public(compiled):
    kernel = Kernel(compiled)
    made = Launch(kernel, 1, ())
    with mock.patch.object(launch, "_RUN", set()):
        made(0, 1)
        made(0, 2)
    assert [args for _, args, _ in kernel.public] == [(1,), (2,)]
    compiled.run.assert_not_called()


def test_hooks_send_launches_the_public_way(compiled):
    kernel = Kernel(compiled)
    made = Launch(kernel, 1, ())
    made(0, 1)
    with mock.patch.object(launch, "_hooked", return_value=True):
        made(0, 2)
    assert len(kernel.public) == 2
    compiled.run.assert_not_called()


def test_raw_passes_addresses_and_encodes_each_address_once(compiled):
    kernel, function = Kernel(compiled), mock.Mock()
    compiled.run.launch_cooperative_grid, compiled.run.launch_pdl = True, False
    compiled.metadata.tensordesc_meta = ["meta 1", "meta 3"]
    tiles = {1: Tile((4, 8), (8, 1), (4, 8)), 3: Tile((2, 4, 8), (0, 8, 1), (2, 4, 8))}
    made = Launch(kernel, 5, (True,), tiles)
    a, b, c, d = (torch.randn(4, 8) for _ in range(4))
    encoded = []

    def encode(descriptor, meta):
        encoded.append((descriptor.base.data_ptr(), tuple(descriptor.shape), tuple(descriptor.strides), meta))
        return [f"map of {meta}", 1, 2]

    with (
        mock.patch.object(launch, "_c_function", return_value=function),
        mock.patch.object(launch, "_make_tensordesc_arg", encode),
    ):
        for other in (b, b, d):
            made(0, a, other, 9, (b, c))
    lower, upper = sorted((b, c), key=lambda t: t.data_ptr())
    distance = (upper.data_ptr() - lower.data_ptr()) // 4
    assert sorted(encoded, key=str) == sorted(
        [
            (b.data_ptr(), (4, 8), (8, 1), "meta 1"),
            (d.data_ptr(), (4, 8), (8, 1), "meta 1"),
            (lower.data_ptr(), (2, 4, 8), (distance, 8, 1), "meta 3"),
        ],
        key=str,
    )
    before = (5, 1, 1, 7, "function", True, False, None, None, "metadata", None, None, None)
    maps = ("map of meta 1", 1, 2), ("map of meta 3", 1, 2)
    assert [call.args for call in function.call_args_list] == [(*before, a.data_ptr(), *maps[0], 9, *maps[1], True)] * 2


def test_maps_do_not_pile_up(compiled):
    kernel, function = Kernel(compiled), mock.Mock()
    compiled.metadata.tensordesc_meta = ["meta"]
    made = Launch(kernel, 1, (), {0: Tile((4, 8), (8, 1), (4, 8))})
    alive = [torch.empty(4, 8) for _ in range(9)]
    with (
        mock.patch.object(launch, "_c_function", return_value=function),
        mock.patch.object(launch, "_make_tensordesc_arg", return_value=[0]),
        mock.patch.object(launch, "MAX_MAPS", 4),
    ):
        for x in alive:
            made(0, x)
    assert all(len(maps) <= 4 for *_, maps in made._maps)
    assert len(made._calls) <= 4


def test_other_numbers_are_another_call(compiled):
    kernel, function = Kernel(compiled), mock.Mock()
    made = Launch(kernel, 1, ())
    x = torch.empty(4)
    with mock.patch.object(launch, "_c_function", return_value=function):
        for number in (5, 6, 5, 6):
            made(0, x, number)
    assert [call.args[-2:] for call in function.call_args_list] == [(x.data_ptr(), n) for n in (6, 5, 6)]


def test_offset_moves_the_base():
    x = torch.randn(4, 16)
    found = launch._descriptor(Tile((4, 8), (16, 1), (4, 8), offset=8), x)
    assert found.base.data_ptr() == x[:, 8:].data_ptr()


def test_barrier_counters_belong_to_a_stream_and_a_graph_gets_its_own():
    """Asked of the tensors' device, which need not be the current one."""
    current, capturing = [0], [False]

    class On:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current[0], self.before = self.device.index, current[0]

        def __exit__(self, *reason):
            current[0] = self.before

    device = torch.device("cuda", 1)
    with (
        mock.patch.object(torch._C, "_cuda_getDevice", side_effect=lambda: current[0], create=True),
        mock.patch.object(torch.cuda, "device", On),
        mock.patch.object(
            torch.cuda, "is_current_stream_capturing", side_effect=lambda: capturing[0] and current[0] == 1
        ),
        mock.patch.object(torch, "zeros", side_effect=lambda *size, **options: object()),
        mock.patch.object(launch, "_zeros_outside_pools", side_effect=lambda device: object()),
        mock.patch.object(launch, "_counters", {}),
    ):
        first, second = launch.barrier_counters(device), launch.barrier_counters(device)
        capturing[0] = True
        assert launch.barrier_counters(device) is not first
    assert first is second
    assert current[0] == 0

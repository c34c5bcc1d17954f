"""The launch paths, with a stand-in for the compiled kernel: what is passed on, and which tensor maps are encoded."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fusedmlp import counters, launch
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
    """Device 0 is the current one, its stream is 7, no graph is captured; a CPU build of PyTorch cannot tell."""
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(torch._C, "_cuda_getDevice", return_value=0, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=7, create=True),
        mock.patch.object(launch, "_launcher", None),  # as where it was not built
    ):
        yield


PTX = """
.version 8.7
.target sm_90a
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .align 64 .b8 kernel_param_1[128],
	.param .u32 kernel_param_2,
	.param .u32 kernel_param_3,
	.param .u64 kernel_param_4,
	.param .u64 kernel_param_5,
	.param .u32 kernel_param_6,
	.param .u64 .ptr .global .align 1 kernel_param_7,
	.param .u64 .ptr .global .align 1 kernel_param_8
)
.reqntid 128
{
	.reg .pred %p<3>;
"""
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 32], "fp4_padded": False}
TILE = Tile((100, 64), (128, 1), (64, 32), offset=64)


@pytest.fixture
def known(compiled):
    """A compiled kernel whose parameters are as the launcher expects: tensor, nothing, tile, number, one, constant."""
    kinds = ("*bf16", "constexpr", "tensordesc<bf16[64,32]>", "i32", "constexpr", "constexpr")
    compiled.src = SimpleNamespace(signature=dict(zip("abcdef", kinds, strict=True)))
    compiled.asm, compiled.name = {"ptx": PTX}, "kernel"
    compiled.metadata = SimpleNamespace(
        num_ctas=1,
        num_warps=4,
        shared=1000,
        global_scratch_size=0,
        profile_scratch_size=0,
        launch_cooperative_grid=True,
        launch_pdl=False,
        tensordesc_meta=[META],
    )
    return compiled


class Plans:
    """In the place of the compiled launcher: what plans are made of, and what they are launched with."""

    def __init__(self):
        self.made, self.launched = [], []

    def Plan(self, *args):
        self.made.append(args)
        return SimpleNamespace(launch=lambda *values: self.launched.append(values))


def test_the_compiled_launcher_gets_the_kernel_once_and_then_tensors(known):
    kernel, plans = Kernel(known), Plans()
    made = Launch(kernel, 5, (True,), {2: TILE})
    x, y = torch.empty(4), torch.empty(100, 128, dtype=torch.bfloat16)
    with mock.patch.object(launch, "_launcher", plans):
        for number in (8, 8, 9):
            made(0, x, None, y, number, 1)
    assert len(kernel.public) == 1
    tile = ("map", 2, False, 64, 9, 2, 3, 0, (100, 64), (128, 1), (64, 32))
    specs = (("address", 0), tile, ("int32", 3), ("constant64", 0), ("constant64", 0))
    assert plans.made == [(0, 5, (("kernel", "function", (5, 1, 1), 128, 1000, True, False, specs),))]
    assert plans.launched == [(7, x, None, y, 8, 1), (7, x, None, y, 9, 1)]


def test_the_compiled_launcher_describes_tiles_as_triton_does(known):
    """What goes to the driver's encoder must be the same by both ways."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    rest = (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)  # from 3.8 on there is a third
    utils = mock.MagicMock()
    y, z = (torch.empty(100, 128, dtype=torch.bfloat16) for _ in range(2))
    lower, upper = sorted((y, z), key=torch.Tensor.data_ptr)
    pair = Tile((2, 100, 64), (0, 128, 1), (2, 64, 32))
    wide = META | {"block_size": [2, 64, 32]}
    for tile, tensor, meta in [(TILE, y, META), (pair, (z, y), wide), (pair, (y, z), wide)]:
        with mock.patch.object(launch.triton.runtime.driver, "_active", SimpleNamespace(utils=utils), create=True):
            make_tensordesc_arg(launch._descriptor(tile, tensor), meta, *rest)
        address, swizzle, size, kind, box, shape, strides, padding = utils.method_calls[-1].args
        is_pair = isinstance(tensor, tuple)
        found = launch._map_spec(0, tile, is_pair, meta)
        assert found[:3] == ("map", 0, is_pair)
        assert found[3] * size == address - (lower if is_pair else y).data_ptr()
        assert found[4:8] == (kind, size, swizzle, padding)
        assert (found[8], found[10]) == (tuple(shape), tuple(box))
        assert list(found[9][1:]) == list(strides)[1:]
        distance = (upper.data_ptr() - lower.data_ptr()) // 2 if is_pair else found[9][0]
        assert strides[0] == distance  # of a pair the launcher finds it


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c.metadata, "num_ctas", 2),
        lambda c: setattr(c.metadata, "global_scratch_size", 8),
        lambda c: setattr(c.metadata, "profile_scratch_size", 8),
        lambda c: setattr(c.metadata, "tensordesc_meta", None),
        lambda c: c.metadata.tensordesc_meta.__setitem__(0, META | {"fp4_padded": True}),
        lambda c: c.metadata.tensordesc_meta.__setitem__(0, META | {"is_im2col": True}),
        lambda c: c.src.signature.update(a="fp32"),
        lambda c: c.src.signature.update(d="constexpr"),
        lambda c: c.src.signature.update(d="i64"),
        lambda c: c.src.signature.update(b="i32"),
        lambda c: c.asm.clear(),
        lambda c: c.asm.update(ptx=PTX.replace("[128]", "[64]")),
        lambda c: c.asm.update(ptx=PTX.replace("kernel_param_8", "kernel_param_8,\n\t.param .u64 kernel_param_9")),
    ],
)
def test_what_the_compiled_launcher_does_not_know_goes_through_triton(known, change):
    assert launch._kernel_spec(known, 5, 5, {2: TILE}, set()) is not None
    change(known)
    assert launch._kernel_spec(known, 5, 5, {2: TILE}, set()) is None


def test_hooks_are_called_on_the_compiled_path_too(known):
    kernel, plans = Kernel(known), Plans()
    made = Launch(kernel, 5, (True,), {2: TILE})
    x, y = torch.empty(4), torch.empty(100, 128, dtype=torch.bfloat16)
    with mock.patch.object(launch, "_launcher", plans):
        made(0, x, None, y, 8, 1)
        with mock.patch.object(launch, "_hooked", return_value=True):
            made(0, x, None, y, 8, 1)
        made(0, x, None, y, 8, 1)
    assert (len(kernel.public), len(plans.made), len(plans.launched)) == (2, 1, 1)


def test_path_says_what_runs():
    with mock.patch.object(launch, "interpreting", return_value=False):
        assert "not built" in launch.path()
        with mock.patch.dict("os.environ", FUSEDMLP_LAUNCHER="triton"):
            assert "switched off" in launch.path()
        with mock.patch.object(launch, "_launcher", Plans()):
            assert launch.path() == "the compiled launcher"
        with mock.patch.object(launch, "_RUN", set()):
            assert "not known" in launch.path()


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


class Driver:
    """In the place of libcuda: the capture mode of the thread."""

    def __init__(self):
        self.mode = 0

    def cuThreadExchangeStreamCaptureMode(self, reference):
        self.mode, reference._obj.value = reference._obj.value, self.mode


@pytest.fixture
def capturing():
    driver = Driver()
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True) as asked,
        mock.patch.object(launch.ctypes, "CDLL", return_value=driver),
    ):
        yield SimpleNamespace(driver=driver, asked=asked)


def test_a_first_launch_inside_a_capture_may_load_a_module(compiled, capturing):
    kernel, modes = Kernel(compiled), []
    kernel.compiled.run.side_effect = lambda *args: modes.append(("run", capturing.driver.mode))
    original = kernel.__getitem__

    def loading(grid):
        modes.append(("load", capturing.driver.mode))
        return original(grid)

    made = Launch(kernel, 5, ())
    with mock.patch.object(Kernel, "__getitem__", lambda self, grid: loading(grid)):
        with mock.patch.object(launch, "_c_function", return_value=None):
            for _ in range(3):
                made(0, torch.empty(4))
    assert modes == [("load", 2), ("run", 0), ("run", 0)]  # relaxed while it loads, and never after
    assert capturing.asked.call_count == 1  # steady launches do not ask


def test_a_first_launch_that_fails_inside_a_capture_says_what_to_call(compiled, capturing):
    class Broken(Kernel):
        def __getitem__(self, grid):
            raise ValueError("operation not permitted when stream is capturing")

    made = Launch(Broken(compiled), 5, ())
    message = r"first time inside a CUDA graph capture.*not permitted.*Call fusedmlp.warmup\(module, token_counts\)"
    with pytest.raises(RuntimeError, match=message) as caught:
        made(0, torch.empty(4))
    assert isinstance(caught.value.__cause__, ValueError)
    assert capturing.driver.mode == 0
    capturing.asked.return_value = False
    with pytest.raises(ValueError, match="not permitted"):  # outside a capture it is the kernel's own fault
        made(0, torch.empty(4))


def test_a_capture_on_a_machine_without_the_drivers_library(compiled, capturing):
    kernel = Kernel(compiled)
    with mock.patch.object(launch.ctypes, "CDLL", side_effect=OSError("no such file")):
        Launch(kernel, 5, ())(0, torch.empty(4))
    assert len(kernel.public) == 1


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
        mock.patch.object(counters, "_zeros_outside_pools", side_effect=lambda device, count: torch.empty(count)),
        mock.patch.object(counters, "_counters", {}),
        mock.patch.object(counters, "_for_graphs", {}),
    ):
        capturing[0] = True
        within = counters.barrier_counters(device)  # nothing was made before the capture
        capturing[0] = False
        first, second = counters.barrier_counters(device), counters.barrier_counters(device)
        more, again = counters.barrier_counters(device, 100), counters.barrier_counters(device)
        capturing[0] = True
        captured = [counters.barrier_counters(device, count) for count in (8, 100, counters.GRAPH_COUNTERS, 3)]
    assert not isinstance(within, torch.Tensor)
    assert first is second is again
    assert more.numel() >= 100
    fresh, whole = captured.pop(2), counters.GRAPH_COUNTERS
    assert not isinstance(fresh, torch.Tensor)  # more than is left for graphs
    assert [c.numel() for c in captured] == [8, 128, 8]
    assert [c.storage_offset() for c in captured] == [0, 8, 136]
    assert {c.untyped_storage().nbytes() for c in captured} == {4 * whole}
    assert current[0] == 0

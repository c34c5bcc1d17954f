"""Plans of the compiled launcher against a stand-in for the CUDA driver: tests/support/launcher_process.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.launcher_process import KINDS, Run, runner
from support.native import CAN_COMPILE, CC, NEEDS_COMPILER

pytestmark = pytest.mark.skipif(not CAN_COMPILE, reason=NEEDS_COMPILER)


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param)


def test_launches_what_the_plan_says(run) -> None:
    run("""
        f = function(8, 4, 8, 8, 4, 8)
        spec = (("address", 0), ("int32", 1), ("int64", 2), ("address", 3), ("constant32", -7), ("constant64", 1 << 40))
        plan = launcher.Plan(0, 4, (("k", f, (5, 6, 7), 128, 1000, True, True, spec),))
        assert fake.fake_launches() == 0
        plan.launch(99, Tensor(1 << 47), -3, 1 << 35, None)
        assert parameters("QiqQiq") == (1 << 47, -3, 1 << 35, 0, -7, 1 << 40)
        got = launched()
        assert (list(got.grid), list(got.block), got.shared) == ([5, 6, 7], [128, 1, 1], 1000)
        assert (got.stream, got.function) == (99, f)
        assert list(got.attributes)[: got.attribute_count] == [2, 6]
    """)


def test_several_kernels_run_in_order_of_one_call(run) -> None:
    run("""
        kernels = tuple((f"k{i}", function(8), (i + 1, 1, 1), 32, 0, False, False, (("address", i),)) for i in range(3))
        launcher.Plan(0, 3, kernels).launch(0, Tensor(16), Tensor(32), Tensor(48))
        assert fake.fake_launches() == 3
        assert [parameters("Q", i)[0] for i in range(3)] == [16, 32, 48]
        assert [launched(i).grid[0] for i in range(3)] == [1, 2, 3]
        assert launched(0).attribute_count == 0
    """)


def test_maps_are_encoded_as_asked_and_only_where_the_tensor_moved(run) -> None:
    run("""
        f = function(128, 4, 4, 8, 8)
        spec = (("map", 0, False, 24, *MAP, (100, 48), (64, 1), (32, 16)),)
        plan = launcher.Plan(0, 1, (("k", f, (1, 1, 1), 32, 0, False, False, spec),))
        for n, address in enumerate([4096, 4096, 8192, 8192, 4096]):
            plan.launch(0, Tensor(address))
            found = parameters("128siiqq")
            assert found[1:] == (100, 48, 64, 1)  # sizes, strides
            base, *rest = struct.unpack_from("=Q5Q4Q5I4b", found[0])
            assert base == address + 2 * 24
            sizes, strides, box, kind = rest[:5], rest[5:9], rest[9:14], rest[14:]
            assert (sizes, strides, box) == ([48, 100, 0, 0, 0], [128, 0, 0, 0], [16, 32, 0, 0, 0])
            assert kind == [9, 2, 3, 1]
            assert fake.fake_encodes() == [1, 1, 2, 2, 3][n]
    """)


def test_a_pair_is_seen_from_the_lower_tensor_with_their_distance(run) -> None:
    run("""
        f = function(128, 4, 4, 4, 8, 8, 8)
        spec = (("map", 0, True, 0, *MAP, (2, 100, 48), (0, 64, 1), (2, 32, 16)),)
        plan = launcher.Plan(0, 1, (("k", f, (1, 1, 1), 32, 0, False, False, spec),))
        for pair, n in [((4096, 8192), 1), ((8192, 4096), 1), ((4096, 8192 + 512), 2)]:
            plan.launch(0, tuple(map(Tensor, pair)))
            found = parameters("128siiiqqq")
            distance = abs(pair[1] - pair[0])
            assert found[1:] == (2, 100, 48, distance // 2, 64, 1)
            base, *rest = struct.unpack_from("=Q5Q4Q5I", found[0])
            assert base == 4096 and rest[5:9] == [128, distance, 0, 0]
            assert fake.fake_encodes() == n
    """)


def test_a_failed_encoding_is_not_taken_for_a_known_one(run) -> None:
    run("""
        spec = (("map", 0, False, 0, *MAP, (100, 48), (64, 1), (32, 16)),)
        plan = launcher.Plan(0, 1, (("k", function(128, 4, 4, 8, 8), (1, 1, 1), 32, 0, False, False, spec),))
        plan.launch(0, Tensor(4096))
        fake.fake_fail(b"cuTensorMapEncodeTiled", 1, 0)
        raises(RuntimeError, "cuTensorMapEncodeTiled failed: CUDA_ERROR_INVALID_VALUE", plan.launch, 0, Tensor(8192))
        fake.fake_fail(b"", 0, 0)
        for address in 4096, 8192:
            plan.launch(0, Tensor(address))
            assert struct.unpack_from("=Q", parameters("128siiqq")[0])[0] == address
    """)


def test_errors_carry_the_drivers_message_and_what_was_launched(run) -> None:
    run("""
        kernels = tuple((f"k{i}", function(), (9, 1, 1), 64, 5, False, False, ()) for i in range(3))
        plan = launcher.Plan(0, 0, kernels)
        fake.fake_fail(b"cuLaunchKernelEx", 2, 1)
        raises(RuntimeError, "cuLaunchKernelEx failed: CUDA_ERROR_OUT_OF_MEMORY (out of memory), kernel k1, "
               "grid (9, 1, 1), 64 threads, 5 bytes of shared memory", plan.launch, 0)
        assert fake.fake_launches() == 1
        fake.fake_fail(b"cuLaunchKernelEx", 987, 0)
        raises(RuntimeError, "an unknown CUDA error (no description)", plan.launch, 0)
        fake.fake_fail(b"cuCtxGetCurrent", 1, 0)
        raises(RuntimeError, "cuCtxGetCurrent failed: CUDA_ERROR_INVALID_VALUE (invalid argument)", plan.launch, 0)
        fake.fake_fail(b"cuDevicePrimaryCtxRetain", 2, 0)
        raises(RuntimeError, "out of memory), CUDA device 1", launcher.Plan, 1, 0, kernels)
        raises(RuntimeError, "CUDA device 7", launcher.Plan, 7, 0, kernels)
    """)


def test_wrong_arguments_are_refused_before_anything_is_launched(run) -> None:
    run("""
        spec = (("address", 0), ("int32", 1), ("map", 2, False, 0, *MAP, (8, 8), (8, 1), (8, 8)),
                ("map", 3, True, 0, *MAP, (2, 8, 8), (0, 8, 1), (1, 8, 8)))
        plan = launcher.Plan(0, 4, (("k", function(), (1, 1, 1), 32, 0, False, False, spec),))
        t = Tensor(16)
        good = [t, 1, t, (t, t)]
        class Broken:
            def data_ptr(self):
                raise ValueError("no storage")
        cases = [
            (0, 5, TypeError, "argument 0 must be a tensor or None"),
            (0, (t, t), TypeError, "argument 0 must be a tensor or None"),
            (0, "x", TypeError, "argument 0 must be a tensor, a pair of tensors, an int or None, got <class 'str'>"),
            (0, Broken(), ValueError, "no storage"),
            (1, t, TypeError, "argument 1 must be an int"),
            (1, None, TypeError, "argument 1 must be an int"),
            (1, 1 << 31, TypeError, "argument 1 must be an int of 32 bits"),
            (1, 1 << 70, OverflowError, ""),
            (2, None, TypeError, "argument 2 must be a tensor"),
            (2, (t, t), TypeError, "argument 2 must be a tensor"),
            (3, t, TypeError, "argument 3 must be a pair of tensors"),
            (3, (t,), TypeError, "argument 3 is a tuple of 1"),
            (3, (t, None), TypeError, "argument 3 must be a tensor"),
        ]
        for i, wrong, kind, text in cases:
            raises(kind, text, plan.launch, 0, *[wrong if j == i else a for j, a in enumerate(good)])
        raises(TypeError, "takes the stream and 4 arguments, got 1", plan.launch, 0)
        raises(TypeError, "", plan.launch, None, *good)
        raises(OverflowError, "", plan.launch, -1, *good)
        assert fake.fake_launches() == 0 and fake.fake_encodes() == 0
        plan.launch(0, *good)
    """)


def test_plans_that_make_no_sense_are_refused(run) -> None:
    run("""
        def plan(spec=(), grid=(1, 1, 1), threads=32, function=16, arguments=1, kernels=None):
            kernel = ("k", function, grid, threads, 0, False, False, spec)
            return launcher.Plan(0, arguments, (kernel,) if kernels is None else kernels)
        plan()
        raises(ValueError, "grid (0, 1, 1)", lambda: plan(grid=(0, 1, 1)))
        raises(ValueError, "0 threads", lambda: plan(threads=0))
        raises(ValueError, "1025 threads", lambda: plan(threads=1025))
        raises(ValueError, "function 0", lambda: plan(function=0))
        raises(ValueError, "argument 1 of a plan with 1", lambda: plan((("address", 1),)))
        raises(ValueError, "argument -1 of", lambda: plan((("address", -1),)))
        raises(ValueError, "unknown kind of parameter 'float'", lambda: plan((("float", 0),)))
        raises(ValueError, "starts with its kind", lambda: plan(("address",)))
        raises(ValueError, "more than 160 parameters", lambda: plan((("address", 0),) * 161 and
               (("map", 0, False, 0, *MAP, (8, 8), (8, 1), (8, 8)),) * 40))
        raises(ValueError, "allowed: at most 160", lambda: plan((("address", 0),) * 161))
        raises(ValueError, "has rank 6", lambda: plan((("map", 0, False, 0, *MAP, (8,) * 6, (8,) * 6, (8,) * 6),)))
        raises(ValueError, "has rank 1 (of a pair: 1)", lambda: plan((("map", 0, True, 0, *MAP, (8,), (8,), (8,)),)))
        raises(ValueError, "strides of a tensor map must be a tuple of 2",
               lambda: plan((("map", 0, False, 0, *MAP, (8, 8), (8,), (8, 8)),)))
        raises(ValueError, "must not be negative", lambda: plan((("map", 0, False, 0, *MAP, (8, -8), (8, 1), (8, 8)),)))
        raises(TypeError, "", lambda: plan((("map", 0, False),)))
        raises(TypeError, "must be a tuple", lambda: plan(kernels=(5,)))
        raises(ValueError, "65 kernels", lambda: plan(kernels=(("k", 16, (1, 1, 1), 32, 0, False, False, ()),) * 65))
        raises(ValueError, "65 arguments", lambda: plan(arguments=65))
        raises(TypeError, "takes no keyword", lambda: launcher.Plan(0, 0, (), x=1))
        assert fake.fake_retained() == 0  # each context that a plan took is given back
    """)


def test_a_thread_without_a_context_or_on_another_device_gets_the_plans(run) -> None:
    run("""
        plan = launcher.Plan(2, 0, (("k", function(), (1, 1, 1), 32, 0, False, False, ()),))
        def check(device):
            fake.fake_make_current(device)
            before = fake.fake_pushed()
            plan.launch(0)
            assert launched().context == 2
            assert fake.fake_pushed() - before == (device != 2)
            assert fake.fake_pushed() == fake.fake_popped()
        for device in 0, 2, -1:
            thread = threading.Thread(target=check, args=(device,))
            thread.start(), thread.join()
        assert fake.fake_launches() == 3
        fake.fake_fail(b"cuCtxPushCurrent", 1, 0)
        raises(RuntimeError, "cuCtxPushCurrent failed", plan.launch, 0)
        assert fake.fake_pushed() == fake.fake_popped()
        del plan
        assert fake.fake_retained() == 0
    """)


def test_threads_share_a_plan(run) -> None:
    run("""
        spec = (("address", 0), ("map", 0, False, 0, *MAP, (8, 8), (8, 1), (8, 8)))
        f = function(8, 128, 4, 4, 8, 8)
        plan = launcher.Plan(0, 1, (("k", f, (1, 1, 1), 32, 0, False, False, spec),))
        def work(n):
            fake.fake_make_current(0)
            for i in range(2000):
                plan.launch(0, Tensor(4096 * (4 * i + n)))
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert fake.fake_launches() == 8000
        assert fake.fake_mixed_up() == 0
    """)


def test_nothing_leaks(run) -> None:
    run("""
        spec = (("address", 0), ("map", 1, False, 0, *MAP, (8, 8), (8, 1), (8, 8)))
        kernels = (("k", function(8, 128, 4, 4, 8, 8), (1, 1, 1), 32, 0, True, False, spec),)
        bad = (("k", 16, (1, 1, 1), 32, 0, True, False, (*spec, ("address", 9))),)
        t, u = Tensor(1 << 40), Tensor(1 << 41)
        def work():
            for i in range(300):
                plan = launcher.Plan(0, 2, kernels)
                plan.launch(0, t, u if i % 2 else t)
                for wrong in ((t,), (t, 5), ("x", t), (t, None)):
                    try:
                        plan.launch(0, *wrong)
                    except TypeError:
                        pass
                try:
                    launcher.Plan(0, 2, bad)
                except ValueError:
                    pass
        work()
        tracemalloc.start()
        work()
        before = tracemalloc.get_traced_memory()[0]
        counts = sys.getrefcount(t), sys.getrefcount(None)
        for _ in range(3):
            work()
        grown = tracemalloc.get_traced_memory()[0] - before
        assert grown < 2000, grown  # one plan has several kilobytes
        assert sys.getrefcount(t) == counts[0] and abs(sys.getrefcount(None) - counts[1]) < 20
        assert fake.fake_retained() == 0
    """)


def test_a_missing_or_old_driver_is_named(tmp_path: Path, run) -> None:
    source, old = tmp_path / "old.c", tmp_path / "old.so"
    source.write_text("int cuInit(unsigned int flags) { return flags != 0; }")
    subprocess.run([str(CC), "-shared", "-fPIC", str(source), "-o", str(old)], check=True)
    script = f"""
        raises(OSError, "/nowhere/libcuda.so", launcher.open, "/nowhere/libcuda.so")
        raises(RuntimeError, "has no cuGetErrorName", launcher.open, {str(old)!r})
        launcher.open(sys.argv[2])  # a failure does not stand in the way of a later success
    """
    run(script, fake=False)

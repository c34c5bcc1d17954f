"""Tables of the compiled launcher: which operands are taken for which. tests/support/launcher_process.py."""

from __future__ import annotations

import pytest
from support.launcher_process import EXCHANGE, KINDS, Run, runner
from support.native import CAN_COMPILE, NEEDS_COMPILER

pytestmark = pytest.mark.skipif(not CAN_COMPILE, reason=NEEDS_COMPILER)

PRELUDE = """
from contextlib import contextmanager

@contextmanager
def changed(holder, name, value):
    before = getattr(holder, name)
    setattr(holder, name, value)
    yield
    setattr(holder, name, before)

@contextmanager
def shaped(t, shape, strides):
    before = t.shape, t.strides
    t.set_shape(shape, strides)
    yield
    t.set_shape(*before)
"""


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param, EXCHANGE + PRELUDE)


def test_operands_are_known_by_everything_that_counts(run) -> None:
    run("""
        table = launcher.Table(1)
        x, gate, up, bias = Tensor(4096), Parameter(8192), Parameter(16384), Tensor(64, (8,), (1,))
        operands = [x, gate, up, bias, None]
        calls = []
        assert table.call(*operands) is None and len(table) == 0
        assert table.add(lambda *given: calls.append(given) or "hit", False, *operands) and len(table) == 1
        def hit():
            return table.call(*operands) == "hit"
        assert hit() and all(a is b for a, b in zip(calls[0], operands))
        def misses(*change):
            with change[0] if len(change) == 1 else changed(*change):
                found = table.call(*operands)
                assert found is None, change
            assert hit(), change
        for t in operands[:4]:
            misses(shaped(t, (5, *t.shape[1:]), t.strides))
            misses(shaped(t, t.shape, (t.strides[0] + 1, *t.strides[1:])))
            misses(shaped(t, (*t.shape[:-1], 7), t.strides))
            misses(shaped(t, t.shape, (*t.strides[:-1], 0)))
            misses(shaped(t, (*t.shape, 1), (*t.strides, 1)))
            misses(shaped(t, t.shape[:-1], t.strides[:-1]))
            misses(shaped(t, t.shape, (-(1 << 62), *t.strides[1:])))
            misses(t, "code", 4)
            misses(t, "bits", 32)
            misses(t, "device", ("cpu", 0))
            misses(t, "device", ("cuda", 1))
            for more in range(1, 16):
                misses(t, "address", t.address + more)
            misses(t, "address", None)
            misses(t, "neg", True)
        for i in range(5):
            operands[i], before = (None if operands[i] else Tensor(64)), operands[i]
            assert table.call(*operands) is None
            operands[i] = before
        for given in (operands[:-1], [*operands, None], [x, up, gate, bias, None], [x, gate, up, None, bias], [],
                      [5, *operands[1:]], [Subclass(4096), *operands[1:]]):
            assert table.call(*given) is None
        # What does not count: where they lie, whether they are parameters, what lies behind an offset.
        for other in ([Tensor(1 << 45), Tensor(128), Tensor(256), Parameter(16, (8,), (1,)), None],
                      [Tensor(48, offset=32), gate, up, bias, None]):
            assert table.call(*other) == "hit"
    """)


def test_gradients_the_stream_precision_and_the_order_of_a_pair_count(run) -> None:
    run("""
        table = launcher.Table(1)
        operands = x, a, b = [Tensor(64, grad=True), Tensor(4096, grad=True), Tensor(8192, grad=True)]
        known = {}
        def check():  # each situation is known once, and apart from all others
            key = (state.grad and tuple(t.requires_grad for t in operands), streams.get(0, 0), a.address < b.address,
                   x.bits == 32 and state.precision)
            if key[0] == (False,) * 3:
                key = (False, *key[1:])
            found = table.call(*operands)
            assert found == known.get(key), (key, found)
            if found is None:
                known[key] = found = len(known) + 1
                assert table.add(lambda *_: found, False, *operands)
                assert table.call(*operands) == found
        for _ in range(2):
            for x.bits in 16, 32:
                for state.precision in "ieee", "tf32":
                    for streams[0] in 0, 1 << 46:
                        for a.address in 4096, 8192 + 64:
                            for state.grad in False, True:
                                for bits in range(8):
                                    for i, t in enumerate(operands):
                                        t.requires_grad = bool(bits >> i & 1)
                                    check()
        assert len(known) == len(table) == (1 + 2) * 2 * 2 * 8
        # Gate and up in one place, or too far apart for one descriptor.
        for address in b.address, b.address + (1 << 40), b.address + (1 << 45):
            a.address = address
            found = table.call(*operands)
            assert (found is None) == (address <= b.address + (1 << 40))
            table.add(lambda *_: "pair", False, *operands)
        a.address = b.address + (1 << 40) - 16
        assert table.call(*operands) in known.values()
        # The precision of another operand, or of another kind of 32 bits, is not asked for.
        def never():
            raise AssertionError
        launcher.connect(**(parts | dict(precision=never)))
        for x.code, x.bits, a.bits in (0, 32, 32), (2, 16, 32), (2, 64, 32):
            assert table.add(lambda *_: 5, False, *operands) and table.call(*operands) == 5
    """)


def test_as_many_operands_as_there_may_be(run) -> None:
    run("""
        state.grad = True
        table = launcher.Table(22)
        most = [Tensor(64 * (i + 1), (1,) * 8, (1,) * 8, bits=32) for i in range(24)]
        assert table.add(lambda *_: "hit", False, *most) and table.call(*most) == "hit"
        for i in 0, 22, 23:
            with changed(most[i], "requires_grad", True):
                assert table.call(*most) is None
                assert table.add(lambda *_: i, False, *most) and table.call(*most) == i
        assert not table.add(len, False, *most, None) and table.call(*most, None) is None
        with shaped(most[3], (1,) * 9, (1,) * 9):
            assert not table.add(len, False, *most) and table.call(*most) is None
        scalar = Tensor(64, (), ())
        assert table.add(lambda *_: 7, False, scalar) and table.call(scalar) == 7
    """)


def test_operands_that_cannot_be_known(run) -> None:
    run("""
        table = launcher.Table(-1)
        good, hit = Tensor(64), lambda *_: "hit"
        table.add(hit, False, good)
        cpu = Tensor(64, device=("cpu", 0))
        for wrong in (None, 5, "x", Subclass(64), type("Other", (), {})(), Tensor(None), Tensor(0)):
            assert table.add(hit, False, wrong) is False and table.call(wrong) is None
            if wrong is not None:
                assert table.add(hit, False, good, wrong) is False and table.call(good, wrong) is None
        for answer in (True, None, 5):
            good.neg = answer
            assert table.add(hit, False, good) is False and table.call(good) is None
        good.neg = False
        class Broken(Exception):
            pass
        def broken(*_):
            raise Broken
        good.is_neg = broken
        assert table.add(hit, False, good) is False and table.call(good) is None
        del good.is_neg
        streams[0] = "none"
        assert table.add(hit, False, good) is False and table.call(good) is None
        assert table.add(hit, False, cpu) and table.call(cpu) == "hit"  # which has no stream
        streams.clear()
        for name in "grad_enabled", "precision":
            launcher.connect(**(parts | {name: broken}))
            single = Tensor(64, bits=32)
            raises(Broken, "", table.add, hit, False, single)
            raises(Broken, "", table.call, single)
        launcher.connect(**parts)
        state.grad = True
        for t in (good, single):
            del t.requires_grad
            raises(AttributeError, "requires_grad", table.call, t)
            raises(AttributeError, "requires_grad", table.add, hit, False, t)
        state.grad = False
        raises(TypeError, "at least one operand", table.add, hit, False)
        raises(TypeError, "must be callable", table.add, 5, False, good)
        raises(TypeError, "takes these operands", table.add, program([("launch", 0, 1)], 1, (0,)), False, good, good)
        class NoBool:
            def __bool__(self):
                raise Broken
        raises(Broken, "", table.add, hit, NoBool(), good)
        for wrong in -2, 23, "x":
            raises((ValueError, TypeError), "", launcher.Table, wrong)
        raises(TypeError, "", launcher.Table)
        raises((ValueError, TypeError), "", lambda: launcher.Table(1, pair=2))
        assert table.call(good) == "hit"
    """)


def test_whatever_looks_on_gets_the_long_way(run) -> None:
    run("""
        table, x = launcher.Table(-1), Tensor(64)
        assert table.add(lambda *_: "hit", False, x)
        class Broken(Exception):
            pass
        def broken(*_):
            raise Broken
        class Sized:
            def __len__(self):
                raise Broken
        hook = types.SimpleNamespace(calls=[])
        for holder, name, loud, quiet in [
            (state, "modes", 1, 0), (state, "trace", object(), None), (state, "transforms", True, False),
            (forward_ad, "_current_level", 0, -1), (forward_ad, "_current_level", 2, -5),
            (hooks, "launch_enter_hook", broken, None), (hooks, "launch_enter_hook", broken, hook),
            (hook, "calls", [1], []),
        ]:
            setattr(holder, name, loud)
            assert table.call(x) is None
            setattr(holder, name, quiet)
            assert table.call(x) == "hit"
        for found in busy:
            found.append(None)
            assert table.call(x) is None
            found.clear()
            assert table.call(x) == "hit"
        for name in "dispatch_modes", "tracing_state", "transforms_active":
            launcher.connect(**(parts | {name: broken}))
            raises(Broken, "", table.call, x)
        launcher.connect(**(parts | dict(busy=([], Sized()))))
        raises(Broken, "", table.call, x)
        launcher.connect(**parts)
        for level in "x", 1 << 80:
            forward_ad._current_level = level
            raises((TypeError, OverflowError), "", table.call, x)
        del forward_ad._current_level
        raises(AttributeError, "_current_level", table.call, x)
        forward_ad._current_level = -1
        del hooks.launch_enter_hook
        raises(AttributeError, "launch_enter_hook", table.call, x)
        hooks.launch_enter_hook = hook
        hook.calls = Sized()
        raises(Broken, "", table.call, x)
        assert launcher.Table(-1).call(x) is None  # nothing in it: nothing is asked
    """)


def test_captures_and_other_devices(run) -> None:
    run("""
        table, x, y = launcher.Table(-1), Tensor(64), Tensor(64, (3, 8))
        cpu = Tensor(64, (5, 8), device=("cpu", 0))
        launcher.Plan(0, 0, (("k", function(), (1, 1, 1), 32, 0, False, False, ()),))
        table.add(lambda *_: "free", False, x)
        table.add(lambda *_: "bound", True, y)
        table.add(lambda *_: "cpu", True, cpu)
        everything = ["free", "bound", "cpu"]
        def found():
            return [table.call(t) for t in (x, y, cpu)]
        assert found() == everything
        fake.fake_capture(1)
        assert found() == ["free", None, "cpu"]
        fake.fake_capture(0)
        fake.fake_fail(b"cuStreamIsCapturing", 1, 0)  # as where a capture of another stream forbids the question
        assert found() == ["free", None, "cpu"]
        fake.fake_fail(b"", 0, 0)
        plan = launcher.Plan(1, 0, (("k", function(), (1, 1, 1), 32, 0, False, False, ()),))
        for device in (1, -1):  # another; none yet in this thread
            fake.fake_make_current(device)
            assert found() == [None, None, "cpu"]
        with changed(x, "device", ("cuda", 1)):
            fake.fake_make_current(1)
            assert table.add(lambda *_: "second", False, x) and table.call(x) == "second"
            fake.fake_make_current(0)
            assert table.call(x) is None
        assert found() == everything
        fake.fake_fail(b"cuCtxGetDevice", 1, 0)
        assert found() == [None, None, "cpu"]
    """)


def test_programs_run_from_a_table(run) -> None:
    run("""
        table, x = launcher.Table(-1), Tensor(4096, offset=64)
        steps = [("take", 2, 100), call(lambda: Tensor(1 << 20), results=(1,)), ("launch", 0, 1), ("give", 2)]
        p = program(steps, 3, (1,), 1, ((0, 32),), single=True)
        assert table.add(p, False, x)
        for address, stream in (4096, 0), (8192, 0), (4096, 7):
            x.address, streams[0] = address, stream
            if stream:
                assert table.call(x) is None and table.add(p, False, x)
            memory.clear()
            assert table.call(x).address == 1 << 20
            assert parameters("Q") == (address + 32,) and launched().stream == stream
            assert memory[0] == ("take", 100, stream) and not live
        def none_left(size, stream):
            raise MemoryError("none left")
        launcher.connect(**(parts | dict(allocate=none_left)))
        raises(MemoryError, "none left", table.call, x)
        launcher.connect(**parts)
        # Replaced, and another callable's exception.
        def broken(*_):
            raise KeyError("broken")
        before = len(table)
        assert table.add(broken, False, x) and len(table) == before
        raises(KeyError, "broken", table.call, x)
        assert sys.getrefcount(p) == 3  # the other stream's
        table.clear()
        assert len(table) == 0 and table.call(x) is None and sys.getrefcount(p) == 2
    """)

"""Programs of the compiled launcher, and what it asks of PyTorch: tests/support/launcher_process.py."""

from __future__ import annotations

import pytest
from support.launcher_process import EXCHANGE, KINDS, Run, runner
from support.native import CAN_COMPILE, NEEDS_COMPILER

pytestmark = pytest.mark.skipif(not CAN_COMPILE, reason=NEEDS_COMPILER)


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param, EXCHANGE)


def test_connect_refuses_what_it_cannot_use(run) -> None:
    run("""
        def capsule(name=NAME, major=1, **callbacks):
            made = Exchange(major, 0, (None,) * 4, callbacks.get("view", 1), callbacks.get("stream", 1))
            kept.append(made)
            return new_capsule(ctypes.addressof(made), name, None)
        def connect(**changed):
            launcher.connect(**(parts | changed))
        for name in parts:
            rest = {k: v for k, v in parts.items() if k != name}
            raises(TypeError, name, lambda: launcher.connect(**rest))
        raises(TypeError, "keywords", lambda: launcher.connect(1, **parts))
        for name in "busy", "global_hooks":
            raises(TypeError, "busy and global_hooks must be tuples", lambda: connect(**{name: []}))
        raises(ValueError, "", lambda: connect(exchange=5))
        raises(ValueError, "", lambda: connect(exchange=capsule(b"another")))
        raises(RuntimeError, "is DLPack 2.0; allowed: 1 with views", lambda: connect(exchange=capsule(major=2)))
        raises(RuntimeError, "with views", lambda: connect(exchange=capsule(view=None)))
        raises(RuntimeError, "with views", lambda: connect(exchange=capsule(stream=None)))
        # None of them took anything from the connection that there is.
        assert program([("launch", 0, 1)], 1, [None]).run(Tensor(64)) == (None,)
        assert parameters("Q") == (64,)
        before = sys.getrefcount(busy)
        for _ in range(100):
            connect()
        assert abs(sys.getrefcount(busy) - before) < 3
    """)


def test_steps_run_in_order_on_the_right_addresses(run) -> None:
    run("""
        log = memory
        class Made(Tensor):
            pass
        def make(*args, **kwargs):
            log.append(("make", args, kwargs))
            return Made(1 << 20)
        def two(t, scale, *, out):
            log.append(("two", t, scale, out))
            return [Tensor(1 << 21), Tensor(1 << 22)]
        # Values: 0 an input, 1 None, 2 memory, 3 made, 4 and 5 two made, 6 memory.
        steps = [("take", 2, 1000), call(make, (None, (4, 8)), ((0, 0),), {"dtype": "half"}, (), (3,)),
                 ("launch", 0, 2), ("give", 2),
                 call(two, (None, 0.5), ((0, 3),), None, (("out", 0),), (4, 5)), ("drop", 3),
                 ("take", 6, 24), ("launch", 2, 2), call(log.append, ("seen",)), ("give", 6)]
        slots = [(0, 0), (2, 512), (3, 0), (4, -8)]
        spec = [(("address", 0), ("constant32", 7), ("address", 1)), (("address", 2),), (("address", 3),),
                (("address", 0), ("constant64", -1))]
        sizes = [(8, 4, 8), (8,), (8,), (8, 8)]
        made = tuple((f"k{i}", function(*n), (1, 1, 1), 32, 0, False, False, s)
                     for i, (n, s) in enumerate(zip(sizes, spec)))
        p = program(steps, 7, (4, None, 5, 0), 2, slots, plan=launcher.Plan(0, 4, made))
        for stream in 0, 1 << 50:
            streams[0] = stream
            log.clear()
            x = Tensor(1 << 40, offset=64)
            first = fake.fake_launches()
            a, none, b, same = p.run(x, None)
            assert (a.address, none, b.address, same is x) == (1 << 21, None, 1 << 22, True)
            taken, gave = log[0], log[2]
            assert taken == ("take", 1000, stream) and gave[0] == "give"
            assert log[1] == ("make", (x, (4, 8)), {"dtype": "half"})
            assert log[3][0] == "two" and type(log[3][1]) is Made and log[3][2:] == (0.5, x)
            assert log[4] == ("take", 24, stream) and log[5] == "seen" and log[6][0] == "give" and len(log) == 7
            assert parameters("QiQ", first) == (1 << 40, 7, gave[1] + 512)
            assert parameters("Q", first + 1) == (1 << 20,)
            assert parameters("Q", first + 2) == ((1 << 21) - 8,)
            assert parameters("Qq", first + 3) == (1 << 40, -1)
            assert [launched(first + i).stream for i in range(4)] == [stream] * 4
            assert fake.fake_launches() == first + 4 and not live
        assert sys.getrefcount(a) == 2 and sys.getrefcount(b) == 2
    """)


def test_a_program_of_calls_alone_launches_nothing(run) -> None:
    """Two products of PyTorch's are steady too."""
    run("""
        p = program([call(lambda x: Tensor(x.address + 8), (None,), ((0, 0),), results=(1,))], 2, (1,), slots=(),
                    plan=launcher.Plan(0, 0, ()))
        for address in 64, 128:
            before = fake.fake_launches()
            assert p.run(Tensor(address))[0].address == address + 8 and fake.fake_launches() == before
        raises(ValueError, "kernel 0 of a program with 0", lambda: program([("launch", 0, 1)], 1, (None,), slots=(),
                                                                          plan=launcher.Plan(0, 0, ())))
        launcher.Plan(0, 0, ()).launch(0)
        assert fake.fake_launches() == before
    """)


def test_outputs(run) -> None:
    run("""
        def make():
            return Tensor(1 << 20)
        steps = [call(make, results=(1,)), ("launch", 0, 1)]
        x = Tensor(64)
        assert [t.address for t in program(steps, 2, (1, 1)).run(x)] == [1 << 20] * 2
        assert program(steps, 2, (1,), single=True).run(x).address == 1 << 20
        assert program(steps, 2, (None,), single=True).run(x) is None
        assert program(steps, 2, (0,), single=True).run(x) is x
        raises(RuntimeError, "value 1 of a program is no tensor", program([("launch", 0, 1)], 2, (0, 1)).run, x)
        raises(RuntimeError, "value 1", program([("launch", 0, 1)], 2, (1,), single=True).run, x)
        raises(TypeError, "takes 1 inputs, got 2", program(steps, 2, (1,)).run, x, x)
        raises(RuntimeError, "connect() first", program(steps, 2, (1,)).run, 5)
        streams[0] = "none"
        raises(RuntimeError, "the current stream cannot be told", program(steps, 2, (1,)).run, x)
        # One result of a call, alone or in a tuple; a call whose result nobody takes.
        streams.clear()
        for result in (Tensor(5), (Tensor(5),), [Tensor(5)]):
            p = program([call(lambda: result, results=(1,)), ("launch", 0, 1)], 2, (1,), slots=((1, 0),))
            assert p.run(x)[0].address == 5 and parameters("Q") == (5,)
        assert program([call(lambda: 5), ("launch", 0, 1)], 1, (0,)).run(x) == (x,)
    """)


def test_pairs_go_to_the_kernel_from_the_lower_in_memory(run) -> None:
    run("""
        parameters_of = (("map", 0, True, 3, *MAP, (2, 100, 48), (0, 64, 1), (2, 32, 16)),
                         ("map", 1, False, 0, *MAP, (100, 48), (64, 1), (32, 16)))
        f = function(128, 4, 4, 4, 8, 8, 8, 128, 4, 4, 8, 8)
        plan = launcher.Plan(0, 2, (("k", f, (1, 1, 1), 32, 0, False, False, parameters_of),))
        p = program([("launch", 0, 1)], 3, (0,), 3, ((0, 0, 1, 0), (2, 96)), plan=plan)
        for a, b, c in [(4096, 8192, 128), (8192, 4096, 128), (4096, 8704, 128)]:
            p.run(Tensor(a), Tensor(b), Tensor(c))
            found = parameters("128siiiqqq128siiqq")
            assert found[4] == abs(a - b) // 2
            assert struct.unpack_from("=Q", found[0])[0] == min(a, b) + 6
            assert struct.unpack_from("=Q", found[7])[0] == c + 96
        # A kernel that wants a pair does not take one address, nor one that wants an address a pair.
        raises(TypeError, "must be a pair", program([("launch", 0, 1)], 3, (0,), 3, ((0, 0), (2, 0)), plan=plan).run,
               Tensor(64), Tensor(64), Tensor(64))
        raises(TypeError, "must be a tensor or None", program([("launch", 0, 1)], 1, (0,), 1, ((0, 0, 0, 0),)).run,
               Tensor(64))
        assert fake.fake_launches() == 3
    """)


def test_a_failure_at_any_step_gives_everything_back(run) -> None:
    run("""
        class Bad(Exception):
            pass
        counted, fail_at, deaths = [0], [0], []
        def step(result=None):
            counted[0] += 1
            if counted[0] == fail_at[0]:
                raise Bad(f"step {counted[0]}")
            return result
        class Counted(Tensor):
            def __del__(self):
                deaths.append(self.address)
        def make():
            return step(Counted(1 << 20))
        def counted_allocate(size, stream):
            step()
            return allocate(size, stream)
        def counted_release(address):
            release(address)
            if counted[0] > 0:
                step()
        launcher.connect(**(parts | dict(allocate=counted_allocate, release=counted_release)))
        steps = [("take", 1, 8), call(make, results=(2,)), ("take", 3, 16), ("launch", 0, 1), ("give", 1),
                 call(lambda *a: step((Counted(1 << 21), Counted(1 << 22))), (None,), ((0, 2),), None, (), (4, 5)),
                 ("drop", 2), ("take", 6, 8), ("give", 3), ("give", 6)]
        p = program(steps, 7, (4, 5), 1, ((0, 0),))
        x = Tensor(64)
        baseline = sys.getrefcount(x)
        for n in range(1, 9):
            counted[0], fail_at[0] = 0, n
            deaths.clear()
            raises(Bad, f"step {n}", p.run, x)
            assert not live, (n, live)
            assert len(deaths) == (n >= 2) + 2 * (n >= 5), (n, deaths)
            assert sys.getrefcount(x) == baseline
        counted[0], fail_at[0] = 0, 9
        p.run(x)
        assert counted[0] == 8 and not live
        # Failures of the launch, and of giving back after one: the first is what the caller sees.
        def broken(address):
            release(address)
            raise ValueError("release")
        launcher.connect(**(parts | dict(release=broken)))
        fail_at[0] = 0
        fake.fake_fail(b"cuLaunchKernelEx", 2, 0)
        raises(RuntimeError, "cuLaunchKernelEx failed: CUDA_ERROR_OUT_OF_MEMORY", p.run, x)
        assert not live
        fake.fake_fail(b"", 0, 0)
        # At the end, with a result: memory that no step gives back.
        q = program([("take", 1, 8), ("take", 2, 8), ("launch", 0, 1)], 3, (0,))
        raises(ValueError, "release", q.run, x)
        assert not live and sys.getrefcount(x) == baseline
        for wrong, kind in (("no address", TypeError), (-1, OverflowError), (1 << 64, OverflowError)):
            given = []
            launcher.connect(**(parts | dict(allocate=lambda *a: wrong, release=given.append)))
            raises(kind, "", q.run, x)
            assert given == [wrong]  # whatever it was
    """)


def test_calls_that_do_not_answer_as_before_are_named(run) -> None:
    run("""
        x, t = Tensor(64), Tensor(16)
        def p(function, results, arguments=(), places=()):
            return program([call(function, arguments, places, None, (), results), ("launch", 0, 1)], 4, (0,)).run
        many = "returned another number of results than it did before"
        raises(RuntimeError, many, p(lambda: (t, t), (1,)), x)
        raises(RuntimeError, many, p(lambda: (t,), (1, 2)), x)
        raises(RuntimeError, many, p(lambda: t, (1, 2)), x)
        raises(TypeError, "must be a tensor", p(lambda: 5, (1,)), x)
        raises(TypeError, "must be a tensor", p(lambda: (t, None), (1, 2)), x)
        raises(TypeError, "not callable", p(5, (1,)), x)
        raises(RuntimeError, "value 3 of a program is no tensor", p(lambda t: t, (1,), (None,), ((0, 3),)), x)
        named = program([call(lambda **k: t, (), (), None, (("out", 3),), (1,)), ("launch", 0, 1)], 4, (0,))
        raises(RuntimeError, "value 3", named.run, x)
        assert fake.fake_launches() == 0 and sys.getrefcount(t) == 2
    """)


def test_programs_that_make_no_sense_are_refused(run) -> None:
    run("""
        launch = ("launch", 0, 1)
        def wrong(text, *steps, kind=ValueError, **rest):
            raises(kind, text, lambda: program([*steps, launch], **({"values": 3, "outputs": (0,)} | rest)))
        f = len
        wrong("starts with its kind", 5)
        wrong("starts with its kind", ("take",))
        wrong("starts with its kind", (1, 2))
        wrong("unknown step 'make'", ("make", 1))
        wrong("unknown step 'take'", ("take", 1))
        wrong("value 3 of a program with 3", ("take", 3, 8))
        wrong("value -1", ("give", -1))
        wrong("an input is not", ("give", 0))
        wrong("an input is not", ("drop", 0))
        wrong("an input is not", ("take", 0, 8))
        wrong("an input is not", call(f, results=(0,)))
        wrong("kernel 1 of a program with 1", ("launch", 1, 1))
        wrong("kernel 2 of", ("launch", 0, 2))
        wrong("kernel -1", ("launch", 0, -1))
        wrong("", ("call", f, (), ()), kind=TypeError)
        wrong("", ("call", f, [], (), None, (), ()), kind=TypeError)
        wrong("", ("take", "x", 8), kind=TypeError)
        wrong("must be a dict or None", call(f, keywords=5))
        wrong("too many arguments or results", call(f, results=(1,) * 9))
        wrong("too many arguments or results", call(f, (None,) * 17))
        wrong("value 5", call(f, results=(5,)))
        wrong("argument 1 of a program with 1", call(f, (None,), ((1, 0),)))
        wrong("value 3", call(f, (None,), ((0, 3),)))
        wrong("a place must be", call(f, (None,), (0,)))
        wrong("a place must be", call(f, (None,), ((0, 1, 2),)))
        wrong("must be a str", call(f, named=((0, 1),)))
        wrong("value 3", outputs=(3,))
        wrong("value -1", outputs=(-1,))
        wrong("0 outputs", outputs=())
        wrong("97 outputs", outputs=(0,) * 97)
        wrong("0 inputs", inputs=0)
        wrong("25 inputs", inputs=25, values=30)
        wrong("2 inputs, 1 values", inputs=2, values=1)
        wrong("97 values", values=97)
        wrong("129 steps", *[("give", 1)] * 128)
        wrong("2 kernel arguments for a plan that takes 1", slots=((0, 0), (0, 0)),
              plan=launcher.Plan(0, 1, kernels(1)))
        wrong("has 65 kernel arguments", slots=((0, 0),) * 65, plan=launcher.Plan(0, 1, kernels(1)))
        one = launcher.Plan(0, 1, kernels(1))
        for slot in ((0,), 5, (0, 0, 1), (0, 0, 0, 0, 0)):
            wrong("a kernel argument must be (value, offset)", slots=(slot,), plan=one)
        wrong("value 3", slots=((3, 0),), plan=one)
        wrong("value 9", slots=((0, 0, 9, 0),), plan=one)
        wrong("", slots=((0, 1 << 70),), plan=one, kind=OverflowError)
        raises(TypeError, "needs a Plan", lambda: launcher.Program(5, 1, 1, (), (), (0,), False, None))
        raises(TypeError, "no keyword", lambda: launcher.Program(one, 1, 1, ((0, 0),), (), (0,), False, None, x=1))
        assert sys.getrefcount(one) == 2
        del one
        assert fake.fake_retained() == 0
    """)


def test_a_callable_may_run_the_program_again_or_drop_it(run) -> None:
    run("""
        depth = [0]
        def again():
            depth[0] += 1
            return holder[0].run(x)[0] if depth[0] < 20 else Tensor(48)
        x = Tensor(64)
        holder = [program([("take", 2, 8), call(again, results=(1,)), ("launch", 0, 1), ("give", 2)], 3, (1,),
                          slots=((1, 0), (2, 0)), plan=launcher.Plan(0, 2, kernels(1)))]
        assert holder[0].run(x)[0].address == 48 and fake.fake_launches() == 20 and not live
        def drop():
            holder.clear()
            return Tensor(32)
        holder = [program([call(drop, results=(1,)), ("launch", 0, 1)], 2, (1,), slots=((1, 0),))]
        assert holder[0].run(x)[0].address == 32 and parameters("Q") == (32,)
        assert fake.fake_retained() == 0
    """)


def test_nothing_leaks(run) -> None:
    run("""
        x, options, token = Tensor(64), {"dtype": 5}, object()
        def make(*args, **kwargs):
            return Tensor(1 << 20)
        broken = [False]
        def maybe():
            if broken[0]:
                raise ValueError
            return Tensor(1), Tensor(2)
        counted = (x, make, maybe, options, token)
        def counts():
            return [sys.getrefcount(c) for c in counted] + [fake.fake_retained(), len(live)]
        def work():
            for i in range(200):
                p = program([("take", 1, 8), call(make, (None, 5), ((0, 0),), options, (("out", 0),), (2,)),
                             call(maybe, results=(3, 4)), ("launch", 0, 1), ("give", 1)], 5, (2, 4), kept=token)
                for broken[0] in (False, True):
                    try:
                        p.run(x)
                    except ValueError:
                        pass
                try:
                    program([call(make, keywords=options, results=(9,))], 5, (2,), kept=token)
                except ValueError:
                    pass
                memory.clear()
            kept.clear()
        work()
        tracemalloc.start()
        work()
        before, grown = counts(), tracemalloc.get_traced_memory()[0]
        for _ in range(3):
            work()
        grown = tracemalloc.get_traced_memory()[0] - grown
        assert grown < 3000, grown
        assert counts() == before
    """)


def test_no_memory_is_an_exception_wherever_it_happens(run) -> None:
    pytest.importorskip("_testcapi", reason="this Python was built without its tests")
    run("""
        import _testcapi
        made, plan = (Tensor(1 << 20), Tensor(1 << 21)), launcher.Plan(0, 2, kernels(2))
        launcher.connect(**(parts | dict(allocate=lambda *_: 1 << 40, release=lambda _: None)))
        steps = (("take", 1, 8), call(lambda *a, **k: made, (None, 5), ((0, 2),), {"a": 1}, (("b", 2),), (3, 4)),
                 ("launch", 0, 2), ("give", 1), ("take", 1, 8))
        steps = (call(lambda: made[0], results=(2,)), *steps)
        new = plan, 1, 5, ((2, 0), (1, 4)), steps, (2, None, 3), False, made
        p = launcher.Program(*new)
        counted = (*made, plan, p, steps)
        for function, *args in [
            (p.run, None), (launcher.Program, *new), (launcher.Plan, 0, 2, kernels(2)), (launcher.Table, -1),
            (lambda: launcher.connect(**parts),),
        ]:
            failures = 0
            before = [sys.getrefcount(c) for c in counted]
            for n in range(40):
                _testcapi.set_nomemory(n, n + 1)
                try:
                    function(*args)
                except (MemoryError, TypeError):  # connect() takes a name that it cannot look up for a missing one
                    failures += 1
                finally:
                    _testcapi.remove_mem_hooks()
            assert 0 < failures < 40, (function, failures)
            assert [sys.getrefcount(c) for c in counted] == before
        assert fake.fake_retained() == 1
    """)

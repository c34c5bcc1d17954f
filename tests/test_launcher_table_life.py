"""What tables of the compiled launcher hold, and for how long. tests/support/launcher_process.py."""

from __future__ import annotations

import pytest
from support.launcher_process import EXCHANGE, KINDS, Run, runner
from support.native import CAN_COMPILE, NEEDS_COMPILER

pytestmark = pytest.mark.skipif(not CAN_COMPILE, reason=NEEDS_COMPILER)


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param, EXCHANGE)


def test_a_full_table_is_emptied(run) -> None:
    run("""
        table = launcher.Table(-1)
        class Value:
            def __call__(self, x):
                return x.shape[0]
        value = Value()
        made = [Tensor(64, (n, 8)) for n in range(1, 514)]
        for t in made[:512]:
            assert table.add(value, False, t)
        assert len(table) == 512 and [table.call(t) for t in made[:512]] == list(range(1, 513))
        assert sys.getrefcount(value) == 514
        assert table.add(value, False, made[512])
        assert len(table) == 1 and sys.getrefcount(value) == 3
        assert table.call(made[0]) is None and table.call(made[512]) == 513
        del table
        assert sys.getrefcount(value) == 2
    """)


def test_a_callable_may_change_the_table_that_runs_it(run) -> None:
    run("""
        x, y = Tensor(64), Tensor(64, (3, 8))
        holder = [launcher.Table(-1)]
        steps = lambda f: [call(f, results=(1,)), ("launch", 0, 1)]
        def clear():
            holder[0].clear()
            return Tensor(32)
        def replace():
            holder[0].add(lambda *_: "new", False, x)
            return Tensor(48)
        def again():
            return Tensor(16) if holder[0].call(y) is None else None
        def drop():
            holder.clear()
            return Tensor(80)
        for f, address, after in ((clear, 32, None), (replace, 48, "new"), (again, 16, 16), (drop, 80, None)):
            for make in (lambda: program(steps(f), 2, (1,), single=True, slots=((1, 0),)), lambda: lambda *_: f()):
                holder[:] = [launcher.Table(-1)]
                assert holder[0].add(make(), False, x)
                assert holder[0].call(x).address == address
                found = holder[0].call(x) if holder else None
                assert getattr(found, "address", found) == after
        # What goes when a table is cleared, or goes itself, may use it once more.
        class Last:
            def __init__(self, table):
                self.table = table
            def __call__(self, *_):
                return "last"
            def __del__(self):
                done.append((self.table.call(x), self.table.add(hit, False, y), len(self.table)))
                self.table.clear()
        done, hit = [], lambda *_: "hit"
        table = launcher.Table(-1)
        table.add(Last(table), False, x)
        table.clear()
        assert done == [(None, True, 1)] and len(table) == 0
        table.add(Last(table), False, x)
        table.add(hit, False, x)
        assert done[1:] == [("hit", True, 2)] and len(table) == 0
    """)


def test_threads_share_a_table(run) -> None:
    run("""
        table = launcher.Table(-1)
        made = [Tensor(64, (n, 8)) for n in range(1, 40)]
        wrong = []
        def value(n):
            return lambda t: n
        def work(seed):
            fake.fake_make_current(0)
            for i in range(3000):
                t = made[(i * 7 + seed * 13) % len(made)]
                found = table.call(t)
                if found not in (None, t.shape[0]):
                    wrong.append((found, t.shape))
                if found is None or i % 5 == 0:
                    table.add(value(t.shape[0]), False, t)
                if i % 997 == 0:
                    table.clear()
        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert not wrong and len(table) <= len(made)
    """)


def test_threads_run_one_program(run) -> None:
    run("""
        # One value as an address and as a map, beside memory that is taken and given back.
        spec = (("address", 0), ("map", 0, False, 0, *MAP, (8, 8), (8, 1), (8, 8)), ("address", 1))
        plan = launcher.Plan(0, 2, (("k", function(8, 128, 4, 4, 8, 8, 8), (1, 1, 1), 32, 0, False, False, spec),))
        steps = [("take", 1, 8), call(lambda t: t, (None,), ((0, 0),), results=(2,)), ("launch", 0, 1), ("give", 1)]
        p = program(steps, 3, (2,), 1, ((0, 0), (1, 0)), single=True, plan=plan)
        taken, gave = [], []
        def take(size, stream):
            taken.append(len(taken))
            return 1 << 40
        launcher.connect(**(parts | dict(allocate=take, release=gave.append)))
        table, wrong = launcher.Table(-1), []
        table.add(p, False, Tensor(64))
        def work(n):
            fake.fake_make_current(0)
            for i in range(1500):
                t = Tensor(4096 * (4 * i + n + 1))
                if table.call(t) is not t:
                    wrong.append(t)
        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert not wrong and fake.fake_launches() == 6000 and fake.fake_mixed_up() == 0
        assert len(taken) == len(gave) == 6000
    """)


def test_nothing_leaks(run) -> None:
    run("""
        x, y, wrong = Tensor(64, bits=32, grad=True), Tensor(128, (2, 8)), Subclass(64)
        state.grad = True
        hooks.launch_enter_hook = types.SimpleNamespace(calls=[])
        p = program([("launch", 0, 1)], 2, (0, None), 2)
        def value(a, b):
            return b
        def broken(a, b):
            raise ValueError
        counted = (x, y, wrong, p, value, broken, None, *parts.values(), hooks.launch_enter_hook)
        def work():
            for i in range(300):
                table = launcher.Table(0)
                for v in (p, value, broken, value):
                    table.add(v, False, x, y)
                    table.add(v, True, y, x)
                    table.add(v, True, x, wrong)
                    for operands in ((x, y), (y, x), (x, wrong), (x,), (None, None)):
                        try:
                            table.call(*operands)
                        except ValueError:
                            pass
                if i % 2:
                    table.clear()
        def counts():
            return [sys.getrefcount(c) for c in counted]
        work()
        tracemalloc.start()
        work()
        before, grown = counts(), tracemalloc.get_traced_memory()[0]
        for _ in range(3):
            work()
        grown = tracemalloc.get_traced_memory()[0] - grown
        assert grown < 3000, grown  # a table has two kilobytes
        assert all(abs(a - b) < 20 for a, b in zip(counts(), before)), (counts(), before)
    """)

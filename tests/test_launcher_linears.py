"""Tables of the compiled launcher that read a module's Linears: what is a Linear and nothing else."""

from __future__ import annotations

import pytest
from support.launcher_process import EXCHANGE, KINDS, Run, runner
from support.native import CAN_COMPILE, NEEDS_COMPILER

pytestmark = pytest.mark.skipif(not CAN_COMPILE, reason=NEEDS_COMPILER)


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param, EXCHANGE)


def test_weights_then_biases_of_the_children(run) -> None:
    run("""
        x, w, v, b = Tensor(64), Parameter(4096), Parameter(8192), Parameter(128, (8,), (1,))
        children = {"other": 5, "a": Linear(w, b), "b": Linear(v)}
        table, seen = launcher.Table(-1), []
        assert table.call_linears(children, ("a", "b"), x) is None  # nothing in it
        assert table.add(lambda *given: seen.append(given) or "hit", False, x, w, v, b, None)
        assert table.call_linears(children, ("a", "b"), x) == "hit" and seen == [(x, w, v, b, None)]
        for names in (("b", "a"), ("a",), ("a", "c"), ("a", "other"), (), ("a", 5), tuple("ab" * 6)):
            assert table.call_linears(children, names, x) is None
        table.add(lambda *given: len(given), False, x)
        assert table.call_linears({}, (), x) == 1
        most = {str(i): Linear(w, b) for i in range(11)}
        table.add(lambda *given: len(given), False, x, *[w] * 11, *[b] * 11)
        assert table.call_linears(most, tuple(most), x) == 23
        for wrong in ((), (children,), (children, ["a", "b"], x), (children, ("a", "b"), x, x)):
            raises(TypeError, "call_linears() takes", table.call_linears, *wrong)
        assert table.call_linears(5, ("a",), x) is None
    """)


def test_what_is_more_than_a_linear(run) -> None:
    run("""
        x, w, b = Tensor(64), Parameter(4096), Parameter(128, (8,), (1,))
        linear = Linear(w, b)
        children, table = {"a": linear}, launcher.Table(-1)
        table.add(lambda *_: "hit", False, x, w, b)
        def found():
            return table.call_linears(children, ("a",), x)
        assert found() == "hit"
        for name in "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks":
            hooks = getattr(linear, name)
            hooks[0] = len
            assert found() is None
            hooks.clear()
            for wrong in (None, []):
                setattr(linear, name, wrong)
                assert found() is None
            delattr(linear, name)
            assert found() is None
            setattr(linear, name, hooks)
            assert found() == "hit"
        for hooks in global_hooks:
            hooks[0] = len
            assert found() is None
            hooks.clear()
        linear.forward = len
        assert found() is None
        del linear.forward
        for name, others in (("weight", (None, Subclass(4096), 5)), ("bias", (None, Subclass(128), 5))):
            kept = linear._parameters.pop(name)
            assert found() is None  # a parametrisation
            for other in others:
                linear._parameters[name] = other
                assert found() is None
            linear._parameters[name] = kept
            assert found() == "hit"
        parameters, linear._parameters = linear._parameters, None
        assert found() is None
        del linear._parameters
        assert found() is None
        linear._parameters = parameters
        class Other(Linear):
            pass
        class Slots:
            __slots__ = ()
        for other in (Other(w, b), Slots(), None, 5, w):
            children["a"] = other
            assert found() is None
        children["a"] = linear
        class Broken(Exception):
            pass
        class Sized:
            def __len__(self):
                raise Broken
        launcher.connect(**(parts | dict(global_hooks=(Sized(),))))
        assert found() is None
        launcher.connect(**(parts | dict(linear_type=Slots)))
        children["a"] = Slots()
        assert found() is None  # without a dict
    """)


def test_a_callable_may_take_the_weights_out_of_their_modules(run) -> None:
    run("""
        x, gone = Tensor(64), []
        class Last(Parameter):
            def __del__(self):
                gone.append(self.address)
        # Of the type that the launcher knows, so that it is looked at.
        launcher.connect(**(parts | dict(parameter_type=Last)))
        children = {"a": Linear(Last(4096), Last(128, (8,), (1,)))}
        table = launcher.Table(-1)
        def take_out(x, w, b):
            children.clear()
            del w, b
            return list(gone)
        table.add(take_out, False, x, *children["a"]._parameters.values())
        assert table.call_linears(children, ("a",), x) == [] and sorted(gone) == [128, 4096]
        counted = [x, Parameter(4096), Parameter(128, (8,), (1,)), None]
        launcher.connect(**parts)
        children = {"a": Linear(*counted[1:3]), "b": Linear(counted[1])}
        p = program([("launch", 0, 1)], 5, (0,), 5)
        table.add(p, False, x, counted[1], counted[1], counted[2], None)
        inside = children["a"].__dict__
        before = [sys.getrefcount(c) for c in (*counted, inside, p)]
        for _ in range(100):
            assert table.call_linears(children, ("a", "b"), x) == (x,)
            assert table.call_linears(children, ("a", "a"), x) is None
        assert all(abs(sys.getrefcount(c) - n) < 5 for c, n in zip((*counted, inside, p), before))
    """)

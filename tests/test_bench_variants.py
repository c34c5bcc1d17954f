"""The variants of the benchmarks against float64, the adapters of peers with stand-ins for their packages, and the
process that makes the first calls of a peer."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import common, variants  # noqa: E402
from bench.case import Case  # noqa: E402
from bench.rehearsal import STRIKES, Rehearsal, Verdict  # noqa: E402

SMALL = (48, 64, 96)
TINY = (16, 64, 96)


@pytest.mark.parametrize(
    "op, name",
    [
        (op, name)
        for op in variants.OPS
        for name in ("eager", "fused", "fused_keep")
        if not variants.not_offered(name, op)
    ],
)
def test_errors_against_float64(op: str, name: str) -> None:
    """bfloat16 rounds to 2**-9 at worst; a wrong formula or a gradient in the wrong place is off by much more."""
    case = Case(op, SMALL, "cpu", sets=1)
    case.add(name)
    case.forward(name)(0)
    case.step(name)(0)
    assert all(p.grad is None for p in [case.x[0], *case.eager[0].parameters()])
    errors = case.errors(name)
    assert set(errors) == {"forward", "step"}
    assert 5e-4 < errors["forward"] < 8e-3 and 5e-4 < errors["step"] < 1.2e-2
    assert all(p.grad is None for p in [case.x[0], *case.eager[0].parameters()])
    with torch.no_grad():  # the references must be of this operation, and not follow the variant
        for m in case.built[name]:
            m.module = lambda x, f=m.module: f(x) * 1.1
    assert case.errors(name)["forward"] == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("op", list(variants.OPS))
def test_eager_is_the_operation_of_its_name(op: str) -> None:
    m: Any = variants.eager_module(op, 64, 96).double()
    x = torch.randn(48, 64, dtype=torch.float64)
    if op == "mlp_relu":
        expected = (x @ m.fc1.weight.t() + m.fc1.bias).clamp(min=0) @ m.fc2.weight.t() + m.fc2.bias
    else:
        g = x @ m.gate_proj.weight.t()
        inner = 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)))
        act = g * inner if op == "geglu" else g * torch.sigmoid(g)
        expected = (act * (x @ m.up_proj.weight.t())) @ m.down_proj.weight.t()
    torch.testing.assert_close(m(x), expected)
    assert any(p.ndim == 1 for p in m.parameters()) == variants.OPS[op].bias


def fake_quack(monkeypatch: pytest.MonkeyPatch, swapped: bool = False) -> None:
    """quack.mlp as its documentation has it: fc1's rows are gate 0, up 0, gate 1, up 1, and so on."""
    acts = {"geglu": lambda t: nn.functional.gelu(t, approximate="tanh"), "swiglu": nn.functional.silu}

    class MLP(nn.Module):
        def __init__(self, n: int, hidden: int, out: int, activation: str, device: Any, tuned: bool) -> None:
            super().__init__()
            self.fc1 = nn.Linear(n, hidden, bias=False, device=device)
            self.fc2 = nn.Linear(hidden, out, bias=False, device=device)
            self.act = acts[activation]

        def forward(self, x: Tensor) -> Tensor:
            both = self.fc1(x)
            gate, up = both[..., swapped::2], both[..., 1 - swapped :: 2]
            return self.fc2(self.act(gate) * up)

    def mlp_func(x: Tensor, w1: Tensor, w2: Tensor, activation: str, bias1: Any, bias2: Any, tuned: bool) -> Tensor:
        assert activation == "relu"
        return nn.functional.linear(nn.functional.linear(x, w1, bias1).relu(), w2, bias2)

    mlp = types.ModuleType("quack.mlp")
    mlp.MLP, mlp.mlp_func = MLP, mlp_func  # type: ignore[attr-defined]
    package = types.ModuleType("quack")
    package.mlp = mlp  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", package)
    monkeypatch.setitem(sys.modules, "quack.mlp", mlp)


@pytest.mark.parametrize("op", list(variants.OPS))
def test_quack_gets_interleaved_weights_and_its_gradients_come_apart(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_quack(monkeypatch)
    case = Case(op, SMALL, "cpu", sets=1)
    case.add("quack")
    errors = case.errors("quack")
    assert errors["forward"] < 8e-3 and errors["step"] < 1.2e-2
    if op != "mlp_relu":  # the other order is another function: the error shows it
        fake_quack(monkeypatch, swapped=True)
        case.add("quack_untuned")
        assert case.errors("quack_untuned")["forward"] > 0.1


@pytest.mark.parametrize("op, name", [("swiglu", "flash_swiglu"), ("swiglu", "liger"), ("geglu", "liger")])
def test_peers_with_our_parameter_names_compute_on_our_weights(
    op: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def module(kind: str) -> type[nn.Module]:
        class Peer(nn.Module):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__()
                hidden, inter = args if len(args) == 2 else (args[0].hidden_size, args[0].intermediate_size)
                names = (("gate_proj", hidden, inter), ("up_proj", hidden, inter), ("down_proj", inter, hidden))
                for child, n, m in names:
                    setattr(self, child, nn.Linear(n, m, bias=False))

            def forward(self, x: Tensor) -> Tensor:
                seen.append(tuple(x.shape))
                act = nn.functional.silu if kind == "swiglu" else lambda t: nn.functional.gelu(t, approximate="tanh")
                return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))

        return Peer

    names = ("liger_kernel", "liger_kernel.transformers", "flash_swiglu_mlp")
    made = {n: types.ModuleType(n) for n in names}
    made["flash_swiglu_mlp"].FlashSwiGLUMLP = module("swiglu")  # type: ignore[attr-defined]
    for kind, attribute in (("geglu", "LigerGEGLUMLP"), ("swiglu", "LigerSwiGLUMLP")):
        made[f"liger_kernel.transformers.{kind}"] = types.ModuleType(kind)
        setattr(made[f"liger_kernel.transformers.{kind}"], attribute, module(kind))
    for n, m in made.items():
        monkeypatch.setitem(sys.modules, n, m)
    assert variants.missing(name) is None
    case = Case(op, SMALL, "cpu", sets=1)
    case.add(name)
    assert max(case.errors(name).values()) < 1.2e-2
    assert seen == [(1, 48, 64) if name == "flash_swiglu" else (48, 64)]


def test_saved_bytes_are_those_left_but_for_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [1000]

    def forward(i: int) -> Tensor:
        held[0] += 4096 + 64 * 4
        return torch.zeros(64)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held[0])
    assert common.saved_bytes(forward) == [4096.0] * 3


def worker(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(f"import json, os, subprocess, sys, time\nprint(json.dumps('ready'), flush=True)\n{body}")
    return [sys.executable, str(path)]


def test_a_rehearsal_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    body = f"""
for line in sys.stdin:
    name, op, shape = json.loads(line)
    if name == "slow":
        child = subprocess.Popen(["sleep", "60"])
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
        time.sleep(60)
    print(json.dumps("ok" if name == "good" else "ValueError: " + name), flush=True)
"""
    with Rehearsal(1.0, worker(tmp_path, body)) as rehearsal:
        assert rehearsal("good", "geglu", SMALL) == Verdict(True)
        begin = time.monotonic()
        assert rehearsal("slow", "geglu", SMALL) == Verdict(False, True, "its warm-up ran past 1 s")
        assert time.monotonic() - begin < 20
        assert gone(int((tmp_path / "pid").read_text()))
        assert rehearsal("slow", "geglu", SMALL).timed_out  # remembered, not asked again
        assert rehearsal("bad", "geglu", SMALL) == Verdict(False, False, "ValueError: bad")
        assert rehearsal("good", "swiglu", SMALL).ok  # in a fresh process
        assert STRIKES == 2
        assert rehearsal("slow", "geglu", TINY).reason == "its warm-up ran past 1 s"
        assert rehearsal("slow", "swiglu", TINY).reason.startswith("not tried: ")


def gone(pid: int) -> bool:
    """Whether a process has ended (one that nobody has waited for yet counts)."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


def test_a_rehearsal_that_crashes_is_reported(tmp_path: Path) -> None:
    body = "sys.stdin.readline()\nprint('CUDA error: illegal memory access', file=sys.stderr, flush=True)\nos._exit(3)"
    with Rehearsal(20.0, worker(tmp_path, body)) as rehearsal:
        verdict = rehearsal("quack", "geglu", SMALL)
    assert verdict == Verdict(False, False, "its process ended: CUDA error: illegal memory access")


def test_the_real_rehearsal_process(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "rehearsal.py"), "cpu"]
    with Rehearsal(120.0, command) as rehearsal:
        assert rehearsal("eager", "mlp_relu", SMALL) == Verdict(True)
        assert rehearsal("flash_swiglu", "geglu", SMALL).ok is False

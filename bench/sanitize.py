"""Every kernel once at a small odd shape in bfloat16, for compute-sanitizer; results are held against float64.

    python bench/sanitize.py                                    all cases by themselves; also compiles the kernels
    compute-sanitizer --tool memcheck python bench/sanitize.py
    python bench/sanitize.py --tools memcheck racecheck synccheck    the same under each tool, with logs in
                                                                bench/results/<gpu>/sanitize-<tool>.log (make sanitize)

racecheck does not follow the named barrier by which Triton's compiler wakes a warp-specialised kernel's partitions, and
reports each such kernel. bench/dispatch.py looks those reports up in the machine code: what is verified there to be the
compiler's own is listed in the log, at its head, and all else is a finding.

No CUDA graphs, and no caching of memory: every tensor is an allocation of its own, whose end the tools know. Float64
and eager PyTorch, which say how far a result may be off (tests/support/compare.py), run on the CPU, where no tool slows
them. Compile first: the kernels are then in Triton's cache, and a tool's run should take half a minute.

Exit code: 0; 1 where a result is wrong, a kernel that a case is for was not launched, or a tool found something; 2
where there is no GPU or no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # read when memory is first allocated

from support.compare import assert_matches  # noqa: E402

from bench import common, dispatch  # noqa: E402
from bench.script import script  # noqa: E402
from fusedmlp import functional, reference, settings  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TOKENS, FEW = 70, 33  # ragged in every tile; few: for the kernels for small batches
WIDTHS = (72, 144, 72, 200)  # ragged in every tile; rows of 16 bytes, as TMA needs, also of half a hidden layer
ODD_WIDTHS = (71, 137, 71, 201)
FOUND, PRINTED = 9, 50  # exit code of a tool that found something; what it prints at most
ALL_RIGHT = re.compile(r"^(\d+) of \1 cases are right$", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """An operation with forced settings, and the kernels that it is there for."""

    op: str
    kernels: tuple[str, ...]
    family: str
    bias: bool = True
    backward: bool = True
    tokens: int = TOKENS
    activation: str = "gelu_tanh"
    tile: dict[str, int] = field(default_factory=dict)

    @property
    def widths(self) -> tuple[int, ...]:
        return ODD_WIDTHS if self.family in ("pointer", "pair") else WIDTHS

    def __str__(self) -> str:
        parts = [self.op, self.family, *([] if self.bias else ["no bias"]), *([] if self.backward else ["forward"])]
        return " ".join([*parts, *(f"{k}={v}" for k, v in self.tile.items())])


COOPERATIVE = {"block_m": 128, "block_n": 128, "block_k": 64, "parts": 2, "warps": 8, "stages": 3}
PINGPONG_WIDE = {"block_m": 128, "block_n": 128, "block_k": 64, "parts": 2, "warps": 4, "stages": 4}
GRADS = ("hidden_forward_gluon", "hidden_backward_gluon", "glu_grads_gluon")
CASES = (
    Case("glu_mlp", ("glu_pointer", "glu_backward_pointer", "dual_dgrad_pointer"), "pointer"),
    Case("glu_mlp", ("glu_tma", "glu_backward_tma", "dual_dgrad_tma"), "tma"),
    Case("glu_mlp", ("glu_tma", "glu_backward_tma", "dual_dgrad_tma"), "tma", bias=False, activation="silu"),
    Case("glu_mlp", GRADS, "gluon"),
    Case("glu_mlp", GRADS, "gluon", bias=False, activation="silu"),
    Case("glu_mlp", ("hidden_forward_gluon",), "gluon", backward=False, tile=COOPERATIVE),
    Case("glu_mlp", ("glu_act_forward", "glu_act_backward"), "pair"),
    Case("glu_mlp", ("glu_small", "linear_small", "hidden_backward_small", "dual_dgrad_small"), "small", tokens=FEW),
    Case("mlp", ("linear_act_pointer", "act_backward_pointer"), "pointer"),
    Case("mlp", ("linear_act_tma", "act_backward_tma"), "tma"),
    Case("mlp", GRADS, "gluon"),
    Case("mlp", ("hidden_forward_gluon", "hidden_backward_gluon"), "gluon", bias=False, tile=PINGPONG_WIDE),
    Case("mlp", ("act_forward", "act_grad"), "pair"),
    Case("mlp", ("linear_small", "hidden_backward_small", "dual_dgrad_small"), "small", tokens=FEW),
    Case("linear_act", ("linear_act_tma", "act_grad"), "tma"),
    Case("linear_act", ("hidden_forward_gluon",), "gluon", backward=False, tile=COOPERATIVE),
    Case("relu_mlp", ("relu_stack", "act_grad", "act_backward_pointer"), "pointer"),
    Case("relu_mlp", ("relu_stack", "act_grad", "act_backward_tma"), "tma", bias=False),
)


def operands(case: Case) -> dict[str, Tensor]:
    """x, weights and biases in bfloat16, on the CPU: N(0, 1), N(0, 1 / inputs), N(0, 1 / 4)."""
    generator = torch.Generator().manual_seed(len(str(case)))

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    D, H = case.widths[:2]
    shapes = {
        "glu_mlp": [(H, D), (H, D), (D, H)],
        "mlp": [(H, D), (D, H)],
        "linear_act": [(H, D)],
        "relu_mlp": [(n, k) for k, n in zip(case.widths, case.widths[1:], strict=False)],
    }[case.op]
    made = {"x": normal(case.tokens, D)}
    made |= {f"weight {i}": normal(n, k, scale=k**-0.5) for i, (n, k) in enumerate(shapes)}
    return made | ({f"bias {i}": normal(n, scale=0.5) for i, (n, _) in enumerate(shapes)} if case.bias else {})


def compute(case: Case, where: Any, tensors: dict[str, Tensor], gy: Tensor) -> dict[str, Tensor]:
    """The output and, with ``case.backward``, every gradient; ``where`` has the operations."""
    leaves = {name: t.detach().clone().requires_grad_(case.backward) for name, t in tensors.items()}
    weights = [t for name, t in leaves.items() if name.startswith("weight")]
    biases = [leaves.get(f"bias {i}") for i in range(len(weights))]
    function: Callable[..., Tensor] = getattr(where, case.op)
    if case.op == "relu_mlp":
        y = function(leaves["x"], weights, biases)
    else:
        y = function(leaves["x"], *weights, *biases, case.activation)
    if not case.backward:
        return {"output": y}
    gradients = torch.autograd.grad(y, list(leaves.values()), gy)
    return {"output": y, **dict(zip((f"gradient of {name}" for name in leaves), gradients, strict=True))}


@contextmanager
def watched() -> Iterator[set[str]]:
    """The names of the kernels that are launched inside."""
    from fusedmlp.launch import Launch

    names: set[str] = set()
    launch = Launch.__call__

    def call(self: Any, *arguments: Any) -> None:
        names.add(self.kernel.fn.__name__)
        launch(self, *arguments)

    with mock.patch.object(Launch, "__call__", call):
        yield names


def check(case: Case, device: str) -> str | None:
    """Why a case fails; None where it is right."""
    tensors = operands(case)
    outputs = case.widths[{"relu_mlp": -1, "linear_act": 1}.get(case.op, 0)]
    gy = torch.randn(case.tokens, outputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = compute(case, reference, {k: t.double() for k, t in tensors.items()}, gy.double())
    eager = compute(case, reference, tensors, gy)
    with watched() as names, settings.override(family=case.family, **case.tile):
        ours = compute(case, functional, {k: t.to(device) for k, t in tensors.items()}, gy.to(device))
    if missing := set(case.kernels) - names:
        return f"{', '.join(sorted(missing))} not launched, but {', '.join(sorted(names)) or 'nothing'}"
    try:
        for name, value in ours.items():
            assert_matches(name, value.cpu(), eager[name], exact[name])
    except AssertionError as error:
        return str(error)
    return None


def run(cases: Sequence[Case], device: str = "cuda") -> int:
    """How many cases fail; each is printed."""
    failed = 0
    for case in cases:
        begin = time.perf_counter()
        try:
            reason = check(case, device)
        except Exception as error:  # a kernel that a tool stopped ends the others too, but says which it was
            reason = f"{type(error).__name__}: {error}"
        failed += reason is not None
        print(f"{case}: {reason or 'right'} ({time.perf_counter() - begin:.1f} s)", flush=True)
    print(f"{len(cases) - failed} of {len(cases)} cases are right", flush=True)
    return failed


# ------------------------------------------------------------------------------------------ tools


def sanitizer() -> str | None:
    """Where compute-sanitizer is, on the path or with a CUDA toolkit."""
    places = [os.environ.get("PATH", ""), *(f"{p}/bin" for p in sorted(Path("/usr/local").glob("cuda*"), reverse=True))]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(map(str, places)))


def under(tool: str, program: str, arguments: Sequence[str], folder: Path) -> bool:
    """Runs this script under a tool and writes its log; returns whether it found nothing, or racecheck nothing but the
    compiler's dispatch."""
    command = [program, "--tool", tool, "--target-processes", "application-only", "--error-exitcode", str(FOUND)]
    command += ["--print-limit", str(PRINTED), sys.executable, __file__, *arguments]
    begin = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    seconds = time.perf_counter() - begin
    told = dispatch.SUMMARY.findall(done.stdout)
    said = ", ".join(f"{kind} SUMMARY: {count}" for kind, count in told) or "no summary"
    clean = done.returncode == 0 and bool(told) and all(count == "0" for _, count in told)
    verdict = dispatch.judge(done.stdout, PRINTED) if tool == "racecheck" else None
    judged = ""
    if verdict is not None and (verdict.dispatch or verdict.findings):
        said, judged = f"{verdict} ({said})", f"{verdict.text}\n"
        # The tool's exit code hides that of the cases, which are right where they say so.
        right = done.returncode == FOUND and ALL_RIGHT.search(done.stdout) is not None
        clean = right and not verdict.findings
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"sanitize-{tool}.log"
    head = f"{' '.join(command)}\ncommit {common.commit()}, {common.now()}\n"
    log.write_text(f"{head}{judged}{done.stdout}", encoding="utf-8")
    print(f"{tool}: {said}, exit code {done.returncode}, {seconds:.0f} s: {log}", flush=True)
    if not clean:
        print("\n".join([*(verdict.findings if verdict else []), *done.stdout.splitlines()[-40:]]))
    return clean


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, help="run under each of these tools of compute-sanitizer")
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases whose names have this")
    args = parser.parse_args(argv)
    cases = [case for case in CASES if args.only in str(case)]
    if not cases:
        parser.error(f"no case has {args.only!r} in its name; there are: {', '.join(map(str, CASES))}")
    gpu = common.need_gpu()
    if not args.tools:
        return 1 if run(cases) else 0
    program = sanitizer()
    if program is None:
        print(
            "bench/sanitize.py: compute-sanitizer is neither on the PATH nor in /usr/local/cuda*/bin", file=sys.stderr
        )
        return 2
    if run(cases):  # compiles too
        return 1
    arguments = ["--only", args.only] if args.only else []
    results = [under(tool, program, arguments, common.RESULTS / common.gpu_slug(gpu)) for tool in args.tools]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

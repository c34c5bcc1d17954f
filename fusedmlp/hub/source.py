"""What a build is made from: the files of the package that ship, and what git says of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import HubError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(__file__).resolve().parents[1]
# Rooms beside the line, and what only they use. integrations/ keeps what the layers themselves call.
LEFT_OUT = (
    *("__main__.py", "cli.py", "demo", "hub", "profiling", "tune", "_ops.py"),
    *("integrations/transformers.py", "integrations/_tables.py"),
)
# What a commit has to say about a build.
_TRACKED = ("fusedmlp", "csrc", "setup.py")


@dataclass(frozen=True)
class Source:
    """A copy of the package.

    Attributes:
        package: its folder.
        root: the checkout (or unpacked archive) around it, or None where it is installed.
        commit: that of the checkout; None where none is known.
        dirty: whether files that a build is made from differ from the commit.
    """

    package: Path
    root: Path | None
    commit: str | None
    dirty: bool

    @property
    def tree(self) -> Path:
        """The folder of what goes beside the variants, and of build.toml."""
        return self.package / "hub" / "tree"

    def config(self) -> dict[str, Any]:
        """build.toml."""
        return tomllib.loads((self.tree / "build.toml").read_text(encoding="utf-8"))

    def shipped(self) -> dict[str, bytes]:
        """Path in a variant -> content, sorted; all but ``_ops.py`` and compiled code."""
        endings = tuple(f".{ending}" for ending in self.config()["torch-noarch"]["pyext"])
        found = {}
        for path in sorted(self.package.rglob("*")):
            name = path.relative_to(self.package).as_posix()
            if path.is_file() and path.suffix in endings and _ships(name):
                found[name] = path.read_bytes().replace(b"\r\n", b"\n")
        found["__init__.py"] = public_names(found["__init__.py"].decode(), set(found)).encode()
        return found


def _ships(name: str) -> bool:
    parts = name.split("/")
    return "__pycache__" not in parts and not any("/".join(parts[: i + 1]) in LEFT_OUT for i in range(len(parts)))


def find_source(package: Path = PACKAGE) -> Source:
    """The source of which ``package`` is the folder.

    Raises:
        HubError: it lacks build.toml.
    """
    if not (package / "hub" / "tree" / "build.toml").is_file():
        raise HubError(f"{package} has no hub/tree/build.toml: this copy of fusedmlp was installed without it")
    root: Path | None = package.parent
    if not (package.parent / "setup.py").is_file() or not (package.parent / "csrc").is_dir():
        root = None
    commit = None if root is None else _git(root, "rev-parse", "HEAD")
    if root is None or commit is None:
        return Source(package, root, None, False)
    return Source(package, root, commit, bool(_git(root, "status", "--porcelain", "--", *_TRACKED)))


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def public_names(text: str, shipped: set[str]) -> str:
    """The source of ``__init__.py`` without what comes from modules that do not ship. Whole lines go, so that the rest
    stays as it was written.

    Raises:
        HubError: a line holds more than one entry of ``__all__`` or ``_LAZY``.
    """
    tree = ast.parse(text)
    lazy = next(_assigned(tree, "_LAZY"), None)
    public = next(_assigned(tree, "__all__"), None)
    if not isinstance(public, ast.List) or not isinstance(lazy, ast.Dict):
        raise HubError("fusedmlp/__init__.py must assign __all__, a list, and _LAZY, a dictionary, as literals")
    gone: list[ast.AST] = []
    names = set()
    for key, value in zip(lazy.keys, lazy.values):
        if not _is_shipped(ast.literal_eval(value), shipped) and key is not None:
            names.add(ast.literal_eval(key))
            gone.append(key)
    gone += [entry for entry in public.elts if ast.literal_eval(entry) in names]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and not _is_shipped(node.module or "", shipped):
            gone.append(node)
    return _without(text, gone)


def _assigned(tree: ast.Module, name: str) -> Iterator[ast.expr]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [name]:
            yield node.value


def _is_shipped(module: str, shipped: set[str]) -> bool:
    path = module.replace(".", "/")
    return not module or f"{path}.py" in shipped or f"{path}/__init__.py" in shipped


def _without(text: str, nodes: list[ast.AST]) -> str:
    lines = text.splitlines(keepends=True)
    taken: set[int] = set()
    for node in nodes:
        first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        if taken & set(range(first, last + 1)):
            raise HubError(f"line {first} of fusedmlp/__init__.py holds two names; write one a line")
        taken |= set(range(first, last + 1))
    return "".join(line for number, line in enumerate(lines, 1) if number not in taken)

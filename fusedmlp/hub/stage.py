"""``hub stage``: the tree that the stock ``kernel-builder`` builds from, without the compiled launcher."""

from __future__ import annotations

from pathlib import Path

from . import folders
from .source import Source, find_source

# What kernel-builder writes itself, and refuses to find.
GENERATED = ("_ops.py",)


def stage(output: Path, source: Source | None = None) -> int:
    """Writes build.toml, torch-ext/, benchmarks/ and CARD.md to ``output``; the number of files.

    Raises:
        HubError: ``output`` holds something else.
    """
    source = find_source() if source is None else source
    package = source.config()["general"]["name"].replace("-", "_")
    files = {f"torch-ext/{package}/{name}": data for name, data in source.shipped().items() if name not in GENERATED}
    for path in sorted(path for path in source.tree.rglob("*") if path.suffix in (".toml", ".md", ".py")):
        files[path.relative_to(source.tree).as_posix()] = path.read_bytes()
    return folders.replace(output, files, mark="build.toml")

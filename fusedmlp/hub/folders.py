"""Writes a tree into a folder in which an earlier one may lie, and touches nothing else there."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from . import HubError


def replace(folder: Path, files: Mapping[str, bytes], mark: str) -> int:
    """Writes ``files`` (path -> content) to ``folder`` and removes what an earlier tree left; the number of files.

    ``mark``: a file that tells such a tree from anything else.

    Raises:
        HubError: ``folder`` is a file, or holds something of other origin.
    """
    if folder.exists() and not folder.is_dir():
        raise HubError(f"{folder} is a file; a folder is needed")
    own = {name.split("/")[0] for name in files}
    entries = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in entries if name not in own]
    if foreign or (entries and not (folder / mark).is_file()):
        held = ", ".join(foreign or entries)
        raise HubError(f"{folder} holds {held}, which is of no earlier run; name an empty or a new folder")
    for name in entries:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return len(files)

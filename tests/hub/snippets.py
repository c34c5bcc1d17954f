"""Runs snippets of a page: Python in this process, shell by its commands' own entry points where those are ours."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def sections(page: Path) -> dict[str, list[tuple[str, str]]]:
    """Heading -> (kind, text) of each snippet under it."""
    found: dict[str, list[tuple[str, str]]] = {}
    heading = ""
    kind: str | None = None
    lines: list[str] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        if kind is not None:
            if line == "```":
                found[heading].append((kind, "".join(f"{text}\n" for text in lines)))
                kind, lines = None, []
            else:
                lines.append(line)
        elif line.startswith("```"):
            kind = line[3:]
        elif line.startswith("#"):
            heading = line.lstrip("# ")
            found[heading] = []
    assert kind is None, "the last snippet has no end"
    return found


class Runner:
    """The snippets of one section, in order; Python ones share their names, as a reader's session would."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "snippet"}

    def run(self, kind: str, text: str) -> None:
        """``toml``: written to pyproject.toml. A Python snippet that begins with ``# name.py`` is written to that file
        for the shell to run."""
        if kind == "toml":
            Path("pyproject.toml").write_text(text)
        elif kind == "sh":
            for line in text.strip().splitlines():
                print(f"$ {line}", flush=True)
                shell(os.path.expandvars(line))
        elif text.startswith("# ") and text.split("\n")[0].endswith(".py"):
            Path(text.split("\n")[0][2:]).write_text(text)
        else:
            exec(compile(text, "snippet", "exec"), self.names)


def shell(line: str) -> None:
    """One command: ``python -m fusedmlp ...`` and ``kernels ...`` are called, another Python is started."""
    words = shlex.split(line)
    settings = dict(word.split("=", 1) for word in words if "=" in word and word[0].isupper())
    words = words[len(settings) :]
    if words[:3] == ["python", "-m", "fusedmlp"] and not settings:
        from fusedmlp.cli import main

        code = main(words[3:])
    elif words[0] == "kernels" and not settings:
        from kernels.cli import main as kernels

        sys.argv = words
        kernels()
        code = 0
    elif words[0] == "python":
        code = subprocess.call([sys.executable, *words[1:]], env=os.environ | settings)
    else:
        raise AssertionError(f"a command that no test runs: {line}")
    assert code == 0, f"exit code {code}: {line}"

"""A local Hub with two versions of the kernel, built and published by the command line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.local_hub import LocalHub

from fusedmlp.hub.build import build
from fusedmlp.hub.source import Source, find_source

ROOT = Path(__file__).resolve().parents[2]
SCENES = Path(__file__).with_name("scenes.py")
REPO = "org/fusedmlp"
BACKEND = "cuda" if torch.version.cuda else "cpu"


@dataclass
class Stage:
    """The Hub, the tree that version 1 was published from, and a folder for users' caches."""

    hub: LocalHub
    tree: Path
    folder: Path
    source: Source

    def run(self, scene: str, *arguments: object, cache: str = "cache", code: int = 0, **variables: str) -> str:
        """Runs a scene against the Hub and returns what it printed; its exit code must be ``code``."""
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "KERNELS_", "LOCAL_KERNELS"))}
        settings = {
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.folder / cache),
            "HF_TOKEN": "hf_of_nobody",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [variables.pop("first_on_path", ""), str(ROOT)])),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, str(SCENES), scene, *map(str, arguments)]
        environment = keep | settings | variables
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=self.folder, env=environment, timeout=240, **streams)
        assert done.returncode == code, done.stdout
        return done.stdout

    def commands(self, *lines: str, codes: tuple[int, ...] | None = None, **variables: str) -> list[str]:
        """Runs commands of the package in one process; what each printed. All succeed unless ``codes`` says else."""
        printed = self.run("commands", *lines, **variables)
        parts = re.split(r"^exit code (\d+)\n", printed, flags=re.MULTILINE)
        found = tuple(map(int, parts[1::2]))
        assert found == (codes or (0,) * len(lines)), printed
        return parts[:-1:2]


def copy_of(source: Source, folder: Path) -> Source:
    """The package in another folder, for a source that differs from the commit's."""
    package = folder / "fusedmlp"
    shutil.copytree(source.package, package, ignore=shutil.ignore_patterns("__pycache__"))
    return Source(package, None, "0" * 40, False)


@pytest.fixture(scope="session")
def clean_source() -> Source:
    """This package as if it were committed: whether it is does not matter to what is tested."""
    found = find_source()
    return Source(found.package, found.root, found.commit, False)


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory, clean_source: Source) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("hub")
    build(folder / "v1", clean_source, launcher=False)
    second = copy_of(clean_source, folder / "second")
    init = second.package / "__init__.py"
    init.write_text(init.read_text().replace('__version__ = "0.1.0"', '__version__ = "2.0.0"'))
    build(folder / "v2", second, version=2, launcher=False)
    for variant in (folder / "v2" / "build").glob("torch-*"):
        if variant.name != f"torch-{BACKEND}":
            shutil.rmtree(variant)
    with LocalHub() as hub:
        made = Stage(hub, folder / "v1", folder, clean_source)
        made.commands(*(f"hub publish {folder / version} --repo {REPO} --upload" for version in ("v1", "v2")))
        yield made


@pytest.fixture
def requests_of(stage: Stage) -> Callable[[], list[str]]:
    """The requests since the test began, each once, with commits and names of files left out."""
    begin = len(stage.hub.log)

    def found() -> list[str]:
        commits = {c for r in stage.hub.repositories.values() for c in r.trees}
        lines = []
        for method, path, _ in stage.hub.log[begin:]:
            for commit in commits:
                path = path.replace(commit, "COMMIT")
            lines.append(f"{method} {path.split('?')[0]}")
        return sorted(set(lines))

    return found

"""Every snippet of docs/hub.md, run as it stands, against the local Hub."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from hub.conftest import REPO, ROOT, Stage
from hub.snippets import sections
from support.local_hub import NO_TRANSFORMERS

PAGE = ROOT / "docs" / "hub.md"
BY_TRANSFORMERS = "By transformers itself"


def test_every_snippet_is_of_a_kind_that_is_run():
    kinds = [kind for snippets in sections(PAGE).values() for kind, _ in snippets]
    assert set(kinds) == {"python", "sh", "toml"}
    assert len(kinds) >= 15


def transformers_for_kernels() -> str | None:
    """What to put on the path for a transformers that works with the installed kernels: "" where the installed one
    does, else the folder that tools/make_env.py fills."""
    from transformers.utils import is_kernels_available

    folder = Path(sys.prefix, "with-kernels")
    return "" if is_kernels_available() else str(folder) if folder.is_dir() else None


def test_snippet_of_the_card(stage: Stage, tmp_path: Path):
    """As it stands on the page of the repository, with its name and version filled in."""
    card = tmp_path / "README.md"
    card.write_bytes(stage.hub.files(REPO, "main")["README.md"])
    snippets = sections(card)["fusedmlp"]
    assert len(snippets) == 1 and f'get_kernel("{REPO}", version=' in snippets[0][1]
    stage.run("documented", card, tmp_path, "fusedmlp", cache="docs")


@pytest.fixture
def trusted(stage: Stage):
    stage.hub.trusted.add("org")
    yield
    stage.hub.trusted.clear()


def test_snippets(stage: Stage, tmp_path: Path, trusted: None):
    headings = [h for h, snippets in sections(PAGE).items() if snippets and h != BY_TRANSFORMERS]
    printed = stage.run("documented", PAGE, tmp_path, *headings, cache="docs")
    assert "glu_mlp [1024, 768 -> 3072 -> 768] float32 ieee gelu_tanh" in printed
    assert printed.count("torch.Size([2, 64])") == 2  # serve.py, from the cache and from a tree
    assert "variants, nothing to find fault with" in printed
    assert "nothing was uploaded; add --upload to do it" in printed
    assert "published: get_kernel('yours/fusedmlp', version=1)" in printed
    assert stage.hub.files("yours/fusedmlp", "v1")
    assert re.search(r"│ geglu_step\s+│.*✓", printed)
    assert (tmp_path / "staged" / "torch-ext" / "fusedmlp" / "layers.py").is_file()


def test_snippets_of_transformers(stage: Stage, tmp_path: Path):
    path = transformers_for_kernels()
    if path is None:
        pytest.skip(NO_TRANSFORMERS)
    arguments = (PAGE, tmp_path, BY_TRANSFORMERS)
    printed = stage.run("documented_by_transformers", *arguments, cache="transformers", first_on_path=path)
    assert "bound method SwiGLUMLP.forward of LlamaMLP" in printed

"""`hub publish`: shows first, then uploads to the local Hub; goes on where it broke off; refuses what is not fit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from hub.conftest import BACKEND, Stage
from support.native import CAN_COMPILE

from fusedmlp.cli import main
from fusedmlp.hub.build import build
from fusedmlp.hub.source import Source


def small(folder: Path, source: Source) -> Path:
    """A tree of few variants: that for a CPU, and one that is compiled where it can be."""
    build(folder, source, launcher=CAN_COMPILE)
    for name in ("torch-cuda", "torch-rocm", "torch-xpu", "torch-stable-abi29-cu126-x86_64-linux"):
        shutil.rmtree(folder / "build" / name, ignore_errors=True)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    del found["build/CARD.md"]
    return found


def ours(tree: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in tree.items() if name.startswith(("build/", "benchmarks/"))}


def other_source(stage: Stage, folder: Path) -> Source:
    """A package of which one file differs, and one has another name."""
    package = shutil.copytree(stage.source.package, folder / "fusedmlp", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "saving.py").write_text((package / "saving.py").read_text() + "# later\n")
    (package / "_load.py").rename(package / "_loading.py")
    for path in package.rglob("*.py"):
        text = path.read_text()
        path.write_text(text.replace("._load import", "._loading import"))
    return Source(package, stage.source.root, None, False)


def test_upload_resume_and_update(stage: Stage, tmp_path: Path):
    repo, tree = "org/updated", small(tmp_path / "tree", stage.source)
    stage.hub.large.clear()  # another test may have sent the same
    before = len([path for method, path, _ in stage.hub.log if method == "PUT"])
    stage.hub.fail_commits = 1  # the files arrive, the commit does not
    publish = f"hub publish {tree} --repo {repo}"
    upload = f"{publish} --upload"
    shown, broken, resumed, again = stage.commands(publish, upload, upload, upload, codes=(0, 2, 0, 0))
    built_from = f"built from  {stage.source.commit}"
    for line in (built_from, "repository  org/updated (to be created)", "branch      v1 (to be created)"):
        assert line in shown
    assert "upload      build/torch-cpu/settings/nvidia-h200.json (" in shown
    assert "nothing was uploaded; add --upload to do it" in shown
    assert "(to be created)" in broken.split("\n")[0]  # the first has made nothing
    assert "the same command goes on from here" in broken
    uploads = [path for method, path, _ in stage.hub.log if method == "PUT"][before:]
    assert len(uploads) == len(list(tree.rglob("*.so")))  # sent once, before the commit was refused
    assert "repository  org/updated\nbuilt from" in resumed
    assert f"published: get_kernel({repo!r}, version=1)" in resumed
    assert "nothing to do" in again
    assert ours(stage.hub.files(repo, "v1")) == contents(tree)
    card = stage.hub.files(repo, "main")["README.md"].decode()
    assert f'get_kernel("{repo}", version=1, trust_remote_code=True)' in card and "{{" not in card

    # A build from another source: what is the same is not sent, what went is deleted.
    small(tree, other_source(stage, tmp_path))
    (printed,) = stage.commands(f"{upload} --message Later")
    assert "no commit is known" in printed
    assert re.search(r"upload +build/torch-cpu/saving.py", printed)
    assert re.search(r"delete +build/torch-cpu/_load.py", printed)
    assert "build/torch-cpu/activations.py" not in printed
    assert ours(stage.hub.files(repo, "v1")) == contents(tree)


def test_a_second_version_leaves_the_first(stage: Stage):
    first, second = (stage.hub.files("org/fusedmlp", version) for version in ("v1", "v2"))
    path = f"build/torch-{BACKEND}/metadata.json"
    assert [json.loads(tree[path])["version"] for tree in (first, second)] == [1, 2]
    assert b"version=2" in stage.hub.files("org/fusedmlp", "main")["README.md"]


@pytest.mark.parametrize(
    "repo, options, said",
    [
        ("nowhere", (), "--repo takes OWNER/NAME, got 'nowhere'"),
        ("org/x", ("--version", "2"), "--version is 2, the tree was built as version 1: build it with --version"),
    ],
)
def test_refusals(stage: Stage, repo: str, options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["hub", "publish", str(stage.tree), "--repo", repo, *options]) == 2
    assert said in capsys.readouterr().err


def test_a_tree_with_findings_is_refused(stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tree = shutil.copytree(stage.tree, tmp_path / "tree")
    with open(tree / "build/torch-cpu/saving.py", "a") as file:
        file.write("# changed since\n")
    assert main(["hub", "publish", str(tree), "--repo", "org/x", "--upload"]) == 2
    printed = capsys.readouterr().err
    assert "nothing is published until there are none" in printed and "saving.py" in printed


def test_a_dirty_build_is_refused(stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    build(tmp_path, Source(stage.source.package, None, "0" * 40, True), launcher=False)
    assert main(["hub", "publish", str(tmp_path), "--repo", "org/x"]) == 2
    said = "was built from files that differ from the commit; commit them and build again"
    assert said in capsys.readouterr().err


def test_the_hub_refuses(stage: Stage):
    publish = f"hub publish {stage.tree} --upload --repo"
    forbidden, untold = stage.commands(f"{publish} forbidden/x", f"HF_TOKEN= {publish} org/untold", codes=(2, 2))
    assert "publishing kernels is a right that the Hub grants on request" in forbidden
    assert "log in with `hf auth login`, or set HF_TOKEN" in untold


def test_without_a_network(stage: Stage):
    line = f"hub publish {stage.tree} --repo org/x --upload"
    (printed,) = stage.commands(line, codes=(2,), HF_HUB_OFFLINE="1")
    assert "NOTE        not compared with what is there" in printed
    assert "the Hub cannot be reached" in printed

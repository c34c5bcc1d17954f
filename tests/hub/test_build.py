"""What a build writes: the same bytes each time, what ships and what does not, and what kernels makes of it."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from kernels._rust import Backend, Build, Metadata
from kernels.variants import get_variants_local
from support.native import CAN_COMPILE, NEEDS_COMPILER

import fusedmlp
from fusedmlp.cli import main
from fusedmlp.hub import HubError, folders
from fusedmlp.hub.build import CUDA, build
from fusedmlp.hub.check import check
from fusedmlp.hub.source import LEFT_OUT, Source, find_source, public_names
from fusedmlp.hub.stage import stage as stage_tree

NOARCH = ["torch-cpu", "torch-cuda", "torch-rocm", "torch-xpu"]
needs_compiler = pytest.mark.skipif(not CAN_COMPILE, reason=NEEDS_COMPILER)
on_linux = pytest.mark.skipif(platform.system() != "Linux", reason="the launcher runs on Linux")


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, clean_source: Source) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    build(folder, clean_source, launcher=False)
    return folder


def imported(variant: Path, ident: str, module: str) -> ModuleType:
    """A module of a variant, whether this machine would take the variant or not."""
    spec = importlib.util.spec_from_file_location(ident, variant / "__init__.py")
    assert spec and spec.loader
    package = sys.modules[ident] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return importlib.import_module(module, ident)


@needs_compiler
@on_linux
def test_two_builds_have_the_same_bytes(tmp_path: Path, clean_source: Source):
    first = build(tmp_path / "a", clean_source)
    build(tmp_path / "elsewhere" / "b", clean_source)
    assert contents(tmp_path / "a") == contents(tmp_path / "elsewhere" / "b")
    assert check(tmp_path / "a") == []
    compiled = [name for name in first.variants if name.startswith("torch-stable-abi")]
    assert len(compiled) == len(CUDA)
    assert {v.variant_str for v in get_variants_local(tmp_path / "a" / "build")} == {*NOARCH, *compiled}
    for name in compiled:
        assert [p.name for p in (tmp_path / "a" / "build" / name).rglob("*.so")] == ["_launcher.abi3.so"]
        launch = imported(tmp_path / "a" / "build" / name, first.variants[name], ".launch")
        assert Path(launch._launcher.__file__) == tmp_path / "a" / "build" / name / "_launcher.abi3.so"


def test_a_tree_may_be_built_again_over_itself(tmp_path: Path, clean_source: Source):
    build(tmp_path, clean_source, launcher=False)
    before = contents(tmp_path)
    (tmp_path / "build" / "torch-cuda" / "old.py").write_text("")
    build(tmp_path, clean_source, launcher=False)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["notes.txt", "build/mine.txt"])
def test_a_folder_with_anything_else_is_left_alone(tmp_path: Path, clean_source: Source, name: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(HubError, match="of no earlier run"):
        build(tmp_path, clean_source, launcher=False)
    assert contents(tmp_path) == {name: b"mine"}


def test_every_variant_holds_the_line_and_its_tables(tree: Path):
    assert sorted(p.name for p in (tree / "build").iterdir()) == ["CARD.md", *NOARCH]
    for variant in NOARCH:
        files = set(contents(tree / "build" / variant))
        assert {"__init__.py", "_ops.py", "metadata.json", "layers.py", "settings/nvidia-h200.json"} <= files
        assert {name.split("/")[0] for name in files} & set(LEFT_OUT) == {"_ops.py"}
        assert not files & set(LEFT_OUT[7:])
        assert not [name for name in files if not name.endswith((".py", ".pyi", ".json"))]


def test_public_names_are_those_that_ship(tree: Path):
    text = (tree / "build" / "torch-cpu" / "__init__.py").read_text()
    found = re.search(r"__all__ = (\[.*?\])", text, re.DOTALL)
    assert found
    gone = {"LaunchCounts", "PatchReport", "count_launches", "patch", "unpatch"}
    assert set(json.loads(found[1].replace(",\n]", "\n]"))) == set(fusedmlp.__all__) - gone
    assert "profiling" not in text and "transformers" not in text


def test_two_names_on_a_line_are_refused():
    text = '__all__ = [\n    "a", "b",\n]\n_LAZY = {\n    "a": "gone",\n    "b": "gone",\n}\n'
    with pytest.raises(HubError, match="line 2 .* holds two names"):
        public_names(text, set())
    with pytest.raises(HubError, match="as literals"):
        public_names("__all__ = sorted([])\n_LAZY = {}\n", set())


def test_metadata(tree: Path, clean_source: Source):
    idents = set()
    for variant in NOARCH:
        folder = tree / "build" / variant
        metadata = Metadata.read_from_file(folder / "metadata.json")
        backend = variant.removeprefix("torch-")
        assert (metadata.name.python_name, metadata.version, metadata.license) == ("fusedmlp", 1, "Apache-2.0")
        assert str(metadata.backend.backend_type).lower().endswith(backend)
        assert re.fullmatch(rf"_fusedmlp_{backend}_[0-9a-f]{{7}}", metadata.id)
        assert f'torch.ops, "{metadata.id}")' in (folder / "_ops.py").read_text()
        digests = json.loads((folder / "metadata.json").read_text())["digest"]["files"]
        wanted = {n: d for n, d in contents(folder).items() if n != "metadata.json"}
        assert digests == {n: base64.b64encode(hashlib.sha256(d).digest()).decode() for n, d in wanted.items()}
        idents.add(metadata.id)
    assert len(idents) == len(NOARCH)


def test_ids_follow_from_the_content(tmp_path: Path, clean_source: Source, tree: Path):
    def idents(folder: Path) -> set[str]:
        return {json.loads(p.read_text())["id"] for p in folder.glob("build/*/metadata.json")}

    build(tmp_path / "again", clean_source, launcher=False)
    build(tmp_path / "second", clean_source, version=2, launcher=False)
    dirty = Source(clean_source.package, clean_source.root, clean_source.commit, True)
    build(tmp_path / "dirty", dirty, launcher=False)
    assert idents(tmp_path / "again") == idents(tree)
    assert not idents(tmp_path / "second") & idents(tree)
    assert idents(tmp_path / "dirty") == {f"{ident}_dirty" for ident in idents(tree)}


def test_stage_is_what_kernel_builder_reads(tmp_path: Path, clean_source: Source):
    stage_tree(tmp_path, clean_source)
    assert set(Build.open(tmp_path).general.backends) == {Backend.CPU, Backend.CUDA, Backend.ROCm, Backend.XPU}
    shipped = {f"torch-ext/fusedmlp/{name}" for name in clean_source.shipped()}
    beside = {"build.toml", "CARD.md", "benchmarks/benchmark_mlp.py"}
    assert set(contents(tmp_path)) == shipped | beside
    stage_tree(tmp_path, clean_source)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(HubError, match="holds notes.txt"):
        stage_tree(tmp_path, clean_source)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_what_git_says_of_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "fusedmlp"
    folders.replace(package / "hub" / "tree", {"build.toml": b"[general]"}, mark="build.toml")
    assert find_source(package) == Source(package, None, None, False)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "setup.py").write_text("")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert find_source(package) == Source(package, tmp_path, None, False)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    assert find_source(package) == Source(package, tmp_path, git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "notes.txt").write_text("")
    assert not find_source(package).dirty
    (package / "new.py").write_text("")
    assert find_source(package).dirty
    with pytest.raises(HubError, match="was installed without it"):
        find_source(tmp_path)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    out = str(tmp_path / "out")
    assert main(["hub", "build", "--output", out, "--no-launcher", "--version", "3"]) == 0
    assert "torch-cuda" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/build/torch-cpu/metadata.json").read_text())["version"] == 3
    assert main(["hub", "check", out]) == 0
    assert "4 variants, nothing to find fault with" in capsys.readouterr().out
    assert main(["hub", "stage", "--output", str(tmp_path / "staged")]) == 0
    assert main(["hub", "build", "--output", out, "--version", "-1", "--no-launcher"]) == 2
    assert "must be a number, 0 or more, got -1" in capsys.readouterr().err
    assert main(["hub", "check", str(tmp_path)]) == 2
    assert "has no folder build; make a tree with: python -m fusedmlp hub build" in capsys.readouterr().err
    monkeypatch.setenv("CC", "no-such-compiler")
    assert main(["hub", "build", "--output", out]) == 2
    assert "leave the compiled variants out with --no-launcher" in capsys.readouterr().err

"""The wheel, the Hub description, the import of the package, and the rules that its source files keep.

The order of the package, from top to bottom, is the table LINE below. Imports inside functions count like the others:

* modules check what they are given, hold parameters, and call functional;
* functional checks and chooses between autograd (eager calls) and ops (traced calls);
* both ask plan for the plan of a call and carry it out through operations;
* steady writes down how eager calls of a plan go, and runs that;
* plan decides by settings, and asks operations for their checks;
* operations are sequences of launches: importing them is light, launchers come when one first runs;
* launchers see kernels through settings and launch.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from support.native import CAN_COMPILE, NEEDS_COMPILER

import fusedmlp
from fusedmlp.hub.build import build
from fusedmlp.hub.source import find_source

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fusedmlp"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400

# The line of the package, from top to bottom: a module imports from lower rows only, or from its own.
LINE = [
    {"modules", "layers", "_described", "_glu", "_linear_act", "_mlp", "_stateless"},
    {"functional"},
    {"autograd", "ops"},
    {"steady"},
    {"plan"},
    {"operations"},
    {"launchers"},
    {"settings", "launch"},
    {"kernels"},
]
RANK = {name: len(LINE) - row for row, names in enumerate(LINE) for name in names}
# Rooms beside the line: they may import all of it, and none of it imports them.
SIDE = {"profiling", "integrations", "demo", "tune", "hub", "cli", "_warmup", "__main__"}
# The one way out of the line: from_safetensors() imports its checkpoint reader when it is called.
WHEN_CALLED = {(layer, "integrations") for layer in LINE[0]}
# A lower row names a class of a higher one in its signatures, and nothing else of it.
IN_ANNOTATIONS = {("launchers", "plan"): "Plan"}
# Everything else (activations, reference, checks, ...) is shared ground below the line.
SHARED = 0

GENERAL_REQUIRED = {"name", "version", "edition", "license", "backends"}
GENERAL_OPTIONAL = {
    *("upstream", "source", "python-depends", "kernel-depends", "hub", "cuda", "xpu", "neuron", "tpu"),
}
NOARCH_KEYS = {"pyext", "cuda_capabilities", "rocm_archs"}
BACKENDS = {"cann", "cpu", "cuda", "metal", "neuron", "rocm", "tpu", "xpu"}


def read_toml(name: str) -> dict:
    return tomllib.loads((ROOT / name).read_text())


def room_of(path: Path) -> str:
    """The name of the module or sub-package directly under fusedmlp/ that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path, tree: ast.AST) -> set[tuple[str, bool]]:
    """The rooms of fusedmlp that a file imports from, and whether only when a function of it is called.

    What is imported for type checkers alone does not count.
    """
    package = path.relative_to(ROOT).parent.parts
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    typing_blocks = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    for_types = {id(node) for block in typing_blocks for child in block.body for node in ast.walk(child)}
    found: set[tuple[str, bool]] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level == 0 or id(node) in for_types:
            continue
        base = package[: len(package) - node.level + 1]
        target = [*base, *(node.module.split(".") if node.module else [])]
        # from .. import name: modules of the package, or public names of its __init__
        names = [alias.name if is_room(alias.name) else "__init__" for alias in node.names]
        rooms = [target[1]] if len(target) > 1 else names
        found.update((room, id(node) in inside) for room in rooms)
    return found


def is_room(name: str) -> bool:
    return any((PACKAGE / f"{name}{end}").exists() for end in (".py", ".pyi", ""))  # .pyi: a compiled one


def may_import(importer: str, imported: str, when_called: bool = False) -> bool:
    if importer == imported or importer in SIDE or (importer, imported) in IN_ANNOTATIONS:
        return True
    if when_called and (importer, imported) in WHEN_CALLED:
        return True
    if imported in SIDE or imported == "__init__":
        return False
    return RANK.get(importer, SHARED) > RANK.get(imported, SHARED) or same_row(importer, imported)


def same_row(one: str, other: str) -> bool:
    return RANK.get(one, SHARED) == RANK.get(other, SHARED)


def test_there_is_something_to_check():
    assert {room_of(path) for path in SOURCES} >= {"__init__", "modules", "functional", "plan", "kernels"}


def test_version_is_the_same_everywhere():
    assert read_toml("pyproject.toml")["project"]["version"] == fusedmlp.__version__


def test_build_toml_is_valid_edition_5():
    build = read_toml("build.toml")
    assert set(build) == {"general", "torch-noarch"}
    general, noarch = build["general"], build["torch-noarch"]
    assert set(general) >= GENERAL_REQUIRED
    assert set(general) <= GENERAL_REQUIRED | GENERAL_OPTIONAL
    assert set(noarch) <= NOARCH_KEYS
    assert general["edition"] == 5
    assert isinstance(general["version"], int)
    assert general["backends"]
    assert set(general["backends"]) <= BACKENDS
    assert set(general.get("hub", {})) <= {"repo-id", "branch"}
    assert {"py", "json"} <= set(noarch["pyext"])


def test_build_toml_agrees_with_pyproject():
    general, project = read_toml("build.toml")["general"], read_toml("pyproject.toml")["project"]
    assert general["name"] == project["name"] == PACKAGE.name
    assert general["license"] == project["license"] == "Apache-2.0"


def build_wheel(folder: Path, **variables: str) -> zipfile.ZipFile:
    """The wheel, built without an index from a copy, so that the checkout stays as it is."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "fusedmlp_pytest.py"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(PACKAGE, source / "fusedmlp", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copytree(ROOT / "csrc", source / "csrc")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = {k: v for k, v in os.environ.items() if k != "FUSEDMLP_NO_LAUNCHER"} | variables
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def compiled_in(wheel: zipfile.ZipFile) -> list[str]:
    return [name for name in wheel.namelist() if name.endswith((".so", ".pyd", ".dylib"))]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build_wheel(tmp_path_factory.mktemp("wheel"), FUSEDMLP_NO_LAUNCHER="1")


def test_wheel_installs_anywhere(wheel: zipfile.ZipFile):
    assert Path(str(wheel.filename)).name == f"fusedmlp-{fusedmlp.__version__}-py3-none-any.whl"
    assert compiled_in(wheel) == []


@pytest.mark.skipif(not CAN_COMPILE, reason=NEEDS_COMPILER)
def test_wheel_with_the_compiled_launcher_suits_every_python(tmp_path: Path):
    found = build_wheel(tmp_path)
    assert Path(str(found.filename)).name.startswith(f"fusedmlp-{fusedmlp.__version__}-cp310-abi3-linux_")
    assert compiled_in(found) == ["fusedmlp/_launcher.abi3.so"]


def test_wheel_is_built_without_a_compiler_too(tmp_path: Path):
    assert compiled_in(build_wheel(tmp_path, CC="no-such-compiler")) == []


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile):
    data = [path for end in ("*.json", "*.txt", "*.pyi", "*.html", "*.md", "*.toml") for path in PACKAGE.rglob(end)]
    plugin = ROOT / "fusedmlp_pytest.py"
    expected = {path.relative_to(ROOT).as_posix() for path in [*SOURCES, *data, PACKAGE / "py.typed", plugin]}
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == expected


def test_a_wheel_builds_the_same_hub_tree(wheel: zipfile.ZipFile, tmp_path: Path):
    """But for the commit, which an installed package does not know."""
    wheel.extractall(tmp_path / "site")
    installed = find_source(tmp_path / "site" / "fusedmlp")
    assert (installed.root, installed.commit) == (None, None)
    trees = {}
    for source in (installed, replace(find_source(), dirty=False)):
        folder = tmp_path / str(len(trees))
        build(folder, source, launcher=False)
        trees[source] = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    ours, theirs = trees.values()
    assert set(ours) == set(theirs)
    assert {path.name for path in ours if ours[path] != theirs[path]} == {"metadata.json"}


def test_wheel_names_its_requirements(wheel: zipfile.ZipFile):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = wheel.read(name).decode().splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert {line.split()[1].split(">")[0] for line in needed} == {"torch", "safetensors", "triton"}
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: >=3.10" in lines
    extras = {line.split()[1] for line in lines if line.startswith("Provides-Extra:")}
    assert extras >= {"kernels", "hub", "transformers", "demo", "profile", "test", "dev"}


IMPORT_PROBE = """
import json, sys
import fusedmlp
import torch
runtime = sys.modules.get("triton.runtime.driver")
driver = getattr(runtime, "driver", None)
print(json.dumps({
    "cuda": torch.cuda.is_initialized(),
    "driver": bool(driver and (getattr(driver, "_active", None) or getattr(driver, "_default", None))),
    "side": sorted(m for m in sys.modules if m.startswith((%s))),
    "heavy": [m for m in ("triton", "torch._dynamo") if m in sys.modules],
}))
"""


def test_import_touches_no_gpu():
    side = ", ".join(f'"fusedmlp.{name}"' for name in sorted(SIDE))
    command = [sys.executable, "-c", IMPORT_PROBE % side]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"cuda": False, "driver": False, "side": [], "heavy": []}


IMPORT_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, fusedmlp
x = torch.ones(2, 3)
weight = torch.ones(4, 3)
print(fusedmlp.linear_act(x, weight, activation="relu").sum().item())
"""


def test_package_works_without_triton():
    command = [sys.executable, "-c", IMPORT_WITHOUT_TRITON]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 24.0


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
class TestSourceFile:
    def test_is_short(self, path: Path):
        assert len(path.read_text().splitlines()) <= MAX_LINES

    def test_imports_itself_relatively(self, path: Path):
        """The Hub loads the package under another name, where `import fusedmlp` finds nothing."""
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] != "fusedmlp" for alias in node.names), node.lineno
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert (node.module or "").split(".")[0] != "fusedmlp", node.lineno

    def test_imports_downwards(self, path: Path):
        room = room_of(path)
        if room == "__init__":  # the public names: test_import_touches_no_gpu sees what it imports
            return
        imported = imports_of(path, ast.parse(path.read_text()))
        wrong = sorted(name for name, when_called in imported if not may_import(room, name, when_called))
        assert wrong == [], f"{room} may not import {wrong}"


def outside_annotations(tree: ast.AST, name: str) -> list[int]:
    """The lines where a name is used other than as the type of something."""
    nodes = list(ast.walk(tree))
    annotations = [getattr(node, field, None) for node in nodes for field in ("annotation", "returns")]
    typing = {id(inner) for found in annotations if found for inner in ast.walk(found)}
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == name and id(node) not in typing]
    return [use.lineno for use in uses]


@pytest.mark.parametrize("rooms", IN_ANNOTATIONS, ids="->".join)
def test_named_in_annotations_alone(rooms: tuple[str, str]):
    importer, imported = rooms
    name = IN_ANNOTATIONS[rooms]
    for path in (path for path in SOURCES if room_of(path) == importer):
        tree = ast.parse(path.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == imported]
        assert {alias.name for node in imports for alias in node.names} <= {name}, path
        assert outside_annotations(tree, name) == [], path


def test_uses_outside_annotations_are_found():
    tree = ast.parse("def f(p: Plan) -> Plan:\n    q: Plan = g(p)\n    return Plan(q)")
    assert outside_annotations(tree, "Plan") == [3]


@pytest.mark.parametrize(
    "importer, imported, when_called, allowed",
    [
        ("modules", "functional", False, True),
        ("functional", "modules", False, False),
        ("functional", "modules", True, False),
        ("autograd", "ops", False, True),
        ("plan", "operations", False, True),
        ("operations", "plan", True, False),
        ("operations", "launchers", True, True),
        ("launchers", "plan", False, True),
        ("settings", "plan", False, False),
        ("kernels", "settings", False, False),
        ("kernels", "activations", False, True),
        ("activations", "kernels", False, False),
        ("plan", "profiling", True, False),
        ("modules", "integrations", False, False),
        ("modules", "integrations", True, True),
        ("functional", "integrations", True, False),
        ("cli", "profiling", False, True),
        ("kernels", "__init__", False, False),
    ],
)
def test_import_rule(importer: str, imported: str, when_called: bool, allowed: bool):
    assert may_import(importer, imported, when_called) is allowed


def test_import_rule_sees_every_form():
    forms = ["from . import plan", "from .kernels.glu import f", "def g(): from .cli import main"]
    forms.append("if TYPE_CHECKING:\n    from .tune import T")
    source = "\n".join([*forms, "from . import __version__"])
    found = imports_of(PACKAGE / "modules.py", ast.parse(source))
    assert found == {("plan", False), ("kernels", False), ("cli", True), ("__init__", False)}
    source = "from ..settings import x\nfrom .a import b"
    nested = imports_of(PACKAGE / "kernels" / "glu.py", ast.parse(source))
    assert nested == {("settings", False), ("kernels", False)}


def test_wheel_offers_the_pytest_fixture(wheel: zipfile.ZipFile):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "[pytest11]\nfusedmlp = fusedmlp_pytest" in wheel.read(name).decode()

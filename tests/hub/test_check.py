"""Every rule of `hub check`: a tree without fault, and one planted fault at a time."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fusedmlp.cli import main
from fusedmlp.hub import check as checking
from fusedmlp.hub import syntax
from fusedmlp.hub.build import build
from fusedmlp.hub.check import check
from fusedmlp.hub.source import Source

CPU = "build/torch-cpu"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, clean_source: Source) -> Path:
    folder = tmp_path_factory.mktemp("good")
    build(folder, clean_source, launcher=False)
    assert check(folder) == []
    for name in ("torch-rocm", "torch-xpu"):  # two are enough to differ from each other
        shutil.rmtree(folder / "build" / name)
    return folder


@pytest.fixture
def tree(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "tree")


def edit_metadata(**values: object) -> Callable[[Path], None]:
    def plant(tree: Path) -> None:
        path = tree / CPU / "metadata.json"
        content = json.loads(path.read_text())
        for key, value in values.items():
            name = key.replace("_", "-")
            if value is None:
                del content[name]
            else:
                content[name] = value
        path.write_text(json.dumps(content))

    return plant


def write(name: str, text: str) -> Callable[[Path], None]:
    def plant(tree: Path) -> None:
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return plant


def append(name: str, text: str) -> Callable[[Path], None]:
    def plant(tree: Path) -> None:
        with open(tree / name, "a") as file:
            file.write(text)

    return plant


def remove(name: str) -> Callable[[Path], None]:
    def plant(tree: Path) -> None:
        path = tree / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return plant


def link(tree: Path) -> None:
    (tree / CPU / "link.py").symlink_to("layers.py")


def same_id(tree: Path) -> None:
    shutil.copytree(tree / CPU, tree / "build/torch-metal")


def grow(tree: Path) -> None:
    (tree / CPU / "table.json").write_bytes(b" " * (checking.LARGEST_FILE + 1))


LAYERS = f"{CPU}/layers.py"
LAYER = "\n\nclass L(nn.Module):\n    has_backward = True\n    can_torch_compile = True\n"
FORWARD = "\n    def forward(self, x):\n        return x\n"
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "variant's name": (lambda t: (t / CPU).rename(t / "build/torch-2"), "no name of a build variant|the folder says"),
    "unknown framework": (write("build/jax-cpu/__init__.py", ""), "build/jax-cpu: no name of a build variant"),
    "no init": (remove(f"{CPU}/__init__.py"), "has no __init__.py"),
    "no metadata": (remove(f"{CPU}/metadata.json"), "metadata.json: "),
    "no version": (edit_metadata(version=None), "metadata.json: .*version"),
    "version is text": (edit_metadata(version="1"), "metadata.json: "),
    "other version": (edit_metadata(version=2), "the variants differ in version: 1, 2"),
    "bad name": (edit_metadata(name="fused_mlp"), "metadata.json: "),
    "id": (edit_metadata(id="fusedmlp"), "id 'fusedmlp' is not of the form _fusedmlp_cpu_<unique>"),
    "id without namespace": (
        edit_metadata(id="_fusedmlp_cpu_0000000"),
        "_ops.py: does not name .* _fusedmlp_cpu_0000000",
    ),
    "backend": (edit_metadata(backend={"type": "cuda"}), "backend is cuda, the folder says cpu"),
    "python-depends": (edit_metadata(python_depends=["einops"]), "python-depends is"),
    "no digest": (edit_metadata(digest=None), "has no digest"),
    "digest of a file": (append(f"{CPU}/saving.py", "# more\n"), "digest: .*saving.py"),
    "file not in digest": (write(f"{CPU}/more.py", ""), "digest: .*more.py"),
    "file missing": (remove(f"{CPU}/settings/nvidia-h200.json"), "digest: .*nvidia-h200.json"),
    "same id": (same_id, "two variants have the id _fusedmlp_cpu_"),
    "bytecode": (write(f"{CPU}/__pycache__/a.pyc", ""), "bytecode"),
    "link": (link, "a link"),
    "size": (grow, "only .so may have more than 10"),
    "own name": (write(f"{CPU}/fusedmlp/__init__.py", ""), "holds a package of its own name"),
    "no card": (remove("build/CARD.md"), "build/CARD.md: missing"),
    "card without licence": (write("build/CARD.md", "---\nlibrary_name: kernels\n---\n"), "must say license:"),
    "no benchmarks": (remove("benchmarks"), "no benchmark\\*.py"),
    "benchmark without verify": (
        write("benchmarks/benchmark_x.py", "class B:\n    def benchmark_a(self): ...\n"),
        r"B.benchmark_a\(\) has no verify_ of its own",
    ),
    "compiled code": (write(f"{CPU}/x.abi3.so", "no object"), "holds compiled code: x.abi3.so"),
    "no object": (write(f"{CPU}/x.abi3.so", "no object"), "not a shared object"),
    "object's name": (write(f"{CPU}/x.so", "no object"), "must end in .abi3.so"),
    "nothing compiled": (
        lambda t: (t / CPU).rename(t / "build/torch-stable-abi29-cpu-x86_64-linux"),
        "holds no compiled code",
    ),
    "no operators' file": (remove(f"{CPU}/_ops.py"), "has no _ops.py"),
    "no layers": (remove(LAYERS), "layers.py: missing"),
    "layer's method": (append(LAYERS, f"{LAYER}{FORWARD}\n    def help(self): ...\n"), r"L defines help\(\)"),
    "layer's constructor": (
        append(LAYERS, f"{LAYER}{FORWARD}\n    def __init__(self): ...\n"),
        r"L defines __init__\(\)",
    ),
    "layer's attribute": (append(LAYERS, f"{LAYER}    size = 3\n{FORWARD}"), "L sets size"),
    "layer's annotated value": (append(LAYERS, f"{LAYER}    size: int = 3\n{FORWARD}"), "L sets size"),
    "layer's flag": (append(LAYERS, f"\n\nclass L(nn.Module):\n    has_backward = f()\n{FORWARD}"), "True or False"),
    "layer is silent": (
        append(LAYERS, f"\n\nclass L(nn.Module):\n    x: int\n{FORWARD}"),
        "L does not say has_backward",
    ),
    "layer without forward": (append(LAYERS, LAYER), r"L has no forward\(\)"),
    "layer without base": (append(LAYERS, f"{LAYER}{FORWARD}".replace("(nn.Module)", "")), "L is no nn.Module"),
    "names not a list": (
        write(f"{CPU}/__init__.py", "__all__ = ('layers',)\nfrom . import layers\n"),
        "needs one __all__",
    ),
    "names not text": (write(f"{CPU}/__init__.py", "__all__ = [layers]\nfrom . import layers\n"), "must hold strings"),
    "layers not public": (
        write(f"{CPU}/__init__.py", "__all__ = ['x']\nfrom . import layers\n"),
        "__all__ lacks layers",
    ),
    "layers not imported": (write(f"{CPU}/__init__.py", "__all__ = ['layers']\n"), "does not import layers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(tree: Path, fault: str, capsys: pytest.CaptureFixture[str]):
    plant, said = FAULTS[fault]
    plant(tree)
    assert main(["hub", "check", str(tree)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if re.search(said, line)], lines
    assert all(re.match(r"[\w./*-]+: \S", line) for line in lines)


def test_a_tree_without_variants(tmp_path: Path):
    (tmp_path / "build").mkdir()
    assert "build: holds no variant" in check(tmp_path)


INIT = "from . import layers\n"
FUTURE = "from __future__ import annotations\n"
SYNTAX: list[tuple[str, str]] = [
    ("match x:\n    case 1: pass\n", "not Python 3.9"),
    ("def f(:\n", "not Python 3.9"),
    ("zip(a, b, strict=True)", r"zip\(strict=\) is newer"),
    ("isinstance(x, int | str)", r"write \(A, B\)"),
    ("from dataclasses import dataclass\n@dataclass(slots=True)\nclass A: ...", r"dataclass\(slots="),
    ("from itertools import pairwise", "itertools.pairwise is newer"),
    ("import tomllib", "tomllib, which is newer"),
    ("def f(x: int | None): ...", "begin the file with from __future__"),
    ("A = int | None", "use typing.Union"),
    ("import numpy", "imports numpy: only the standard library"),
    ("import fusedmlp.plan", "imports fusedmlp.plan: only"),
    ("from fusedmlp import plan", "imports fusedmlp: only"),
    ("def f():\n    import numpy", "imports numpy: only"),
    ("import safetensors", "imports safetensors: only"),
    ("import triton", "when the kernel is loaded"),
    ("from .gone import x", ".gone is not in the variant"),
    ("from . import gone", ".gone is not in the variant"),
    ("import torch\ntorch.library.custom_op('fusedmlp::x', f, mutates_args=())", "must name its operator by"),
    (
        "from torch.library import custom_op\n@custom_op('a::x', mutates_args=())\ndef f(): ...",
        "must name its operator",
    ),
    (
        "import torch\nfrom ._ops import add_op_namespace_prefix\nNAME = add_op_namespace_prefix('x')\n"
        "@torch.library.custom_op(NAME, mutates_args=())\ndef f(): ...",
        "must name its operator",  # the Hub's own check wants the call itself in a decorator
    ),
]
FINE = [
    FUTURE + "def f(x: int | None): ...",
    "def f():\n    import safetensors",
    "def f():\n    from .late import x",
    "import torch, os.path, collections.abc",
    "x = 1 | 2",
    "a = b = {} | {}",
    "from ._ops import add_op_namespace_prefix as p",
    "import torch\nfrom ._ops import add_op_namespace_prefix\n"
    "@torch.library.custom_op(add_op_namespace_prefix('x'), mutates_args=())\ndef f(): ...",
]
OTHERS = {"layers.py": "", "late.py": "import triton\n", "_ops.py": ""}


@pytest.mark.parametrize("source, said", SYNTAX)
def test_what_files_may_not_say(source: str, said: str):
    found = list(syntax.findings({"__init__.py": f"{source}\n", **OTHERS}))
    assert len(found) == 1 and re.search(said, found[0]), found


@pytest.mark.parametrize("source", FINE)
def test_what_files_may_say(source: str):
    assert list(syntax.findings({"__init__.py": f"{source}\n", **OTHERS})) == []


def test_triton_may_be_imported_late_alone():
    late = {"__init__.py": "from . import middle\n", "middle.py": "def f():\n    from . import late\n", **OTHERS}
    assert list(syntax.findings(late)) == []
    early = late | {"middle.py": "from . import late\n"}
    assert [line.split(":")[0] for line in syntax.findings(early)] == ["late.py"]

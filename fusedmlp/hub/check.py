"""``hub check``: what is wrong with a tree, one line a finding. Nothing of the tree is run."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from . import HubError, layer_rules, syntax

# Files above this size must lie in the Hub's large file storage, which takes .so by their ending.
LARGEST_FILE = 10 * 2**20
LARGEST_TREE = 200 * 2**20
PYTHON_ABI = "3.9"
MANYLINUX = "manylinux_2_28"
_CARD_KEYS = ("library_name: kernels", "license:")


def check(folder: Path) -> list[str]:
    """The findings, none of which a tree that can be published has.

    Raises:
        HubError: there is no tree in ``folder``, or the libraries that know the rules are not installed.
    """
    _need_libraries()
    build = folder / "build"
    if not build.is_dir():
        raise HubError(
            f"{folder} has no folder build; make a tree with: python -m fusedmlp hub build --output {folder}"
        )
    return [f"{where}: {said}" for where, said in _findings(folder, build)]


def _need_libraries() -> None:
    try:
        import kernel_abi_check  # noqa: F401
        import kernels  # noqa: F401
    except ImportError as error:
        raise HubError(f"{error.name} is needed, and not installed: pip install 'fusedmlp[hub]'") from error


def variants_of(build: Path) -> list[Path]:
    """The folders of the variants, sorted."""
    return sorted(path for path in build.iterdir() if path.is_dir() and path.name != "__pycache__")


def _findings(folder: Path, build: Path) -> Iterator[tuple[str, str]]:
    variants = variants_of(build)
    if not variants:
        yield "build", "holds no variant"
    read: dict[str, dict[str, Any]] = {}
    for variant in variants:
        name = f"build/{variant.name}"
        yield from ((name, said) for said in _variant(variant, read))
    yield from (("build", said) for said in _between(read))
    yield from _card(build / "CARD.md")
    yield from _benchmarks(folder / "benchmarks")
    yield from _files(folder)


def _variant(variant: Path, read: dict[str, dict[str, Any]]) -> Iterator[str]:
    from kernels.variants import parse_variant

    try:
        parsed: Any = parse_variant(variant.name)
    except ValueError as error:
        yield f"no name of a build variant: {error}"
        parsed = None
    objects = sorted(path for path in variant.rglob("*") if path.suffix in (".so", ".pyd", ".dylib"))
    if parsed is not None:
        yield from _compiled(variant, objects, noarch=type(parsed).__name__ == "NoarchVariant")
    if not (variant / "__init__.py").is_file():
        yield "has no __init__.py"
    yield from _metadata(variant, parsed, read)
    files, broken = _sources(variant)
    yield from broken
    generated = {"_ops.py": files.get("_ops.py", "")}
    yield from _python(tuple(sorted((files | {"_ops.py": ""}).items())))
    yield from syntax.findings(generated)
    read_by_rules = {name: text for name, text in files.items() if name in layer_rules.FILES and _parses(text)}
    yield from layer_rules.findings(read_by_rules)
    metadata = read.get(variant.name)
    if metadata is not None:
        yield from _namespace(files.get("_ops.py"), str(metadata.get("id")))
        package = str(metadata.get("name")).replace("-", "_")
        if (variant / package).is_dir():
            yield f"holds a package of its own name, {package}/, as only old clients needed"


@cache  # the variants of a tree have these files in common
def _python(files: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    return tuple(syntax.findings(dict(files)))


def _sources(variant: Path) -> tuple[dict[str, str], list[str]]:
    files, broken = {}, []
    for path in sorted((*variant.rglob("*.py"), *variant.rglob("*.pyi"))):  # .pyi: what a compiled module is known by
        name = path.relative_to(variant).as_posix()
        try:
            files[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            broken.append(f"{name}: not UTF-8: {error}")
    return files, broken


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _compiled(variant: Path, objects: list[Path], noarch: bool) -> Iterator[str]:
    from kernel_abi_check import ObjectFile

    if noarch and objects:
        yield f"a variant for every machine, and holds compiled code: {', '.join(p.name for p in objects)}"
    if not noarch and not objects:
        yield "a variant for one kind of machine, and holds no compiled code"
    for path in objects:
        name = path.relative_to(variant).as_posix()
        if not path.name.endswith(".abi3.so"):
            yield f"{name}: its name must end in .abi3.so"
        try:
            found = ObjectFile(str(path))
            wrong = [*found.check_python_abi(PYTHON_ABI), *found.check_manylinux(MANYLINUX)]
        except Exception as error:  # the library has one for each thing that a file may be
            yield f"{name}: not a shared object: {error}"
            continue
        yield from (f"{name}: {symbol}" for symbol in wrong)


def _metadata(variant: Path, parsed: Any, read: dict[str, dict[str, Any]]) -> Iterator[str]:
    from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

    path = variant / "metadata.json"
    try:
        metadata = Metadata.read_from_file(path)
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError) as error:
        yield f"metadata.json: {' '.join(str(error).split())}"
        return
    read[variant.name] = content
    backend = content["backend"]["type"]
    package = metadata.name.python_name
    if not re.fullmatch(rf"_{re.escape(package)}_{backend}_[0-9a-z]+(_dirty)?", content["id"]):
        yield f"metadata.json: id {content['id']!r} is not of the form _{package}_{backend}_<unique>"
    named = _backend_of(parsed)
    if named is not None and named != backend:
        yield f"metadata.json: backend is {backend}, the folder says {named}"
    if content.get("python-depends"):
        yield f"metadata.json: python-depends is {content['python-depends']}; the package needs none"
    if metadata.digest is None:
        yield "metadata.json: has no digest"
        return
    try:
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    except DigestValidationError as error:
        yield from (f"digest: {violation}" for violation in error.violations)


def _backend_of(parsed: Any) -> str | None:
    """The backend that the name of a variant says: torch-cuda, ...-cu130-..."""
    if parsed is None:
        return None
    if type(parsed).__name__ == "NoarchVariant":
        return str(parsed.arch.backend_name)
    return str(parsed.arch.backend.name)


def _namespace(ops: str | None, ident: str) -> Iterator[str]:
    if ops is None:
        yield "has no _ops.py"
        return
    given = {n.value for n in ast.walk(ast.parse(ops)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    if ident not in given or f"{ident}::" not in given:
        yield f"_ops.py: does not name the operators' namespace {ident}, the id in metadata.json"


def _between(read: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What must agree, or differ, from one variant to the next."""
    for key in ("name", "version", "license"):
        values = {str(content.get(key)) for content in read.values()}
        if len(values) > 1:
            yield f"the variants differ in {key}: {', '.join(sorted(values))}"
    idents = [str(content.get("id")) for content in read.values()]
    for ident in sorted({i for i in idents if idents.count(i) > 1}):
        yield f"two variants have the id {ident}; the second one loaded would get the code of the first"


def _card(path: Path) -> Iterator[tuple[str, str]]:
    if not path.is_file():
        yield "build/CARD.md", "missing; it becomes the repository's README.md"
        return
    parts = path.read_text(encoding="utf-8").split("---\n")
    for key in _CARD_KEYS:
        if len(parts) < 3 or parts[0] or key not in parts[1]:
            yield "build/CARD.md", f"its first lines, between two lines of ---, must say {key}"


def _benchmarks(folder: Path) -> Iterator[tuple[str, str]]:
    scripts = sorted(folder.glob("benchmark*.py")) if folder.is_dir() else []
    if not scripts:
        yield "benchmarks", "no benchmark*.py, which `kernels benchmark` runs"
    for script in scripts:
        where = f"benchmarks/{script.name}"
        try:
            tree = ast.parse(script.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError) as error:
            yield where, f"cannot be read: {error}"
            continue
        for cls in (n for n in tree.body if isinstance(n, ast.ClassDef)):
            names = {n.name for n in cls.body if isinstance(n, ast.FunctionDef)}
            for name in sorted(n for n in names if n.startswith("benchmark_")):
                if name.replace("benchmark_", "verify_", 1) not in names:
                    yield where, f"{cls.name}.{name}() has no verify_ of its own: its result is not compared"


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    total = 0
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            yield name, "a link; the Hub takes files"
        elif path.name == "__pycache__" or path.suffix in (".pyc", ".pyo"):
            yield name, "bytecode, which is made anew where the kernel is loaded"
        elif path.is_file():
            size = path.stat().st_size
            total += size
            if size > LARGEST_FILE and path.suffix != ".so":
                yield name, f"{size / 2**20:.1f} MiB; only .so may have more than {LARGEST_FILE // 2**20}"
    if total > LARGEST_TREE:
        yield ".", f"{total / 2**20:.0f} MiB in all, more than {LARGEST_TREE // 2**20}"

"""The rules for the Python files of a variant, read from their syntax trees: nothing is run.

The Hub wants files that Python 3.9 could read, that import the standard library, PyTorch and themselves alone, and that
register operators under the build's own namespace.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

OLDEST_PYTHON = (3, 9)
# triton: from modules that loading the kernel does not import, as the CPU builds of PyTorch come without it.
LATE_MODULES = {"triton"}
# In a function that is called for what it is about.
OPTIONAL_MODULES = {"safetensors"}
REGISTERS = {
    *("custom_op", "triton_op", "register_kernel", "register_fake", "register_vmap", "register_torch_dispatch"),
}
_PREFIX = "add_op_namespace_prefix"
_AFTER_39 = {
    "itertools": {"pairwise"},
    "typing": {"TypeAlias", "ParamSpec", "Concatenate", "TypeGuard", "Self", "Never", "assert_never", "override"},
    "types": {"NoneType", "EllipsisType", "UnionType"},
    "contextlib": {"aclosing", "chdir"},
    "enum": {"StrEnum", "verify", "member", "nonmember"},
}
_NEW_MODULES = {"tomllib"}


def findings(files: Mapping[str, str]) -> Iterator[str]:
    """One line for each thing that is wrong in the files (path in the variant -> source)."""
    trees = {}
    for name, text in files.items():
        try:
            trees[name] = ast.parse(text, name, feature_version=OLDEST_PYTHON)
        except SyntaxError as error:
            yield f"{name}:{error.lineno}: not Python {_OLDEST}: {error.msg}"
    at_load = imported_at_load(trees)
    for name, tree in trees.items():
        old = () if name.endswith(".pyi") else _old_python(tree)  # a stub is never run
        for line, said in (*old, *_imports(name, tree, trees, name in at_load), *_registrations(tree)):
            yield f"{name}:{line}: {said}"


_OLDEST = ".".join(map(str, OLDEST_PYTHON))


def _dotted(node: ast.AST | None) -> str:
    """``a.b.c`` of such an expression; of another one what follows its last part that is none."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _old_python(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What parses, but does not run, on the oldest Python."""
    lazy = any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _old_call(node)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                if alias.name in _AFTER_39.get(node.module or "", ()):
                    yield node.lineno, f"{node.module}.{alias.name} is newer than Python {_OLDEST}"
    if not lazy:
        for annotation in _annotations(tree):
            if any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.BitOr) for n in ast.walk(annotation)):
                yield annotation.lineno, "an annotation with |; begin the file with from __future__ import annotations"
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign) else None
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr) and _is_type(value.right):
            yield node.lineno, "a union of types with | is made when the file runs; use typing.Union"


def _old_call(call: ast.Call) -> Iterator[tuple[int, str]]:
    name = _dotted(call.func).split(".")[-1]
    keywords = {k.arg for k in call.keywords}
    if name == "zip" and "strict" in keywords:
        yield call.lineno, "zip(strict=) is newer than Python 3.9"
    if name == "dataclass" and keywords & {"slots", "kw_only"}:
        yield call.lineno, "dataclass(slots=, kw_only=) is newer than Python 3.9"
    if name in ("isinstance", "issubclass") and len(call.args) == 2 and isinstance(call.args[1], ast.BinOp):
        yield call.lineno, f"{name}() with A | B is newer than Python 3.9; write (A, B)"


def _annotations(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            found = getattr(node, field, None)
            if isinstance(found, ast.expr):
                yield found


def _is_type(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return node.value is None
    return isinstance(node, ast.Name) and (node.id[0].isupper() or node.id in ("int", "str", "float", "bool", "bytes"))


def _imports(name: str, tree: ast.Module, trees: Mapping[str, ast.Module], at_load: bool) -> Iterator[tuple[int, str]]:
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _absolute(node.lineno, alias.name, at_load, id(node) in inside)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from _absolute(node.lineno, node.module or "", at_load, id(node) in inside)
        elif isinstance(node, ast.ImportFrom):
            missing = _missing(name, node, trees)
            if missing:
                yield node.lineno, f"{missing} is not in the variant"


def _missing(name: str, node: ast.ImportFrom, trees: Mapping[str, ast.Module]) -> str:
    """What a relative import does not find, "" where it finds all. Names in a module are Python's to look for."""
    said = "." * node.level + (node.module or "")
    if node.module:
        return "" if any(True for _ in targets(name, node, trees)) else said
    path = _base(name, node)
    known = set()
    for file in _file(path, trees):
        known |= {n.id for n in ast.walk(trees[file]) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    gone = [a.name for a in node.names if a.name not in known and not any(_file([*path, a.name], trees))]
    return ", ".join(f"{said}{name}" for name in gone)


def _absolute(line: int, module: str, at_load: bool, inside: bool) -> Iterator[tuple[int, str]]:
    top = module.split(".")[0]
    if top in _NEW_MODULES:
        yield line, f"imports {module}, which is newer than Python {_OLDEST}"
    elif top in LATE_MODULES:
        if at_load and not inside:
            yield line, f"imports {module} when the kernel is loaded; CPU builds of PyTorch come without it"
    elif top not in sys.stdlib_module_names and top != "torch" and not (top in OPTIONAL_MODULES and inside):
        yield line, f"imports {module}: only the standard library, torch and the kernel's own files are allowed"


def targets(name: str, node: ast.ImportFrom, files: Mapping[str, object]) -> Iterator[str]:
    """The files of the variant that a relative import in ``name`` reads."""
    module = [*_base(name, node), *(node.module.split(".") if node.module else [])]
    for path in ([*module, alias.name] for alias in node.names):
        yield from _file(path, files)
    yield from _file(module, files)


def _base(name: str, node: ast.ImportFrom) -> list[str]:
    parts = [part for part in PurePosixPath(name).parent.parts if part != "."]
    return parts[: len(parts) - node.level + 1]


def _file(path: list[str], files: Mapping[str, object]) -> Iterator[str]:
    joined = "/".join(path)
    for candidate in (f"{joined}.py", f"{joined}/__init__.py", f"{joined}.pyi", "__init__.py" if not path else ""):
        if candidate in files:
            yield candidate


def imported_at_load(trees: Mapping[str, ast.Module]) -> set[str]:
    """The files that importing the kernel runs."""
    seen: set[str] = set()
    waiting = ["__init__.py"]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in trees:
            continue
        seen.add(name)
        parents = PurePosixPath(name).parents
        waiting += [f"{parent}/__init__.py" for parent in parents if str(parent) != "."]
        for node in _run_at_import(trees[name]):
            if isinstance(node, ast.ImportFrom) and node.level:
                waiting += targets(name, node, trees)
    return seen


def _run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and _dotted(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from _run_at_import(node)


def _registrations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Operators whose name does not come from the build's namespace."""
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target, value in _pairs(node)
        if isinstance(target, ast.Name) and _is_prefix(value)
    }
    decorators = {
        id(decorator)
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        for decorator in node.decorator_list
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not _registers(node.func):
            continue
        first = node.args[0] if node.args else None
        by_name = isinstance(first, ast.Name) and first.id in names and id(node) not in decorators
        if not _is_prefix(first) and not by_name:
            yield node.lineno, f"{ast.unparse(node.func)}() must name its operator by {_PREFIX}(...)"


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts)
        else:
            yield target, node.value


def _registers(function: ast.expr) -> bool:
    """Whether a call registers an operator by its name: torch.library's functions, not an operator's own methods."""
    text = _dotted(function)
    return text.split(".")[-1] in REGISTERS and ("library" in text or "." not in text)


def _is_prefix(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Call) and _dotted(node.func).split(".")[-1] == _PREFIX

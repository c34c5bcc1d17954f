"""The rules for layers.py and the top-level names of a variant, read from their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator

FILES = ("__init__.py", "layers.py", "layers/__init__.py")
MEMBERS = {"has_backward", "can_torch_compile"}
METHODS = {"forward", "extra_repr"}


def findings(files: dict[str, str]) -> Iterator[str]:
    """One line for each thing that ``kernelize()`` or the card tool would not take. ``files``: those that parse."""
    init = ast.parse(files.get("__init__.py", ""))
    yield from _top_level(init)
    path = "layers.py" if "layers.py" in files else "layers/__init__.py"
    if path not in files:
        yield "layers.py: missing; kernelize() finds layers there"
        return
    for node in ast.parse(files[path]).body:
        if isinstance(node, ast.ClassDef):
            for line, said in _layer(node):
                yield f"{path}:{line}: {node.name} {said}"


def _top_level(init: ast.Module) -> Iterator[str]:
    public = [n.value for n in init.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    if len(public) != 1 or not isinstance(public[0], ast.List):
        yield "__init__.py: needs one __all__, a list of strings: the names that a version promises"
    elif not all(isinstance(e, ast.Constant) and isinstance(e.value, str) for e in public[0].elts):
        yield f"__init__.py:{public[0].lineno}: __all__ must hold strings alone"
    elif "layers" not in ast.literal_eval(public[0]):
        yield f"__init__.py:{public[0].lineno}: __all__ lacks layers, where kernelize() looks"
    imported = {alias.asname or alias.name for n in init.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    if "layers" not in imported:
        yield "__init__.py: does not import layers, where kernelize() looks"


def _layer(cls: ast.ClassDef) -> Iterator[tuple[int, str]]:
    methods = set()
    for node in cls.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            methods.add(node.name)
            if node.name not in METHODS:
                yield node.lineno, f"defines {node.name}(); a stateless layer has {' and '.join(sorted(METHODS))} alone"
        elif isinstance(node, ast.Assign):
            names = {ast.unparse(target) for target in node.targets}
            if not names <= MEMBERS:
                others = ", ".join(sorted(names - MEMBERS))
                yield node.lineno, f"sets {others}; a stateless layer may set {' and '.join(sorted(MEMBERS))} alone"
            elif not isinstance(node.value, ast.Constant) or not isinstance(node.value.value, bool):
                yield node.lineno, f"must set {', '.join(sorted(names))} to True or False"
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.lineno, f"sets {ast.unparse(node.target)}; a stateless layer only annotates"
    if "forward" not in methods:
        yield cls.lineno, "has no forward()"
    if not cls.bases:
        yield cls.lineno, "is no nn.Module"
    set_here = {ast.unparse(t) for n in cls.body if isinstance(n, ast.Assign) for t in n.targets}
    for name in sorted(MEMBERS - set_here):
        yield cls.lineno, f"does not say {name}"

"""Runs the tests on a built Hub tree in the place of the package: FUSEDMLP_HUB_TREE=DIR.

The variant that suits the machine is loaded as users load it, and ``fusedmlp`` and all that it has of modules become
names of it. What a variant has not (profiling, tuning, the command line) comes from the checkout, and finds the
variant's modules in turn.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

VARIABLE = "FUSEDMLP_HUB_TREE"
CHECKOUT = Path(__file__).resolve().parents[2] / "fusedmlp"
# Public names of the package that no variant has, and the module of the checkout with each.
BESIDE = {"count_launches": "profiling.launches", "LaunchCounts": "profiling.launches"}
BESIDE |= dict.fromkeys(("patch", "unpatch", "PatchReport"), "integrations.transformers")


class _Known(Loader):
    """ "Loads" a module that is there already, under a second name."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = self.module


class _Names(MetaPathFinder):
    """``fusedmlp.x`` is the variant's module x where it has one, else the checkout's; ``<variant>.x`` likewise, which
    is what ``from fusedmlp import x`` asks for."""

    def __init__(self, kernel: ModuleType) -> None:
        self.kernel, self.folder = kernel.__name__, Path(kernel.__path__[0])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package not in ("fusedmlp", self.kernel) or not rest:
            return None
        if _file_of(self.folder, rest) is not None:
            return None if package == self.kernel else _alias(fullname, f"{self.kernel}.{rest}")
        file = _file_of(CHECKOUT, rest)
        if file is None or package == self.kernel:
            return None if file is None else _alias(fullname, f"fusedmlp.{rest}")
        locations = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=locations)


def _alias(name: str, known: str) -> ModuleSpec:
    return ModuleSpec(name, _Known(import_module(known)))


def _file_of(folder: Path, module: str) -> Path | None:
    base = folder.joinpath(*module.split("."))
    found = (base / "__init__.py", base.with_name(f"{base.name}.py"), base.with_name(f"{base.name}.abi3.so"))
    return next((path for path in found if path.is_file()), None)


def use_tree_of_environment() -> str:
    """Puts the tree that the variable names, if any, in the place of the package; what is tested, as text."""
    tree = os.environ.get(VARIABLE)
    if not tree:
        return "fusedmlp: this checkout"
    if "fusedmlp" in sys.modules:
        raise RuntimeError(f"{VARIABLE} is set, and fusedmlp was imported before the tree could take its place")
    from kernels import get_local_kernel

    kernel = get_local_kernel(Path(tree).resolve())
    sys.modules["fusedmlp"] = kernel
    sys.meta_path.insert(0, _Names(kernel))
    for name, module in BESIDE.items():
        setattr(kernel, name, getattr(import_module(f"fusedmlp.{module}"), name))
    return f"fusedmlp: {kernel.__name__}, {kernel.__file__}"

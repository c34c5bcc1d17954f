"""Gluon kernels for Hopper on a CPU. Gluon has no interpreter, so this is where barriers are tested without a GPU.

`load` imports a kernel's module with stand-ins for Gluon, so that its functions stay plain Python; `launch` runs one.
Wrong ring indices and parities, early releases, missing waits and fences, and deadlocks become an AssertionError, a
TimeoutError or wrong numbers. How that works is said in gluon_machine.py, and in gluon_language.py what waits do.

Not modelled: layouts, registers, the warps of a partition, swizzling, clusters, conflicts in global memory, programs
that run at the same time (they run one after another), and the rounding of approximate instructions.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import linecache
import re
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from .gluon_language import ASSEMBLY, HOPPER, LANGUAGE, Descriptor, Pointer, passed, same
from .gluon_machine import Machine, Partition, expect

__all__ = ["ASSEMBLY", "HOPPER", "LANGUAGE", "LIMIT", "Descriptor", "Pointer", "launch", "load"]

LIMIT = 20.0  # seconds that a wait may last


def _stand_in(name: str, content: Mapping[str, Any]) -> ModuleType:
    """A module that says where to add what it lacks."""
    module = ModuleType(name)
    for key, value in content.items():
        setattr(module, key, _stand_in(f"{name}.{key}", value) if isinstance(value, dict) else value)

    def missing(attribute: str) -> NoReturn:
        raise AttributeError(f"the simulator has no {name}.{attribute}; it may be added in gluon_language.py")

    module.__getattr__ = missing
    return module


def _decorator(function: Any = None, **options: Any) -> Any:
    return function if function is not None else same


def _stand_ins() -> dict[str, ModuleType]:
    """By full name. They are made anew for each load, so that what was added since is there."""
    gluon = "triton.experimental.gluon"
    hopper = _stand_in(f"{gluon}.language.nvidia.hopper", HOPPER)
    nvidia = _stand_in(f"{gluon}.language.nvidia", {"hopper": hopper})
    language = _stand_in(f"{gluon}.language", {**LANGUAGE, "nvidia": nvidia})
    root = _stand_in(gluon, {"jit": _decorator, "constexpr_function": _decorator, "language": language})
    modules = [hopper, nvidia, language, root, hopper.tma, hopper.mbarrier]
    experimental = _stand_in("triton.experimental", {"gluon": root})
    plain = _stand_in("triton.language", LANGUAGE)  # of Triton's functions that Gluon kernels call
    triton = _stand_in("triton", {"jit": _decorator, "language": plain, "experimental": experimental})
    return {module.__name__: module for module in [*modules, experimental, plain, triton]}


_USES_TRITON = re.compile(r"^\s*(from|import) triton\b", re.MULTILINE)


def _find(name: str) -> ModuleSpec | None:
    """Where a module is, without importing its packages."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec


class _Loader:
    """Executes Gluon modules of one package with an `import` statement of its own; sys.modules sees none of them."""

    def __init__(self, top: str, replace: Mapping[str, str]) -> None:
        self.top, self.replace = top, replace
        self.stand_ins = _stand_ins()
        self.modules: dict[str, ModuleType] = {}
        self.found = dict.fromkeys(replace, 0)

    def source(self, name: str) -> tuple[ModuleSpec, str] | None:
        """Of a module that uses Triton; None for any other."""
        spec = _find(name) if name.split(".")[0] == self.top else None
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        text = Path(spec.origin).read_text()
        return (spec, text) if _USES_TRITON.search(text) else None

    def load(self, name: str) -> ModuleType | None:
        if name in self.modules:
            return self.modules[name]
        origin = self.source(name)
        if origin is None:
            return None
        spec, text = origin
        filename = str(spec.origin)
        for old, new in self.replace.items():
            self.found[old] += text.count(old)
            text = text.replace(old, new)
        if self.replace:  # tracebacks, and names of allocations, are those of the changed text
            filename = f"<changed {filename} {id(self)}>"
            linecache.cache[filename] = len(text), None, text.splitlines(keepends=True), filename
        module = self.modules[name] = ModuleType(name)
        content = {"__file__": spec.origin, "__package__": spec.parent, "__spec__": spec}
        module.__dict__.update(content, __builtins__={**vars(builtins), "__import__": self.import_})
        exec(compile(text, filename, "exec", dont_inherit=True), module.__dict__)
        return module

    def import_(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        full = importlib.util.resolve_name("." * level + name, globals["__package__"]) if level else name
        if full in self.stand_ins:
            if fromlist:
                return self.stand_ins[full]
            return self.stand_ins["triton"]
        module = self.load(full) if fromlist else None
        if module and "*" in fromlist:
            return module
        inner = {item: found for item in fromlist or () if (found := self.load(f"{full}.{item}"))}
        if not module and not inner:
            return builtins.__import__(name, globals, locals, fromlist, level)
        # `from . import common, plain`: of a package some modules may use Gluon and others not.
        handed = ModuleType(full)
        handed.__dict__.update(vars(module) if module else {}, **inner)
        rest = [item for item in fromlist if item not in vars(handed)]
        if rest:
            usual = builtins.__import__(name, globals, locals, rest, level)
            handed.__dict__.update({item: getattr(usual, item) for item in rest if hasattr(usual, item)})
        return handed


def load(module_name: str, replace: Mapping[str, str] | None = None) -> ModuleType:
    """A module of Gluon kernels whose functions are plain Python, to be passed to `launch`.

    Modules of the same package with Triton or Gluon functions that it imports come along in the same way; anything
    else is imported as usual. ``replace``: changes of the source text, to plant faults; each must be found once.
    """
    loader = _Loader(module_name.split(".")[0], replace or {})
    module = loader.load(module_name)
    if module is None:
        raise ImportError(f"{module_name} is not the name of a module that uses Gluon")
    for text, count in loader.found.items():
        expect(count == 1, f"{text!r} was found {count} times, not once")
    return module


def launch(
    function: Callable[..., Any],
    grid: int | tuple[int, ...],
    num_warps: int,
    *args: Any,
    seed: int = 0,
    limit: float | None = None,
    **kwargs: Any,
) -> None:
    """Run a kernel's programs one after another. Tensors are passed as pointers, as Triton does.

    AssertionError: the kernel broke a rule. TimeoutError: it waits in vain, or longer than ``limit`` seconds (LIMIT).
    ``seed`` decides the order of all that may happen in any order.
    """
    grid = grid if isinstance(grid, tuple) else (grid,)
    grid = (*grid, 1, 1)[:3]
    args = tuple(passed(value) for value in args)
    kwargs = {name: passed(value) for name, value in kwargs.items()}
    for program in product(*(range(n) for n in reversed(grid))):
        machine = Machine(program[::-1], grid, seed)
        kernel = Partition(machine, function.__name__, num_warps)
        machine.start(kernel, function, args, kwargs)
        kernel.baton.release()
        try:
            machine.supervise(LIMIT if limit is None else limit)
        except KeyboardInterrupt as interrupt:
            machine.fail(interrupt)
            raise

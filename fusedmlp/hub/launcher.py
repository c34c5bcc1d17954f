"""The compiled launcher for a build variant: made by setup.py, with flags that make the bytes repeat."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from . import HubError
from .source import Source

# glibc 2.34 moved these from libdl to libc under a new version; under the old one the binary runs on 2.28 too.
_MOVED = ("dlopen", "dlsym", "dlclose", "dlerror")
_VERSIONS = {"x86_64": "GLIBC_2.2.5", "aarch64": "GLIBC_2.17"}
_LINK = "-Wl,--build-id=none -Wl,--strip-all -Wl,--no-as-needed -l:libdl.so.2"  # older ones have them in libdl alone
ADVICE = "leave the compiled variants out with --no-launcher"


def shared_objects(source: Source) -> dict[str, bytes]:
    """Path in a variant -> content. Built where the source is a checkout, else those that are installed.

    Raises:
        HubError: there is none, and none can be made here.
    """
    if platform.system() != "Linux" or platform.machine() not in _VERSIONS:
        where = f"{platform.system()} {platform.machine()}"
        raise HubError(f"the launcher runs on Linux, x86_64 and aarch64; this is {where}: {ADVICE}")
    if source.root is not None:
        return _build(source.root)
    found = _read(source.package)
    if not found:
        raise HubError(f"{source.package} was installed without the compiled launcher: {ADVICE}")
    return found


def _read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.abi3.so"))}


def _build(root: Path) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        header = Path(folder, "old_glibc.h")
        version = _VERSIONS[platform.machine()]
        header.write_text("".join(f'__asm__(".symver {name},{name}@{version}");\n' for name in _MOVED))
        flags = f"-g0 -include {header} -ffile-prefix-map={root}=. -ffile-prefix-map={folder}=."
        made, work = Path(folder, "made"), Path(folder, "work")
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(made), "--build-temp", str(work)]
        environment = {k: v for k, v in os.environ.items() if k != "FUSEDMLP_NO_LAUNCHER"}
        environment |= {"CFLAGS": flags, "LDFLAGS": _LINK, "SOURCE_DATE_EPOCH": "0"}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
        found = _read(made / "fusedmlp") if made.is_dir() else {}
    if not found:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        said = f" ({lines[-1].strip()})" if lines else ""
        raise HubError(
            f"setup.py made no launcher{said}. It needs a C compiler, setuptools and a Python with a GIL: "
            f"install them, or {ADVICE}"
        )
    return found

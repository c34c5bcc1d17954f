"""Builds the compiled launcher (csrc/) where there is a C compiler; pyproject.toml says everything else.

Without a compiler, or with FUSEDMLP_NO_LAUNCHER=1, the package is pure Python and launches through Triton.
"""

import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

options: dict = {}
if sys.platform == "linux" and os.environ.get("FUSEDMLP_NO_LAUNCHER", "0") in ("", "0"):
    limited = not sysconfig.get_config_var("Py_GIL_DISABLED")  # the limited API knows no free-threaded Python yet
    launcher = Extension(
        "fusedmlp._launcher",
        sorted(str(path) for path in Path("csrc").glob("*.c")),
        depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
        define_macros=[("Py_LIMITED_API", "0x030A0000")] if limited else [],
        extra_compile_args=["-std=c11", "-D_GNU_SOURCE", "-O2", "-fvisibility=hidden"],
        libraries=["dl"],
        py_limited_api=limited,
        optional=True,  # a failure to compile is a warning
    )
    options["ext_modules"] = [launcher]
    if limited:
        options["options"] = {"bdist_wheel": {"py_limited_api": "cp310"}}

setup(**options)

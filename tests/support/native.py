"""Whether C can be compiled here for this Python, and whether it can see PyTorch's tensors."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

CC = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
INCLUDE = sysconfig.get_path("include")
CAN_COMPILE = sys.platform == "linux" and CC is not None and Path(INCLUDE, "Python.h").is_file()
NEEDS_COMPILER = "needs Linux, a C compiler and Python's headers"
CAN_EXCHANGE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
NEEDS_EXCHANGE = "needs PyTorch 2.10 or newer, whose tensors have DLPack's C exchange interface"

"""What the settings need to know of a device, asked once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class DeviceInfo:
    """What a GPU offers.

    Attributes:
        slug: the model's name as the tables and results spell it.
        capability: e.g. (9, 0).
        sms: multiprocessors.
        shared: shared memory that a block may have, in bytes.
    """

    slug: str
    capability: tuple[int, int]
    sms: int
    shared: int = 232_448

    @property
    def has_tma(self) -> bool:
        """TMA, and the shared memory that the TMA tiles count on: consumer GPUs of 12.x have the one, not the other."""
        return self.capability >= (9, 0) and self.shared >= 200 * 1024

    @property
    def has_wgmma(self) -> bool:
        """The warpgroup products that the Gluon kernels are written for: 9.x alone. Newer ones have another kind."""
        return self.capability[0] == 9 and self.slug != "interpreter" and _has_gluon()


# Gluon is experimental and changes: the releases of Triton under which the kernels were seen to compile for 9.0 without
# spills (tests/test_aot.py). Under any other the TMA kernels serve.
GLUON_TRITON = {(3, 6), (3, 7), (3, 8)}


def triton_version() -> tuple[int, ...]:
    """Major and minor; empty where there is no Triton."""
    try:
        import triton
    except ImportError:
        return ()
    return tuple(int(part) for part in triton.__version__.split(".")[:2])


@cache
def _has_gluon() -> bool:
    return triton_version() in GLUON_TRITON


# What Triton's interpreter runs on: kernels of every family, one program at a time.
INTERPRETER = DeviceInfo("interpreter", (9, 0), 1)


def slug_of(name: str) -> str:
    """``"NVIDIA H200"`` -> ``"nvidia-h200"``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@cache
def _cuda_info(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    # Older PyTorch does not tell; the two kinds of 9.x and 10.x have 227 KiB, 12.x has 99 (CUDA C++ guide).
    shared = getattr(properties, "shared_memory_per_block_optin", 232_448 if properties.major < 12 else 101_376)
    return DeviceInfo(slug_of(properties.name), capability, properties.multi_processor_count, shared)


def info(device: torch.device) -> DeviceInfo:
    """The facts of a CUDA device; of the interpreter for a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    return _cuda_info(torch.cuda.current_device() if device.index is None else device.index)

"""What the settings need to know of a device, asked once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class DeviceInfo:
    """capability: e.g. (9, 0). sms: multiprocessors. slug: the model's name as the tables and results spell it."""

    slug: str
    capability: tuple[int, int]
    sms: int

    @property
    def has_tma(self) -> bool:
        return self.capability >= (9, 0)


# What Triton's interpreter runs on: kernels of every family, one program at a time.
INTERPRETER = DeviceInfo("interpreter", (9, 0), 1)


def slug_of(name: str) -> str:
    """``"NVIDIA H200"`` -> ``"nvidia-h200"``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@cache
def _cuda_info(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    return DeviceInfo(slug_of(properties.name), (properties.major, properties.minor), properties.multi_processor_count)


def info(device: torch.device) -> DeviceInfo:
    """The facts of a CUDA device; of the interpreter for a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    return _cuda_info(torch.cuda.current_device() if device.index is None else device.index)

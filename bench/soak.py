"""Many steps of free-running sizes, on every device and by several threads: does anything grow, is anything wrong?

    python bench/soak.py                  10,000 steps by 4 threads a device, under 60 s on an H200
    python bench/soak.py --steps 2000     fewer

A step is a forward of GeGLU (256 -> 512 or 768 -> 3072, bfloat16) with a random number of tokens from 1 to 4096, on a
stream of the thread's own; half of them are followed by a backward. Kernels are loaded before, by fusedmlp.warmup.
After step 500 neither the process's memory (resident) nor what is allocated on any device may grow; every 100th step
is compared with eager PyTorch. Exit code 1 where something grew or differed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import resource
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import common
from bench.variants import eager_module
from fusedmlp import FusedGLUMLP, warmup

WIDTHS = ((256, 512), (768, 3072))
MOST_TOKENS = 4096
SETTLED = 500  # steps after which nothing may grow
COMPARE_EVERY = 100
MOST_ERROR = 2e-2
MOST_HOST_GROWTH = 24 << 20  # bytes: 2.6 kilobytes a step; the allocators of C and of PyTorch have some play
MOST_DEVICE_GROWTH = 64 << 10  # counters of a kernel that a stream runs for the first time
# Every size where a kernel may be another one: alone, few, and up to the largest with and without a factor of 16.
KINDS = (*range(1, 65), *range(80, MOST_TOKENS + 1, 16), *range(67, MOST_TOKENS, 61))


@dataclass
class Memory:
    """Bytes: of the process (resident), and allocated on each device."""

    host: int
    devices: list[int]

    @classmethod
    def now(cls, devices: Sequence[torch.device]) -> Memory:
        gc.collect()
        for device in devices:
            wait(device)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        return cls(resident, [torch.cuda.memory_allocated(d) if d.type == "cuda" else 0 for d in devices])


@dataclass
class Progress:
    """What the threads share: steps begun, and what went wrong."""

    steps: int
    most_tokens: int = MOST_TOKENS
    begun: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    faults: list[str] = field(default_factory=list)
    compared: int = 0

    def next(self) -> int | None:
        """The number of the next step; None where all are begun or something went wrong."""
        with self.lock:
            if self.begun >= self.steps or self.faults:
                return None
            self.begun += 1
            return self.begun


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Worker(threading.Thread):
    """Runs steps on one device, on a stream of its own, with layers of its own."""

    def __init__(self, device: torch.device, seed: int, parts: list[Progress], idle: threading.Barrier) -> None:
        super().__init__(daemon=True)
        self.device, self.parts, self.idle = device, parts, idle
        self.random = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.eager = [eager_module("geglu", *widths, **options) for widths in WIDTHS]
        self.fused = [FusedGLUMLP.from_module(module) for module in self.eager]

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream(self.device)))
            for progress in self.parts:
                try:
                    self.work(progress)
                except Exception as error:  # a thread's exception would be lost
                    progress.faults.append(f"{type(error).__name__}: {error}")
                # The same threads go on afterwards: others would get handles and workspaces of their own.
                self.idle.wait()
                self.idle.wait()

    def work(self, progress: Progress) -> None:
        while (number := progress.next()) is not None:
            tokens, which = self.random.randint(1, progress.most_tokens), self.random.randrange(len(WIDTHS))
            training = self.random.random() < 0.5
            compare = number % COMPARE_EVERY == 0
            x, gy = (
                torch.randn(
                    tokens, WIDTHS[which][0], device=self.device, dtype=torch.bfloat16, generator=self.generator
                )
                for _ in range(2)
            )
            found = step(self.fused[which], x, gy, training)
            if compare:
                self.compare(found, step(self.eager[which], x, gy, training), f"step {number}, {tokens} tokens")
                with progress.lock:
                    progress.compared += 1

    def compare(self, found: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
        for i, (ours, right) in enumerate(zip(found, expected, strict=True)):
            error = common.relative_error(ours, right.double())
            if not error <= MOST_ERROR:
                raise common.BenchError(f"{what} on {self.device}: tensor {i} differs from eager's by {error:.1e}")


def step(module: nn.Module, x: torch.Tensor, gy: torch.Tensor, training: bool) -> list[torch.Tensor]:
    """The output, and in training the gradients of x and the weights."""
    if not training:
        with torch.no_grad():
            return [module(x)]
    x = x.detach().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], gy)]


def soak(
    devices: Sequence[torch.device], steps: int, threads: int = 4, seed: int = 0, most_tokens: int = MOST_TOKENS
) -> list[str]:
    """Runs it; what was found wrong, empty where nothing was. Prints what it measures."""
    torch.manual_seed(seed)
    begin = time.perf_counter()
    settled = min(SETTLED, steps // 2)
    parts = [Progress(settled, most_tokens), Progress(steps - settled, most_tokens)]
    idle = threading.Barrier(threads * len(devices) + 1)
    workers = [Worker(d, 100 * i + j, parts, idle) for i, d in enumerate(devices) for j in range(threads)]
    counts = [count for count in KINDS if count <= most_tokens]
    for first in workers[::threads]:  # of each device
        warmup(nn.ModuleList(first.fused), counts, training=True)
    print(f"{len(counts)} sizes warmed up in {time.perf_counter() - begin:.1f} s", flush=True)
    for worker in workers:
        worker.start()
    marks = []
    for _ in parts:
        idle.wait()
        marks.append(Memory.now(devices))
        idle.wait()
    for worker in workers:
        worker.join()
    faults = [fault for progress in parts for fault in progress.faults]
    compared = sum(progress.compared for progress in parts)
    before, after = marks
    grown = after.host - before.host
    print(f"host memory: {before.host >> 20} MiB after step {settled}, {grown / 2**20:+.1f} MiB at the end")
    if grown > MOST_HOST_GROWTH:
        faults.append(f"host memory grew by {grown / 2**20:.1f} MiB, allowed: {MOST_HOST_GROWTH >> 20}")
    for device, old, new in zip(devices, before.devices, after.devices, strict=True):
        print(f"{device}: {old / 2**20:.1f} MiB after step {settled}, {(new - old) / 2**20:+.3f} MiB at the end")
        if new - old > MOST_DEVICE_GROWTH:
            faults.append(f"{device}: memory grew by {(new - old) / 2**20:.1f} MiB")
    seconds = time.perf_counter() - begin
    print(f"{steps} steps by {len(workers)} threads, {compared} compared with eager, {seconds:.1f} s")
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="default: 10000")
    parser.add_argument("--threads", type=int, default=4, help="threads a device (default: 4)")
    args = parser.parse_args(argv)
    if args.steps < 2 or args.threads < 1:
        parser.error("--steps must be at least 2 and --threads at least 1")
    try:
        common.need_gpu()
    except common.BenchError as error:
        print(f"bench/soak.py: {error}", file=sys.stderr)
        return 2
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    faults = soak(devices, args.steps, args.threads)
    print("\n".join([*faults, "FAILED" if faults else "nothing grew, nothing differs"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

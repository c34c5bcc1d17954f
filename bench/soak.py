"""Many steps of free-running sizes, on every device and by several threads: does anything grow, is anything wrong?

    python bench/soak.py                  10,000 steps by 4 threads a device, under 60 s on an H200
    python bench/soak.py --steps 2000     fewer
    python bench/soak.py --eager          eager PyTorch alone: what grows here is not the package's
    PYTHONTRACEMALLOC=1 python bench/soak.py    says too whether Python allocated what grew

A step is a forward of GeGLU (256 -> 512 or 768 -> 3072, bfloat16) with a random number of tokens from 1 to 4096, on a
stream of the thread's own; half of them are followed by a backward. Kernels are loaded before, by fusedmlp.warmup.
After step 500 neither the process's memory (resident) nor what is allocated on any device may grow, and after half of
the steps even less; every 100th step is compared with eager PyTorch's, both by their distance from float64: eager's
weight gradients may lack the last token (bench/last_token.py). Exit code 1 where something grew or differed.

So that memory at the marks can be compared, each thread begins with fixed steps that take every handle, workspace and
counter its stream will have, and the package's caches, which fill all along, are emptied before each mark: they may be
as large as their bounds, which are looked at then. cuBLAS would remember the algorithm of every size that it meets
(8192 of them a device), which is switched off. And it loads each of its kernels when a size first chooses it, 130 KB of
host memory each: so every product runs once at every size before the first step.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import gc
import os
import random
import resource
import sys
import threading
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import common
from bench.script import script
from bench.variants import eager_module
from fusedmlp import FusedGLUMLP, plan, steady, warmup

WIDTHS = ((256, 512), (768, 3072))
MOST_TOKENS = 4096
SETTLED = 500  # steps after which nothing may grow
COMPARE_EVERY = 100
MOST_ERROR, FACTOR = 1e-2, 1.25  # of the distance from float64, or so many times eager's
FIRST_TOKENS = (1, 32, 64)  # before any others, and the most: kernels for few tokens have counters of other sizes
MOST_HOST_GROWTH = 24 << 20  # bytes: 2.6 kilobytes a step; the allocators of C and of PyTorch have some play
# In the second half alone; a leak of a kilobyte in each of its 5000 steps exceeds it. The package's caches would not
# let it be so small: they are emptied before each mark. Of 8192 keys a device (4096 sizes of two widths) 512 plans of
# some 30 KiB are kept: all are dropped there and fill anew, so that a mark finds any number. Steady calls are at no
# bound at half time: only a key that comes back before its plan is dropped adds one, which makes some 100 of the 512 of
# a table until then, and 170 to the end, each with a plan.
MOST_LATE_HOST_GROWTH = 4 << 20
MOST_DEVICE_GROWTH = 64 << 10  # counters of a kernel that a stream runs for the first time
# Every size where a kernel may be another one: alone, few, and up to the largest with and without a factor of 16.
KINDS = (*range(1, 65), *range(80, MOST_TOKENS + 1, 16), *range(67, MOST_TOKENS, 61))


class MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and newer."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def in_use() -> int:
    """Bytes that malloc has handed out; 0 where it does not say."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    ask.restype = MallInfo
    found = ask()
    return int(found.uordblks + found.hblkhd)


@dataclass
class Memory:
    """Bytes: of the process (resident), and allocated on each device. What a leak would show in and play of the
    allocators would not: bytes in use of malloc, Python's blocks, and the bytes of all that Python allocated where
    tracemalloc runs. Pieces that PyTorch's allocator of device memory keeps records of: they grow until it settles."""

    host: int
    devices: list[int]
    used: int = 0
    blocks: int = 0
    traced: int = 0
    pieces: int = 0

    @classmethod
    def now(cls, devices: Sequence[torch.device]) -> Memory:
        gc.collect()
        for device in devices:
            wait(device)
        with contextlib.suppress(AttributeError):  # of glibc alone: what is free, but held, is no growth
            ctypes.CDLL(None).malloc_trim(0)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        traced = tracemalloc.get_traced_memory()[0]
        sizes = [allocated(device) for device in devices]
        return cls(resident, sizes, in_use(), sys.getallocatedblocks(), traced, sum(map(pieces, devices)))


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


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def pieces(device: torch.device) -> int:
    """Of PyTorch's reserved memory: blocks in use, and the free rests of those that were split."""
    if device.type != "cuda":
        return 0
    found = torch.cuda.memory_stats(device)
    return int(found.get("active.all.current", 0) + found.get("inactive_split.all.current", 0))


def empty_caches(threads: int) -> list[str]:
    """Forgets plans and steady calls; which of them were over their bound."""
    largest = {"plans": len(plan._plans), "steady calls": max(map(len, steady._tables.values()), default=0)}
    plan.clear()
    # Threads that find a cache one below its bound at the same time add an entry each.
    most = plan.MAX_PLANS + threads
    return [f"{count} {what} are kept, allowed: {most}" for what, count in largest.items() if count > most]


class Worker(threading.Thread):
    """Runs steps on one device, on a stream of its own, with layers of its own."""

    def __init__(
        self,
        device: torch.device,
        seed: int,
        parts: list[Progress],
        idle: threading.Barrier,
        eager: bool = False,
        is_first: bool = False,  # of its device
    ) -> None:
        super().__init__(daemon=True)
        self.device, self.parts, self.idle, self.is_first = device, parts, idle, is_first
        self.random = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.eager = [eager_module("geglu", *widths, **like(device)) for widths in WIDTHS]
        self.fused = self.eager if eager else [FusedGLUMLP.from_module(module) for module in self.eager]

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream(self.device)))
            for progress in self.parts:
                try:
                    if progress is self.parts[0]:
                        self.begin(progress.most_tokens)
                        if self.is_first:
                            load_products(self.device, self.eager, progress.most_tokens)
                    self.work(progress)
                except Exception as error:  # a thread's exception would be lost
                    progress.faults.append(f"{type(error).__name__}: {error}")
                # The same threads go on afterwards: others would get handles and workspaces of their own.
                self.idle.wait()
                self.idle.wait()

    def begin(self, most_tokens: int) -> None:
        """Each kind of step: PyTorch has a handle of cuBLAS for each thread, of autograd's too, and on Hopper a
        workspace of 32 MiB for each stream of a handle. Random steps may first need one late."""
        for tokens in (most_tokens, *(count for count in FIRST_TOKENS if count < most_tokens)):
            for which in range(len(WIDTHS)):
                x, gy = self.inputs(tokens, which)
                for module in (self.fused[which], self.eager[which]):
                    for training in (False, True):
                        step(module, x, gy, training)

    def inputs(self, tokens: int, which: int) -> list[torch.Tensor]:
        """x and the gradient of the result."""
        size, options = (tokens, WIDTHS[which][0]), like(self.device)
        return [torch.randn(*size, generator=self.generator, **options) for _ in range(2)]

    def work(self, progress: Progress) -> None:
        while (number := progress.next()) is not None:
            tokens, which = self.random.randint(1, progress.most_tokens), self.random.randrange(len(WIDTHS))
            training = self.random.random() < 0.5
            compare = number % COMPARE_EVERY == 0
            x, gy = self.inputs(tokens, which)
            found = step(self.fused[which], x, gy, training)
            if compare:
                eager = step(self.eager[which], x, gy, training)
                exact = step(copy.deepcopy(self.eager[which]).double(), x.double(), gy.double(), training)
                self.compare(found, eager, exact, f"step {number}, {tokens} tokens")
                with progress.lock:
                    progress.compared += 1

    def compare(
        self, found: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor], what: str
    ) -> None:
        for i, (ours, theirs, right) in enumerate(zip(found, eager, exact, strict=True)):
            error, allowed = (common.relative_error(result, right) for result in (ours, theirs))
            if not error <= max(MOST_ERROR, FACTOR * allowed):
                raise common.BenchError(
                    f"{what} on {self.device}: tensor {i} is {error:.1e} from float64's, eager's {allowed:.1e}"
                )


def load_products(device: torch.device, modules: Sequence[nn.Module], most_tokens: int) -> None:
    """Runs each product of PyTorch's that a step may take, eager's and ours, at every number of tokens."""
    for module in modules:
        gate, up, down = (weight.detach() for weight in module.parameters())
        H, D = gate.shape
        for tokens in range(1, most_tokens + 1):
            x, both = torch.zeros(tokens, D, **like(device)), torch.zeros(tokens, 2 * H, **like(device))
            step(module, x, x, True)
            torch.mm(x, gate.t(), out=both[:, :H])
            torch.addmm(both[:, :H] @ gate, both[:, H:], up)
            x @ down, both.t() @ x, both[:, :H].t() @ x
    wait(device)


def like(device: torch.device) -> dict[str, Any]:
    return {"device": device, "dtype": torch.bfloat16}


def step(module: nn.Module, x: torch.Tensor, gy: torch.Tensor, training: bool) -> list[torch.Tensor]:
    """The output, and in training the gradients of x and the weights."""
    if not training:
        with torch.no_grad():
            return [module(x)]
    x = x.detach().requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], gy)]


def _mib(count: int) -> str:
    return f"{count / 2**20:.3f} MiB"


def _growth(sizes: list[int], settled: int, half: int) -> str:
    first, middle, last = sizes
    early, late = (middle - first) / 2**20, (last - middle) / 2**20
    return f"{_mib(first)} after step {settled}, {early:+.3f} MiB to step {half}, {late:+.3f} MiB to the end"


def _counts(counts: list[int]) -> str:
    return f"{counts[0]}, {counts[1] - counts[0]:+d} to the half, {counts[2] - counts[1]:+d} to the end"


def soak(
    devices: Sequence[torch.device],
    steps: int,
    threads: int = 4,
    seed: int = 0,
    most_tokens: int = MOST_TOKENS,
    eager: bool = False,
) -> list[str]:
    """Runs it; what was found wrong, empty where nothing was. Prints what it measures."""
    torch.manual_seed(seed)
    begin = time.perf_counter()
    half = steps // 2
    settled = min(SETTLED, half // 2)
    parts = [Progress(count, most_tokens) for count in (settled, half - settled, steps - half)]
    idle = threading.Barrier(threads * len(devices) + 1)
    workers = [
        Worker(d, 100 * i + j, parts, idle, eager, is_first=not j)
        for i, d in enumerate(devices)
        for j in range(threads)
    ]
    sizes_warmed = [count for count in KINDS if count <= most_tokens]
    for first in () if eager else workers[::threads]:  # of each device
        warmup(nn.ModuleList(first.fused), sizes_warmed, training=True)
    if not eager:
        print(f"{len(sizes_warmed)} sizes warmed up in {time.perf_counter() - begin:.1f} s", flush=True)
    for worker in workers:
        worker.start()
    marks, faults = [], []
    for _ in parts:
        idle.wait()
        for device in devices:
            wait(device)
        faults += empty_caches(len(workers))
        marks.append(Memory.now(devices))
        idle.wait()
    for worker in workers:
        worker.join()
    faults += [fault for progress in parts for fault in progress.faults]
    compared = sum(progress.compared for progress in parts)
    hosts = [mark.host for mark in marks]
    print(f"host memory: {_growth(hosts, settled, half)}")
    print(f"  of that in use: {_growth([mark.used for mark in marks], settled, half)}")
    if tracemalloc.is_tracing():
        print(f"  of that Python's: {_growth([mark.traced for mark in marks], settled, half)}")
    print(f"  Python's blocks: {_counts([mark.blocks for mark in marks])}")
    print(f"  pieces of PyTorch's device memory: {_counts([mark.pieces for mark in marks])}")
    if hosts[2] - hosts[0] > MOST_HOST_GROWTH:
        faults.append(f"host memory grew by {_mib(hosts[2] - hosts[0])}, allowed: {_mib(MOST_HOST_GROWTH)}")
    if hosts[2] - hosts[1] > MOST_LATE_HOST_GROWTH:
        grown, most = _mib(hosts[2] - hosts[1]), _mib(MOST_LATE_HOST_GROWTH)
        faults.append(f"host memory grew by {grown} in the second half, allowed: {most}")
    for i, device in enumerate(devices):
        sizes = [mark.devices[i] for mark in marks]
        print(f"{device}: {_growth(sizes, settled, half)}")
        if sizes[2] - sizes[0] > MOST_DEVICE_GROWTH:
            faults.append(f"{device}: memory grew by {_mib(sizes[2] - sizes[0])}, allowed: {_mib(MOST_DEVICE_GROWTH)}")
    seconds = time.perf_counter() - begin
    print(f"{steps} steps by {len(workers)} threads, {compared} compared with eager, {seconds:.1f} s")
    return faults


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="default: 10000")
    parser.add_argument("--threads", type=int, default=4, help="threads a device (default: 4)")
    parser.add_argument("--eager", action="store_true", help="eager PyTorch in the place of the package")
    args = parser.parse_args(argv)
    if args.steps < 2 or args.threads < 1:
        parser.error("--steps must be at least 2 and --threads at least 1")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # read when CUDA starts
    os.environ.setdefault("CUBLASLT_HEURISTICS_CACHE_CAPACITY", "0")  # read when its first handle is made
    common.need_gpu()
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    faults = soak(devices, args.steps, args.threads, eager=args.eager)
    print("\n".join([*faults, "FAILED" if faults else "nothing grew, nothing differs"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

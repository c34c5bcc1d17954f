"""Compile ahead, in several processes at once: what a run needs is then in the caches on disk (Triton's, Inductor's).

One kernel takes seconds to compile on one core, and a run that measures must not keep a GPU waiting for that: with 16
cores the 150 candidates of a sweep should take half a minute. What fails is left to the run itself, which says why.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fusedmlp.settings.types import FAMILIES, GLUON_ONLY_OPS, Settings

Shape = tuple[int, int, int]  # tokens, hidden, intermediate
Task = tuple[Callable[..., None], tuple[Any, ...]]


def run(tasks: Sequence[Task], jobs: int, seconds: float = 300.0) -> int:
    """Runs all in ``jobs`` processes, for ``seconds`` at most; returns how many of them ended well."""
    if not tasks:
        return 0
    begin = time.monotonic()
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_one_thread)
    futures: list[Future[None]] = [pool.submit(function, *arguments) for function, arguments in tasks]
    done, left = wait(futures, seconds)
    pool.shutdown(wait=not left, cancel_futures=True)
    if left:
        for process in multiprocessing.active_children():
            process.kill()
    errors = [error for future in done if (error := future.exception()) is not None]
    for text in sorted({f"{type(error).__name__}: {str(error)[:400]}" for error in errors}):
        print(f"  not compiled ahead: {text}", file=sys.stderr)
    late = f", {len(left)} not in time" if left else ""
    well = len(done) - len(errors)
    print(f"compiled ahead: {well} of {len(tasks)}{late}, {time.monotonic() - begin:.0f} s", flush=True)
    return well


def _one_thread() -> None:
    """The processes are the parallelism: none of them starts compile workers of its own."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


# ------------------------------------------------------------------------------------------ kernels of a sweep


def stand_in(candidate: Settings, shape: Shape) -> Shape:
    """A small shape for which a candidate compiles to the same kernel.

    Kernels are not specialised on the tokens, and on widths and row strides only by whether 16 divides them, which also
    decides whether TMA can serve. Those for small batches have one tile of tokens up to 64.
    """
    tokens, hidden, intermediate = shape
    few = min(tokens, 64 if candidate.family == "small" else 128)
    return few, 256 + hidden % 16, 512 + intermediate % 16


def kernel_tasks(
    ops: Iterable[str], shapes: Sequence[Shape], dtype: str, families: Sequence[str] = FAMILIES
) -> list[Task]:
    """One for each kernel that :func:`fusedmlp.tune.measure.measure` needs at these shapes."""
    from fusedmlp.tune.candidates import DTYPES
    from fusedmlp.tune.measure import candidates_for

    found: dict[tuple[Any, ...], Task] = {}
    for op in ops:
        for shape in shapes:
            for candidate in candidates_for(op, *shape, DTYPES[dtype][0], families):
                if op in GLUON_ONLY_OPS and candidate.family == "pair":
                    continue  # products as they are served at the very shape
                small = stand_in(candidate, shape)
                found.setdefault((op, candidate, small[1:]), (compile_kernel, (op, candidate, small, dtype)))
    return list(found.values())


def compile_kernel(op: str, candidate: Settings, shape: Shape, dtype: str) -> None:
    """What a candidate launches at a shape, compiled and not launched."""
    from unittest import mock

    from fusedmlp.launch import Launch
    from fusedmlp.tune import measure
    from fusedmlp.tune.candidates import DTYPES

    with mock.patch.object(Launch, "__call__", Launch.compile), measure.precision_of(dtype):
        problem = measure.Problem.make(*shape, DTYPES[dtype][0])
        plan = measure.plan_of(op, problem, candidate)
        if plan.eager_reason is None and plan.settings[measure.KERNEL[op]] == candidate:
            measure.run_ours(op, plan, problem)


# ------------------------------------------------------------------------------------------ first calls of a grid


def first_calls(op: str, shape: Shape, variants: Sequence[str], dtype: str, device: str = "cuda") -> None:
    """A forward and a step of each variant: torch.compile's kernels and ours."""
    import torch

    from bench.case import Case

    case = Case(op, shape, device, sets=1, dtype=getattr(torch, dtype))
    for name in variants:
        case.add(name)
        case.forward(name)(0)
        case.step(name)(0)
    case.wait()
    del case
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()  # the other processes need it

"""fusedmlp, eager PyTorch, torch.compile and Liger over the whole grid of widths and token counts, forward and step.

    python bench/grid.py                       bench/results/<gpu>/grid.json, 9 minutes; again: goes on with the rest
    python bench/grid.py --jobs 16             first calls (compilation) of all cells ahead, in 16 processes
    python bench/grid.py --tokens 1 1024 --widths 768,3072 --op geglu --variants eager fused --dtype float16

geglu has no biases, mlp_relu (two layers) has. A step is a forward and a backward with a random upstream gradient. Up
to 2048 tokens the time is that of a call within a CUDA graph (graph_us), where gaps between launches count, above it is
kernel time from the profiler (kernel_us); both under sustained load. Variants take turns on the same inputs, weights.

Tokens 1, 16, 128, 1024, 4096 and 16384 come first, over all widths, so that a run that ends early covers the grid
evenly. The file is written after every shape that ends 5 s after the last write. A run goes on with a file of the same
commit, GPU and PyTorch: cells that have all variants are not measured again. With an unknown commit, or changes on top,
all is measured anew; set BENCH_COMMIT where there is no git.

What it should cost on an H200 (an estimate): 0.4 s a shape up to 2048 tokens, 2 to 6 s above, 6 minutes in all; and the
first calls. torch.compile compiles three graphs a shape, 3 to 6 s on one core: --jobs does that ahead, within half of
the minutes. compile_dynamic, one set of kernels for all tokens, is there to be chosen with --variants instead.

--merge FILE... makes one file of several runs of one commit, GPU model and PyTorch, say on several GPUs.

Exit code: 0; 1 where a variant raised or nothing was measured; 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import ahead, common
from bench.case import Case, bytes_of
from bench.rows import Rows
from bench.script import script
from bench.summary import cell_of
from bench.variants import OPS, VARIANTS, missing, not_offered

WIDTHS = (
    *((384, 1536), (576, 1536), (768, 3072), (1024, 4096), (1152, 4304), (2048, 8192), (2304, 9216), (2560, 10240)),
    *((3072, 24576), (4096, 11008), (4096, 14336), (5120, 13824), (8192, 28672)),
)
TOKENS = tuple(2**k for k in range(15))
FIRST = (1, 16, 128, 1024, 4096, 16384)
PASSES = ("forward", "step")
DEFAULT = ("eager", "compile", "liger", "fused")
COMPILED = ("compile", "compile_dynamic", "compile_max")
Width = tuple[int, int]


def parse_width(text: str) -> Width:
    """ "768,3072" -> (768, 3072)."""
    parts = text.split(",")
    if len(parts) != 2 or not all(p.strip().isdecimal() and int(p) > 0 for p in parts):
        raise argparse.ArgumentTypeError(f"a width is HIDDEN,INTERMEDIATE, got {text!r}")
    return int(parts[0]), int(parts[1])


def parse_tokens(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"tokens are a whole number of 1 or more, got {text!r}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--op", nargs="+", choices=list(OPS), default=["geglu", "mlp_relu"])
    made.add_argument("--widths", nargs="+", type=parse_width, default=list(WIDTHS), metavar="D,H")
    made.add_argument("--tokens", nargs="+", type=parse_tokens, default=list(TOKENS), metavar="M")
    made.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(DEFAULT))
    made.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    made.add_argument("--minutes", type=float, default=9.0, help="begin nothing after that (default: %(default)s)")
    made.add_argument("--jobs", type=int, default=0, metavar="N", help="first calls ahead, in N processes")
    made.add_argument(
        "--merge", nargs="+", metavar="FILE", help="measure nothing; write the rows of these files to --out"
    )
    made.add_argument("--quick", action="store_true", help="fewer repeats")
    made.add_argument("--out", metavar="FILE", help="result file (default: bench/results/<gpu>/grid.json)")
    return made


def visits(args: argparse.Namespace) -> Iterator[tuple[str, Width, list[int]]]:
    """(operation, width, its tokens): the first tokens over all widths, then the others; graphs before the profiler,
    which stays attached to the process once used."""
    wanted = sorted(set(args.tokens))
    first, rest = [t for t in wanted if t in FIRST], [t for t in wanted if t not in FIRST]
    for tokens in (first, rest):
        for metric in ("graph_us", "kernel_us"):
            some = [t for t in tokens if common.grid_metric(t) == metric]
            for width in args.widths if some else ():
                for op in args.op:
                    yield op, width, some


class Grid(Rows):
    """A run over the grid. rows: those of an earlier run that it goes on with."""

    def __init__(
        self,
        args: argparse.Namespace,
        save: Callable[[list[dict[str, Any]]], None],
        rows: Sequence[dict[str, Any]] = (),
        device: str = "cuda",
        sets: int | None = None,
    ) -> None:
        super().__init__(1 if args.quick else 2)
        self.args, self.save, self.device, self.sets = args, save, device, sets
        self.rows += rows
        self.unmeasured: list[str] = []
        self.left_out = {v: reason for v in args.variants if (reason := missing(v))}
        self.begin, self.written = time.perf_counter(), 0.0

    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def offered(self, op: str) -> list[str]:
        return [v for v in self.args.variants if v not in self.left_out and not_offered(v, op) is None]

    def todo(self, op: str, width: Width, tokens: Sequence[int]) -> dict[int, list[str]]:
        """Tokens -> passes that lack a variant."""
        have: dict[tuple[Any, ...], set[str]] = {}
        for row in self.rows:
            have.setdefault(cell_of(row), set()).add(row["variant"])
        wanted = set(self.offered(op))
        found = {}
        for t in tokens:
            cells = {p: (op, p, t, *width, self.args.dtype, common.grid_metric(t)) for p in PASSES}
            lacking = [p for p, cell in cells.items() if not wanted <= have.get(cell, set())]
            if lacking:
                found[t] = lacking
        return found

    def all(self) -> None:
        for op, width, tokens in visits(self.args):
            todo = self.todo(op, width, tokens)
            if not todo:
                continue
            if self.late(op, width, list(todo)):
                continue
            try:
                self.visit(op, width, todo)
            except Exception as error:  # the other widths are still worth having
                self.fault(op, (max(todo), *width), "", self.offered(op), "set-up", error)
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
            print(f"{op} {width[0]} -> {width[1]}, {list(todo)}: done at {self.seconds():.0f} s", flush=True)
        self.write(0.0)

    def late(self, op: str, width: Width, tokens: Sequence[int]) -> bool:
        """Whether the time is up; what is then not measured is named."""
        if self.seconds() <= self.args.minutes * 60:
            return False
        self.unmeasured += [f"{op} {t}x{width[0]}x{width[1]}" for t in tokens]
        return True

    def write(self, every: float = 5.0) -> None:
        if self.rows and self.seconds() - self.written >= every:
            self.save(self.rows)
            self.written = self.seconds()

    def visit(self, op: str, width: Width, todo: dict[int, list[str]]) -> None:
        """One case for the width, with the sets that the fewest tokens need; its tokens are cut out of it."""
        dtype = getattr(torch, self.args.dtype)
        # Its weights are those of every token count, and of every variant.
        sets = self.sets or common.input_sets(bytes_of(op, (min(todo), *width)))
        whole = Case(op, (max(todo), *width), self.device, sets, dtype=dtype)
        ready = self.added(whole, self.offered(op))
        for tokens, passes in todo.items():
            if not self.late(op, width, [tokens]):
                self.shape(whole.at(tokens, self.sets), passes, ready)
                self.write()

    def shape(self, case: Case, passes: Sequence[str], names: Sequence[str]) -> None:
        metric = common.grid_metric(case.shape[0])
        for pass_ in passes:
            working, us = self.warmed(case, pass_, names)
            cell = (case.op, pass_, *case.shape, self.args.dtype, metric)
            self.rows[:] = [row for row in self.rows if cell_of(row) != cell]  # of fewer variants
            self.metric(case, pass_, metric, working, us)

    def report(self) -> str:
        lines = [f"{len({cell_of(row) for row in self.rows})} cells at {self.seconds():.0f} s"]
        if graphs := torch._dynamo.utils.counters["stats"]["unique_graphs"]:
            lines[0] += f"; torch.compile made {graphs} graphs"
        lines += [f"left out: {what}: {why}" for what, why in self.left_out.items()]
        lines += [f"raised: {what}: {why}" for what, why in self.raised.items()]
        if self.unmeasured:
            lines.append(f"not measured in the {self.args.minutes:g} minutes: {', '.join(self.unmeasured)}")
        return "\n".join(lines)


def earlier(path: Path, now: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The rows of a file that a run can go on with, and what to say of it."""
    if not path.is_file():
        return [], ""
    try:
        there = common.load(path)
    except (OSError, ValueError, common.BenchError) as error:
        return [], f"{path} cannot be read ({error}); all is measured anew"
    if now["commit"] == "unknown" or now["commit"].endswith("-dirty"):
        return [], f"{path}: this commit is {now['commit']}, so that all is measured anew"
    differs = [k for k in ("commit", "gpu", "torch", "triton") if there[k] != now[k]]
    if differs:
        was = ", ".join(f"{k} {there[k]}" for k in differs)
        return [], f"{path} was measured with {was}; all is measured anew"
    return there["rows"], f"{path}: going on after {len(there['rows'])} rows"


def merge(files: Sequence[str], out: str | None) -> int:
    """Writes the rows of all files, whose heads must be alike; the ceilings are those of the first."""
    contents = [common.load(file) for file in files]
    for file, content in zip(files, contents, strict=True):
        differs = [k for k in ("bench", "commit", "gpu", "torch", "triton") if content[k] != contents[0][k]]
        if differs:
            print(f"bench/grid.py: {file} and {files[0]} differ in {', '.join(differs)}", file=sys.stderr)
            return 1
    rows = {(*cell_of(row), row["variant"]): row for content in contents for row in content["rows"]}
    path = common.write({**contents[0], "rows": list(rows.values())}, out)
    print(f"written: {path}, {len(rows)} rows of {len(files)} files")
    return 0


def let_compile_specialise() -> None:
    """A kernel for every token count, and an error rather than eager PyTorch under another name."""
    config: Any = torch._dynamo.config
    config.recompile_limit = 512
    config.accumulated_recompile_limit = 4096
    config.fail_on_recompile_limit_hit = True


def compile_ahead(args: argparse.Namespace, grid: Grid) -> None:
    tasks: list[ahead.Task] = []
    for op, (hidden, intermediate), tokens in visits(args):
        names = [v for v in grid.offered(op) if v in COMPILED or v == "fused"]
        todo = grid.todo(op, (hidden, intermediate), tokens)
        tasks += [(ahead.first_calls, (op, (t, hidden, intermediate), names, args.dtype)) for t in todo if names]
    ahead.run(tasks, args.jobs, seconds=max(30.0, args.minutes * 60 / 2))


@script
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.merge:
        return merge(args.merge, args.out)
    gpu = common.need_gpu()
    let_compile_specialise()
    ceilings = common.ceilings()
    path = Path(args.out) if args.out else common.RESULTS / common.gpu_slug(gpu) / "grid.json"
    head = common.result("grid", [], ceilings, gpu)
    rows, said = earlier(path, head)
    if said:
        print(said, flush=True)

    def save(found: list[dict[str, Any]]) -> None:
        common.write({**head, "date": common.now(), "rows": found}, path)

    grid = Grid(args, save, rows)
    if args.jobs > 0:
        compile_ahead(args, grid)
    grid.all()
    print(f"\n{gpu}, driver {head['driver']}, torch {head['torch']}; {json.dumps(ceilings)}\n{grid.report()}")
    if grid.rows:
        print(f"written: {path}; python bench/report.py {path} --grid")
    return 1 if grid.raised or not grid.rows else 0


if __name__ == "__main__":
    sys.exit(main())

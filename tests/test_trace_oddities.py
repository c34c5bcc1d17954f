"""Traces of odd form: huge numbers, names of any character, older profilers, several devices."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.trace_builder import GEMM, MUL, SPLIT, TraceBuilder, linear

from fusedmlp import cli
from fusedmlp.profiling import html
from fusedmlp.profiling.html import write_html
from fusedmlp.profiling.trace.load import load
from fusedmlp.profiling.trace.stats import analyse
from fusedmlp.profiling.trace.stream import TraceError
from fusedmlp.profiling.trace_report import TraceReport
from fusedmlp.profiling.verdict import products

ROOT = Path(__file__).resolve().parents[1]
TRACE = ROOT / "tests" / "traces" / "h200-geglu-eager-step.json.gz"


def event(name: str = "k", cat: str = "kernel", ts: float = 1.0, dur: float = 2.0, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7, "args": args}


def written(tmp_path: Path, *events: dict[str, Any]) -> Path:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.mark.parametrize("where", ["head", "event"])
def test_an_integer_of_thousands_of_digits_is_refused(where: str, tmp_path: Path) -> None:
    number, path = "9" * 5000, tmp_path / "t.json"
    head, args = (f'"x": {number},', "{}") if where == "head" else ("", f'{{"bytes": {number}}}')
    path.write_text(f'{{{head} "traceEvents": [{{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "args": {args}}}]}}')
    with pytest.raises(TraceError, match="not a trace"):
        load(path)


def test_dimensions_that_no_tensor_has_are_refused(tmp_path: Path) -> None:
    size = [[10**200, 10**200]] * 2
    path = written(tmp_path, event("aten::mm", "cpu_op", **{"Input Dims": size, "Input type": ["float"] * 2}))
    assert cli.main(["explain", str(path)]) == 2


def test_a_name_that_is_too_long_for_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "a" * 300]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_durations_below_zero_count_as_none(tmp_path: Path) -> None:
    stats = analyse(load(written(tmp_path, event(ts=1, dur=-5), event(ts=3, dur=2))))
    assert (stats.kernel_us, stats.busy_us, stats.idle_us) == (2, 2, 2)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_of_any_character_are_printed(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    path = written(tmp_path, event("kern\ud800el é"))
    done = subprocess.run(
        [sys.executable, "-m", "fusedmlp", "explain", str(path)], capture_output=True, timeout=250, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert b"kern\\ud800el" in done.stdout


@pytest.mark.parametrize("options", ["", "--json -"])
def test_a_reader_that_stops_early_is_no_error(options: str) -> None:
    command = f"'{sys.executable}' -m fusedmlp explain '{TRACE}' {options} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert done.stderr == ""


def test_a_name_cannot_leave_its_place_in_the_page(tmp_path: Path) -> None:
    name = "<!--<script>k</script><b>"
    page = write_html(tmp_path / "t.html", [TraceReport(load(written(tmp_path, event(name))))], title=name).read_text()
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert "<" not in data
    assert json.loads(data)["variants"][0]["kernels"][0]["name"] == name


def test_older_profiles_write_steps_as_operations(tmp_path: Path) -> None:
    step = event("ProfilerStep#3", "Operator", ts=0, dur=20)
    call = event("cudaLaunchKernel", "Runtime", ts=1, dur=2, correlation=5)
    trace = load(written(tmp_path, step, call, event(cat="Kernel", ts=5, correlation=5)))
    assert [s.name for s in trace.steps] == ["ProfilerStep#3"] and [w.step for w in trace.work] == [0]


def test_every_product_counts_once(tmp_path: Path) -> None:
    """Products that are split along K have it in their names, and what runs beside a product computes nothing."""
    t = TraceBuilder()
    split = "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT"
    reduction = "void cutlass::Kernel<cutlass::reduction::kernel::ReduceSplitK<cutlass::MatrixShape<4, 128>>>(x)"
    for kernels in ((split, SPLIT), (GEMM, reduction), (GEMM, "void cublasLt::epilogue::impl::globalKernel<8>(int)")):
        with t.op("aten::mm", [16, 32], [32, 128]):
            for kernel in kernels:
                t.launch(kernel)
    found = products(load(t.write(tmp_path / "t.json")).work)
    assert [p.name for p in found] == [split, GEMM, GEMM]
    assert {(p.M, p.N, p.K, p.flop, p.bytes) for p in found} == {(16, 128, 32, 2 * 16 * 128 * 32, 2 * 6656)}


@pytest.mark.parametrize("shapes", [([4, 16, 32], [4, 32, 128]), ([4, 16, 128], [4, 16, 32], [4, 32, 128])])
def test_each_matrix_of_a_batch_is_read(shapes: tuple[list[int], ...], tmp_path: Path) -> None:
    t = TraceBuilder()
    with t.op("aten::bmm" if len(shapes) == 2 else "aten::baddbmm", *shapes):
        t.launch(GEMM)
    (found,) = products(load(t.write(tmp_path / "t.json")).work)
    assert (found.M, found.N, found.K, found.flop) == (64, 128, 32, 2 * 64 * 128 * 32)
    assert found.bytes == 2 * 4 * (16 * 32 + 32 * 128 + 16 * 128)


def test_devices_wait_for_the_host_each_in_its_own_time(tmp_path: Path) -> None:
    """The second device is idle before its first work of the step, which is none of the step's idle time."""
    calls, kernels = [], []
    for i, (device, called, start, dur) in enumerate(
        ((1, 10, 15, 30), (0, 20, 25, 10), (1, 80, 90, 5), (0, 95, 98, 2))
    ):
        calls.append(event("cudaLaunchKernel", "cuda_runtime", called, 2, correlation=i + 1))
        kernels.append(event(ts=start, dur=dur, device=device, stream=7, correlation=i + 1))
    steps = [
        event(f"ProfilerStep#{i}", "user_annotation", start, 18 if i == 1 else 80) for i, start in ((1, 1), (2, 20))
    ]
    (_, step) = analyse(load(written(tmp_path, *steps, *calls, *kernels))).steps
    assert (step.kernels, step.busy_us, step.idle_us) == (3, 17, 63)
    assert step.waiting_us == 63


def test_a_page_of_a_long_trace_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without steps the whole trace is one: the longest of everything are drawn, and the rest is left out."""
    monkeypatch.setattr(html, "MAX_ITEMS", 10)
    t = TraceBuilder()
    for i in range(50):
        linear(t, 16, 32, 32, us=float(i + 1))
    report = TraceReport(load(t.write(tmp_path / "t.json")))
    lanes, _ = html._lanes(report)
    assert [len(lane["items"]) for lane in lanes] == [10, 10]
    assert {item["d"] for item in lanes[1]["items"]} == set(range(41, 51))


def verdict_of(tmp_path: Path, *kernels: tuple[str, float]) -> str:
    t = TraceBuilder()
    for name, us in kernels:
        with t.op("aten::mm", [16, 32], [32, 32]):
            t.launch(name, us)
    t.synchronize()
    for e in t.events:  # launched well ahead: nothing waits
        if e["cat"] == "kernel":
            e["ts"] += 1000
    return TraceReport(load(t.write(tmp_path / "t.json"))).verdict.word


CONVOLUTION = (
    "sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x32_execute_kernel__5x_cudnn"
)
FLASH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 64, 4>>(x)"


@pytest.mark.parametrize(
    "kernels, word",
    [
        ([(CONVOLUTION, 90.0), (MUL, 10.0)], "compute-bound"),
        ([(FLASH, 90.0), (MUL, 10.0)], "compute-bound"),
        ([(CONVOLUTION, 10.0), (MUL, 90.0)], "memory-bound"),
        ([("%%% no name", 10.0)], "undecided"),
        ([(GEMM, 0.0), (MUL, 10.0)], "memory-bound"),
    ],
)
def test_what_a_step_is_bound_by(kernels: list[tuple[str, float]], word: str, tmp_path: Path) -> None:
    assert verdict_of(tmp_path, *kernels) == word

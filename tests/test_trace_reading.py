"""Reading traces: any size and form, broken files, and what belongs to which step, call and operation."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from support.trace_builder import GEMM, TraceBuilder, geglu_forward, linear

from bench.large_trace import write_large
from fusedmlp import cli
from fusedmlp.profiling.trace import stream
from fusedmlp.profiling.trace.load import load
from fusedmlp.profiling.trace.model import Work, busy_us
from fusedmlp.profiling.trace.stats import analyse
from fusedmlp.profiling.trace.stream import TraceError, read_events

ROOT = Path(__file__).resolve().parents[1]


def trace_of(tmp_path: Path, t: TraceBuilder, name: str = "trace.json") -> Any:
    return load(t.write(tmp_path / name))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_work_knows_its_call_operation_and_step(tmp_path: Path, name: str) -> None:
    t = TraceBuilder()
    for _ in range(3):
        with t.step():
            geglu_forward(t)
            t.synchronize()
    trace = trace_of(tmp_path, t, name)
    assert [s.name for s in trace.steps] == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]
    assert [len(trace.by_step()[i]) for i in range(3)] == [5, 5, 5]
    first = trace.work[0]
    assert first.call is not None and first.call.name == "cudaLaunchKernelExC"
    assert first.op is not None and [o.name for o in first.op.line()] == ["aten::mm", "aten::linear"]
    assert first.op.shapes == ((8192, 768), (768, 3072))
    assert trace.devices == [{"id": 0, "name": "NVIDIA H200"}]


def test_events_longer_than_the_window_and_every_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CHUNK", 7)
    events = [{"name": "é" * 50, "n": 1.5e-3}, {"name": "x", "args": {"a": [[1, 2], []]}}, {"n": 12345678}]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, "end": 123}, ensure_ascii=False))
    head: dict[str, Any] = {}
    assert list(read_events(path, head.__setitem__)) == events
    assert head == {"schemaVersion": 1, "end": 123}


def test_the_array_form_and_odd_characters(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'\n[{"name": "bad \xff byte\tand tab", "v": NaN}\n]\n')
    (event,) = read_events(path, lambda *_: None)
    assert event["name"] == "bad � byte\tand tab"


BROKEN = {
    "empty": (b"", "is empty"),
    "blank": (b" \n ", "is empty"),
    "text": (b"hello", "not JSON"),
    "number": (b"{} {", "no traceEvents"),
    "other json": (b'{"a": 1}', "no traceEvents"),
    "json list": (b"[1, 2]", "an event is an object"),
    "no list": (b'{"traceEvents": 3}', "is not a list"),
    "cut in an event": (b'{"traceEvents": [{"name": "a", "ph', "cut off"),
    "cut after an event": (b'{"traceEvents": [{"name": "a"}', "cut off"),
    "cut at the end": (b'{"traceEvents": [{"name": "a"}]', "cut off"),
    "no comma": (b'{"traceEvents": [{"name": "a"} {"name": "b"}]}', "not valid JSON"),
    "bare word": (b'{"traceEvents": [xyz, {"name": "b"}]}', "not valid JSON"),
    "cut gzip": (gzip.compress(b'{"traceEvents": [' + b"{},\n" * 5000)[:-20], "gzip data are cut off"),
    "no events": (b'{"traceEvents": []}', "no events of torch.profiler"),
    "other tool": (b'{"traceEvents": [{"ph": "X", "cat": "gc", "name": "gc", "ts": 1, "dur": 2}]}', "no events of"),
    "text for a time": (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "now"}]}', "event 1 "),
    "no time": (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k"}]}', "event 1 "),
    "args of another kind": (
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "args": 3}]}',
        "event 1 ",
    ),
    "deep": (b'{"traceEvents": ' + b"[" * 200_000, "an event is an object|nested too deeply|cut off"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_explained_with_exit_code_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = BROKEN[name]
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        load(path)
    assert cli.main(["explain", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"fusedmlp explain: {path}: ")


def test_missing_file_and_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert cli.main(["explain", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    t = TraceBuilder()
    linear(t, 8, 8, 8)
    path = t.write(tmp_path / "t.json")
    assert cli.main(["explain", str(path), "--json", str(tmp_path / "no" / "out.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_memory_does_not_grow_with_what_is_not_kept(tmp_path: Path) -> None:
    """Python frames and flow arrows are most of a large trace; 12 MB of them may not cost 8."""
    frame = {"ph": "X", "cat": "python_function", "name": "f" * 200, "ts": 1, "dur": 1, "args": {"Python id": 1}}
    t = TraceBuilder()
    linear(t, 8, 8, 8)
    known = len(t.events)
    t.events += [frame] * 45_000
    path = t.write(tmp_path / "t.json")
    assert path.stat().st_size > 12e6
    tracemalloc.start()
    trace = load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert trace.events == known + 45_000
    assert peak < 8e6, peak


def test_without_steps_the_whole_trace_is_one(tmp_path: Path) -> None:
    t = TraceBuilder()
    geglu_forward(t)
    trace = trace_of(tmp_path, t)
    assert [s.name for s in trace.steps] == ["whole trace"]
    assert analyse(trace).steps[0].kernels == 5


def test_graph_kernels_count_and_belong_to_the_launch(tmp_path: Path) -> None:
    t = TraceBuilder()
    with t.step():
        t.graph(GEMM, GEMM, GEMM)
    stats = analyse(trace_of(tmp_path, t))
    assert (stats.steps[0].kernels, stats.launches, stats.graph_launches) == (3, 1, 1)


def test_busy_time_is_a_union() -> None:
    def work(start: float, us: float) -> Work:
        return Work("k", "kernel", start, us, 0, 7, 1)

    assert busy_us([work(0, 10), work(2, 3), work(8, 4), work(20, 1)]) == 13
    assert busy_us([]) == 0


def test_waiting_for_the_host_is_told_from_other_idle_time(tmp_path: Path) -> None:
    t = TraceBuilder()
    with t.step():
        linear(t, 8, 8, 8, us=50)
        linear(t, 8, 8, 8, us=5)  # launched while the first ran
        t.synchronize()
        with t.op("aten::item", cost=100.0):
            pass
        linear(t, 8, 8, 8, us=5)
    stats = analyse(trace_of(tmp_path, t))
    step = stats.steps[0]
    assert step.kernels == 3 and step.kernel_us == 60
    assert step.waiting_us == pytest.approx(step.idle_us)
    assert step.waiting_us > 100
    assert [s.kernels for s in stats.stretches] == [1]
    assert stats.stretches[0].op == "aten::linear"
    assert [(s.call, s.count) for s in stats.stalls] == [("cudaDeviceSynchronize", 1)]


def test_copies_are_listed_apart(tmp_path: Path) -> None:
    t = TraceBuilder()
    with t.step():
        t.launch("Memcpy HtoD (Pageable -> Device)", 9.0, call="cudaMemcpyAsync")
        t.launch("Memset (Device)", 1.0, call="cudaMemsetAsync")
        linear(t, 8, 8, 8)
    stats = analyse(trace_of(tmp_path, t))
    step = stats.steps[0]
    assert (step.kernels, step.memcpy, step.memset) == (1, 1, 1)
    assert stats.copies["Memcpy HtoD (Pageable -> Device)"] == (1, 9.0, 1 << 20)


PEAK = """
import resource, sys
import fusedmlp
from fusedmlp.cli import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert main(["explain", sys.argv[1], "--json", sys.argv[2]]) == 0
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_a_trace_of_200_mb_stays_within_500_mb(tmp_path: Path) -> None:
    """PyTorch itself, without CUDA, takes 230 MB of them."""
    path, out = tmp_path / "large.json", tmp_path / "out.json"
    steps = write_large(path, 200)
    command = [sys.executable, "-c", PEAK, str(path), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT)
    path.unlink()
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["steps"]
    assert [s["kernels"] for s in found] == [319] * steps
    assert int(done.stdout.split()[-1]) < 270


ODD: list[Any] = [None, True, -1, [], {}, "x", 1e308, float("nan"), float("inf"), [[1], None], {"a": 1}]


def _mutated(content: dict[str, Any], rng: random.Random) -> bytes:
    """A trace in which a few fields hold something else, or that is cut off, or with other bytes."""
    events = content["traceEvents"]
    for _ in range(3):
        event = rng.choice(events)
        holder = event["args"] if event.get("args") and rng.random() < 0.6 else event
        if isinstance(holder, dict) and holder:
            holder[rng.choice(list(holder))] = rng.choice(ODD)
    data = bytearray(json.dumps(content).encode())
    if rng.random() < 0.2:
        del data[rng.randrange(len(data)) :]
    if rng.random() < 0.2:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("seed", range(40))
def test_damaged_traces_are_read_or_refused(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    t = TraceBuilder()
    for _ in range(2):
        with t.step():
            geglu_forward(t)
            t.synchronize()
    path, page = tmp_path / "t.json", tmp_path / "t.html"
    path.write_bytes(_mutated(t.content(), random.Random(seed)))
    code = cli.main(["explain", str(path), "--json", str(tmp_path / "t.out"), "--html", str(page)])
    said = capsys.readouterr()
    assert (code, page.exists()) in ((0, True), (2, False))
    assert (code == 2) == said.err.startswith(f"fusedmlp explain: {path}: ")

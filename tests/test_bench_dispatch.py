"""bench/dispatch.py: racecheck's reports of the compiler's dispatch are told from races, by a real kernel's code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.aot import DEVICES, cubin_for, pretended
from support.gluon import HAS_GLUON, NEEDS_GLUON

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import dispatch, sanitize  # noqa: E402
from fusedmlp import functional, settings  # noqa: E402

KERNEL = "hidden_backward_gluon"
LIMIT = 50


@pytest.fixture(scope="module")
def cubin() -> bytes:
    """Of a warp-specialised kernel that stores to shared memory of its own too."""
    if not HAS_GLUON:
        pytest.skip(NEEDS_GLUON)
    (case,) = [c for c in sanitize.CASES if (c.op, c.family, c.bias) == ("mlp", "gluon", True)]
    meta = {name: t.to("meta") for name, t in sanitize.operands(case).items()}
    with settings.override(family=case.family), pretended(DEVICES["nvidia-h200"]) as recorded:
        gy = torch.empty(case.tokens, case.widths[0], dtype=torch.bfloat16, device="meta")
        sanitize.compute(case, functional, meta, gy)
    (entry,) = [entry for entry in recorded if entry.name == KERNEL]
    return cubin_for(entry, 90)


@pytest.fixture(scope="module")
def folder(cubin: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of Triton's; the kernel is there in another variant too, which is not what ran."""
    made = tmp_path_factory.mktemp("cache")
    for name, code in (("A", b"no machine code"), ("B", cubin)):
        (made / name).mkdir()
        (made / name / f"{KERNEL}.cubin").write_bytes(code)
    return made


@pytest.fixture(scope="module")
def code(folder: Path) -> dispatch.Code:
    return dispatch.disassembled(folder / "B" / f"{KERNEL}.cubin", KERNEL)


def found(code: dispatch.Code, pattern: str) -> list[int]:
    """Offsets of the instructions that have this."""
    return [offset for offset, text in code.entries if offset is not None and re.search(pattern, text)]


@pytest.fixture(scope="module")
def true(code: dispatch.Code) -> tuple[int, list[int]]:
    """Where the dispatch's load and stores are: its load is the kernel's only one of a byte; what is at most 32 bytes
    from that, as the stores are, no other instruction is."""
    (load,) = found(code, r"LDS\.U8")
    address = int(re.findall(r"\+0x([0-9a-f]+)\]", dict(code.entries)[load])[0], 16)
    stores = [
        offset
        for offset in found(code, r"STS(\.64)? \[UR\d+\+0x")
        if 0 < int(re.findall(r"\+0x([0-9a-f]+)\]", dict(code.entries)[offset])[0], 16) - address <= 32
    ]
    assert len(stores) == 2  # as it begins, and as it ends
    return load, stores


def log(read: int, writes: list[int], count: int = 1, kernel: str = KERNEL) -> str:
    """What racecheck prints of one report, among what the program does."""
    lines = ["========= COMPUTE-SANITIZER", "mlp tma: right (1.2 s)"]
    lines += [f"========= Error: Race reported between Read access at {kernel}+{read:#x} in hidden_backward.py:281"]
    lines += [
        f"=========     and Write access at {kernel}+{at:#x} in hidden_backward.py:349 [8 hazards]" for at in writes
    ]
    summary = f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)"
    return "\n".join([*lines, "========= ", "mlp gluon: right (1.2 s)", "2 of 2 cases are right", summary, ""])


def judged(text: str, folder: Path) -> dispatch.Verdict:
    return dispatch.judge(text, LIMIT, folder)


def test_the_dispatch_is_told_by_the_machine_code(folder: Path, true: tuple[int, list[int]]) -> None:
    verdict = judged(log(*true), folder)
    assert verdict.findings == [] and len(verdict.dispatch) == 1
    said = str(verdict)
    assert said == "1 report, all of the compiler's dispatch byte (verified in the machine code), none of our own"
    shown = verdict.text
    assert f"B/{KERNEL}.cubin" in shown and "LDS.U8" in shown
    assert shown.count("STS") == 2 and shown.count("BAR.SYNC") == 3


def test_several_reports_each_count(folder: Path, true: tuple[int, list[int]], code: dispatch.Code) -> None:
    read, writes = true
    twice = log(read, writes[:1]) + log(read, writes[1:])
    lines = [line for line in twice.splitlines() if "SUMMARY" not in line and "SANITIZER" not in line]
    summary = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"
    verdict = judged("\n".join([*lines, summary]), folder)
    assert len(verdict.dispatch) == 2 and not verdict.findings
    other = found(code, "STSM")[0]
    verdict = judged("\n".join([*lines, *log(read, [other]).splitlines()[2:4], "=========", summary]), folder)
    assert len(verdict.dispatch) == 2 and len(verdict.findings) == 2  # the race, and a count that does not add up
    assert str(verdict) == "2 findings, and 2 reports of the compiler's dispatch byte"


@pytest.mark.parametrize("pattern", ["STSM", r"@!?P\d+ STS", "LDSM", "BAR", "EXIT"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_write_elsewhere_is_a_race(
    folder: Path, true: tuple[int, list[int]], code: dispatch.Code, pattern: str, which: int
) -> None:
    read, writes = true
    others = found(code, pattern)
    if pattern == "LDSM" and not others:
        others = found(code, "LDS ")
    assert others
    for other in {others[0], others[-1]}:
        moved = [other if i == which else write for i, write in enumerate(writes)]
        (finding,) = judged(log(read, moved), folder).findings
        assert "is no store to it right before barrier 1" in finding and f"{other:#x}" in finding


def test_a_read_elsewhere_is_a_race(folder: Path, true: tuple[int, list[int]], code: dispatch.Code) -> None:
    _, writes = true
    for read in (found(code, "LDS ")[0], found(code, "STSM")[0], writes[0], 0x7FFFFFF0):
        verdict = judged(log(read, writes), folder)
        assert verdict.dispatch == [] and "is no load of a byte right behind barrier 1" in verdict.findings[0]


def test_the_report_of_another_shape_is_a_race(folder: Path, true: tuple[int, list[int]]) -> None:
    read, writes = true
    text = log(read, writes)
    assert judged(log(read, []), folder).findings  # against what?
    assert judged(text.replace("Read access", "Write access"), folder).findings
    assert judged(text.replace("and Write", "and Read"), folder).findings
    two = judged(text.replace(f"and Write access at {KERNEL}", "and Write access at act_grad", 1), folder)
    assert "accesses of two kernels" in two.findings[0]


def test_a_cubin_that_is_missing_or_broken_verifies_nothing(
    folder: Path, cubin: bytes, tmp_path: Path, true: tuple[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = judged(log(*true), tmp_path).findings
    assert f"no {KERNEL}.cubin in {tmp_path}" in finding
    assert f"no act_grad.cubin in {folder}" in judged(log(*true, kernel="act_grad"), folder).findings[0]
    broken = tmp_path / "C" / f"{KERNEL}.cubin"
    broken.parent.mkdir()
    broken.write_bytes(cubin[: len(cubin) // 2])
    assert judged(log(*true), tmp_path).findings and judged(log(*true), folder).dispatch

    def missing(*args: Any, **options: Any) -> None:
        raise FileNotFoundError("nvdisasm")

    monkeypatch.setattr(subprocess, "run", missing)
    dispatch.disassembled.cache_clear()
    assert "cannot be disassembled: nvdisasm" in judged(log(*true), folder).findings[0]


MALFORMED: dict[str, Callable[[str], str]] = {
    "a warning": lambda text: text.replace("Error: Race", "Warning: Race"),
    "another error": lambda text: text.replace("========= \n", "========= \n========= Error: Invalid shared read\n"),
    "an offset that is none": lambda text: text.replace("+0x", "+"),
    "a write without a report": lambda text: re.sub(r"========= Error.*\n", "", text),
    "a line that is cut": lambda text: text.replace(" hazards]\n", "\n", 1),
    "a line in another": lambda text: text.replace("=========     and", "mlp: right=========     and", 1),
    "an error of the tool": lambda text: text + "========= Internal Sanitizer Error\n",
    "a count too large": lambda text: text.replace("SUMMARY: 1", "SUMMARY: 2"),
    "a count too small": lambda text: text.replace("SUMMARY: 1", "SUMMARY: 0"),
    "no summary": lambda text: re.sub(r"========= RACECHECK.*\n", "", text),
    "two summaries": lambda text: text + "========= RACECHECK SUMMARY: 1 hazards were not printed\n",
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_not_understood_is_a_finding(folder: Path, true: tuple[int, list[int]], what: str) -> None:
    text = log(*true)
    spoilt = MALFORMED[what](text)
    assert spoilt != text and judged(spoilt, folder).findings


def test_as_many_reports_as_are_printed_at_most_are_a_finding(folder: Path, true: tuple[int, list[int]]) -> None:
    """There may be more."""
    assert not dispatch.judge(log(*true), 2, folder).findings
    assert dispatch.judge(log(*true), 1, folder).findings


def edited(code: dispatch.Code, offset: int, move: int, text: str) -> dispatch.Code:
    """Code with another instruction at, or some places from, an offset."""
    entries = list(code.entries)
    place = code.at(offset)
    assert place is not None
    entries[place + move] = (entries[place + move][0], text)
    return dispatch.Code(tuple(entries))


def test_the_order_by_the_barrier_is_what_counts(code: dispatch.Code, true: tuple[int, list[int]]) -> None:
    """Code that is as the compiler's but for one instruction is a race."""
    read, writes = true
    accesses = [dispatch.Access("Read", KERNEL, read), *[dispatch.Access("Write", KERNEL, at) for at in writes]]
    report = dispatch.Report(tuple(accesses))
    assert report.explain(code)[0]
    place = code.at(read)
    assert place is not None
    before = code.barrier(place, -1)
    assert before is not None
    load, store = dict(code.entries)[read], dict(code.entries)[writes[0]]
    spoilt = {
        "another barrier before the load": edited(code, read, before - place, "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80"),
        "a barrier of some warps": edited(code, writes[0], 1, "BAR.SYNC.DEFER_BLOCKING 0x1, 0x80"),
        "a barrier that does not wait": edited(code, writes[0], 1, "BAR.ARV 0x1"),
        "a predicated barrier": edited(code, writes[1], 1, "@P0 BAR.SYNC.DEFER_BLOCKING 0x1"),
        "no barrier after the store": edited(code, writes[1], 1, "EXIT"),
        "a branch in between": edited(code, writes[0], 1, "@P0 BRA `(.L_x_1)"),
        "a predicated store": edited(code, writes[0], 0, f"@P0 {store}"),
        "a store of each thread's": edited(code, writes[0], 0, store.replace("[UR", "[R")),
        "a store before the bytes": edited(code, writes[0], 0, re.sub(r"\+0x\w+", "+0x10", store)),
        "a load of more": edited(code, read, 0, load.replace(".U8", "")),
    }
    assert [what for what, other in spoilt.items() if report.explain(other)[0]] == []
    # Stores with one barrier between them: what the first stored may be read while the second stores.
    a, b = (code.at(write) for write in writes)
    assert a is not None and b is not None
    entries = [
        (offset, "NOP" if a + 1 < i < b and "BAR.SYNC.DEFER_BLOCKING 0x1" == text else text)
        for i, (offset, text) in enumerate(code.entries)
    ]
    assert not report.explain(dispatch.Code(tuple(entries)))[0]


def test_functions_have_offsets_of_their_own() -> None:
    listing = '\t.section\t.text.a,"ax"\n.L_x_1:\n /*0000*/  NOP ;\n\t.section\t.text.b,"ax"\n /*0000*/  EXIT ;\n'
    assert dispatch.Code.of(listing, "a").entries == ((None, ".L_x_1:"), (0, "NOP"))
    assert dispatch.Code.of(listing, "b").entries == ((0, "EXIT"),)


@pytest.fixture
def under(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> Callable[..., bool]:
    """sanitize.under() with a tool that says this."""
    monkeypatch.setattr(dispatch, "cache_folder", lambda: folder)

    def call(text: str, code: int = sanitize.FOUND, tool: str = "racecheck") -> bool:
        done = SimpleNamespace(stdout=text, returncode=code)
        with monkeypatch.context() as patch:
            run = subprocess.run
            patch.setattr(
                subprocess, "run", lambda command, **o: done if command[0] == "sanitizer" else run(command, **o)
            )
            return sanitize.under(tool, "sanitizer", [], tmp_path)

    return call


def test_clean_is_what_was_verified(
    under: Callable[..., bool], true: tuple[int, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = log(*true)
    assert under(text)
    said = capsys.readouterr().out
    assert said.startswith(
        "racecheck: 1 report, all of the compiler's dispatch byte (verified in the machine code), none"
    )
    assert "exit code 9" in said and "Race reported" not in said
    kept = (tmp_path / "sanitize-racecheck.log").read_text()
    assert kept.endswith(text) and "the compiler's dispatch: Read at" in kept and "STS" in kept
    read, writes = true
    assert not under(log(read, [*writes[:1], read]))
    said = capsys.readouterr().out
    assert said.startswith("racecheck: 1 finding, and 0 reports of the compiler's dispatch byte") and "a race: " in said
    assert not under(text.replace("2 of 2 cases", "1 of 2 cases"))
    assert not under(text, code=1) and not under(text, code=0)
    assert not under(text, tool="memcheck")

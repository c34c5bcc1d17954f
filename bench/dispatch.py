"""Which of racecheck's reports are about the byte by which Triton dispatches a warp-specialised kernel's partitions.

The compiler lets the warps that wait for a partition of ``gl.warp_specialize`` sleep at named barrier 1, of which all
warps of a program are part. The others store a byte for each of those warps, pass the barrier, and each woken warp
loads its byte: the barrier is between the two. racecheck does not follow named barriers and reports a race.

Such a report is no fault of a kernel, but only the machine code can say that it is such a report. So each is looked up
in the cubins of that name in Triton's cache, and is the compiler's only where in one of them

* the read is a load of a single byte right behind barrier 1;
* each write is a store, at one address for all threads, over bytes which that load may read, with barrier 1 next;
* barrier 1 is passed at least twice between two such stores: once to be seen, and once more after it was read.

Everything else that racecheck says is a finding, what is not understood included.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

NEAR = 6  # instructions; on Triton 3.6 the barrier is at most 3 before the load, and the next one after a store
WARPS = 32  # of a program, at most: bytes that the load may read
SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (\d+)")
_ACCESS = r"(Read|Write) access at (\w+)\+0x([0-9a-f]+)(?: in \S+)?"
_FIRST = re.compile(rf"========= Error: Race reported between {_ACCESS}")
_OTHER = re.compile(rf"=========     and {_ACCESS} \[\d+ hazards?\]")
_NO_REPORT = re.compile(rf"========= (COMPUTE-SANITIZER|{SUMMARY.pattern}\b.*)|=========")
# Predicated ones do not match: whether such a barrier was passed cannot be told here.
_BARRIER = re.compile(r"BAR\.SYNC(\.DEFER_BLOCKING)? 0x1")  # without a number of threads: all of the program's
_LOAD = re.compile(r"LDS\.U8 R\d+, \[R\d+(?:\+UR\d+)?\+0x([0-9a-f]+)\]")
_STORE = re.compile(r"STS(?:\.64|\.128)? \[UR\d+\+0x([0-9a-f]+)\], R\d+")
_LEAVES = re.compile(r"(@!?U?P\d+ )?(BRA|BRX|BRXU|JMP|JMX|CALL|RET|EXIT|BSYNC|BREAK|KILL)\b")


@dataclass(frozen=True)
class Access:
    kind: str  # "Read" or "Write"
    kernel: str
    offset: int  # of its instruction, in bytes

    def __str__(self) -> str:
        return f"{self.kind} at {self.kernel}+{self.offset:#x}"


@dataclass(frozen=True)
class Code:
    """A kernel's instructions in order; a label is an entry without an offset."""

    entries: tuple[tuple[int | None, str], ...]

    @classmethod
    def of(cls, listing: str, kernel: str) -> Code:
        """From what nvdisasm prints; functions have sections, and offsets, of their own."""
        entries: list[tuple[int | None, str]] = []
        inside = False
        for line in listing.splitlines():
            if section := re.match(r"\s*\.section\s+([^,\s]+)", line):
                inside = section[1] == f".text.{kernel}"
            elif inside and (found := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line)):
                entries.append((int(found[1], 16), found[2]))
            elif inside and re.match(r"\s*\.L\w+:", line):
                entries.append((None, line.strip()))
        return cls(tuple(entries))

    def at(self, offset: int) -> int | None:
        return next((i for i, (here, _) in enumerate(self.entries) if here == offset), None)

    def barrier(self, place: int, way: int) -> int | None:
        """Where barrier 1 is, the nearest barrier of any kind before (-1) or after (1) a place, in straight code."""
        for i in range(place + way, place + way * (NEAR + 1), way):
            if not 0 <= i < len(self.entries):
                return None
            offset, text = self.entries[i]
            if offset is None or _LEAVES.match(text):
                return None
            if re.search(r"\bBAR\.", text):
                return i if _BARRIER.fullmatch(text) else None
        return None

    def shown(self, first: int, last: int) -> str:
        return "; ".join(f"{offset or 0:#x} {text}" for offset, text in self.entries[first : last + 1])


@dataclass(frozen=True)
class Report:
    accesses: tuple[Access, ...]

    def __str__(self) -> str:
        return " and ".join(map(str, self.accesses))

    def explain(self, code: Code) -> tuple[bool, list[str]]:
        """Whether it is about the dispatch in this code; the instructions that say so, or the first that does not."""
        by_kind = {kind: [a for a in self.accesses if a.kind == kind] for kind in ("Read", "Write")}
        if len(by_kind["Read"]) != 1 or not by_kind["Write"]:
            return False, ["not one read against writes"]
        (read,) = by_kind["Read"]
        place = code.at(read.offset)
        load = None if place is None else _LOAD.fullmatch(code.entries[place][1])
        before = None if place is None else code.barrier(place, -1)
        if place is None or load is None or before is None:
            return False, [f"{read}: {_text(code, place)} is no load of a byte right behind barrier 1"]
        lines = [f"{read}: {code.shown(before, place)}"]
        first = int(load[1], 16)
        stores = _stores(code, range(first, first + WARPS + 1))
        for write in by_kind["Write"]:
            place = code.at(write.offset)
            after = None if place is None else code.barrier(place, 1)
            if place not in stores or after is None:
                return False, [*lines, f"{write}: {_text(code, place)} is no store to it right before barrier 1"]
            earlier = [s for s in stores if s < place]
            passed = sum(bool(_BARRIER.fullmatch(text)) for _, text in code.entries[max(earlier, default=0) : place])
            if earlier and passed < 2:
                return False, [*lines, f"{write}: {_text(code, place)} follows another store at once"]
            lines.append(f"{write}: {code.shown(place, after)}")
        return True, lines


def _stores(code: Code, addresses: range) -> list[int]:
    """The places of stores to these addresses, each the same for all threads."""
    found = ((i, _STORE.fullmatch(text)) for i, (offset, text) in enumerate(code.entries) if offset is not None)
    return [i for i, match in found if match and int(match[1], 16) in addresses]


def _text(code: Code, place: int | None) -> str:
    return "no instruction" if place is None else code.entries[place][1]


@dataclass
class Verdict:
    """What racecheck said: its reports of the dispatch and what else there is, each as lines of text."""

    dispatch: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        count = _count(len(self.dispatch), "report")
        if self.findings:
            return f"{_count(len(self.findings), 'finding')}, and {count} of the compiler's dispatch byte"
        return f"{count}, all of the compiler's dispatch byte (verified in the machine code), none of our own"

    @property
    def text(self) -> str:
        return "\n".join([str(self), *self.findings, *self.dispatch])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def parse(said: str) -> tuple[list[Report], list[str]]:
    """racecheck's reports, and the lines of it that are not understood."""
    reports: list[list[Access]] = []
    strange = []
    open_report = False
    for line in map(str.strip, said.splitlines()):
        first, other = _FIRST.fullmatch(line), _OTHER.fullmatch(line)
        if first:
            reports.append([_access(first)])
        elif other and open_report:
            reports[-1].append(_access(other))
        elif not _NO_REPORT.fullmatch(line) and ("=========" in line or "Race reported" in line):
            strange.append(line)
        # The program's own lines may come in between, at the beginning of a report's lines or after them.
        open_report = bool(first) or (open_report and (bool(other) or not line.startswith("=========")))
    return [Report(tuple(accesses)) for accesses in reports], strange


def _access(match: re.Match[str]) -> Access:
    return Access(match[1], match[2], int(match[3], 16))


@cache
def disassembled(cubin: Path, kernel: str) -> Code:
    """By the nvdisasm that Triton brings."""
    from triton import knobs

    command = [knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    return Code.of(subprocess.run(command, capture_output=True, text=True, check=True).stdout, kernel)


def cache_folder() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def judge(said: str, limit: int, folder: Path | None = None) -> Verdict:
    """Each report of racecheck's output; ``limit``: reports that it prints at most; ``folder``: Triton's cache."""
    reports, strange = parse(said)
    verdict = Verdict(findings=[f"not understood: {line}" for line in strange])
    counts = [int(count) for _, count in SUMMARY.findall(said)]
    if counts != [len(reports)] or len(reports) >= limit:
        told = ", ".join(map(str, counts)) or "nothing"
        verdict.findings.append(
            f"{len(reports)} reports were read, the summary says {told}; {limit} are printed at most"
        )
    for report in reports:
        verified, lines = _looked_up(report, folder or cache_folder())
        kind = "the compiler's dispatch" if verified else "a race"
        (verdict.dispatch if verified else verdict.findings).append("\n    ".join([f"{kind}: {report}", *lines]))
    return verdict


def _looked_up(report: Report, folder: Path) -> tuple[bool, list[str]]:
    """Whether one cubin of the kernel explains all of a report, and the lines of that one, or of the one that came
    nearest to it."""
    kernel = report.accesses[0].kernel
    if any(access.kernel != kernel for access in report.accesses):
        return False, ["accesses of two kernels"]
    nearest: list[str] = []
    for cubin in sorted(folder.glob(f"*/{kernel}.cubin")):
        try:
            code = disassembled(cubin, kernel)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            lines = [f"{cubin} cannot be disassembled: {error}"]
        else:
            verified, lines = report.explain(code)
            lines = [f"in {cubin.parent.name}/{cubin.name}:", *lines]
            if verified:
                return True, lines
        nearest = max(nearest, lines, key=len)
    return False, nearest or [f"no {kernel}.cubin in {folder}"]

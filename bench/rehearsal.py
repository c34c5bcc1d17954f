"""Let another process make the first call of a peer, and end it when its time is up.

The first call of some peers at a shape compiles and measures candidates for minutes, in code that cannot be stopped
from outside: a thread cannot be killed. A process can, with everything that it started. What it compiled and
measured is on disk (quack's, Inductor's and Triton's own caches), so that the call that follows in the process that
measures is short; and a peer that brings its process down brings down no other. A rehearsal that was ended leaves
its finished parts on disk too: a later run gets further. While it runs, the process that measures waits.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

START_SECONDS = 180.0  # imports and the device's context, counted apart
STRIKES = 2  # a variant that ran past its time at so many shapes is not tried at others


@dataclass(frozen=True)
class Verdict:
    """ok, or why not: it ran past its time, or it raised."""

    ok: bool
    timed_out: bool = False
    reason: str = ""


class Rehearsal:
    """Asks one process, which it starts when there is something to ask, and again after one that ended badly."""

    def __init__(self, seconds: float, command: Sequence[str] | None = None) -> None:
        self.seconds = seconds
        self.command = list(command or (sys.executable, __file__))
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._buffer = b""
        self._known: dict[tuple[str, str, tuple[int, int, int]], Verdict] = {}

    def __call__(self, name: str, op: str, shape: tuple[int, int, int]) -> Verdict:
        key = (name, op, shape)
        if key not in self._known:
            late = [k for k, v in self._known.items() if k[0] == name and v.timed_out]
            if len(late) >= STRIKES:
                reason = f"not tried: its warm-up ran past {self.seconds:.0f} s at {len(late)} shapes"
                self._known[key] = Verdict(False, True, reason)
            else:
                self._known[key] = self._ask(name, op, shape)
        return self._known[key]

    def _ask(self, name: str, op: str, shape: tuple[int, int, int]) -> Verdict:
        try:
            process = self._started()
            assert process.stdin is not None
            process.stdin.write((json.dumps([name, op, shape]) + "\n").encode())
            process.stdin.flush()
            answer = self._line(self.seconds)
        except (OSError, EOFError) as error:
            said = self._last_words()
            self.close()
            return Verdict(False, False, f"its process ended: {said or error}")
        if answer is None:
            self.close()
            return Verdict(False, True, f"its warm-up ran past {self.seconds:.0f} s")
        if answer != "ok":
            self.close()  # after a fault in a kernel, the process is good for nothing more
            return Verdict(False, False, answer)
        return Verdict(True)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._log = tempfile.TemporaryFile()
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
                start_new_session=True,  # so that its workers end with it
            )
            if self._line(START_SECONDS) != "ready":
                raise EOFError(f"it was not ready after {START_SECONDS:.0f} s")
        return self._process

    def _line(self, seconds: float) -> str | None:
        """The next line that the process writes; None where it writes none in time."""
        assert self._process is not None and self._process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            more = os.read(self._process.stdout.fileno(), 65536)
            if not more:
                raise EOFError("it said nothing")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""

    def close(self) -> None:
        """Ends the process and its workers."""
        process, self._process, self._buffer = self._process, None, b""
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            self._log.close()
            self._log = None

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


def rehearse(name: str, op: str, shape: tuple[int, int, int], device: str) -> str:
    """ "ok" after a forward and a step of a variant, or what it raised."""
    import torch

    from bench.case import Case

    try:
        case = Case(op, shape, device, sets=1)
        case.add(name)
        for call in (case.forward(name), case.step(name)):
            case.warm_up(call)
    except Exception as error:  # that is the answer
        return f"{type(error).__name__}: {str(error).strip()[:300]}"
    del case, call
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return "ok"


def main() -> int:
    """Answers each line of [variant, op, shape] on standard input with one on standard output."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what peers print is not an answer

    def say(what: str) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    import torch

    from bench import case  # noqa: F401

    torch.zeros(1, device=device)
    say("ready")
    for line in sys.stdin:
        name, op, shape = json.loads(line)
        say(rehearse(name, op, tuple(shape), device))
    return 0


if __name__ == "__main__":
    sys.exit(main())

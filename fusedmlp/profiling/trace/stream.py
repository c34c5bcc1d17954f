"""Read the events of a Chrome trace one by one: json or json.gz, of any size, in bounded memory.

The standard library's decoder reads one event at a time off a sliding window of the file. That is several times faster
than an incremental parser that reports every token, needs no package, and holds a window and one event at a time.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

CHUNK = 1 << 20
MAX_VALUE = 64 << 20  # characters of one event or of one entry of the head; beyond, the file is not a trace
_BLANK = re.compile(r"[ \t\r\n]*")
_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ValueError):
    """The file cannot be read as a trace of torch.profiler: what is wrong with it, and what would be right."""


class _Window:
    """The decoded text of the file from ``at`` on, read as it is needed."""

    def __init__(self, path: Path, raw: BinaryIO, progress: Callable[[int], Any] | None) -> None:
        self.path, self._raw, self._progress = path, raw, progress
        self._zipped = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        self._file: Any = gzip.GzipFile(fileobj=raw) if self._zipped else raw
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # strict=False: kernel names and arguments of some profilers hold bare control characters.
        self._decode = json.JSONDecoder(strict=False).raw_decode
        self.text, self.at, self.ended, self._before = "", 0, False, 0

    def error(self, what: str) -> TraceError:
        return TraceError(f"{self.path}: {what} (at character {self._before + self.at})")

    def _more(self) -> None:
        try:
            data = self._file.read(max(CHUNK, len(self.text) - self.at))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{self.path}: the gzip data are cut off or damaged: {error}") from error
        self.ended = not data
        self._before += self.at
        self.text = self.text[self.at :] + self._utf8.decode(data, final=self.ended)
        self.at = 0
        if self._progress is not None:
            self._progress(self._raw.tell())

    def peek(self) -> str:
        """The next character that is not blank; empty at the end of the file."""
        while True:
            self.at = _BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self._more()

    def take(self, wanted: str) -> str:
        """The next character, which must be one of ``wanted``."""
        found = self.peek()
        if not found:
            raise self.error(f"the file ends where one of {' '.join(wanted)} should follow: it is cut off")
        if found not in wanted:
            raise self.error(f"not valid JSON: {found!r} where one of {' '.join(wanted)} should be")
        self.at += 1
        return found

    def value(self) -> Any:
        """The next JSON value, in full."""
        self.peek()
        while True:
            try:
                found, end = self._decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if self.ended or len(self.text) - self.at > MAX_VALUE:
                    cut = "the file is cut off, or " if self.ended else ""
                    raise self.error(f"{cut}not valid JSON: {error.msg}") from error
            except ValueError as error:  # Python refuses integers of thousands of digits
                raise self.error(f"not a trace: {error}") from error
            except RecursionError as error:
                raise self.error("not a trace: its values are nested too deeply") from error
            else:
                # A number at the window's end may go on behind it.
                if end < len(self.text) or self.ended:
                    self.at = end
                    return found
            if self._looks_broken():
                raise self.error(f"not valid JSON: {self.text[self.at : self.at + 40]!r}")
            self._more()

    def _looks_broken(self) -> bool:
        """Whether reading on cannot help: no JSON value starts like this."""
        return self.text[self.at : self.at + 1] not in tuple('{["-0123456789tfnNI') + ("",)


def read_events(
    path: str | Path, on_head: Callable[[str, Any], Any], progress: Callable[[int], Any] | None = None
) -> Iterator[dict[str, Any]]:
    """The entries of ``traceEvents``, one at a time, as dictionaries.

    on_head: called with name and value of every other entry of the file (``deviceProperties``, ``schemaVersion``, ...).
    progress: called now and then with the bytes of the file that have been read.

    Raises TraceError where the file cannot be opened, is empty, cut off, not JSON, or has no ``traceEvents``.
    """
    path = Path(path)
    try:
        raw = path.open("rb")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    with raw:
        try:
            yield from _events(_Window(path, raw, progress), on_head)
        except OSError as error:
            raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error


def _events(window: _Window, on_head: Callable[[str, Any], Any]) -> Iterator[dict[str, Any]]:
    first = window.peek()
    if not first:
        raise TraceError(f"{window.path}: the file is empty; a trace is what profile.export_chrome_trace() writes")
    if first == "[":  # the array form of the format: events alone
        yield from _array(window)
        return
    if first != "{":
        raise TraceError(f"{window.path}: not JSON: a trace starts with {{ or [, this file with {first!r}")
    window.take("{")
    found = False
    while window.peek() != "}":
        name = window.value()
        window.take(":")
        if name == "traceEvents":
            if window.peek() != "[":
                raise window.error("not a trace: traceEvents is not a list")
            found = True
            yield from _array(window)
        else:
            on_head(str(name), window.value())
        if window.peek() != "}":
            window.take(",}")
            continue
    window.take("}")
    if not found:
        raise TraceError(
            f"{window.path}: not a trace: it has no traceEvents; give the file that profile.export_chrome_trace() wrote"
        )


def _array(window: _Window) -> Iterator[dict[str, Any]]:
    window.take("[")
    if window.peek() == "]":
        window.take("]")
        return
    while True:
        event = window.value()
        if not isinstance(event, dict):
            raise window.error(f"not a trace: an event is an object, this is {type(event).__name__}")
        yield event
        if window.take(",]") == "]":
            return

"""Tables in the terminal: by rich where it is installed (the extra ``profile``), in plain columns else."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def _rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


def any_name() -> None:
    """Let stdout escape what its encoding lacks: names in a trace, and of files, hold any character."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], left: Sequence[int] = (0,)) -> None:
    """Print a table. left: the columns of text, to the left; the others are numbers, to the right. Nothing is cut off
    where the output is no terminal."""
    texts = [[str(cell) for cell in row] for row in rows]
    if _rich():
        _show_rich(title, columns, texts, left)
        return
    widths = [max(len(row[i]) for row in [list(columns), *texts]) for i in range(len(columns))]
    print(f"\n{title}")
    for row in [list(columns), ["-" * w for w in widths], *texts]:
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())


def _show_rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # As Text: brackets in names are no markup.
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(columns):
        table.add_column(Text(name), justify="left" if i in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    wide = None if sys.stdout.isatty() else 200
    Console(width=wide, highlight=False).print(table)


@contextmanager
def progress_bar(total: int, label: str) -> Iterator[Callable[[int], None] | None]:
    """What to call with the amount done; draws on stderr where that is a terminal and rich is installed, else None."""
    if not (sys.stderr.isatty() and _rich()):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    parts = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*parts, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)

        def update(done: int) -> None:
            bar.update(task, completed=done)

        yield update

"""The page of docs/profiling.md, made of the shipped traces, and its pictures by headless Chromium.

    python bench/pictures.py                  # docs/images/*.png
    python bench/pictures.py --check profile/report.html    # only open a page, and fail where it does not draw
    python bench/pictures.py --page profile/report.html --out picture.png

Needs Chromium (`chromium`, `chromium-browser` or `google-chrome` in the PATH). A page whose scripts fail, or that lacks
a table or a lane, is an error.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fusedmlp.profiling.html import Page, write_html
from fusedmlp.profiling.trace.load import load
from fusedmlp.profiling.trace_report import TraceReport

ROOT = Path(__file__).resolve().parents[1]
TRACES, IMAGES = ROOT / "tests" / "traces", ROOT / "docs" / "images"
VARIANTS = ("eager", "compile", "fused")
WIDTH = 1400


def browser() -> str:
    """The command; raises SystemExit where there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise SystemExit("Chromium is not in the PATH")
    return found


def _run(page: Path, *options: str) -> tuple[str, str]:
    command = [browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging"]
    command += ["--log-level=0", "--virtual-time-budget=4000", *options, page.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout, done.stderr


def check(page: Path) -> None:
    """Open the page and look at what its scripts made of it. Raises SystemExit where something is missing."""
    dom, log = _run(page, "--dump-dom")
    failures = re.findall(r"CONSOLE.*?(Uncaught[^\"\n]*)", log)
    wanted = {
        "a title": r"<h1 id=\"title\">.+?</h1>",
        "a tab": r"<div id=\"tabs\"><button",
        "a canvas with a height": r"<canvas[^>]*height=\"[1-9]\d+\"",
        "a table of kernels": r"<section id=\"kernels\"><h2>Kernels</h2><table>",
    }
    failures += [f"no {what}" for what, pattern in wanted.items() if not re.search(pattern, dom)]
    if failures:
        raise SystemExit(f"{page}: {'; '.join(failures)}")


def shoot(page: Path, picture: Path, height: int) -> None:
    """A picture of the top of the page, WIDTH x height pixels."""
    check(page)
    picture.parent.mkdir(parents=True, exist_ok=True)
    _run(page, f"--window-size={WIDTH},{height}", f"--screenshot={picture}")
    print(picture)


def geglu_page(path: Path, pass_: str) -> Path:
    """Eager, compiled and fused GeGLU side by side."""
    reports = [TraceReport(load(TRACES / f"h200-geglu-{v}-{pass_}.json.gz")) for v in VARIANTS]
    title = "geglu MLP 768 -> 3072 on [64, 128, 768] in bfloat16"
    return write_html(path, reports, Page(title, reports[0].device, VARIANTS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="+", type=Path, metavar="FILE", help="pages to open")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a page to take a picture of")
    parser.add_argument("--out", type=Path, default=Path("page.png"), metavar="FILE", help="the picture")
    parser.add_argument("--height", type=int, default=1000)
    args = parser.parse_args()
    if args.page:
        shoot(args.page, args.out, args.height)
        return 0
    if args.check:
        for page in args.check:
            check(page)
            print(f"{page}: drawn")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        shoot(geglu_page(Path(folder, "step.html"), "step"), IMAGES / "profile-geglu-step.png", 1000)
        model = TraceReport(load(TRACES / "h200-model-vit-step.json.gz"))
        page = write_html(Path(folder, "vit.html"), [model], title="A training step of a ViT")
        shoot(page, IMAGES / "explain-vit-step.png", 560)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

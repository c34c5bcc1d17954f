"""How a benchmark's command ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from bench.common import BenchError


def script(main: Callable[..., int]) -> Callable[..., int]:
    """A script's main, which a BenchError ends with a line that says why it cannot go on, and status 2."""

    @wraps(main)
    def guarded(*args: Any) -> int:
        try:
            return main(*args)
        except BenchError as error:
            print(f"bench/{Path(main.__code__.co_filename).name}: {error}", file=sys.stderr)
            return 2

    return guarded

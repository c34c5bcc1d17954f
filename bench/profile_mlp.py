"""`python -m fusedmlp profile mlp` as a script; takes the same arguments.

python bench/profile_mlp.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fusedmlp.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["profile", "mlp", *sys.argv[1:]]))

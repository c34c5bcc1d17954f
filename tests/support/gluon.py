"""Whether the package launches its Gluon kernels under this Triton.

It does under the releases that fusedmlp/settings/device.py lists. Tests of what is launched need that; tests of what
is chosen do not (the fixture `gluon_serves`).
"""

from __future__ import annotations

import pytest

from fusedmlp.settings.device import GLUON_TRITON, DeviceInfo

HAS_GLUON = DeviceInfo("nvidia-h200", (9, 0), 132).has_wgmma
NEEDS_GLUON = "needs a Triton whose Gluon serves: " + ", ".join(f"{a}.{b}" for a, b in sorted(GLUON_TRITON))
needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason=NEEDS_GLUON)

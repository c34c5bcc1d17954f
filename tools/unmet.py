"""Print, as JSON, the requirements of fusedmlp that this Python does not meet.

    python tools/unmet.py [EXTRA ...]

Run it with the environment's own Python, where fusedmlp is installed (its dependencies need not be). The
answer covers the package's dependencies and the named extras, with environment markers applied.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import sys

# pip is in every environment; packaging on its own may not be.
from pip._vendor.packaging.requirements import Requirement


def applies(requirement: Requirement, extras: list[str]) -> bool:
    """Whether a requirement counts on this platform, for the package itself or for one of the extras."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ["", *extras])


def is_met(requirement: Requirement) -> bool:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def unmet(extras: list[str]) -> list[str]:
    """The requirements that are missing or of the wrong version, without their markers."""
    known = metadata.metadata("fusedmlp").get_all("Provides-Extra") or []
    wrong = [extra for extra in extras if extra not in known]
    if wrong:
        sys.exit(f"unknown extras {wrong}; fusedmlp has {known}")
    found = []
    for text in metadata.requires("fusedmlp") or []:
        requirement = Requirement(text)
        if applies(requirement, extras) and not is_met(requirement):
            found.append(f"{requirement.name}{requirement.specifier}")
    return sorted(set(found))


if __name__ == "__main__":
    print(json.dumps(unmet(sys.argv[1:])))

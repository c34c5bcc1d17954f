"""Built, checked, published to a Hub on loopback, loaded and kernelized by the real clients."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hub.conftest import BACKEND
from support.local_hub import Repository

pytestmark = pytest.mark.timeout(300)


def test_get_kernel_and_direct_use(stage, requests_of):
    printed = stage.run("direct")
    ident = re.search(rf"_fusedmlp_{BACKEND}_\w+", printed)
    assert ident
    # All that loading asks of the network; nothing else of it is used.
    variant = f"build/torch-{BACKEND}"
    files = {f"{variant}/{name}" for name in (*stage.source.shipped(), "_ops.py")}
    allowed = {f"{m} /kernels/org/fusedmlp/resolve/COMMIT/{f}" for m in ("GET", "HEAD") for f in files}
    metadata = [f"{m} /kernels/org/fusedmlp/resolve/COMMIT/{variant}/metadata.json" for m in ("GET", "HEAD")]
    api = "/api/kernels/org/fusedmlp"
    calls = {f"GET {api}/refs", f"GET {api}/tree/COMMIT/build", f"GET {api}/tree/COMMIT", *metadata}
    calls |= {f"GET {api}/revision/COMMIT", "GET /api/agent-harnesses"}
    found = set(requests_of())
    assert found <= allowed | calls
    assert allowed & found
    stage.run("unpickle", ident.group())


def test_kernelize(stage):
    stage.run("kernelized")


def test_two_versions_and_the_package_in_one_process(stage):
    stage.run("side_by_side", TRITON_INTERPRET="1")


def test_lock_file(stage, tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text('[tool.kernels.dependencies]\n"org/fusedmlp" = 1\n')
    stage.hub.trusted.add("org")
    try:
        stage.run("locked", tmp_path, cache="locked")
    finally:
        stage.hub.trusted.clear()
    assert stage.hub.repositories["org/fusedmlp"].branches["v1"] in (tmp_path / "kernels.lock").read_text()


def test_offline(stage):
    stage.run("fill_cache", cache="offline")
    stage.run("offline", stage.tree, cache="offline", HF_HUB_OFFLINE="1")


def test_offline_with_nothing_in_the_cache(stage):
    stage.run("nothing_cached", cache="nothing", HF_HUB_OFFLINE="1", LOCAL_KERNELS=f"org/fusedmlp={stage.tree}")


def test_refusals(stage):
    repository = stage.hub.repositories["org/elsewhere"] = Repository()
    tree = stage.hub.files("org/fusedmlp", "v1")
    repository.commit("v1", {name: data for name, data in tree.items() if "torch-xpu" in name})
    stage.run("refusals", cache="refusals")

"""``hub build``: the tree that is published, one folder a build variant."""

from __future__ import annotations

import base64
import hashlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import HubError, folders
from .launcher import shared_objects
from .source import Source, find_source

# The compiled launcher links to neither PyTorch nor CUDA: one build for each major version of CUDA that PyTorch 2.9 and
# newer come with, under the oldest minor one.
OLDEST_TORCH = "29"
CUDA = ("cu126", "cu130")
# The first release of `kernels` that reads this metadata.
MINIMUM_KERNELS = "0.14.0"
UID_DIGITS = 7

_OPS = '''"""The namespace of this build's operators, made by `python -m fusedmlp hub build`."""

import torch

ops = getattr(torch.ops, "{ident}")


def add_op_namespace_prefix(op_name: str) -> str:
    """"glu_mlp" -> the operator's full name."""
    return f"{ident}::{{op_name}}"
'''


@dataclass(frozen=True)
class Built:
    """What was written: the folder of the tree, and the name of each variant with its id."""

    folder: Path
    variants: dict[str, str]
    files: int


def build(output: Path, source: Source | None = None, version: int | None = None, launcher: bool = True) -> Built:
    """Writes the tree to ``output``, which is made; of an older tree there, nothing is left.

    Args:
        source: the package; None for this one.
        version: of the kernel, 0 (unstable) or more; None for that of build.toml.
        launcher: whether to make the variants with the compiled launcher.

    Raises:
        HubError: ``output`` holds something that is no such tree, or the launcher cannot be made here.
    """
    source = find_source() if source is None else source
    general = source.config()["general"]
    version = general["version"] if version is None else version
    if not isinstance(version, int) or version < 0:
        raise HubError(f"the version of a kernel must be a number, 0 or more, got {version!r}")
    shipped = source.shipped()
    compiled = shared_objects(source) if launcher else {}
    variants = {f"torch-{backend}": (backend, shipped) for backend in general["backends"]}
    if compiled:
        system = f"{platform.machine()}-{platform.system().lower()}"
        for cuda in CUDA:
            variants[f"torch-stable-abi{OLDEST_TORCH}-{cuda}-{system}"] = ("cuda", shipped | compiled)
    ids, tree = {}, {"build/CARD.md": (source.tree / "CARD.md").read_bytes()}
    for path in sorted(source.tree.glob("benchmarks/*.py")):
        tree[f"benchmarks/{path.name}"] = path.read_bytes()
    for name, (backend, files) in variants.items():
        metadata = {"name": general["name"], "version": version, "license": general["license"]}
        content = _variant(name, backend, files, metadata, source)
        ids[name] = json.loads(content["metadata.json"])["id"]
        tree |= {f"build/{name}/{path}": data for path, data in content.items()}
    return Built(output, ids, folders.replace(output, tree, mark="build/CARD.md"))


def _variant(
    name: str, backend: str, files: dict[str, bytes], metadata: dict[str, Any], source: Source
) -> dict[str, bytes]:
    """All files of a variant. Its id follows from their content, so that no two builds share one."""
    uid = _uid([name.encode(), str(metadata["version"]).encode(), *(x for item in files.items() for x in item)])
    package = str(metadata["name"]).replace("-", "_")
    ident = f"_{package}_{backend}_{uid}{'_dirty' if source.dirty else ''}"
    content = dict(files) | {"_ops.py": _OPS.format(ident=ident).encode()}
    content = {path: content[path] for path in sorted(content)}
    hashes = {path: base64.b64encode(hashlib.sha256(data).digest()).decode() for path, data in content.items()}
    described = {
        "name": metadata["name"],
        "id": ident,
        "version": metadata["version"],
        "kernels-minver": MINIMUM_KERNELS,
        "license": metadata["license"],
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend},
        # Not the format's own "provenance", which names a kernel-builder: none was at work.
        "built-from": {"commit": source.commit, "dirty": source.dirty},
        "digest": {"algorithm": "sha256", "files": hashes},
    }
    return content | {"metadata.json": (json.dumps(described, indent=2) + "\n").encode()}


def _uid(parts: list[bytes | str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:UID_DIGITS]

"""``hub publish``: uploads a built tree to a kernel repository, through huggingface_hub.

Version N is the branch vN and gets build/ and benchmarks/ in one commit; CARD.md becomes README.md on main. What the
Hub has already is not sent again, so that a run that broke off is finished by the same command.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import HubError
from .check import check, variants_of

REPO_TYPE = "kernel"
MAIN = "main"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass
class Plan:
    """What an upload would do.

    Attributes:
        repo: "owner/name".
        version: N; the branch is vN.
        commit: of the sources that the tree was built from, None where it is not known.
        create_repo, create_branch: what is not there yet.
        send: path in the repository -> content, what the branch lacks or has otherwise.
        kept: how many files the branch has already.
        delete: paths under build/ and benchmarks/ that the branch has and the tree has not.
        card: the text of README.md on main, None where it is the same.
        unreachable: why the repository was not compared with, "" where it was.
    """

    repo: str
    version: int
    commit: str | None = None
    create_repo: bool = False
    create_branch: bool = False
    send: dict[str, bytes] = field(default_factory=dict)
    kept: int = 0
    delete: list[str] = field(default_factory=list)
    card: bytes | None = None
    unreachable: str = ""

    @property
    def branch(self) -> str:
        return f"v{self.version}"

    def lines(self) -> Iterator[str]:
        """The plan as text."""
        size = sum(map(len, self.send.values()))
        yield f"repository  {self.repo}" + (" (to be created)" if self.create_repo else "")
        yield f"built from  {self.commit or 'an installed package or an archive: no commit is known'}"
        yield f"branch      {self.branch}" + (" (to be created)" if self.create_branch else "")
        if self.unreachable:
            yield f"NOTE        not compared with what is there: {self.unreachable}"
        yield from (f"upload      {path} ({len(data)} bytes)" for path, data in self.send.items())
        yield from (f"delete      {path}" for path in self.delete)
        if self.card is not None:
            yield f"upload      README.md ({len(self.card)} bytes) to {MAIN}"
        yield f"in all      {len(self.send)} files, {size} bytes; {self.kept} are there already"

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.send or self.delete or self.card or self.create_repo or self.create_branch)


def plan(folder: Path, repo: str, version: int | None = None) -> Plan:
    """What publishing the tree in ``folder`` would do; reads the repository and changes nothing.

    Raises:
        HubError: the name of the repository is none, ``version`` is not the tree's, the tree has findings or comes
            from files that no commit has.
    """
    if not _REPO.fullmatch(repo):
        raise HubError(f"--repo takes OWNER/NAME, got {repo!r}")
    findings = check(folder)
    if findings:
        lines = "\n  ".join(findings)
        raise HubError(f"{folder} has {len(findings)} findings; nothing is published until there are none:\n  {lines}")
    metadata = [json.loads((v / "metadata.json").read_text("utf-8")) for v in variants_of(folder / "build")]
    built = int(metadata[0]["version"])
    if version is not None and version != built:
        raise HubError(f"--version is {version}, the tree was built as version {built}: build it with --version")
    if any(m.get("built-from", {}).get("dirty") or str(m["id"]).endswith("_dirty") for m in metadata):
        raise HubError(f"{folder} was built from files that differ from the commit; commit them and build again")
    made = Plan(repo, built, metadata[0].get("built-from", {}).get("commit"))
    card = (folder / "build" / "CARD.md").read_text("utf-8")
    card = card.replace("{{ repo_id }}", repo).replace("{{ version }}", str(built))
    _compare(made, _local(folder), card.encode())
    return made


def _local(folder: Path) -> dict[str, bytes]:
    paths = [path for name in ("build", "benchmarks") for path in sorted((folder / name).rglob("*")) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    del files["build/CARD.md"]
    return {name: path.read_bytes() for name, path in files.items()}


def _compare(made: Plan, local: dict[str, bytes], card: bytes) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    api = HfApi()
    remote: dict[str, Any] = {}
    try:
        refs = api.list_repo_refs(made.repo, repo_type=REPO_TYPE)
        made.create_branch = made.branch not in {branch.name for branch in refs.branches}
        if not made.create_branch:
            remote = _files_of(api, made.repo, made.branch)
        readme = _files_of(api, made.repo, MAIN).get("README.md")
    except RepositoryNotFoundError:
        made.create_repo = made.create_branch = True
        readme = None
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        made.unreachable = f"{type(error).__name__}: {error}".splitlines()[0]
        readme = None
    made.send = {name: data for name, data in local.items() if not _is_there(remote.get(name), data)}
    made.kept = len(local) - len(made.send)
    ours = [name for name in remote if name.startswith(("build/", "benchmarks/"))]
    made.delete = sorted(set(ours) - set(local))
    made.card = None if _is_there(readme, card) else card


def _files_of(api: Any, repo: str, revision: str) -> dict[str, Any]:
    tree = api.list_repo_tree(repo, recursive=True, revision=revision, repo_type=REPO_TYPE)
    return {entry.path: entry for entry in tree if hasattr(entry, "blob_id")}


def _is_there(entry: Any, data: bytes) -> bool:
    """Whether the repository's file has that content, by the hash that git, or large file storage, keeps of it."""
    if entry is None:
        return False
    if entry.lfs is not None:
        return bool(entry.lfs.sha256 == hashlib.sha256(data).hexdigest())
    return bool(entry.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())


def upload(made: Plan, message: str) -> None:
    """Carries out a plan.

    Raises:
        HubError: the Hub refused, or could not be reached; the message says what to do.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    api = HfApi()
    if made.unreachable:
        raise HubError(f"the Hub cannot be reached: {made.unreachable}")
    try:
        _upload(api, made, message)
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise HubError(_advice(error)) from error


def _upload(api: Any, made: Plan, message: str) -> None:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    if made.create_repo:
        api.create_repo(made.repo, repo_type=REPO_TYPE, exist_ok=True)
    if made.create_branch:
        api.create_branch(made.repo, branch=made.branch, repo_type=REPO_TYPE, exist_ok=True)
    operations: list[Any] = [CommitOperationAdd(path, data) for path, data in made.send.items()]
    operations += [CommitOperationDelete(path) for path in made.delete]
    if operations:
        api.create_commit(
            made.repo, operations, commit_message=message, repo_type=REPO_TYPE, revision=made.branch, num_threads=2
        )
    if made.card is not None:
        card = [CommitOperationAdd("README.md", made.card)]
        api.create_commit(made.repo, card, commit_message=message, repo_type=REPO_TYPE, revision=MAIN)


def _advice(error: Exception) -> str:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    if status == 401:
        return f"{said}\nno token, or one that is not valid: log in with `hf auth login`, or set HF_TOKEN"
    if status == 403:
        return f"{said}\nthis token may not write there; publishing kernels is a right that the Hub grants on request"
    return f"{said}\nthe same command goes on from here: what has arrived is not sent again"

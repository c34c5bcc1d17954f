"""A Hub of kernel repositories on loopback, as much of it as the real clients ask for; it lives in memory.

``with LocalHub() as hub`` serves; ``hub.url`` goes into HF_ENDPOINT, ``hub.log`` has every request as (method, path,
status), ``hub.trusted`` the publishers that need no trust flag. Branches are versions; a commit is a whole tree.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

NO_TRANSFORMERS = "no transformers that takes the installed kernels"
Tree = dict[str, bytes]
LARGE = (".so",)


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Repository:
    """Branches and their commits."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.branches: dict[str, str] = {}
        self.trees: dict[str, Tree] = {}
        self.commit("main", {".gitattributes": b"*.so filter=lfs diff=lfs merge=lfs -text\n"})

    def commit(self, branch: str, tree: Tree) -> str:
        commit = hashlib.sha1(f"{next(self._numbers)} {branch}".encode()).hexdigest()
        self.trees[commit] = tree
        self.branches[branch] = commit
        return commit

    def resolve(self, revision: str) -> str | None:
        name = revision.removeprefix("refs/heads/")
        return self.branches.get(name, name if name in self.trees else None)


class Refusal(Exception):
    """An answer that is an error, with the code that huggingface_hub turns into its exceptions."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class LocalHub:
    """The server, and what it holds."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.trusted: set[str] = set()
        self.log: list[tuple[str, str, int]] = []
        self.fail_commits = 0  # so many commits to come fail
        self.lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> LocalHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def files(self, repo: str, branch: str) -> Tree:
        """What a branch holds."""
        found = self.repositories[repo]
        return found.trees[found.branches[branch]]


class Handler(BaseHTTPRequestHandler):
    """One request. Routes are tried in order; what none takes is 404."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def respond(self) -> None:
        body = self._body()
        url = urlsplit(self.path)
        with self.hub.lock:
            try:
                self._dispatch(url.path, parse_qs(url.query), body)
            except Refusal as refusal:
                self.send(refusal.status, {"error": refusal.code}, {"X-Error-Code": refusal.code})

    do_GET = do_HEAD = do_POST = do_PUT = respond

    def _dispatch(self, path: str, query: dict[str, list[str]], body: bytes) -> None:
        for pattern, handle in ROUTES:
            match = pattern.fullmatch(path)
            if match:
                handle(self, match, query, body)
                return
        raise Refusal(404, "EntryNotFound")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def send(self, status: int, content: Any = b"", headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.hub.log.append((self.command, self.path, status))
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def repository(self, match: re.Match[str]) -> Repository:
        found = self.hub.repositories.get(match["repo"])
        if found is None:
            raise Refusal(404, "RepoNotFound")
        return found

    def commit_of(self, match: re.Match[str]) -> tuple[Repository, str]:
        repository = self.repository(match)
        commit = repository.resolve(unquote(match["revision"]))
        if commit is None:
            raise Refusal(404, "RevisionNotFound")
        return repository, commit

    # ------------------------------------------------------------------ reading

    def organization(self, match: re.Match[str], query: Any, body: bytes) -> None:
        name = match["name"]
        trust = {"trustedKernelPublisher": True} if name in self.hub.trusted else {}
        self.send(200, {"name": name, "fullname": name, "avatarUrl": "", **trust})

    def refs(self, match: re.Match[str], query: Any, body: bytes) -> None:
        branches = self.repository(match).branches.items()
        heads = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit} for name, commit in branches]
        self.send(200, {"branches": heads, "tags": [], "converts": [], "pullRequests": []})

    def revision(self, match: re.Match[str], query: Any, body: bytes) -> None:
        _, commit = self.commit_of(match)
        self.send(200, {"id": match["repo"], "sha": commit, "private": False, "gated": False})

    def tree(self, match: re.Match[str], query: dict[str, list[str]], body: bytes) -> None:
        repository, commit = self.commit_of(match)
        folder = unquote(match["path"] or "").strip("/")
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = list(_entries(repository.trees[commit], folder, recursive))
        if not entries:
            raise Refusal(404, "EntryNotFound")
        self.send(200, entries)

    def resolve(self, match: re.Match[str], query: Any, body: bytes) -> None:
        repository, commit = self.commit_of(match)
        path = unquote(match["path"])
        data = repository.trees[commit].get(path)
        if data is None:
            raise Refusal(404, "EntryNotFound")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob_id(data)}"', "Accept-Ranges": "bytes"}
        if path.endswith(LARGE):
            digest = hashlib.sha256(data).hexdigest()
            headers |= {"ETag": f'"{digest}"', "X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        self.send(200, data, headers)

    # ------------------------------------------------------------------ writing

    def create(self, match: re.Match[str], query: Any, body: bytes) -> None:
        wanted = json.loads(body)
        if not self.headers.get("Authorization"):
            raise Refusal(401, "Unauthorized")
        repo = f"{wanted.get('organization') or 'somebody'}/{wanted['name']}"
        url = f"{self.hub.url}/kernels/{repo}"
        if repo in self.hub.repositories:
            self.send(409, {"error": "exists", "url": url})
            return
        if repo.startswith("forbidden/"):
            raise Refusal(403, "Forbidden")
        self.hub.repositories[repo] = Repository()
        self.send(200, {"url": url, "name": repo, "id": repo})

    def branch(self, match: re.Match[str], query: Any, body: bytes) -> None:
        repository = self.repository(match)
        name = unquote(match["revision"])
        if name in repository.branches:
            self.send(409, {"error": "Reference already exists"})
            return
        repository.branches[name] = repository.branches["main"]
        self.send(200, {})

    def preupload(self, match: re.Match[str], query: Any, body: bytes) -> None:
        files = json.loads(body)["files"]
        modes = [(f["path"], "lfs" if f["path"].endswith(LARGE) else "regular") for f in files]
        self.send(200, {"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes]})

    def lfs_batch(self, match: re.Match[str], query: Any, body: bytes) -> None:
        objects = []
        for wanted in json.loads(body)["objects"]:
            entry: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.large:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/_large/{wanted['oid']}"}}
            objects.append(entry)
        self.send(200, {"transfer": "basic", "objects": objects})

    def large(self, match: re.Match[str], query: Any, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != match["oid"]:
            raise Refusal(422, "WrongHash")
        self.hub.large[match["oid"]] = body
        self.send(200)

    def commit(self, match: re.Match[str], query: Any, body: bytes) -> None:
        repository, parent = self.commit_of(match)
        if self.hub.fail_commits:
            self.hub.fail_commits -= 1
            raise Refusal(423, "Locked")  # one that the client does not try again by itself
        tree = dict(repository.trees[parent])
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                tree[value["path"]] = self.hub.large[value["oid"]]
            elif operation["key"] == "deletedFile":
                del tree[value["path"]]
        commit = repository.commit(unquote(match["revision"]), tree)
        url = f"{self.hub.url}/kernels/{match['repo']}/commit/{commit}"
        self.send(200, {"success": True, "commitOid": commit, "commitUrl": url})

    def fine(self, match: re.Match[str], query: Any, body: bytes) -> None:
        self.send(200, {"errors": [], "warnings": [], "name": "somebody", "type": "user", "orgs": []})


def _entries(tree: Tree, folder: str, recursive: bool) -> Iterator[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    folders: set[str] = set()
    for path in sorted(tree):
        if not path.startswith(prefix):
            continue
        parts = path[len(prefix) :].split("/")
        for depth in range(1, len(parts) if recursive else min(2, len(parts))):
            folders.add(prefix + "/".join(parts[:depth]))
        if recursive or len(parts) == 1:
            yield _file_entry(path, tree[path])
    for name in sorted(folders):
        yield {"type": "directory", "path": name, "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0}


def _file_entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob_id(data)}
    if path.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


Handle = Callable[[Handler, "re.Match[str]", dict[str, list[str]], bytes], None]
_REPO = r"(?P<repo>[^/]+/[^/]+?)"
_API = rf"/api/kernels/{_REPO}"
ROUTES: list[tuple[re.Pattern[str], Handle]] = [
    (re.compile(pattern), handle)
    for pattern, handle in (
        (r"/api/organizations/(?P<name>[^/]+)/overview", Handler.organization),
        (r"/api/repos/create", Handler.create),
        (r"/api/(validate-yaml|whoami-v2)", Handler.fine),
        (rf"{_API}/refs", Handler.refs),
        (rf"{_API}/revision/(?P<revision>[^/]+)", Handler.revision),
        # The path begins after an unquoted slash: one inside the revision comes quoted.
        (rf"{_API}/tree/(?P<revision>[^/]+)(/(?P<path>.*))?", Handler.tree),
        (rf"{_API}/branch/(?P<revision>[^/]+)", Handler.branch),
        (rf"{_API}/preupload/(?P<revision>[^/]+)", Handler.preupload),
        (rf"{_API}/commit/(?P<revision>[^/]+)", Handler.commit),
        (rf"/kernels/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
        (rf"/kernels/{_REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch),
        (r"/_large/(?P<oid>[0-9a-f]{64})", Handler.large),
    )
]

# SPDX-License-Identifier: Apache-2.0
"""A Hub on this machine's loopback, of one model repository: what its client asks to make it, list, download and commit, and faults."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub
import pytest


REPO, TOKEN = "org/compiled", "hf_test"
_PAGE = 3  # files of a page of the list


@dataclass
class Fault:
    """Answers requests of a method with some words in the path; with status 0 half of the answer is sent, and the connection is cut."""

    method: str
    words: str
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1_000


@dataclass
class LoopbackHub:
    """The repository: its commits, each with names and contents of files; how many commits lead to a branch; and what was asked of it."""

    url: str = ""
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{"README.md": b"compiled graphs"}])
    branches: dict[str, int] = field(default_factory=dict)
    exists: bool = True
    private: bool = False
    objects: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    needs_token: bool = False

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]

    def sha(self, revision: str = "main") -> str | None:
        """The commit that a branch, or a commit's own name, stands for; None where there is none such."""
        known = {f"{count + 1:040x}" for count in range(len(self.commits))}
        if revision in known:
            return revision
        count = self.branches.get(revision, len(self.commits) if revision == "main" else 0)
        return f"{count:040x}" if count else None

    def at(self, revision: str) -> dict[str, bytes]:
        return self.commits[int(self.sha(revision) or "", 16) - 1]

    def asked(self, method: str, words: str) -> list[dict[str, str]]:
        return [headers for each, path, headers in self.requests if each == method and words in path]

    def fault(self, method: str, path: str) -> Fault | None:
        for each in self.faults:
            if each.method == method and each.words in path and each.times:
                each.times -= 1
                return each
        return None


def put_in_hub_cache(folder: Path, repo_id: str, cache_dir: Path) -> Path:
    """Put a repository into a cache of the Hub's client, as a download does."""
    repository, commit = cache_dir / f"models--{repo_id.replace('/', '--')}", "0123456789abcdef" * 2 + "01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    return Path(shutil.copytree(folder, repository / "snapshots" / commit))


@contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    hub = LoopbackHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def connected_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A Hub that its client in this process goes to, with a cache of its own."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with loopback_hub() as found, tempfile.TemporaryDirectory() as cache:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        huggingface_hub.close_session()
        yield found
        huggingface_hub.close_session()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LoopbackHub

    def do_GET(self) -> None:
        self._answer(self.command)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path
        self.hub.requests.append((method, path, {name.lower(): value for name, value in self.headers.items()}))
        fault = self.hub.fault(method, path)
        if fault is not None and fault.status:
            return self._send(fault.status, b"{}", fault.headers)
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not allowed and not path.startswith("/lfs/") and (self.hub.needs_token or method not in ("GET", "HEAD")):
            hidden = method in ("GET", "HEAD") and "Authorization" not in self.headers
            refused = {"X-Error-Message": "Invalid credentials in Authorization header"}
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"} if hidden else refused)
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if not self.hub.exists:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        api = f"/api/models/{REPO}"
        if path == api or path.startswith(f"{api}/"):
            return self._api(*(unquote(part) for part in path[len(api) :].strip("/").partition("/")[::2]), body)
        if path == f"/{REPO}.git/info/lfs/objects/batch":
            return self._batch(json.loads(body)["objects"])
        if path.startswith("/lfs/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/lfs/")
            self.hub.objects[path.removeprefix("/lfs/")] = body
            return self._send(200, b"")
        _, found, rest = path.partition(f"/{REPO}/resolve/")
        revision, _, name = rest.partition("/")
        sha = self.hub.sha(unquote(revision)) if found else None
        if sha is not None and unquote(name) in self.hub.at(sha):
            return self._file(self.hub.at(sha)[unquote(name)], sha, cut=fault is not None)
        codes = {"X-Error-Code": "EntryNotFound" if sha else "RevisionNotFound" if found else "RepoNotFound"}
        return self._send(404, b"{}", codes | ({"X-Repo-Commit": sha} if sha else {}))

    def _api(self, action: str, revision: str, body: bytes) -> None:
        if action == "branch":
            known = self.hub.sha(revision) is not None
            if not known:
                self.hub.branches[revision] = int(self.hub.sha() or "", 16)
            return self._send(409 if known else 200, b"{}")
        if action == "preupload":
            return self._preupload(json.loads(body))
        sha = self.hub.sha(revision or "main")
        if sha is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if action == "commit":
            return self._commit(revision, [json.loads(line) for line in body.splitlines()])
        if action == "tree":
            return self._tree(self.hub.at(sha))
        siblings = [{"rfilename": name} for name in self.hub.at(sha)]
        return self._send(200, {"id": REPO, "sha": sha, "private": self.hub.private, "siblings": siblings})

    def _create(self, asked: dict[str, Any]) -> None:
        if not self.hub.exists:
            self.hub.private = asked.get("visibility") == "private"
        status, self.hub.exists = 409 if self.hub.exists else 200, True
        self._send(status, {"url": f"{self.hub.url}/{REPO}"})

    def _tree(self, files: dict[str, bytes]) -> None:
        path = urlsplit(self.path).path
        start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        names = sorted(files)
        page = [
            {"type": "file", "path": name, "size": len(files[name]), "oid": _git_oid(files[name])}
            for name in names[start : start + _PAGE]
        ]
        more = {"Link": f'<{self.hub.url}{path}?recursive=true&cursor={start + _PAGE}>; rel="next"'}
        self._send(200, page, more if start + _PAGE < len(names) else {})

    def _preupload(self, asked: dict[str, Any]) -> None:
        modes = {
            each["path"]: "regular" if each["path"].endswith((".json", ".md")) else "lfs" for each in asked["files"]
        }
        files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
        self._send(200, {"files": files})

    def _batch(self, objects: list[dict[str, Any]]) -> None:
        for each in objects:
            if each["oid"] not in self.hub.objects:
                each["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}
        self._send(200, {"transfer": "basic", "objects": objects})

    def _commit(self, revision: str, lines: list[dict[str, Any]]) -> None:
        files = dict(self.hub.at(revision))
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        asks = "create_pr=1" in urlsplit(self.path).query
        branch, done = f"refs/pr/{len(self.hub.commits)}" if asks else revision, len(self.hub.commits)
        if branch != "main" or "main" in self.hub.branches:
            self.hub.branches.setdefault("main", done)
            self.hub.branches[branch] = done + 1
        self.hub.commits.append(files)
        answer = {"commitUrl": f"{self.hub.url}/{REPO}/commit/{done + 1:040x}", "commitOid": f"{done + 1:040x}"}
        pull_request = {"pullRequestUrl": f"{self.hub.url}/{REPO}/discussions/{done}"} if asks else {}
        self._send(200, answer | pull_request)

    def _file(self, data: bytes, sha: str, *, cut: bool) -> None:
        headers = {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if start else 200, data[start:], headers, cut=cut)

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None, *, cut: bool = False) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = self.close_connection or cut


for _method in ("HEAD", "POST", "PUT"):
    setattr(_Handler, f"do_{_method}", _Handler.do_GET)


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

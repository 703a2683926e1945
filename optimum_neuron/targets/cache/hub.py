# SPDX-License-Identifier: Apache-2.0
"""Entries of the compile cache in a Hub repository, so that what one machine compiled is compiled on no other.

The repository has the files of the cache under the same names, <kind>/<key>/<file>. All files of an entry are in one commit, and
downloads are from one commit, so no entry is ever a mixture of two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.hf_api import RepoFile

from ... import progress
from ...checkpoints.hub import explained_errors, try_again
from .entries import (
    ABOUT,
    CODE,
    RECORD,
    BrokenError,
    check_code,
    check_digest,
    copy_file,
    list_entries,
    read_about,
    read_record,
    write_documents,
)
from .store import CompileCache


# Graphs. Kernels for this CPU are in wheels, and are native code of this process, which no repository should decide.
SHARED_KINDS = ("cpu", "neuron")
_MAIN = "main"
_FILE = re.compile(rf"({'|'.join(SHARED_KINDS)})/([0-9a-f]{{64}})/((?:entry|about)\.json|{CODE}\.[A-Za-z0-9_.-]+)")
_ENTRIES_PER_COMMIT = 16


@dataclass(frozen=True)
class Synced:
    """Names of entries, <kind>/<key>; of those that were not taken, the reasons."""

    downloaded: list[str]
    uploaded: list[str]
    refused: dict[str, str]


def sync(
    repo: str, *, revision: str | None = None, token: str | None = None, download: bool = True, upload: bool = True
) -> Synced:
    """Bring entries that one side lacks from the other; leave an entry that both have as it is.

    Args:
        repo: a model repository, as org/name.
        revision: a branch, or to download from, also a tag or commit; default main.
        token: of the Hub; default, the one that hf stored.

    Raises:
        ValueError, FileNotFoundError, RuntimeError: as `explained_errors` says.
        OSError: the cache cannot be used, or the disk is full.
    """
    api, branch = HfApi(token=token), revision or _MAIN
    with explained_errors(repo, branch, other_way=", or --download-only"):
        commit, there = _list_files(api, repo, branch)
        here = {_entry_name(entry.path) for entry in list_entries() if entry.path.parent.name in SHARED_KINDS}
        done = Synced([], [], {})
        missing = sorted(there.keys() - here) if download else []
        with progress.stage("Downloading entries", len(missing)) as advance:
            for name in missing:
                problem = _download_entry(api, repo, commit, name, there[name])
                _note_entry(done.downloaded, done.refused, name, problem)
                advance(name)
        extra = iter(sorted(here - there.keys()) if upload else [])
        while names := list(islice(extra, _ENTRIES_PER_COMMIT)):
            for name, problem in _upload_entries(api, repo, branch, names):
                _note_entry(done.uploaded, done.refused, name, problem)
    return done


def shared_entries(repo: str, *, revision: str | None = None, token: str | None = None) -> dict[str, set[str]]:
    """List the entries that a repository has by name, <kind>/<key>, with the files of each; raise as `sync` does."""
    branch = revision or _MAIN
    with explained_errors(repo, branch):
        return _list_files(HfApi(token=token), repo, branch)[1]


def _note_entry(done: list[str], refused: dict[str, str], name: str, problem: str | None) -> None:
    if problem is None:
        done.append(name)
    else:
        refused[name] = problem


def _entry_name(entry: Path) -> str:
    return f"{entry.parent.name}/{entry.name}"


def _list_files(api: HfApi, repo: str, branch: str) -> tuple[str | None, dict[str, set[str]]]:
    """Return the commit of a branch, and the files of each entry that it has."""
    commit = try_again(lambda: api.repo_info(repo, revision=branch)).sha
    found: dict[str, set[str]] = {}
    for each in api.list_repo_tree(repo, recursive=True, revision=commit):
        match = _FILE.fullmatch(each.path) if isinstance(each, RepoFile) else None
        if match is not None:
            found.setdefault(f"{match[1]}/{match[2]}", set()).add(match[3])
    return commit, {name: files for name, files in found.items() if RECORD in files}


def _download_entry(api: HfApi, repo: str, commit: str | None, name: str, files: Iterable[str]) -> str | None:
    """Put an entry into the cache if it is what its record says; else return what is wrong."""
    kind, _, key = name.partition("/")
    cache = CompileCache(kind)
    with cache.scratch() as scratch:
        for file in sorted(files):
            # Next to the cache, so that a full disk is named by its folder, and a move takes one step.
            api.hf_hub_download(repo, f"{name}/{file}", revision=commit, local_dir=scratch)
        entry = scratch / key
        (scratch / kind / key).rename(entry)
        entry.chmod(0o700)
        for path in entry.iterdir():
            path.chmod(0o600)
        try:
            digests = check_code(entry)
        except BrokenError as error:
            return str(error)
        vouched = {RECORD, ABOUT, *(CODE + suffix for suffix in digests)}
        for path in entry.iterdir():
            if path.name not in vouched:
                path.unlink()
        cache.admit(entry)
    return None


def _upload_entries(api: HfApi, repo: str, branch: str, names: list[str]) -> Iterator[tuple[str, str | None]]:
    """Commit entries together; yield each with what is wrong with it, or None."""
    kind = names[0].partition("/")[0]
    with CompileCache(kind).scratch() as scratch:
        whole: list[str] = []
        for name in names:
            try:
                _copy_entry(name, scratch / name)
            except BrokenError as error:
                yield name, str(error)
            else:
                whole.append(name)
        paths = sorted(path for name in whole for path in (scratch / name).iterdir())
        if paths:
            count = "1 graph" if len(whole) == 1 else f"{len(whole)} graphs"
            with progress.stage(f"Uploading {count}"):
                try_again(lambda: _commit_files(api, repo, branch, scratch, paths))
        yield from ((name, None) for name in whole)


def _commit_files(api: HfApi, repo: str, branch: str, folder: Path, paths: Iterable[Path]) -> None:
    operations = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in paths]
    api.create_commit(repo, operations, commit_message="Add compiled graphs", revision=branch)


def _copy_entry(name: str, copy: Path) -> None:
    """Copy an entry as it was stored: what is sent is what was checked."""
    kind, _, key = name.partition("/")
    entry = CompileCache(kind).folder / key
    copy.mkdir(parents=True, mode=0o700)
    digests = read_record(entry)
    for suffix, digest in digests.items():
        check_digest(suffix, copy_file(entry / (CODE + suffix), copy / (CODE + suffix)), digest)
    write_documents(copy, digests, read_about(entry))

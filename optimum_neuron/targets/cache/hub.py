# SPDX-License-Identifier: Apache-2.0
"""Entries of the compile cache in a Hub repository, under the same names, <kind>/<key>/<file>.

All files of an entry are in one commit, and downloads are from one commit, so no entry is ever a mixture of two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.hf_api import RepoFile

from ... import progress
from ...artifact.user_cache import cache_root
from ...checkpoints.hub import explained_errors, try_again
from . import entries
from .entries import ABOUT, CODE, RECORD, BrokenError, check_code, copy_code, read_record
from .store import CompileCache


# Graphs. Kernels for this CPU are in wheels, and are native code of this process, which no repository should decide.
SHARED_KINDS = ("cpu", "neuron")
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
    api, branch = HfApi(token=token), revision or "main"
    done = Synced([], [], {})
    with explained_errors(repo, branch, other_way=", or --download-only"):
        commit, there = _list_files(api, repo, branch)
        paths = (entry.path for entry in entries.list_entries())
        here = {f"{path.parent.name}/{path.name}" for path in paths if path.parent.name in SHARED_KINDS}
        missing = sorted(there.keys() - here) if download else []
        with progress.stage("Downloading entries", len(missing)) as advance:
            for name in missing:
                try:
                    _download_entry(api, repo, commit, name, there[name])
                    done.downloaded.append(name)
                except BrokenError as error:
                    done.refused[name] = str(error)
                advance(name)
        extra = iter(sorted(here - there.keys()) if upload else [])
        while names := list(islice(extra, _ENTRIES_PER_COMMIT)):
            _upload_entries(api, repo, branch, names, done)
    return done


def shared_entries(repo: str, *, revision: str | None = None, token: str | None = None) -> dict[str, set[str]]:
    """List the entries that a repository has by name, <kind>/<key>, with the files of each; raise as `sync` does."""
    branch = revision or "main"
    with explained_errors(repo, branch):
        return _list_files(HfApi(token=token), repo, branch)[1]


def _list_files(api: HfApi, repo: str, branch: str) -> tuple[str | None, dict[str, set[str]]]:
    """Return the commit of a branch, and the files of each entry that it has."""
    commit = try_again(lambda: api.repo_info(repo, revision=branch)).sha
    found: dict[str, set[str]] = {}
    for each in api.list_repo_tree(repo, recursive=True, revision=commit):
        match = _FILE.fullmatch(each.path) if isinstance(each, RepoFile) else None
        if match is not None:
            found.setdefault(f"{match[1]}/{match[2]}", set()).add(match[3])
    return commit, {name: files for name, files in found.items() if RECORD in files}


def _download_entry(api: HfApi, repo: str, commit: str | None, name: str, files: Iterable[str]) -> None:
    """Put an entry into the cache; raise BrokenError where it is not what its record says."""
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
        vouched = {RECORD, ABOUT, *(CODE + suffix for suffix in check_code(entry))}
        for path in entry.iterdir():
            if path.name not in vouched:
                path.unlink()
        cache.admit(entry)


def _upload_entries(api: HfApi, repo: str, branch: str, names: list[str], done: Synced) -> None:
    """Commit entries together, as they were stored: what is sent is what was checked."""
    operations: list[CommitOperationAdd] = []
    whole: list[str] = []
    with CompileCache(names[0].partition("/")[0]).scratch() as scratch:
        for name in names:
            entry, copy = cache_root() / name, scratch / name
            copy.mkdir(parents=True, mode=0o700)
            try:
                digests = read_record(entry)
                for suffix, digest in digests.items():
                    copy_code(entry, suffix, digest, copy / (CODE + suffix))
            except BrokenError as error:
                done.refused[name] = str(error)
                continue
            entries.write_documents(copy, digests, entries.read_about(entry))
            whole.append(name)
            operations += [CommitOperationAdd(f"{name}/{path.name}", path) for path in sorted(copy.iterdir())]
        if operations:
            count = "1 graph" if len(whole) == 1 else f"{len(whole)} graphs"
            with progress.stage(f"Uploading {count}"):
                try_again(
                    lambda: api.create_commit(repo, operations, commit_message="Add compiled graphs", revision=branch)
                )
    done.uploaded.extend(whole)

# SPDX-License-Identifier: Apache-2.0
"""Downloads from the Hub, with errors that name the remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from ..errors import first_line
from .hub_errors import HTTP_ERROR, explained_errors


_COMMIT = re.compile("[0-9a-f]{40}")
_NUMBER = re.compile(r"^\[Errno -?\d+\] ")
# Seconds for the Hub's first answer.
_PATIENCE = 5.0


class HubFile(NamedTuple):
    """A file of a Hub repository, as `org/repo:folder/file.gguf` names it."""

    repo_id: str
    name: str


def hub_file(model: str | Path) -> HubFile | None:
    """Return the Hub file that a name stands for; None for another name, a drive of Windows, and a path that exists."""
    repo_id, colon, name = str(model).partition(":")
    if not (colon and name) or len(repo_id) == 1 or name.startswith("/") or Path(model).expanduser().exists():
        return None
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        return None
    return HubFile(repo_id, name)


def commit_of(folder: Path, revision: str | None) -> str | None:
    """Return the commit of a downloaded folder, so that further files come from the same one; `revision` if it is not known."""
    return folder.name if _COMMIT.fullmatch(folder.name) else revision


def repository_files(
    repo_id: str,
    folder: Path,
    *,
    revision: str | None,
    token: str | bool | None,
    local_files_only: bool = False,
    **_: Any,
) -> list[str]:
    """Return the sorted names of a repository's files, or of the downloaded `folder` where the Hub does not answer."""
    try:
        if not local_files_only:
            names = HfApi(token=token).list_repo_files(repo_id, revision=commit_of(folder, revision))
            return sorted(filter(str.isprintable, names))
    except (OfflineModeIsEnabled, HfHubHTTPError, HTTP_ERROR):
        pass
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def refuse_revision(path: Path, revision: str | None) -> None:
    """Raise ValueError where a revision of a local path was asked for."""
    if revision is not None:
        raise ValueError(
            f"revision={revision!r} names a state of a Hub repository, and {path} is a local path; leave --revision out, or "
            f"name the repository"
        )


def download(
    repo_id: str,
    patterns: list[str],
    *,
    revision: str | None,
    token: str | bool | None,
    local_files_only: bool = False,
    **hub: Any,
) -> Path:
    """Download a Hub repository's files that match `patterns`, or find them in the cache where the Hub cannot be reached.

    Raises:
        FileNotFoundError: the name is neither a local path nor a repository that can be read, or has no such revision.
        RuntimeError: the Hub refuses or fails, as `hub_errors.explained_errors` says.
    """
    with explained_errors(repo_id, revision or "main"):
        try:
            problem = "local_files_only is set" if local_files_only else _why_unreachable(repo_id, token)
            options = {"revision": revision, "token": token, "local_files_only": problem is not None, **hub}
            return Path(snapshot_download(repo_id, allow_patterns=patterns, **options))
        except GatedRepoError:
            raise
        except (HFValidationError, RepositoryNotFoundError) as error:
            raise FileNotFoundError(
                f"{repo_id} is neither a local path nor a Hub repository that can be read; check the name, or pass token (--token)"
            ) from error
        except LocalEntryNotFoundError as error:
            if problem is None:  # the Hub answers, and fails
                raise
            found = "has not all of its files" if hasattr(error, "snapshot_path") else "does not have it"
            cache = hub.get("cache_dir") or constants.HF_HUB_CACHE
            raise FileNotFoundError(
                f"{repo_id} is no local path, the Hub cache {cache} {found}, and the Hub cannot be reached ({problem}); check the name, or "
                f"go online"
            ) from error


def _why_unreachable(repo_id: str, token: str | bool | None) -> str | None:
    """Return why the Hub gives no answer; None if it gives one. By itself its client waits for minutes."""
    try:
        HfApi(token=token).repo_info(repo_id, timeout=_PATIENCE)
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except HfHubHTTPError:
        return None
    except HTTP_ERROR as error:
        return _NUMBER.sub("", first_line(error))
    return None

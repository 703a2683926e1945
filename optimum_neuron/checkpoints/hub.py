# SPDX-License-Identifier: Apache-2.0
"""Downloads from the Hub, and its errors: tried again where that helps, and explained in one sentence otherwise."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from ..errors import first_line


_Value = TypeVar("_Value")
# The base of the errors of whichever HTTP client the Hub's client brings.
HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
_TOO_MANY = 429
_TRIES, _LONGEST_WAIT = 4, 60  # the wait in seconds
_AGAIN = "what was done stays, so run the command again"
_COMMIT = re.compile("[0-9a-f]{40}")
# Seconds for the Hub's first answer.
_PATIENCE = 5.0


def try_again(call: Callable[[], _Value]) -> _Value:
    """Call a function again where the Hub is busy, fails or cannot be reached, and its client does not repeat the call."""
    for wait in (2**tries for tries in range(_TRIES - 1)):
        try:
            return call()
        except (HfHubHTTPError, HTTP_ERROR, RuntimeError) as error:
            cause = _cause_of(error)
            status = _status_of(cause)
            may_pass = status == _TOO_MANY or status >= 500 if status is not None else isinstance(cause, HTTP_ERROR)
            if not may_pass:
                raise
            time.sleep(min(_retry_after(cause) or wait, _LONGEST_WAIT))
    return call()


@contextmanager
def explained_errors(repo: str, revision: str, *, other_way: str = "") -> Iterator[None]:
    """Replace the errors of the Hub's client by one sentence with the remedy, which `other_way` may end.

    Raise ValueError where `repo` is no name, FileNotFoundError without such a repository or revision, RuntimeError where the Hub fails.
    """
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is no name of a Hub repository; name it as in org/name") from error
    except (HfHubHTTPError, HTTP_ERROR, OfflineModeIsEnabled, LocalEntryNotFoundError, RuntimeError, OSError) as error:
        cause = _cause_of(error)
        if isinstance(cause, RevisionNotFoundError):
            raise FileNotFoundError(
                f"{repo} has no revision {revision!r}; leave it out, or name a branch that it has"
            ) from error
        if isinstance(cause, RepositoryNotFoundError) and not isinstance(cause, GatedRepoError):
            raise FileNotFoundError(
                f"{repo} is no Hub repository that can be read; check the name, pass token (--token), or make it first: hf repo create {repo}"
            ) from error
        problem = _problem_text(cause, repo, other_way)
        if problem is None:
            raise
        raise RuntimeError(problem) from error


def _cause_of(error: BaseException) -> BaseException:
    while isinstance(error, LocalEntryNotFoundError | RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _problem_text(error: BaseException, repo: str, other_way: str) -> str | None:
    if isinstance(error, OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, so the Hub is not asked; unset it to reach {repo}"
    status = _status_of(error)
    if status is None:
        if isinstance(error, HTTP_ERROR):
            return f"the Hub cannot be reached ({first_line(error)}); check the connection: {_AGAIN}"
        return None
    if status == 401:
        return "the Hub does not take this token (401), or got none; pass one as token (--token), or log in: hf auth login"
    if status == 403:
        return f"this token may not do that with {repo} (403); ask for access, or pass a token (--token) that allows it{other_way}"
    if status in (409, 412):
        return f"{repo} was changed at the same time by another program ({status}); {_AGAIN}"
    if status == _TOO_MANY:
        wait = _retry_after(error)
        return f"the Hub has had too many requests (429); {_AGAIN} {f'in {wait} s' if wait else 'later'}"
    if status >= 500:
        return f"the Hub fails with status {status}; {_AGAIN} later"
    return f"the Hub refuses with status {status}: {first_line(error)}; check the repository's name, the revision and the token"


def _status_of(error: BaseException) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _retry_after(error: BaseException) -> int | None:
    text = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return int(text) if text.isdigit() else None


def hub_file(model: str | Path) -> tuple[str, str] | None:
    """Return the repository and the file that `org/repo:folder/file.gguf` stands for; None for another name, and a path that exists."""
    repo_id, colon, name = str(model).partition(":")
    if not (colon and name) or len(repo_id) == 1 or name.startswith("/") or Path(model).expanduser().exists():
        return None
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        return None
    return repo_id, name


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
    if revision is not None:
        raise ValueError(
            f"revision={revision!r} names a state of a Hub repository, and {path} is a local path; leave --revision out"
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
    """Download a repository's files that match `patterns`, or find them in the cache where the Hub cannot be reached.

    Raise FileNotFoundError where there is no such repository or revision, RuntimeError where the Hub refuses or fails.
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
        return re.sub(r"^\[Errno -?\d+\] ", "", first_line(error))
    return None
